"""The built-in patterns: torch's norms, Hugging Face's SigLIP and Qwen3, GR00T-shaped blocks by structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from loongforge_fuse.patching import forwards
from loongforge_fuse.patching.pattern import Pattern, Structure

_NORM_MAX = 8192
_RMS_TYPES = ("RMSNorm", "Qwen3RMSNorm", "Qwen2RMSNorm", "LlamaRMSNorm")


def _like(module: nn.Module) -> dict[str, Any]:
    """Type and device for example inputs: those of the module's parameters."""
    for parameter in module.parameters():
        return {"dtype": parameter.dtype, "device": parameter.device}
    return {"dtype": torch.float32, "device": "cpu"}


def _width_problem(width: int) -> str | None:
    if width % 8 or width > _NORM_MAX:
        return f"width {width} is not a multiple of 8 up to {_NORM_MAX}"
    return None


def _refuses_layer_norm(module: nn.Module) -> str | None:
    if type(module) is not nn.LayerNorm:
        return "not a LayerNorm"
    if len(module.normalized_shape) != 1:
        return f"normalizes {len(module.normalized_shape)} dimensions"
    return _width_problem(module.normalized_shape[0])


def _refuses_rms_norm(module: nn.Module) -> str | None:
    if type(module).__name__ not in _RMS_TYPES:
        return "not an RMSNorm"
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or list(module.children()):
        return "no one-dimensional weight"
    if not hasattr(module, "eps") and not hasattr(module, "variance_epsilon"):
        return "no eps"
    return _width_problem(weight.shape[0])


def _rms_examples(module: nn.Module) -> tuple[object, ...]:
    norm: Any = module
    width = norm.weight.shape[0]
    return (torch.randn(3, 5, width, **_like(module)),)


def _all(*checks: Callable[[nn.Module], str | None]) -> Callable[[nn.Module], str | None]:
    def refuses(module: nn.Module) -> str | None:
        for check in checks:
            reason = check(module)
            if reason is not None:
                return reason
        return None

    return refuses


_LINEAR = ("Linear", "Float8FrozenLinear")
_VISION_MLP = Structure(type_name="VisionMLP", children={"fc1": _LINEAR, "fc2": _LINEAR})
_LANGUAGE_MLP = Structure(
    type_name="LanguageMLP", children={"gate_proj": _LINEAR, "up_proj": _LINEAR, "down_proj": _LINEAR}
)
_VISION_ATTENTION = Structure(
    type_name="VisionAttention",
    children={"q_proj": _LINEAR, "k_proj": _LINEAR, "v_proj": _LINEAR, "out_proj": _LINEAR},
    attributes=("heads",),
)
_VISION_BLOCK = Structure(
    type_name="VisionBlock",
    children={
        "layer_norm1": ("LayerNorm",),
        "layer_norm2": ("LayerNorm",),
        "self_attn": ("VisionAttention",),
        "mlp": ("VisionMLP",),
    },
)
_LANGUAGE_ATTENTION = Structure(
    type_name="LanguageAttention",
    children={
        "q_proj": _LINEAR,
        "k_proj": _LINEAR,
        "v_proj": _LINEAR,
        "o_proj": _LINEAR,
        "q_norm": _RMS_TYPES,
        "k_norm": _RMS_TYPES,
    },
    attributes=("head_dim", "grouped"),
)
_LANGUAGE_LAYER = Structure(
    type_name="LanguageLayer",
    children={
        "self_attn": ("LanguageAttention",),
        "mlp": ("LanguageMLP",),
        "input_layernorm": _RMS_TYPES,
        "post_attention_layernorm": _RMS_TYPES,
    },
)
_DIT_BLOCK = Structure(
    type_name="DiTBlock",
    children={
        "norm1": ("AdaLayerNorm",),
        "attn1": ("DiTAttention",),
        "ff": ("FeedForward",),
        "final_dropout": ("Dropout",),
    },
)


