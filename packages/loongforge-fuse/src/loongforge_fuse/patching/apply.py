"""``apply_fused_ops``: find modules that fit a pattern, check the replacement, swap, report, undo."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import Tensor, nn

from loongforge_fuse.autotune import Autotuner
from loongforge_fuse.patching.pattern import Pattern
from loongforge_fuse.patching.registry import patterns
from loongforge_fuse.patching.tuned import tuned_forward
from loongforge_fuse.precision.fp8 import Float8FrozenLinear

Mode = Literal["auto", "tuned", "always", "off"]
_MODES: tuple[Mode, ...] = ("auto", "tuned", "always", "off")
# Largest root mean square difference, relative, between original and replacement on random inputs.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_ORIGINAL = "_loongforge_original_forward"


@dataclass(frozen=True, kw_only=True)
class PatchPolicy:
    """Which modules to patch and when the fused forward runs.

    Attributes:
        mode: "auto": fused on CUDA tensors, the original forward elsewhere; "tuned": like "auto", but each
            module's first call with new shapes measures both, forward and backward, and the faster one stays;
            "always": fused everywhere (the CPU uses the reference); "off": change nothing.
        include: shell patterns of module names to consider; default all.
        exclude: shell patterns of module names to leave alone; default none.
        kinds: names of the patterns to use; None: all registered ones.
        check: run original and replacement once per configuration on random inputs and refuse a replacement
            that differs by more than rounding.
    """

    mode: Mode = "auto"
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    kinds: tuple[str, ...] | None = None
    check: bool = True

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            message = f"policy mode must be one of {', '.join(_MODES)}, got {self.mode!r}"
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class PatchRecord:
    """What happened to one module: the pattern that fitted, and why it was left (None: it was patched)."""

    module: str
    pattern: str
    reason: str | None


@dataclass(kw_only=True)
class FusedOpsReport:
    """The outcome of :func:`apply_fused_ops`.

    Attributes:
        records: one entry per patched module, and per module that nearly fitted.
        tuner: the decisions of mode "tuned".
    """

    records: list[PatchRecord] = field(default_factory=list)
    tuner: Autotuner = field(default_factory=Autotuner, repr=False)
    _patched: list[nn.Module] = field(default_factory=list, repr=False)

    @property
    def patched(self) -> int:
        """Number of modules whose forward is replaced now."""
        return len(self._patched)

    def counts(self) -> dict[str, int]:
        """Return how many modules each pattern changed."""
        return dict(Counter(r.pattern for r in self.records if r.reason is None))

    def left(self) -> dict[str, int]:
        """Return why modules were left, with their number."""
        return dict(Counter(f"{r.pattern}: {r.reason}" for r in self.records if r.reason is not None))

    def explain(self) -> str:
        """Return a short text for people: what was changed, what was left and why."""
        lines = [f"fused {count} x {name}" for name, count in self.counts().items()]
        lines += [f"left {count} x {reason}" for reason, count in self.left().items()]
        return "\n".join(lines) or "nothing to fuse"

    def undo(self) -> None:
        """Put every original forward back; safe to call twice."""
        for module in self._patched:
            module.__dict__.pop("forward", None)
            module.__dict__.pop(_ORIGINAL, None)
        self._patched.clear()


def apply_fused_ops(
    model: nn.Module, policy: PatchPolicy | Mode = "auto", *, tuner: Autotuner | None = None
) -> FusedOpsReport:
    """Replace the forwards of modules that fit a pattern by fused ones.

    Parameters, buffers, names and the state dict stay as they are; only the attribute ``forward`` of single
    modules changes. Norms, activations and dropouts inside a fused block are not called as modules any more,
    so a block is left alone when one of them has hooks. Dropout keeps its distribution, not its mask: keys
    come from torch's generator, so seeds, checkpoints and recomputation work as before.

    Args:
        model: patched in place.
        policy: a :class:`PatchPolicy`, or just its mode.
        tuner: where mode "tuned" measures and remembers; default: the user cache.

    Returns:
        What was changed and what was not, with `undo`.

    Raises:
        ValueError: an unknown mode or pattern name.
    """
    chosen = policy if isinstance(policy, PatchPolicy) else PatchPolicy(mode=policy)
    report = FusedOpsReport(tuner=tuner or Autotuner())
    if chosen.mode == "off":
        return report
    known = {p.name: p for p in patterns()}
    if chosen.kinds is not None:
        unknown = set(chosen.kinds) - set(known)
        if unknown:
            message = f"unknown pattern {', '.join(sorted(unknown))}; there are {', '.join(known)}"
            raise ValueError(message)
        known = {n: p for n, p in known.items() if n in chosen.kinds}
    covered: set[int] = set()
    verdicts: dict[tuple[object, ...], str | None] = {}
    for name, module in model.named_modules():
        if id(module) in covered or _ORIGINAL in module.__dict__ or not _selected(name, chosen):
            continue
        for pattern in known.values():
            reason = pattern.refuses(module)
            if reason is not None and reason.startswith("not a"):
                continue
            reason = reason or _hooks(module, pattern) or _verdict(module, pattern, chosen, verdicts)
            report.records.append(PatchRecord(module=name, pattern=pattern.name, reason=reason))
            if reason is None:
                _swap(module, pattern, chosen.mode, report.tuner)
                report._patched.append(module)  # noqa: SLF001 - the report belongs to this function
                covered.update(id(module.get_submodule(part)) for part in pattern.covers)
                break
    return report


def _selected(name: str, policy: PatchPolicy) -> bool:
    taken = any(fnmatch(name, p) for p in policy.include)
    return taken and not any(fnmatch(name, p) for p in policy.exclude)


def _hooks(module: nn.Module, pattern: Pattern) -> str | None:
    for part in pattern.covers:
        child = module.get_submodule(part)
        found = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(child, name) for name in found):
            return f"{part} has hooks, which a fused block would not call"
        if "forward" in child.__dict__:
            return f"{part} has a forward of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced by somebody else"
    return None


def _swap(module: nn.Module, pattern: Pattern, mode: Mode, tuner: Autotuner) -> None:
    original: Callable[..., object] = module.forward
    fused = types.MethodType(pattern.forward, module)
    module.__dict__[_ORIGINAL] = original
    if mode == "always":
        module.__dict__["forward"] = fused
        return

    if mode == "tuned":
        module.__dict__["forward"] = tuned_forward(module, pattern.name, original, fused, tuner)
        return

    def forward(x: Tensor, *arguments: object, **named: object) -> object:
        return fused(x, *arguments, **named) if x.is_cuda else original(x, *arguments, **named)

    module.__dict__["forward"] = forward


def _verdict(
    module: nn.Module, pattern: Pattern, policy: PatchPolicy, known: dict[tuple[object, ...], str | None]
) -> str | None:
    """Return why the replacement is refused after a trial, or None; one trial per configuration."""
    if not policy.check or pattern.examples is None or any(p.is_meta for p in module.parameters()):
        return None
    key = (
        pattern.name,
        type(module),
        tuple((n, tuple(p.shape), p.dtype, p.device) for n, p in module.named_parameters()),
    )
    if key not in known:
        known[key] = _trial(module, pattern)
    return known[key]


def _trial(module: nn.Module, pattern: Pattern) -> str | None:
    modes = [(m, m.training) for m in module.modules()]
    devices = {p.device for p in module.parameters() if p.is_cuda}
    try:
        # Dropout is off for the comparison; the caller's random state is left as it was.
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
            module.eval()
            examples = pattern.examples(module) if pattern.examples is not None else ()
            want, got = module.forward(*examples), pattern.forward(module, *examples)
        # A float8 layer computes in bf16 whatever it returns, and rounds its input to three bits.
        coarse = any(isinstance(m, Float8FrozenLinear) for m in module.modules())
        return _difference(want, got, _TOLERANCES[torch.bfloat16] if coarse else 0.0)
    except Exception as error:  # whatever goes wrong, the original stays
        return f"trial failed: {type(error).__name__}: {error}"
    finally:
        for part, training in modes:
            part.training = training


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _difference(want: object, got: object, least: float) -> str | None:
    pairs = list(zip(_tensors(want), _tensors(got), strict=True))
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"returns {b.dtype} {tuple(b.shape)} instead of {a.dtype} {tuple(a.shape)}"
        gap = (a.double() - b.double()).square().mean().sqrt() / a.double().square().mean().sqrt().clamp_min(
            1e-30
        )
        limit = max(least, _TOLERANCES.get(a.dtype, 0.0))
        if not float(gap) <= limit:
            return f"differs from the original by {float(gap):.1e}, more than {limit:.0e}"
    return None if pairs else "returns no tensor"
