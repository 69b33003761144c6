"""Random weights that depend on a seed and the parameter's name alone, materialised tensor by tensor."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.lora import LoraConfig, add_adapters
from loongforge.recipes.gr00t_n1_6.model import GrootModel

_RESIDUAL_ENDS = (
    "o_proj.weight",
    "down_proj.weight",
    "out_proj.weight",
    "fc2.weight",
    "to_out.0.weight",
    "ff.net.2.weight",
    "leave.weight",
    "attention.out.weight",
)


def build_on_meta(config: GrootConfig, lora: LoraConfig | None = None) -> GrootModel:
    """Build the model without memory for its parameters, with adapters where asked for."""
    with torch.device("meta"):
        model = GrootModel(config)
        if lora is not None:
            add_adapters(model, lora)
    return model


def materialise(
    model: nn.Module,
    device: torch.device | str,
    *,
    frozen_dtype: torch.dtype,
    fill: Callable[[str, Tensor], None],
) -> None:
    """Give every meta parameter memory on ``device`` and contents, one after the other.

    Args:
        model: Model on the meta device; has no buffers.
        device: Where the parameters go.
        frozen_dtype: Dtype of parameters that do not train; the others become float32.
        fill: Writes the contents of one parameter, given its name.
    """
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dtype = torch.float32 if parameter.requires_grad else frozen_dtype
            value = torch.empty(parameter.shape, dtype=dtype, device=device)
            fill(f"{prefix}.{name}" if prefix else name, value)
            module.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))


def random_fill(seed: int, config: GrootConfig) -> Callable[[str, Tensor], None]:
    """Return the filler of a GR00T model; see :func:`named_fill`."""
    depth = {
        "vision_model": config.vision.layers,
        "language_model": config.language.layers,
        "transformer_blocks": config.dit.layers,
    }
    return named_fill(seed, depth)


def named_fill(seed: int, depth: Mapping[str, int]) -> Callable[[str, Tensor], None]:
    """Return a filler: matrices N(0, 1/fan_in), residual ends damped by depth, norms 1, biases 0.

    The numbers of a tensor depend on ``seed`` and its name (and on the kind of device), not on the order of
    filling, so every rank builds the same model and the global generators stay as they are.

    Args:
        seed: Seed of the model.
        depth: Number of layers by a part of the parameter names.
    """

    @torch.no_grad()
    def fill(name: str, value: Tensor) -> None:
        kind = name.rsplit(".", 1)[-1]
        if kind == "lora_B":
            value.zero_()
            return
        if value.ndim == 1 or kind in ("bias", "b", "in_proj_bias"):
            is_norm = kind == "weight"
            value.fill_(1.0 if is_norm else 0.0)
            return
        inputs = value.shape[-2] if kind == "W" else value[0].numel()
        std = 0.02 if _is_embedding(name) else 1.0 / math.sqrt(inputs)
        if name.endswith(_RESIDUAL_ENDS):
            std *= next(((2 * layers) ** -0.5 for part, layers in depth.items() if part in name), 1.0)
        generator = torch.Generator(device=value.device)
        generator.manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % (1 << 63))
        # Drawn in float32 whatever the storage, so that a frozen bfloat16 model is the float32 one, rounded.
        wide = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        value.copy_(wide.normal_(0.0, std, generator=generator))

    return fill


def _is_embedding(name: str) -> bool:
    return any(part in name for part in ("embed_tokens", "position_embedding", "mask_token", "probe"))