def _dit_parts(module: nn.Module) -> str | None:
    """Check what stands below the direct submodules of a DiT block."""
    block: Any = module
    kinds = [type(part).__name__ for part in getattr(block.ff, "net", ())]
    if kinds != ["GeluProjection", "Dropout", "Linear", "Dropout"]:
        return f"feed-forward of {kinds}"
    if [name for name, _ in block.norm1.named_children()] != ["linear"]:
        return "AdaLayerNorm with other parts than a linear layer"
    outputs = [type(part).__name__ for part in getattr(block.attn1, "to_out", ())]
    if outputs != ["Linear", "Dropout"] or not hasattr(block.attn1, "heads"):
        return f"attention output of {outputs}"
    return _width_problem(block.norm1.linear.out_features // 2)


def _dit_examples(module: nn.Module) -> tuple[object, ...]:
    block: Any = module
    width, memory = block.attn1.to_q.in_features, block.attn1.to_k.in_features
    like = _like(module)
    x, time = torch.randn(2, 5, width, **like), torch.randn(2, width, **like)
    other = torch.randn(2, 7, memory, **like) if memory != width else None
    return x, time, other, None


def _hidden_examples(field: str) -> Callable[[nn.Module], tuple[object, ...]]:
    def examples(module: nn.Module) -> tuple[object, ...]:
        linear: Any = module.get_submodule(field)
        return (torch.randn(2, 5, linear.in_features, **_like(module)),)

    return examples


def _rotary_examples(attention: str) -> Callable[[nn.Module], tuple[object, ...]]:
    def examples(module: nn.Module) -> tuple[object, ...]:
        part: Any = module.get_submodule(attention) if attention else module
        like = _like(module)
        angles = torch.randn(5, part.head_dim // 2, **like)
        angles = torch.cat((angles, angles), -1)
        return torch.randn(2, 5, part.q_proj.in_features, **like), angles.cos(), angles.sin()

    return examples


def _refuses_hf_gelu_mlp(module: nn.Module) -> str | None:
    if type(module).__name__ not in ("SiglipMLP", "Siglip2MLP"):
        return "not a SigLIP MLP"
    activation = getattr(module, "activation_fn", None)
    return None if forwards.is_tanh_gelu(activation) else f"activation {type(activation).__name__}"


def _refuses_hf_gated_mlp(module: nn.Module) -> str | None:
    if type(module).__name__ not in ("Qwen3MLP", "Qwen2MLP", "LlamaMLP"):
        return "not a gated MLP"
    activation = getattr(module, "act_fn", None)
    return None if forwards.is_silu(activation) else f"activation {type(activation).__name__}"


# Small modules first: the last of the registry is tried first.
BUILTIN = (
    Pattern(name="layer_norm", refuses=_refuses_layer_norm, forward=forwards.layer_norm),
    Pattern(name="rms_norm", refuses=_refuses_rms_norm, forward=forwards.rms_norm, examples=_rms_examples),
    Pattern(
        name="hf_gelu_mlp",
        refuses=_refuses_hf_gelu_mlp,
        forward=forwards.gelu_tanh_mlp,
        examples=_hidden_examples("fc1"),
        covers=("activation_fn",),
    ),
    Pattern(
        name="hf_gated_mlp",
        refuses=_refuses_hf_gated_mlp,
        forward=forwards.silu_gated_mlp,
        examples=_hidden_examples("gate_proj"),
        covers=("act_fn",),
    ),
    Pattern(
        name="vision_mlp",
        refuses=_VISION_MLP.refuses,
        forward=forwards.gelu_tanh_mlp,
        examples=_hidden_examples("fc1"),
    ),
    Pattern(
        name="language_mlp",
        refuses=_LANGUAGE_MLP.refuses,
        forward=forwards.silu_gated_mlp,
        examples=_hidden_examples("gate_proj"),
    ),
    Pattern(
        name="language_attention",
        refuses=_LANGUAGE_ATTENTION.refuses,
        forward=forwards.language_attention,
        examples=_rotary_examples(""),
        covers=("q_norm", "k_norm"),
    ),
    Pattern(
        name="vision_attention",
        refuses=_VISION_ATTENTION.refuses,
        forward=forwards.vision_attention,
        examples=_hidden_examples("q_proj"),
    ),
    Pattern(
        name="vision_block",
        refuses=_VISION_BLOCK.refuses,
        forward=forwards.vision_block,
        examples=_hidden_examples("mlp.fc1"),
        covers=("layer_norm1", "layer_norm2"),
    ),
    Pattern(
        name="language_layer",
        refuses=_LANGUAGE_LAYER.refuses,
        forward=forwards.language_layer,
        examples=_rotary_examples("self_attn"),
        covers=("input_layernorm", "post_attention_layernorm"),
    ),
    Pattern(
        name="dit_block",
        refuses=_all(_DIT_BLOCK.refuses, _dit_parts),
        forward=forwards.dit_block,
        examples=_dit_examples,
        covers=(
            "norm1",
            "attn1",
            "attn1.to_out.1",
            "ff",
            "ff.net.0",
            "ff.net.1",
            "ff.net.3",
            "final_dropout",
        ),
    ),
)
