"""The model a user comes from: Hugging Face's towers, and work that our recipe leaves out.

Published means NVIDIA/Isaac-GR00T, tree N1.6; a file in brackets is the place there that a statement is
from. ``stock_of`` gives a model around the parameters of another, not copies of them, in which

* the vision tower is transformers' ``Siglip2VisionModel`` with SDPA. The published tower is a changed copy
  of it, with flash attention over all images as one sequence (modeling_siglip2.py). Its patches, its
  positions (resized anew for every image), its order by windows (made and undone, without an effect on the
  numbers) and its pixel unshuffle (image by image) are not those of the class; here these pieces are ours,
  for all images at once and with the resized positions kept: less work. The pooling head is called neither
  there nor here;
* the decoder is transformers' ``Qwen3ForCausalLM``, cut to the selected layers (eagle_backbone.py), with
  SDPA. Published is flash attention (modeling_eagle3_vl.py), which in the version pinned there gathers the
  valid rows of queries, keys and values in every layer and asks the device for their number; SDPA takes one
  mask for all layers. As there, it gets the padding mask, keeps the output of every layer, and makes the
  logits of the whole vocabulary, which nothing reads. No cache is made, which the published call leaves to
  the default. The matrix of the logits is the embedding table; the published one is a tensor of its own of
  the same size;
* image rows are put where the image tokens are by a boolean mask, for which the host waits once (twice in
  modeling_eagle3_vl.py);
* cross-attention of the action head reads all tokens, and each block masks text or images by a boolean mask,
  repeated over the heads in every block; every block activates the time embedding itself (dit.py, and the
  attention of diffusers that it calls);
* weights of an embodiment are looked up sample by sample (embodiment_conditioned_mlp.py). Of the 32 slots
  that are stored and stepped there, one exists here, as in every other column;
* nothing is under ``no_grad``: as there, frozen weights alone keep autograd from recording, and the frozen
  modules are in evaluation mode (eagle_backbone.py).

Noise and time come from the same draws as in every other column (published: time from the CPU), the
optimizer is the fused AdamW of plain PyTorch (published: not fused), weights are bf16 (published: trainable
ones float32 under autocast). Where this model differs from the published one, it launches less and waits less
for the device; how long masked SDPA takes there beside flash attention was not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from loongforge.recipes.gr00t_n1_6.config import LanguageConfig, VisionConfig, WorkConfig
from loongforge.recipes.gr00t_n1_6.connector import pixel_unshuffle
from loongforge.recipes.gr00t_n1_6.dit import CrossMemory, DiT, DiTAttention, plain_layer_norm
from loongforge.recipes.gr00t_n1_6.model import GrootModel, VisionLanguage, tensor
from loongforge.recipes.gr00t_n1_6.vision import VisionEmbeddings
from torch import Tensor, nn
from torch.nn import functional

STOCK = ("stock_4x4", "stock_1x16")
"""Columns of this model."""
KNOWN = "5.17 and 5.24"
"""Versions of transformers with which this was run."""
WORK = WorkConfig(
    skip_logits=False, frozen_without_autograd=False, split_cross_attention=False, keep_unused=False
)
"""What the published code does; it stores what it never uses too, which takes memory but no time."""


def stock_of(model: GrootModel) -> GrootModel:
    """Make ``model``, a shell of its own, a stock model around the same parameters, and return it.

    Raises:
        RuntimeError: transformers is missing, or its classes are not those that are known to work.
    """
    version = transformers_version()
    try:
        model.backbone = StockBackbone(model.backbone.model)
    except (ImportError, TypeError, AttributeError) as error:
        message = f"transformers {version} has not the classes of {KNOWN}, which are known to work: {error}"
        raise RuntimeError(message) from error
    model.config = dataclasses.replace(model.config, work=WORK)
    model.single_slot = None
    # Other ways through the same modules: the classes below add no state.
    dit = model.action_head.model
    for block in dit.transformer_blocks:
        if block.is_cross:
            block.attn1.__class__ = StockCrossAttention
    dit.__class__ = StockDiT
    model.__class__ = StockModel
    return model


def transformers_version() -> str:
    """Return the version of transformers.

    Raises:
        RuntimeError: It is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        message = f"the stock columns need transformers ({KNOWN} are known to work): pip install transformers"
        raise RuntimeError(message) from error
    return str(transformers.__version__)


def loss_without_dropout(model: nn.Module, batch: Mapping[str, object]) -> float:
    """Return the loss of a drawn batch in evaluation mode, and leave the model in training mode."""
    model.eval()
    with torch.no_grad():
        loss = model(batch)["loss"]
    model.train()
    return float(loss)


