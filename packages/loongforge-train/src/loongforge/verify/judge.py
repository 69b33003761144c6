"""Verdicts: a run with a pillar on against the reference, by a rule that the table names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from loongforge.config import TrainConfig
from loongforge.verify.curves import Curve, Distance, distance, known
from loongforge.verify.toggles import BIT_EXACT, TOLERANCES, Toggle, Tolerance

REPEAT_MARGIN = 3.0
"""Factor on the largest difference between repeats of the reference. Runs that differ by chance alone are as
far apart as repeats are, and the next one exceeds the largest of a few about as often as not."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """By what an outcome is judged."""

    name: str
    allowed: Tolerance


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One toggle against the reference."""

    name: str
    kind: str
    passed: bool
    active: bool | None
    """Whether the records show the pillar at work; None where they cannot."""
    rule: str
    """bit-exact, repeats of the reference, or tolerance by dtype."""
    loss: float
    """Largest relative difference of a step's loss."""
    norm: float
    weights: float
    """Largest absolute difference of a final weight over the summed learning rates."""
    allowed_loss: float
    allowed_norm: float
    allowed_weights: float
    step_ms: float
    """Median step time of the run with the toggle on."""
    note: str = ""


def exact_rule(reference: Curve, repeats: Sequence[Curve]) -> Rule:
    """Return the rule for changes that keep every operation.

    Bit for bit where the reference repeats itself (always on the CPU, where it is not even run again); else
    within :data:`REPEAT_MARGIN` times what any two runs of the same reference differ by.
    """
    apart = [distance(first, second) for first, second in combinations([reference, *repeats], 2)]
    widest = Tolerance(
        loss=max((d.loss for d in apart), default=0.0),
        norm=max((d.norm for d in apart), default=0.0),
        weights=max((d.weights for d in apart), default=0.0),
    )
    if widest == BIT_EXACT:
        return Rule(name="bit-exact", allowed=BIT_EXACT)
    return Rule(
        name=f"{REPEAT_MARGIN:g} x the difference of {len(repeats) + 1} runs of the reference",
        allowed=Tolerance(
            loss=REPEAT_MARGIN * widest.loss,
            norm=REPEAT_MARGIN * widest.norm,
            weights=REPEAT_MARGIN * widest.weights,
        ),
    )


def judge(toggle: Toggle, config: TrainConfig, reference: Curve, curve: Curve, exact: Rule) -> Verdict:
    """Compare a run with the reference by the rule of its kind and precision."""
    precision = "bf16" if config.precision == "bf16" else "fp32"
    rule = exact
    if toggle.kind != "exact":
        rule = Rule(
            name=f"tolerance for {toggle.kind} {precision}", allowed=TOLERANCES[toggle.kind][precision]
        )
    apart: Distance = distance(reference, curve)
    times = sorted(known(record, "step_ms") for record in curve.records)
    same_length = len(reference.losses) == len(curve.losses)
    return Verdict(
        name=toggle.name,
        kind=toggle.kind,
        passed=apart.within(rule.allowed),
        active=active(toggle.name, curve),
        rule=rule.name,
        loss=apart.loss,
        norm=apart.norm,
        weights=apart.weights,
        allowed_loss=rule.allowed.loss,
        allowed_norm=rule.allowed.norm,
        allowed_weights=rule.allowed.weights,
        step_ms=times[len(times) // 2] if times else math.nan,
        note="" if same_length else f"{len(curve.losses)} steps instead of {len(reference.losses)}",
    )


def active(name: str, curve: Curve) -> bool | None:
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


def verdict_rows(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """Return the table: heading and one row per toggle; differences stand beside what is allowed."""
    heading = ["toggle", "verdict", "active", "judged by", "loss", "norm", "weights / rates", "step ms", ""]
    return [heading, *(_row(verdict) for verdict in verdicts)]


def _row(v: Verdict) -> list[str]:
    return [
        v.name,
        "equal" if v.passed else "DIFFERS",
        "-" if v.active is None else "yes" if v.active else "no",
        v.rule,
        _beside(v.loss, v.allowed_loss),
        _beside(v.norm, v.allowed_norm),
        _beside(v.weights, v.allowed_weights),
        f"{v.step_ms:.1f}",
        v.note,
    ]


def _beside(value: float, allowed: float) -> str:
    if value == allowed == 0:
        return "0"
    return f"{value:.1e} {'<=' if value <= allowed else '>'} {allowed:.1e}"
