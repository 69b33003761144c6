"""Proof of equality: the same training with and without each pillar, from the same state.

Loss and gradient norm of every step and the final weights are compared against tolerances by dtype. A toggle
is one setting that differs from the reference, which has every pillar off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.errors import ConfigError
from loongforge.ranks import Ranks
from loongforge.records import read_metrics

Build = Callable[[TrainConfig, Ranks], tuple[nn.Module, Callable[[], object]]]
"""Builds a run: the model, and a function that trains it."""

REFERENCE = PillarConfig(mem="off", comm="off", data="off", fuse="off", graph=False, fused_ops=False)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest allowed differences from the reference."""

    loss: float
    """Relative, any step."""
    norm: float
    """Relative, any step."""
    weights: float
    """Largest absolute difference of a weight, in units of the summed learning rates (Adam moves a weight by
    about
    its rate a step, whatever the gradient's size)."""


TOLERANCES: Mapping[str, Mapping[str, Tolerance]] = {
    "exact": {
        "fp32": Tolerance(loss=0.0, norm=0.0, weights=0.0),
        "bf16": Tolerance(loss=0.0, norm=0.0, weights=0.0),
    },
    "reordered": {
        "fp32": Tolerance(loss=2e-3, norm=2e-2, weights=0.3),
        "bf16": Tolerance(loss=3e-2, norm=2e-1, weights=1.0),
    },
    "rounded": {
        "fp32": Tolerance(loss=5e-2, norm=3e-1, weights=2.0),
        "bf16": Tolerance(loss=5e-2, norm=3e-1, weights=2.0),
    },
}
"""By kind of change and precision: the same operations; the same sums in another order; another rounding."""


@dataclass(frozen=True, kw_only=True)
class Toggle:
    """One setting to prove: its name, what kind of change it is, and how to switch it on."""

    name: str
    kind: str
    change: Callable[[TrainConfig], TrainConfig]


def _pillars(**values: object) -> Callable[[TrainConfig], TrainConfig]:
    def change(config: TrainConfig) -> TrainConfig:
        pillars = dataclasses.replace(config.pillars, **values)  # type: ignore[arg-type]
        return dataclasses.replace(config, pillars=pillars)

    return change


def _bf16(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, precision="bf16")


TOGGLES = {
    "mem": Toggle(name="mem", kind="exact", change=_pillars(mem="pool")),
    "data": Toggle(name="data", kind="exact", change=_pillars(data="on")),
    "fuse": Toggle(name="fuse", kind="reordered", change=_pillars(fuse="auto")),
    "graph": Toggle(name="graph", kind="reordered", change=_pillars(graph=True)),
    "comm": Toggle(name="comm", kind="reordered", change=_pillars(comm="hybrid")),
    "ops": Toggle(name="ops", kind="reordered", change=_pillars(fused_ops=True)),
    "precision": Toggle(name="precision", kind="rounded", change=_bf16),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One toggle against the reference."""

    name: str
    kind: str
    passed: bool
    active: bool | None
    """Whether the records show the pillar at work; None where they cannot."""
    loss: float
    """Largest relative difference of a step's loss."""
    norm: float
    weights: float
    """Largest absolute difference of a final weight over the summed learning rates."""
    step_ms: float
    """Median step time of the run with the toggle on."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one run left."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    rates: tuple[float, ...]
    weights: Mapping[str, Tensor]
    records: tuple[Mapping[str, object], ...]


def parse_toggles(text: str) -> list[Toggle]:
    """Return toggles by their names, separated by commas.

    Raises:
        ConfigError: An unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TOGGLES]
    if unknown or not names:
        msg = f"toggle is {', '.join(unknown) or 'empty'}: allowed are {', '.join(TOGGLES)}"
        raise ConfigError(msg)
    return [TOGGLES[name] for name in names]


def run_curve(config: TrainConfig, ranks: Ranks, build: Build) -> Curve:
    """Train from the start and return losses, norms and final weights."""
    model, train = build(config, ranks)
    train()
    records = read_metrics(config.output, rank=ranks.rank)
    return Curve(
        losses=tuple(_known(record, "loss") for record in records),
        norms=tuple(_known(record, "grad_norm") for record in records),
        rates=tuple(_known(record, "lr") for record in records),
        weights={name: value.detach().float().cpu().clone() for name, value in model.state_dict().items()},
        records=tuple(records),
    )


def reference_config(config: TrainConfig, folder: Path, name: str) -> TrainConfig:
    """Return the configuration with every pillar off, in a folder of its own, without checkpoints in
    between.
    """
    return dataclasses.replace(
        config,
        output=str(folder / name),
        pillars=REFERENCE,
        resume="never",
        control=False,
        probe_interval=0,
        checkpoint=CheckpointConfig(every=0, keep_last=1, background=False),
    )


