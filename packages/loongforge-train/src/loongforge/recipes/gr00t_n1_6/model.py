"""GR00T N1.6: backbone and action head under their published names, flow-matching loss, inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from loongforge.errors import ConfigError
from loongforge.filling import blank_rows
from loongforge.recipes.gr00t_n1_6.config import GrootConfig, WorkConfig
from loongforge.recipes.gr00t_n1_6.connector import connector_mlp, pixel_unshuffle
from loongforge.recipes.gr00t_n1_6.dit import CrossMemory, key_bias
from loongforge.recipes.gr00t_n1_6.draws import Generators, draw_flow
from loongforge.recipes.gr00t_n1_6.heads import ActionHead, Slot
from loongforge.recipes.gr00t_n1_6.language import LanguageModel
from loongforge.recipes.gr00t_n1_6.layers import (
    at_dtype_of,
    autocast_dtype,
    is_low_precision,
    without_autocast,
)
from loongforge.recipes.gr00t_n1_6.layout import canonical_batch
from loongforge.recipes.gr00t_n1_6.processing.images import ImageOptions, plan_decoded, prepare_images
from loongforge.recipes.gr00t_n1_6.vision import VisionModel

Batch = Mapping[str, object]

FROZEN_ROWS = "frozen_rows"
"""Batch entry with hidden states (B, L, D) below the first trainable layer, where they were made before."""


def tensor(batch: Batch, name: str) -> Tensor:
    """Return the tensor ``name`` of a batch or say what is missing."""
    value = batch.get(name)
    if not isinstance(value, Tensor):
        msg = (
            f"the batch has no tensor '{name}' (it has {sorted(batch)}); build batches with the "
            "recipe's collate"
        )
        raise ConfigError(msg)
    return value


class VisionLanguage(nn.Module):
    """Vision tower, decoder and the connector between them."""

    def __init__(self, config: GrootConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_model = VisionModel(config.vision, pooling_head=config.work.keep_unused)
        self.language_model = LanguageModel(config.language, lm_head=config.work.keep_unused)
        self.mlp1 = connector_mlp(config.vision.hidden_size, config.language.hidden_size)

    def encode_images(self, images: Tensor) -> Tensor:
        """Encode images (N, 3, H, W) of one size as decoder rows (N, H*W/784, D)."""
        patch = self.config.vision.patch_size
        rows, columns = images.shape[-2] // patch, images.shape[-1] // patch
        weight = self.vision_model.vision_model.embeddings.patch_embedding.weight
        patches = self.vision_model(at_dtype_of(images, weight))
        return self.mlp1(pixel_unshuffle(patches, rows, columns))

    def embed(self, batch: Batch) -> Tensor:
        """Embed tokens and put the image rows in place: (B, L, D)."""
        decoder = self.language_model.model
        x = decoder.embed_tokens(tensor(batch, "input_ids"))
        pixels = batch.get("pixel_values")
        if isinstance(pixels, Tensor):
            pixels = (pixels,)
        if isinstance(pixels, tuple):
            index = tensor(batch, "image_index")
            # One call per image size; equal sizes travel together.
            encoded = [
                self.encode_images(p.flatten(0, 1)).reshape(x.shape[0], -1, x.shape[-1]) for p in pixels
            ]
            rows = encoded[0] if len(encoded) == 1 else torch.cat(encoded, dim=1)
            if rows.shape[1] != index.shape[1]:
                msg = (
                    f"the images give {rows.shape[1]} tokens a sample but the prompt has places for "
                    f"{index.shape[1]}; prompt and image size come from different settings"
                )
                raise ConfigError(msg)
            return x.scatter(1, index[..., None].expand_as(rows), rows.to(x.dtype))
        return self._embed_unequal(x, batch, cast(Sequence[Tensor], pixels))

    def _embed_unequal(self, x: Tensor, batch: Batch, images: Sequence[Tensor]) -> Tensor:
        """Place rows of images of unequal sizes, counting them on the host (waits for it).

        The order is that of the flattened batch.
        """
        if not isinstance(images, list):
            msg = (
                "'pixel_values' must be a tensor (B, V, 3, H, W), a tuple of such tensors (one per view "
                f"size) or a list of images (3, H, W), got {type(images).__name__}"
            )
            raise ConfigError(msg)
        images = [image.reshape(image.shape[-3:]) for image in images]
        rows: list[Tensor | None] = [None] * len(images)
        for size in dict.fromkeys(image.shape for image in images):
            members = [i for i, image in enumerate(images) if image.shape == size]
            encoded = self.encode_images(torch.stack([images[i] for i in members]))
            for i, one in zip(members, encoded, strict=True):
                rows[i] = one
        flat = torch.cat([row for row in rows if row is not None]).to(x.dtype)
        places = tensor(batch, "input_ids") == self.config.language.image_token_id
        if int(places.sum()) != flat.shape[0]:
            msg = f"the images give {flat.shape[0]} tokens but the prompts have {int(places.sum())}"
            raise ConfigError(msg)
        return x.masked_scatter(places[..., None], flat)


class Backbone(nn.Module):
    """The vision-language model, cut at the selected layer."""

    def __init__(self, config: GrootConfig) -> None:
        super().__init__()
        self.config = config
        self.model = VisionLanguage(config)

    def lower(self, batch: Batch) -> Tensor:
        """Return the hidden states (B, L, D) below the first trainable layer."""
        return self.run_layers(self.embedded(batch), 0, self.config.first_trainable_layer)

    def embedded(self, batch: Batch) -> Tensor:
        """Return embedded tokens and encoded images (B, L, D)."""
        weight = self.model.language_model.model.embed_tokens.weight
        # Where frozen weights are 16-bit already, autocast would only look at each of them again.
        quiet, grad = is_low_precision(weight), torch.is_grad_enabled()
        with (
            _autocast(weight.device, off=self.frozen_inputs and quiet),
            torch.set_grad_enabled(grad and (self._record_frozen or not self.frozen_inputs)),
        ):
            return self.model.embed(batch)

    def run_layers(self, x: Tensor, begin: int, end: int) -> Tensor:
        """Run frozen decoder layers ``begin`` to ``end`` over hidden states (B, L, D)."""
        decoder = self.model.language_model.model
        weight, grad = decoder.embed_tokens.weight, torch.is_grad_enabled()
        with (
            _autocast(weight.device, off=is_low_precision(weight) and end > 0),
            torch.set_grad_enabled(grad and (self._record_frozen or not end)),
        ):
            return decoder.run(x, list(decoder.layers)[begin:end])

    @property
    def _record_frozen(self) -> bool:
        return not self.config.work.frozen_without_autograd

    @property
    def frozen_inputs(self) -> bool:
        """Whether images and tokens are encoded by frozen weights alone."""
        return not (self.config.tune.visual or self.config.tune.language)

    def frozen_modules(self) -> list[nn.Module]:
        """Return what :meth:`lower` runs where no part of it trains, else nothing."""
        if not self.frozen_inputs:
            return []
        model, decoder = self.model, self.model.language_model.model
        layers = list(decoder.layers)[: self.config.first_trainable_layer]
        return [model.vision_model, model.mlp1, decoder.embed_tokens, *layers]

    def forward(self, batch: Batch) -> Tensor:
        """Return the decoder's normed features (B, L, D); rows at padding hold nothing useful."""
        config, work = self.config, self.config.work
        decoder = self.model.language_model.model
        layers, first = list(decoder.layers), config.first_trainable_layer
        made = batch.get(FROZEN_ROWS)
        x = made if isinstance(made, Tensor) else self.lower(batch)
        if first < len(layers):
            x = at_dtype_of(x, next(layers[first].parameters()))
            x = decoder.run(x, layers[first:], recompute=work.recompute)
        x = decoder.norm(x)
        if not work.skip_logits:
            if not work.keep_unused:
                msg = "skip_logits=False needs keep_unused=True: the logits need the stored LM head"
                raise ConfigError(msg)
            self.model.language_model.lm_head(at_dtype_of(x, self.model.language_model.lm_head.weight))
        return x


