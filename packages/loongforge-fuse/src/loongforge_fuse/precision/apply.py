"""Applying a precision policy: cast parameters, wrap forward passes, swap frozen linears; with undo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from loongforge_fuse.precision.fp8 import float8_problem, use_float8
from loongforge_fuse.precision.policy import DTYPES, Compute, PrecisionPolicy
from loongforge_fuse.protocol import restore_forward


@dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """What the policy made of one module.

    Attributes:
        module: Name; empty for the model itself.
        kind: Class name.
        parameters: Elements of its own parameters.
        trainable: Whether any of them trains.
        storage: Their dtype now.
        compute: How it computes now.
        reduction: Type of its gradients' communication, ``keep`` for their own.
        note: Why a wish was not granted; empty when all was.
    """

    module: str
    kind: str
    parameters: int
    trainable: bool
    storage: str
    compute: str
    reduction: str
    note: str = ""


@dataclass(kw_only=True)
class AppliedPrecision:
    """Result of :func:`apply_precision`.

    Attributes:
        rows: One row per module that has parameters of its own or that a rule covers.
        reductions: Parameter name -> dtype of its gradient's communication, where a rule sets one.
    """

    rows: list[PrecisionRow] = field(default_factory=list)
    reductions: dict[str, torch.dtype] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        """Put forward passes, modules and storage types back (rounded values stay rounded)."""
        while self._undo:
            self._undo.pop()()

    def on_undo(self, action: Callable[[], None]) -> None:
        """Register what undo has to do; the latest runs first."""
        self._undo.append(action)

    def table(self, *, limit: int = 60) -> str:
        """Return the rows as text: modules of equal treatment are joined, notes last."""
        groups: dict[tuple[str, ...], list[PrecisionRow]] = {}
        for row in self.rows:
            key = (row.kind, row.storage, row.compute, row.reduction, str(row.trainable), row.note)
            groups.setdefault(key, []).append(row)
        lines = ["modules  parameters  storage   compute   reduction  trains  kind  (first module)  note"]
        for (kind, storage, compute, reduction, trains, note), rows in list(groups.items())[:limit]:
            total = sum(r.parameters for r in rows)
            first = rows[0].module or "(model)"
            lines.append(
                f"{len(rows):7d}  {total:10d}  {storage:8s}  {compute:8s}  {reduction:9s}  "
                f"{'yes' if trains == 'True' else 'no':6s}  {kind}  ({first})  {note}".rstrip()
            )
        return "\n".join(lines)


def apply_precision(model: nn.Module, policy: PrecisionPolicy) -> AppliedPrecision:
    """Apply a policy to a model in place.

    Parameters keep their identity and names (their data is cast), so optimizers and state dicts stay valid;
    apply before the optimizer makes its state. A wish that cannot be granted (float8 for a trainable or
    unaligned layer) is left out and stands in the row's note.

    Raises:
        ValueError: A rule that covers no module, or ``tf32`` for single modules (torch has one switch for
            all).
        TypeError: float8 for something that is no linear layer.
    """
    applied = AppliedPrecision()
    modules = list(model.named_modules())
    for rule in policy.rules:
        if not any(rule.matches(name, module) for name, module in modules):
            message = (
                f"the precision rule for '{rule.pattern}'"
                + (f" of kind '{rule.kind}'" if rule.kind else "")
                + " covers no module of this model; check the pattern against named_modules()"
            )
            raise ValueError(message)
    float8: list[str] = []
    for name, module in modules:
        storage, compute, reduction, masters = policy.resolve(name, module)
        note = ""
        own = list(module.named_parameters(recurse=False))
        if storage != "keep":
            note = _cast(applied, own, DTYPES[storage], masters=masters)
        if compute == "float8":
            problem = _float8_problem(name, module)
            if problem is None:
                float8.append(name)
            else:
                note, compute = f"float8 refused: {problem}", "keep"
        elif compute == "tf32":
            _use_tf32(applied, name)
        elif compute != "keep":
            _wrap(applied, module, compute)
        if reduction != "keep":
            for parameter, _ in own:
                applied.reductions[f"{name}.{parameter}" if name else parameter] = DTYPES[reduction]
        if own or compute != "keep":
            applied.rows.append(
                PrecisionRow(
                    module=name,
                    kind=type(module).__name__,
                    parameters=sum(p.numel() for _, p in own),
                    trainable=any(p.requires_grad for _, p in own),
                    storage="/".join(sorted({str(p.dtype).removeprefix("torch.") for _, p in own})) or "-",
                    compute=compute,
                    reduction=reduction,
                    note=note,
                )
            )
    for name in float8:
        _swap_float8(applied, model, name)
    return applied


def _cast(
    applied: AppliedPrecision, own: list[tuple[str, nn.Parameter]], dtype: torch.dtype, *, masters: bool
) -> str:
    """Cast a module's own parameters; trainable ones keep float32 where masters are wanted."""
    note = ""
    for _, parameter in own:
        if parameter.requires_grad and masters and dtype != torch.float32:
            note = "trains: kept as float32 master"
            continue
        if parameter.dtype == dtype or not parameter.is_floating_point():
            continue
        before = parameter.dtype
        parameter.data = parameter.data.to(dtype)

        def back(parameter: nn.Parameter = parameter, before: torch.dtype = before) -> None:
            parameter.data = parameter.data.to(before)

        applied.on_undo(back)
    return note


