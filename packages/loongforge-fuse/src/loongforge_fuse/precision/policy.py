"""Precision per module: storage of parameters, numbers of the computation, type of gradient reduction."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Storage = Literal["keep", "float32", "bfloat16", "float16"]
Compute = Literal["keep", "float32", "bfloat16", "float16", "tf32", "float8"]
Reduction = Literal["keep", "float32", "bfloat16", "float16"]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


@dataclass(frozen=True, kw_only=True)
class PrecisionRule:
    """Precision of the modules whose name matches.

    Attributes:
        pattern: Shell pattern over module names as ``named_modules`` gives them; ``*`` also matches dots. The
            empty name is the model itself.
        kind: Restricts the rule to ``"norm"``, ``"linear"``, ``"embedding"`` or ``"frozen"`` modules (those
            whose parameters all are frozen). Default None, every module.
        parameters: Storage of the module's own parameters. Trainable ones stay float32 masters unless
            ``masters`` is False. Default ``"keep"``.
        compute: Numbers of the forward pass: autocast to a 16-bit type, float32 with inputs widened,
            ``"tf32"`` (float32 storage, tensor cores; forward and backward) or ``"float8"`` (frozen linear
            layers only). Default ``"keep"``.
        reduction: Type in which gradients of the module's parameters are communicated. Default ``"keep"``.
        masters: Keep trainable parameters in float32. Default True.
    """

    pattern: str
    kind: Literal["norm", "linear", "embedding", "frozen"] | None = None
    parameters: Storage = "keep"
    compute: Compute = "keep"
    reduction: Reduction = "keep"
    masters: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("parameters", ("keep", *DTYPES)),
            ("compute", ("keep", *DTYPES, "tf32", "float8")),
            ("reduction", ("keep", *DTYPES)),
            ("kind", (None, "norm", "linear", "embedding", "frozen")),
        ):
            value = getattr(self, name)
            value = _NAMES.get(value, value) if isinstance(value, str) else value
            object.__setattr__(self, name, value)
            if value not in allowed:
                message = f"{name} of the rule for '{self.pattern}' is {value!r}, allowed: {allowed}"
                raise ValueError(message)
        if self.parameters == "keep" and self.compute == "keep" and self.reduction == "keep":
            message = f"the rule for '{self.pattern}' changes nothing; set parameters, compute or reduction"
            raise ValueError(message)

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether the rule covers a module."""
        return fnmatch.fnmatchcase(name, self.pattern) and (self.kind is None or _is_kind(module, self.kind))


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """Rules in order; for each setting the last rule that matches and sets it wins.

    Attributes:
        rules: The rules.
    """

    rules: tuple[PrecisionRule, ...]

    @classmethod
    def of(cls, rules: Sequence[PrecisionRule]) -> PrecisionPolicy:
        """Make a policy from any sequence of rules."""
        return cls(rules=tuple(rules))

    @classmethod
    def mixed_bfloat16(cls) -> PrecisionPolicy:
        """The usual fine-tuning policy: frozen parameters in bf16, trainable float32 masters, bf16 compute.

        Norm statistics are computed in float32 by torch's own norm kernels whatever the storage; softmax and
        losses are in float32 under autocast.
        """
        return cls(
            rules=(
                PrecisionRule(pattern="*", kind="frozen", parameters="bfloat16"),
                PrecisionRule(pattern="", compute="bfloat16"),
            )
        )

    @classmethod
    def float8_frozen(cls, pattern: str = "*") -> PrecisionPolicy:
        """Opt-in: frozen linear layers compute in float8; what does not fit stays and is listed."""
        return cls(rules=(PrecisionRule(pattern=pattern, kind="linear", compute="float8"),))

    def __add__(self, other: PrecisionPolicy) -> PrecisionPolicy:
        return PrecisionPolicy(rules=self.rules + other.rules)

    def resolve(self, name: str, module: nn.Module) -> tuple[Storage, Compute, Reduction, bool]:
        """Return storage, compute, reduction and masters of one module."""
        storage: Storage = "keep"
        compute: Compute = "keep"
        reduction: Reduction = "keep"
        masters = True
        for rule in self.rules:
            if not rule.matches(name, module):
                continue
            if rule.parameters != "keep":
                storage, masters = rule.parameters, rule.masters
            compute = rule.compute if rule.compute != "keep" else compute
            reduction = rule.reduction if rule.reduction != "keep" else reduction
        return storage, compute, reduction, masters


def _is_kind(module: nn.Module, kind: str) -> bool:
    if kind == "linear":
        return isinstance(module, nn.Linear)
    if kind == "embedding":
        return isinstance(module, nn.Embedding)
    if kind == "norm":
        return "norm" in type(module).__name__.lower()
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(p.requires_grad for p in own)
