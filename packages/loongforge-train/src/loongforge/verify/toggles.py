"""What ``loongforge verify`` can switch on, and how far a run may then be from the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from loongforge.config import PillarConfig, TrainConfig
from loongforge.errors import ConfigError

Kind = Literal["exact", "reordered", "rounded"]
REFERENCE = PillarConfig(
    mem="off", comm="off", data="off", fuse="off", graph=False, fused_ops=False, fused_optimizer=False
)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest allowed differences from the reference."""

    loss: float
    """Relative, any step."""
    norm: float
    """Relative, any step."""
    weights: float
    """Largest absolute difference of a weight, in units of the summed learning rates: Adam moves a weight by
    about its rate a step, whatever the size of the gradient."""


BIT_EXACT = Tolerance(loss=0.0, norm=0.0, weights=0.0)
TOLERANCES: Mapping[str, Mapping[str, Tolerance]] = {
    "reordered": {
        "fp32": Tolerance(loss=2e-3, norm=2e-2, weights=0.3),
        "bf16": Tolerance(loss=3e-2, norm=2e-1, weights=1.0),
    },
    "rounded": {
        "fp32": Tolerance(loss=5e-2, norm=3e-1, weights=2.0),
        "bf16": Tolerance(loss=5e-2, norm=3e-1, weights=2.0),
    },
}
"""By kind of change and precision: the same sums in another order; another rounding. A change of kind
``exact`` (the same operations) has no entry: it is judged bit for bit, or by repeats of the reference where
that does not repeat."""


@dataclass(frozen=True, kw_only=True)
class Toggle:
    """One setting to prove: its name, what kind of change it is, and how to switch it on."""

    name: str
    kind: Kind
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
    # With several ranks stock DDP cannot follow a replay, so the gradient scheduler comes along.
    "graph": Toggle(name="graph", kind="reordered", change=_pillars(graph=True, comm="hybrid")),
    "comm": Toggle(name="comm", kind="reordered", change=_pillars(comm="hybrid")),
    "optimizer": Toggle(name="optimizer", kind="reordered", change=_pillars(fused_optimizer=True)),
    "ops": Toggle(name="ops", kind="reordered", change=_pillars(fused_ops=True)),
    "precision": Toggle(name="precision", kind="rounded", change=_bf16),
}


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