def _float8_problem(name: str, module: nn.Module) -> str | None:
    if not isinstance(module, nn.Linear):
        message = f"'{name}' is a {type(module).__name__}; float8 computes linear layers only"
        raise TypeError(message)
    return float8_problem(module)


def _swap_float8(applied: AppliedPrecision, model: nn.Module, name: str) -> None:
    linear = use_float8(model, name)

    def back() -> None:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, linear)

    applied.on_undo(back)


def _use_tf32(applied: AppliedPrecision, name: str) -> None:
    if name:
        message = (
            f"tf32 is one switch for the whole process; use pattern '' instead of a rule that covers '{name}'"
        )
        raise ValueError(message)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    applied.on_undo(lambda: torch.set_float32_matmul_precision(before))


def _wrap(applied: AppliedPrecision, module: nn.Module, compute: Compute) -> None:
    """Run a module's forward pass in one precision, whatever autocast is on outside."""
    plain, before = module.forward, module.__dict__.get("forward")
    dtype = DTYPES[compute]

    def forward(*args: object, **kwargs: object) -> object:
        kind = _device_of(module, args)
        if dtype == torch.float32:
            with torch.autocast(kind, enabled=False):
                wide = [_widened(a) for a in args]
                return plain(*wide, **{k: _widened(v) for k, v in kwargs.items()})
        with torch.autocast(kind, dtype=dtype, cache_enabled=not torch.is_inference_mode_enabled()):
            return plain(*args, **kwargs)

    module.forward = forward
    applied.on_undo(lambda: restore_forward(module, before))


def _widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _device_of(module: nn.Module, args: tuple[object, ...]) -> str:
    for value in (*module.parameters(), *args):
        if isinstance(value, Tensor):
            return value.device.type
    return "cpu"


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far a policy moves a model.

    Attributes:
        loss_before: Loss without the policy.
        loss_after: Loss with it.
        similarity: Name of a watched module -> cosine similarity of its outputs before and after.
    """

    loss_before: float
    loss_after: float
    similarity: Mapping[str, float]

    @property
    def loss_deviation(self) -> float:
        """Relative change of the loss."""
        return abs(self.loss_after - self.loss_before) / max(abs(self.loss_before), 1e-12)


def measure_deviation(
    model: nn.Module,
    policy: PrecisionPolicy,
    loss: Callable[[], Tensor],
    *,
    watch: tuple[str, ...] = (),
) -> Deviation:
    """Measure feature similarity and loss deviation of a policy, then undo it.

    Args:
        model: The model.
        policy: The policy to try.
        loss: Runs the model on fixed data and returns its scalar loss; call it with dropout off.
        watch: Names of modules whose outputs are compared.
    """

    def run() -> tuple[float, dict[str, Tensor]]:
        seen: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[nn.Module, object, object], None]:
            def hook(module: nn.Module, inputs: object, output: object) -> None:
                del module, inputs
                if isinstance(output, Tensor):
                    seen[name] = output.detach().float().flatten()

            return hook

        handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in watch]
        try:
            with torch.no_grad():
                return float(loss()), seen
        finally:
            for handle in handles:
                handle.remove()

    before, features = run()
    applied = apply_precision(model, policy)
    try:
        after, moved = run()
    finally:
        applied.undo()
    similarity = {
        name: float(torch.nn.functional.cosine_similarity(features[name], moved[name], dim=0))
        for name in features
        if name in moved
    }
    if not math.isfinite(after):
        similarity = dict.fromkeys(similarity, float("nan"))
    return Deviation(loss_before=before, loss_after=after, similarity=similarity)