def verify(
    config: TrainConfig, toggles: list[Toggle], *, ranks: Ranks, build: Build, folder: Path
) -> tuple[Curve, list[tuple[Verdict, Curve]]]:
    """Run the reference and every toggle, and judge each.

    Args:
        config: The run; its pillars are ignored.
        toggles: What to switch on, one at a time.
        ranks: This process among its peers; all ranks verify together.
        build: Builds a run of a configuration from scratch, with equal initial weights.
        folder: Where the runs go.
    """
    base = reference_config(config, folder, "reference")
    reference = run_curve(base, ranks, build)
    results = []
    for toggle in toggles:
        changed = toggle.change(reference_config(config, folder, toggle.name))
        curve = run_curve(changed, ranks, build)
        results.append((judge(toggle, base, reference, curve), curve))
    return reference, results


def judge(toggle: Toggle, config: TrainConfig, reference: Curve, curve: Curve) -> Verdict:
    """Compare a run with the reference against the tolerances of its kind and precision."""
    allowed = TOLERANCES[toggle.kind]["bf16" if config.precision == "bf16" else "fp32"]
    loss = _largest(reference.losses, curve.losses)
    norm = _largest(reference.norms, curve.norms)
    travelled = sum(reference.rates) or 1.0
    weights = max(
        (
            float((value - curve.weights[name]).abs().max())
            for name, value in reference.weights.items()
            if value.numel()
        ),
        default=0.0,
    )
    share = weights / travelled
    same_length = len(reference.losses) == len(curve.losses)
    fine = loss <= allowed.loss and norm <= allowed.norm and share <= allowed.weights and same_length
    times = sorted(_known(record, "step_ms") for record in curve.records)
    return Verdict(
        name=toggle.name,
        kind=toggle.kind,
        passed=bool(fine),
        active=_active(toggle.name, curve),
        loss=loss,
        norm=norm,
        weights=share,
        step_ms=times[len(times) // 2] if times else math.nan,
        note="" if same_length else f"{len(curve.losses)} steps instead of {len(reference.losses)}",
    )


def _active(name: str, curve: Curve) -> bool | None:
    """Tell from the records whether the pillar was at work."""
    last = curve.records[-1] if curve.records else {}
    if name == "fuse":
        return any(record.get("fused") is True for record in curve.records)
    if name == "graph":
        return any(record.get("graph") is True for record in curve.records)
    if name in {"mem", "comm", "data"}:
        values = last.get(name)
        return bool(values) and len(dict(values)) > 1  # type: ignore[call-overload]
    return None


def _known(record: Mapping[str, object], name: str) -> float:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _largest(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Return the largest relative difference; a value that is missing on one side only counts as infinite."""
    worst = 0.0
    for a, b in zip(first, second, strict=False):
        if math.isnan(a) and math.isnan(b):
            continue
        difference = abs(a - b) / max(abs(a), 1e-8)
        worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def verdict_rows(verdicts: list[Verdict]) -> list[list[str]]:
    """Return the table: heading and one row per toggle."""
    rows = [["toggle", "kind", "verdict", "active", "loss", "norm", "weights / rates", "step ms", ""]]
    for v in verdicts:
        active = "-" if v.active is None else "yes" if v.active else "no"
        verdict = "equal" if v.passed else "DIFFERS"
        numbers = [f"{v.loss:.2e}", f"{v.norm:.2e}", f"{v.weights:.2e}", f"{v.step_ms:.1f}"]
        rows.append([v.name, v.kind, verdict, active, *numbers, v.note])
    return rows


def plot(reference: Curve, results: list[tuple[Verdict, Curve]], path: Path) -> None:
    """Draw loss curves and their differences from the reference as SVG (extra ``plot``)."""
    from loongforge.errors import require

    require("matplotlib", "loongforge-train[plot]", "leave --plot away")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    steps = range(1, len(reference.losses) + 1)
    upper.plot(steps, reference.losses, "k", linewidth=2, label="reference (all off)")
    for verdict, curve in results:
        upper.plot(range(1, len(curve.losses) + 1), curve.losses, linewidth=1, label=verdict.name)
        pairs = zip(reference.losses, curve.losses, strict=False)
        lower.plot([abs(a - b) + 1e-12 for a, b in pairs], linewidth=1)
    upper.set_ylabel("loss")
    lower.set_ylabel("|difference|")
    lower.set_yscale("log")
    lower.set_xlabel("step")
    upper.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def recipe_build(config: TrainConfig, ranks: Ranks) -> tuple[nn.Module, Callable[[], object]]:
    """Build a run of a recipe; equal seeds give equal weights, data order and draws."""
    if torch.cuda.is_available() and ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    from loongforge.runs import build_run

    run = build_run(config, ranks=ranks)
    return run.model, run.session.train
