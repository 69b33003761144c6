"""Low-rank adapters: large matrices stay frozen in 16 bits, two thin ones beside each of them train."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge.errors import ConfigError

_TARGETS = {
    "language": r"language_model\.model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj$",
    "dit": (
        r"action_head\.model\.transformer_blocks\.\d+\."
        r"(attn1\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2))$"
    ),
    "vision": r"vision_model\.encoder\.layers\.\d+\.(self_attn\.\w+|mlp\.fc[12])$",
}


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters.

    Attributes:
        rank: Inner width of an adapter; 0 switches adapters off.
        alpha: The adapter's output is scaled by ``alpha / rank``.
        targets: Parts that get adapters and are frozen otherwise: ``dit``, ``language`` (the layers that
            would train), ``vision``. Encoders and decoder of the embodiment train in full.
    """

    rank: int = 0
    alpha: float = 64.0
    targets: tuple[str, ...] = ("dit", "language")

    def __post_init__(self) -> None:
        if self.rank < 0:
            msg = f"lora.rank must not be negative, got {self.rank}; 0 switches adapters off"
            raise ValueError(msg)
        for target in self.targets:
            if target not in _TARGETS:
                msg = f"unknown lora target '{target}'; allowed are {', '.join(sorted(_TARGETS))}"
                raise ValueError(msg)


class LoraLinear(nn.Linear):
    """A linear layer whose ``weight`` and ``bias`` are frozen, plus ``lora_A`` and ``lora_B``."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    @classmethod
    def around(cls, layer: nn.Linear, rank: int, alpha: float) -> LoraLinear:
        """Turn ``layer`` into an adapted one that holds the same parameters."""
        outputs, inputs = layer.weight.shape
        result = cls.__new__(cls)
        nn.Module.__init__(result)
        result.in_features, result.out_features = inputs, outputs
        result.weight, result.bias = layer.weight, layer.bias
        result.weight.requires_grad_(False)
        if layer.bias is not None:
            result.bias.requires_grad_(False)
        device = layer.weight.device
        result.lora_A = nn.Parameter(torch.zeros(rank, inputs, device=device))
        result.lora_B = nn.Parameter(torch.zeros(outputs, rank, device=device))
        if device.type != "meta":
            nn.init.normal_(result.lora_A, std=1 / math.sqrt(inputs))
        result.scale = alpha / rank
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Apply the frozen layer and add the adapter."""
        base = functional.linear(x, self.weight, self.bias)
        thin = functional.linear(x, self.lora_A.to(x.dtype))
        return base + functional.linear(thin, self.lora_B.to(thin.dtype)) * self.scale

    def merged_weight(self) -> Tensor:
        """Return the weight with the adapter added, in the weight's dtype."""
        delta = (self.lora_B.float() @ self.lora_A.float()) * self.scale
        return (self.weight.float() + delta).to(self.weight.dtype)


def add_adapters(model: nn.Module, config: LoraConfig) -> int:
    """Freeze the targeted parts and put adapters into their linear layers; return how many.

    Only layers that would train get an adapter, so the frozen bottom of the decoder stays as it is.

    Raises:
        ConfigError: No layer matches.
    """
    if config.rank == 0:
        return 0
    patterns = [re.compile(_TARGETS[target]) for target in config.targets]
    chosen = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, LoraLinear)
        and any(pattern.search(name) for pattern in patterns)
        and (module.weight.requires_grad or "vision_model" in name)
    ]
    if not chosen:
        msg = f"no trainable linear layer matches lora.targets {config.targets}; check the tune flags"
        raise ConfigError(msg)
    for name in chosen:
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        layer = cast(nn.Linear, model.get_submodule(name))
        setattr(parent, leaf, LoraLinear.around(layer, config.rank, config.alpha))
    _freeze_rest(model, config)
    return len(chosen)


def _freeze_rest(model: nn.Module, config: LoraConfig) -> None:
    """Freeze what else lies in the adapted parts (norms, modulation), adapters excepted."""
    parts = {"dit": "action_head.model.", "language": "language_model.", "vision": "vision_model."}
    prefixes = [parts[target] for target in config.targets]
    for name, parameter in model.named_parameters():
        if ".lora_" not in name and any(prefix in name for prefix in prefixes):
            parameter.requires_grad_(False)


def merge_adapters(model: nn.Module) -> int:
    """Fold every adapter into its weight in place and reset it; return how many."""
    count = 0
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLinear):
                module.weight.copy_(module.merged_weight())
                module.lora_B.zero_()
                count += 1
    return count