def _autocast(device: torch.device, *, off: bool) -> AbstractContextManager[object]:
    return without_autocast(device) if off else nullcontext()


class GrootModel(nn.Module):
    """GR00T N1.6 behind the model protocol: ``model(batch)["loss"]``, per-sample sums, draws outside.

    A batch holds the entries of :class:`~loongforge.recipes.gr00t_n1_6.layout.TokenLayout`, ``pixel_values``
    (B, V, 3, H, W) or a list of images, ``state`` (B, 1, S), ``action`` and ``action_mask`` (B, T, A),
    ``embodiment_id`` (B,), and after :meth:`draw` also ``noise`` (B, T, A) and ``time`` (B,).
    """

    def __init__(self, config: GrootConfig, image_options: ImageOptions | None = None) -> None:
        super().__init__()
        self.config = config
        self.image_options = image_options or ImageOptions()
        self.backbone = Backbone(config)
        self.action_head = ActionHead(config)
        self.single_slot: int | None = None
        set_trainable(self, config)

    @property
    def work(self) -> WorkConfig:
        """Return the switches for wasted work."""
        return self.config.work

    # ---- draws -------------------------------------------------------------------------------------------
    def draw(self, batch: Batch, generator: Generators = None) -> dict[str, object]:
        """Return the batch with this micro-batch's random numbers; see :func:`~.draws.draw_flow`.

        In training mode the images are augmented too, where the options say so.
        """
        augment = self.image_options if self.training and self.image_options.augment else None
        has_images = any(name == "images" or name.startswith("images.") for name in batch)
        return draw_flow(batch, self.config, generator, augment=augment if has_images else None)

    def loss_count(self, batch: Batch) -> Tensor:
        """Return the number of valid action elements of each sample (B,), known before the forward pass."""
        return tensor(batch, "action_mask").float().flatten(1).sum(1)

    def blank(self, batch: Batch, rows: int) -> dict[str, object]:
        """Return ``rows`` copies of the batch's first sample without any valid action element."""
        return blank_rows(batch, rows, weights=("action_mask",))

    # ---- the part that no step changes ---------------------------------------------------------------------
    def frozen_modules(self) -> Sequence[nn.Module]:
        """Return vision tower, connector, embeddings and frozen decoder layers; nothing where one trains."""
        return self.backbone.frozen_modules()

    def run_frozen(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the hidden states (B, L, D) below the first trainable layer as ``frozen_rows``.

        Empty for batches in another layout than collate's, whose token values the host would have to read.
        """
        begun = self.begin_frozen(batch)
        return self.finish_frozen({**batch, **begun}) if begun else {}

    def begin_frozen(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the hidden states (B, L, D) up to the layers that :meth:`finish_frozen` runs."""
        if "text_index" not in batch or FROZEN_ROWS in batch:
            return {}
        x = self.backbone.embedded(self.with_pixels(batch))
        return {FROZEN_ROWS: self.backbone.run_layers(x, 0, self._frozen_cut)}

    def finish_frozen(self, batch: Batch) -> Mapping[str, Tensor]:
        """Run the last frozen decoder layers, about as long as an optimizer step takes."""
        rows, last = tensor(batch, FROZEN_ROWS), self.config.first_trainable_layer
        return {FROZEN_ROWS: self.backbone.run_layers(rows, self._frozen_cut, last)}

    @property
    def _frozen_cut(self) -> int:
        """The first layer of the end. By its operations (9 of 12 layers at full size, about 3 TFLOP for 16
        samples) that is as long as AdamW by its bytes; the best place is not measured.
        """
        return self.config.first_trainable_layer // 4

    def frozen_inputs(self, batch: Batch) -> list[str]:
        """Return the entries with images and their augmentation."""
        return [name for name in batch if name in _IMAGE_ENTRIES or name.startswith("images.")]

    # ---- forward -----------------------------------------------------------------------------------------
    def canonical(self, batch: Batch) -> dict[str, object]:
        """Return the batch in the model's token layout with prepared images; no work where it is already."""
        ids = self.config.language
        batch = self.with_pixels(batch)
        return canonical_batch(batch, image_token_id=ids.image_token_id, pad_token_id=ids.pad_token_id)

    def with_pixels(self, batch: Batch) -> Batch:
        """Turn uint8 ``images`` into ``pixel_values`` on their device, with the drawn augmentation if any."""
        if "pixel_values" in batch or FROZEN_ROWS in batch:
            return batch
        drawn = batch.get("augmentation")
        views = [batch["images"]] if "images" in batch else _numbered(batch, "images.")
        pixels = []
        for view in views:
            if not isinstance(view, Tensor):
                msg = "'images' must be uint8 tensors (B, V, H, W, 3)"
                raise ConfigError(msg)
            view = view if view.ndim == 5 else view[:, None]
            plan = plan_decoded(view.shape[2], view.shape[3], self.image_options)
            pixels.append(
                prepare_images(view, plan, self.image_options, drawn if isinstance(drawn, Tensor) else None)
            )
        if not pixels:
            msg = f"the batch has neither 'pixel_values' nor 'images'; it has {sorted(batch)}"
            raise ConfigError(msg)
        return {**batch, "pixel_values": pixels[0] if len(pixels) == 1 else tuple(pixels)}

    def memories(self, batch: Batch) -> tuple[CrossMemory, CrossMemory]:
        """Run the backbone and return what text-reading and image-reading blocks see."""
        features = self.backbone(batch)
        vlln = self.action_head.vlln
        features = vlln(at_dtype_of(features, vlln.weight))
        narrow = autocast_dtype(features.device)
        if narrow is not None:
            features = features.to(narrow)
        features = at_dtype_of(features, self.action_head.model.proj_out_1.weight)
        if not self.work.split_cross_attention:
            valid = tensor(batch, "attention_mask").bool()
            image = tensor(batch, "input_ids") == self.config.language.image_token_id
            text_bias, image_bias = (key_bias(valid & keep, features.dtype) for keep in (~image, image))
            return CrossMemory(features=features, bias=text_bias), CrossMemory(
                features=features, bias=image_bias
            )
        text = _gather(features, tensor(batch, "text_index"))
        image = _gather(features, tensor(batch, "image_index"))
        image_valid = batch.get("image_valid")
        return (
            CrossMemory(features=text, bias=key_bias(tensor(batch, "text_valid"), features.dtype)),
            CrossMemory(
                features=image,
                bias=key_bias(image_valid, features.dtype) if isinstance(image_valid, Tensor) else None,
            ),
        )

    def slots(self, batch: Batch) -> Slot:
        """Return the slot of each sample (B,), or the one slot that holds for all of them."""
        return tensor(batch, "embodiment_id") if self.single_slot is None else self.single_slot

    def encode_state(self, batch: Batch, slot: Slot) -> Tensor:
        """Return the state token (B, 1, D), with the drawn dropout and noise where configured."""
        head = self.action_head
        token = head.state_encoder(at_dtype_of(tensor(batch, "state"), head.state_encoder.layer1.W), slot)
        drop, noise = batch.get("state_drop"), batch.get("state_noise")
        if isinstance(drop, Tensor):
            token = torch.where(drop[:, None, None], head.mask_token.to(token.dtype), token)
        if isinstance(noise, Tensor):
            token = token + noise.to(token.dtype) * self.config.head.state_noise
        return token

    def velocity(
        self,
        state_token: Tensor,
        noisy: Tensor,
        buckets: Tensor,
        slot: Slot,
        memories: tuple[CrossMemory, CrossMemory],
    ) -> Tensor:
        """Predict the velocity (B, T, A) of noisy actions at integer flow times (B,)."""
        head = self.action_head
        actions = head.action_encoder(at_dtype_of(noisy, head.action_encoder.W1.W), buckets, slot)
        actions = actions + head.position_embedding.weight[: noisy.shape[1]].to(actions.dtype)
        x = torch.cat((state_token.to(actions.dtype), actions), dim=1)
        x = at_dtype_of(x, head.model.proj_out_1.weight)
        rows = head.model(x, buckets, *memories, recompute=self.work.recompute)
        rows = at_dtype_of(rows, head.action_decoder.layer1.W)
        # The decoder works row by row, so the state row is left out before it.
        return head.action_decoder(rows[:, -noisy.shape[1] :], slot)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``loss`` (scalar), ``loss_sum`` (B,) and ``loss_count`` (B,), all float32.

        The loss is one ratio over the whole batch: masked squared error / (valid elements + 1e-6).
        """
        if self.work.offload and torch.is_grad_enabled():
            pin = tensor(batch, "action").device.type == "cuda"
            with torch.autograd.graph.save_on_cpu(pin_memory=pin):
                return self._loss(batch)
        return self._loss(batch)

    def _loss(self, batch: Batch) -> dict[str, Tensor]:
        batch = self.canonical(batch)
        if "noise" not in batch or "time" not in batch:
            batch = self.draw(batch)
        slot = self.slots(batch)
        memories = self.memories(batch)
        noisy, buckets, target = self.flow(batch)
        predicted = self.velocity(self.encode_state(batch, slot), noisy, buckets, slot, memories)
        mask = tensor(batch, "action_mask").float()
        squared = (predicted.float() - target).square() * mask
        sums, counts = squared.flatten(1).sum(1), mask.flatten(1).sum(1)
        return {"loss": sums.sum() / (counts.sum() + 1e-6), "loss_sum": sums, "loss_count": counts}

    def flow(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return noisy actions, integer times and the velocity target, in float32."""
        action, noise = tensor(batch, "action").float(), tensor(batch, "noise").float()
        time = tensor(batch, "time").float()
        t = time[:, None, None]
        noisy = (1 - t) * noise + t * action
        return noisy, (time * self.config.head.timestep_buckets).long(), action - noise

    @torch.no_grad()
    def get_action(self, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """Denoise actions (B, action_horizon, max_action_dim) in ``inference_steps`` Euler steps.

        Starts from ``batch["initial_noise"]`` where given, else from a draw of N(0, 1).
        """
        batch = self.canonical(batch)
        head = self.config.head
        slot = self.slots(batch)
        memories = self.memories(batch)
        state = self.encode_state({k: v for k, v in batch.items() if not k.startswith("state_")}, slot)
        x = batch.get("initial_noise")
        if not isinstance(x, Tensor):
            shape = (state.shape[0], head.action_horizon, head.max_action_dim)
            x = torch.randn(shape, generator=generator, device=state.device)
        for step in range(head.inference_steps):
            bucket = step * head.timestep_buckets // head.inference_steps
            buckets = torch.full((x.shape[0],), bucket, dtype=torch.int64, device=x.device)
            x = x + self.velocity(state, x, buckets, slot, memories).float() / head.inference_steps
        return x


_IMAGE_ENTRIES = frozenset({"pixel_values", "images", "augmentation"})


def _numbered(batch: Batch, prefix: str) -> list[object]:
    names = [name for name in batch if name.startswith(prefix)]
    return [batch[name] for name in sorted(names, key=lambda name: int(name.removeprefix(prefix)))]


def _gather(features: Tensor, index: Tensor) -> Tensor:
    return features.gather(1, index[..., None].expand(-1, -1, features.shape[-1]))


def set_trainable(model: GrootModel, config: GrootConfig) -> None:
    """Freeze and unfreeze parameters as the fine-tuning flags say."""
    tune, vl, head = config.tune, model.backbone.model, model.action_head
    vl.requires_grad_(False)
    if tune.language:
        vl.language_model.requires_grad_(True)
    if tune.visual:
        vl.vision_model.requires_grad_(True)
        vl.mlp1.requires_grad_(True)
    decoder = vl.language_model.model
    for layer in list(decoder.layers)[config.language.layers - tune.top_language_layers :]:
        layer.requires_grad_(True)
    head.requires_grad_(False)
    if tune.projector:
        for part in (head.state_encoder, head.action_encoder, head.action_decoder, head.position_embedding):
            part.requires_grad_(True)
        if config.head.state_dropout > 0:
            head.mask_token.requires_grad_(True)
    head.model.requires_grad_(tune.diffusion)
    head.vlln.requires_grad_(tune.vlln)