class StockBackbone(nn.Module):
    """Vision tower and decoder of transformers around the parameters of our own, in evaluation mode."""

    def __init__(self, ours: VisionLanguage) -> None:
        super().__init__()
        vision, language = ours.vision_model.vision_model, ours.language_model
        self.patch_size = ours.config.vision.patch_size
        self.image_token_id = ours.config.language.image_token_id
        self.vision_model = vision_tower(ours.config.vision, vision)
        self.mlp1 = ours.mlp1
        self.language_model = decoder(ours.config.language, language)
        self.train()

    def train(self, mode: bool = True) -> StockBackbone:
        """Stay in evaluation mode, which makes no difference to these towers: their dropouts are zero."""
        del mode
        super().train(False)
        return self

    def encode_images(self, images: Tensor) -> Tensor:
        """Encode images (N, 3, H, W) as decoder rows (N, H*W/784, D)."""
        rows, columns = images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size
        out = self.vision_model(pixel_values=images, pixel_attention_mask=None, spatial_shapes=None)
        return self.mlp1(pixel_unshuffle(out.last_hidden_state, rows, columns))

    def forward(self, batch: Mapping[str, object]) -> Tensor:
        """Return the decoder's normed features (B, L, D)."""
        ids, mask, pixels = (tensor(batch, n) for n in ("input_ids", "attention_mask", "pixel_values"))
        x = self.language_model.get_input_embeddings()(ids)
        x[ids == self.image_token_id] = self.encode_images(pixels.flatten(0, 1)).flatten(0, 1)
        out = self.language_model(
            inputs_embeds=x, attention_mask=mask, use_cache=False, output_hidden_states=True
        )
        return out.hidden_states[-1]


class StockModel(GrootModel):
    """The model whose cross-attention reads all tokens."""

    def memories(self, batch: Mapping[str, object]) -> tuple[CrossMemory, CrossMemory]:
        """Run the backbone and return what text-reading and image-reading blocks see, masks as booleans."""
        features = self.action_head.vlln(self.backbone(batch))
        image = tensor(batch, "input_ids") == self.config.language.image_token_id
        valid = tensor(batch, "attention_mask") == 1
        return (
            CrossMemory(features=features, bias=~image & valid),
            CrossMemory(features=features, bias=image & valid),
        )


class StockCrossAttention(DiTAttention):
    """Attention to all tokens of the backbone, of which a boolean mask (B, K) keeps some."""

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        """Attend from (B, T, D) to ``memory`` (B, K, D_m)."""
        (b, t, d), heads = x.shape, self.heads
        q, k, v = (
            layer(rows).view(b, -1, heads, d // heads).transpose(1, 2)
            for layer, rows in ((self.to_q, x), (self.to_k, memory), (self.to_v, memory))
        )
        mask = None if bias is None else bias.repeat_interleave(heads, dim=0).view(b, heads, 1, -1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out[1](self.to_out[0](mixed.transpose(1, 2).reshape(b, t, d)))


class StockDiT(DiT):
    """The stack whose blocks activate the time embedding one by one."""

    def forward(
        self, x: Tensor, buckets: Tensor, text: CrossMemory, image: CrossMemory, *, recompute: bool = False
    ) -> Tensor:
        """Transform (B, T, D) to (B, T, output_size)."""
        del recompute
        time = self.timestep_encoder(buckets)
        for i, block in enumerate(self.transformer_blocks):
            source = (text if self.reads_text(i) else image) if block.is_cross else None
            memory, mask = (None, None) if source is None else (source.features, source.bias)
            x = block(x, functional.silu(time), memory, mask)
        shift, scale = self.proj_out_1(functional.silu(time))[:, None].chunk(2, dim=-1)
        return self.proj_out_2(plain_layer_norm(x, 1e-6) * (1 + scale) + shift)


class _Embeddings(nn.Module):
    """Our patch embedding and positions behind the interface of the stock class."""

    def __init__(self, ours: VisionEmbeddings) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, pixel_values: Tensor, spatial_shapes: Tensor | None = None) -> Tensor:
        """Embed images (N, 3, H, W) of one size as (N, P, D)."""
        del spatial_shapes
        return self.ours(pixel_values)


def vision_tower(config: VisionConfig, ours: nn.Module) -> nn.Module:
    """Return a stock vision tower with the parameters of ``ours`` and its embeddings."""
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    stock = Siglip2VisionConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        patch_size=config.patch_size,
        num_patches=config.position_grid**2,
        layer_norm_eps=config.layer_norm_eps,
        attn_implementation="sdpa",
    )
    stock.vision_use_head = False
    with torch.device("meta"):
        tower = Siglip2VisionModel(stock)
    share(tower, {name: p for name, p in ours.named_parameters() if not name.startswith("head.")})
    tower.embeddings = _Embeddings(ours.embeddings)
    return tower


def decoder(config: LanguageConfig, ours: nn.Module) -> nn.Module:
    """Return a stock decoder with the parameters of ``ours``; the vocabulary projection is the embedding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    stock = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(stock)
    embedding = ours.model.embed_tokens.weight
    share(model, {**dict(ours.named_parameters()), "lm_head.weight": embedding})
    # Its tables are no parameters, and have no values on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=stock).to(embedding.device)
    return model


def share(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Let ``module`` hold these very parameters.

    Raises:
        RuntimeError: Names or shapes differ.
    """
    own = dict(module.named_parameters(remove_duplicate=False))
    wrong = sorted(own.keys() ^ parameters.keys())
    wrong += [name for name in own.keys() & parameters.keys() if own[name].shape != parameters[name].shape]
    if wrong:
        message = (
            f"{type(module).__name__} of transformers {transformers_version()} has other parameters than the "
            f"published model, {len(wrong)} of them, for example {wrong[:3]}; {KNOWN} are known to work"
        )
        raise RuntimeError(message)
    for name, parameter in parameters.items():
        place, _, leaf = name.rpartition(".")
        module.get_submodule(place).register_parameter(leaf, parameter)
