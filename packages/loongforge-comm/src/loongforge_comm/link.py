"""Cost model of a link: time of each collective as a piecewise linear function of its size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

LINK_VERSION = 1
REDUCTIONS = ("ring", "tree", "direct", "all_gather")
MARGIN = 0.95
"""Another strategy replaces the ring only where it is predicted at least 5 % cheaper, so noise does not
decide."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Time of one collective by payload size.

    Attributes:
        nbytes: sizes in bytes, ascending, at least one.
        ms: milliseconds at these sizes, not decreasing.
        spread_ms: interquartile range of the measurement at each size, zeros for models.
        valid_to: largest size at which the curve may speak for an alternative to the ring; a measured curve
            ends where its measurement ended, because a short range says nothing about bandwidth (token
            buckets, caches).
    """

    nbytes: tuple[float, ...]
    ms: tuple[float, ...]
    spread_ms: tuple[float, ...] = ()
    valid_to: float = float("inf")

    def __post_init__(self) -> None:
        if not self.nbytes or len(self.nbytes) != len(self.ms) or list(self.nbytes) != sorted(self.nbytes):
            msg = (
                f"curve has {len(self.nbytes)} sizes and {len(self.ms)} times, "
                "allowed are equally many, ascending, at least one"
            )
            raise ValueError(msg)

    @classmethod
    def linear(cls, alpha_ms: float, ms_per_mib: float) -> Curve:
        """The curve ``alpha + beta * size`` with alpha in milliseconds and beta in milliseconds per MiB."""
        return cls(nbytes=(0.0, 2.0**20), ms=(alpha_ms, alpha_ms + ms_per_mib))

    @classmethod
    def fit(cls, nbytes: Sequence[float], ms: Sequence[float], spread_ms: Sequence[float] = ()) -> Curve:
        """Make the measured times monotone (pool adjacent violators) so that a larger bucket never looks
        cheaper.
        """
        blocks: list[list[float]] = []
        for value in ms:
            blocks.append([value, 1.0])
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                value_b, weight_b = blocks.pop()
                value_a, weight_a = blocks.pop()
                weight = weight_a + weight_b
                blocks.append([(value_a * weight_a + value_b * weight_b) / weight, weight])
        smooth = [value for value, weight in blocks for _ in range(int(weight))]
        return cls(
            nbytes=tuple(map(float, nbytes)),
            ms=tuple(smooth),
            spread_ms=tuple(spread_ms),
            valid_to=float(nbytes[-1]),
        )

    @property
    def alpha_ms(self) -> float:
        """Start-up time in milliseconds: the curve at size zero."""
        return float(self.predict(np.zeros(1))[0])

    @property
    def beta_ms_per_byte(self) -> float:
        """Slope at the large end in milliseconds per byte."""
        if len(self.nbytes) < 2:
            return 0.0
        low = max(0, len(self.nbytes) - 3)
        span = self.nbytes[-1] - self.nbytes[low]
        return (self.ms[-1] - self.ms[low]) / span if span > 0 else 0.0

    @property
    def crossover_bytes(self) -> float:
        """Size at which bandwidth time equals start-up time, ``alpha / beta``; infinity on a free link."""
        beta = self.beta_ms_per_byte
        return self.alpha_ms / beta if beta > 0 else float("inf")

    def predict(self, nbytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Milliseconds for each size; linear between points and with the end slope beyond the last one."""
        x, y = np.asarray(self.nbytes), np.asarray(self.ms)
        result = np.interp(nbytes, x, y)
        beyond = nbytes > x[-1]
        if beyond.any():
            result = np.where(beyond, y[-1] + (nbytes - x[-1]) * self.beta_ms_per_byte, result)
        return np.asarray(result, dtype=np.float64)

    def evaluator(self) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """A fast :meth:`predict` for many small calls: arrays are made once, a straight line needs no
        table.
        """
        x, y = np.asarray(self.nbytes), np.asarray(self.ms)
        beta = self.beta_ms_per_byte
        if len(x) > 1 and x[0] == 0.0 and np.allclose(y, y[0] + x * beta, rtol=1e-12, atol=0.0):
            alpha = float(y[0])
            return lambda nbytes: alpha + beta * nbytes
        far = max(2.0**50, 2.0 * x[-1])
        x, y = np.append(x, far), np.append(y, y[-1] + (far - x[-1]) * beta)
        return lambda nbytes: np.interp(nbytes, x, y)

    def scaled(self, factor: float) -> Curve:
        """The same curve with every time multiplied by ``factor``."""
        return replace(self, ms=tuple(v * factor for v in self.ms))


@dataclass(frozen=True, kw_only=True)
class Correction:
    """How collectives in training differ from the idle link: ``offset_ms + factor * idle``.

    The factor is the bandwidth that is left beside backward; the offset is what a collective that runs alone
    waits for a processor.
    """

    offset_ms: float = 0.0
    factor: float = 1.0

    @classmethod
    def fit(
        cls, idle_ms: Sequence[float], seen_ms: Sequence[float], alone: Sequence[bool] = ()
    ) -> Correction:
        """Match the total time the link was busy, and the extra time of the buckets that ran alone.

        Two buckets in flight share the link: how the time splits between them says nothing about start-up,
        only their sum says something about bandwidth. So the factor (0.7 to 2) is the ratio of the sums; the
        offset is what is left of the buckets that ran alone, if there are three, after their median slope.

        Args:
            idle_ms: predicted time of each bucket on the idle link.
            seen_ms: time each added to the busy time of the link.
            alone: which had no other bucket in flight; none when left out.
        """
        idle, seen = np.asarray(idle_ms, dtype=np.float64), np.asarray(seen_ms, dtype=np.float64)
        if not idle.sum() > 0:
            return cls()
        factor = _limited(seen.sum() / idle.sum())
        solo = np.flatnonzero(alone)
        if len(solo) < 3:
            return cls(factor=factor)
        i, j = (solo[k] for k in np.triu_indices(len(solo), k=1))
        wide = np.abs(idle[i] - idle[j]) > 0.2 * np.maximum(idle[i], idle[j])
        slopes = (seen[i] - seen[j])[wide] / (idle[i] - idle[j])[wide]
        slope = float(np.clip(np.median(slopes), 1.0, 2.0)) if len(slopes) >= 3 else factor
        offset = max(0.0, float(np.median(seen[solo] - slope * idle[solo])))
        return cls(offset_ms=offset, factor=_limited((seen.sum() - len(solo) * offset) / idle.sum()))


def _limited(factor: float) -> float:
    return float(np.clip(factor, 0.7, 2.0))


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Measured or assumed times of the collectives of one process group.

    Attributes:
        world_size: ranks of the group.
        backend: name of the communication backend, or ``model``.
        curves: curve by strategy (``ring``, ``tree``, ``direct``, ``all_gather``); ``ring`` is required.
        fingerprint: topology the figures belong to.
        source: ``measured``, ``cache`` or ``model``.
        launch_ms: milliseconds of backward compute lost per launched bucket (packing call, launch).
    """

    world_size: int
    backend: str
    curves: Mapping[str, Curve]
    fingerprint: str = ""
    source: str = "model"
    launch_ms: float = 0.0
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if "ring" not in self.curves:
            msg = f"link model has curves {sorted(self.curves)}, 'ring' is required"
            raise ValueError(msg)

    @classmethod
    def from_alpha_beta(
        cls, alpha_ms: float, gbytes_per_s: float, *, world_size: int = 2, source: str = "model"
    ) -> LinkModel:
        """A one-curve model: start-up in milliseconds and bus-independent rate in 1e9 bytes per second."""
        if alpha_ms < 0 or gbytes_per_s <= 0:
            msg = f"alpha_ms is {alpha_ms} and gbytes_per_s {gbytes_per_s}, allowed are >= 0 and > 0"
            raise ValueError(msg)
        ring = Curve.linear(alpha_ms, 2.0**20 / (gbytes_per_s * 1e6))
        return cls(world_size=world_size, backend="model", curves={"ring": ring}, source=source)

    @property
    def crossover_bytes(self) -> float:
        """Size that separates low load (latency-bound) from high load (bandwidth-bound)."""
        return self.curves["ring"].crossover_bytes

    def predict_ms(self, strategy: str, nbytes: float) -> float:
        """Milliseconds of one collective; an unmeasured strategy costs as much as the ring."""
        curve = self.curves.get(strategy, self.curves["ring"])
        return float(curve.predict(np.asarray([nbytes], dtype=np.float64))[0])

    def choose(self, nbytes: float) -> str:
        """The strategy with the lowest predicted time; the ring unless another is clearly cheaper."""
        best, best_ms = "ring", self.predict_ms("ring", nbytes)
        for name in REDUCTIONS[1:]:
            if name in self.curves and nbytes <= self.curves[name].valid_to:
                ms = self.predict_ms(name, nbytes) / MARGIN
                if ms < best_ms:
                    best, best_ms = name, ms
        return best

    def corrected(self, corrections: Mapping[str, Correction]) -> LinkModel:
        """The model as seen in training: each strategy's times stretched and shifted by its correction."""
        curves = dict(self.curves)
        for name, correction in corrections.items():
            if name in curves:
                ms = tuple(correction.offset_ms + correction.factor * v for v in curves[name].ms)
                curves[name] = replace(curves[name], ms=ms)
        return replace(self, curves=curves)

    def to_json(self) -> str:
        """Versioned JSON text."""
        return json.dumps(
            {
                "version": LINK_VERSION,
                "world_size": self.world_size,
                "backend": self.backend,
                "fingerprint": self.fingerprint,
                "source": self.source,
                "launch_ms": self.launch_ms,
                "notes": dict(self.notes),
                "curves": {
                    name: {
                        "nbytes": curve.nbytes,
                        "ms": curve.ms,
                        "spread_ms": curve.spread_ms,
                        "valid_to": None if curve.valid_to == float("inf") else curve.valid_to,
                    }
                    for name, curve in self.curves.items()
                },
            }
        )

    @classmethod
    def from_json(cls, text: str) -> LinkModel:
        """Read what ``to_json`` wrote; ValueError names a wrong version."""
        data = json.loads(text)
        if data.get("version") != LINK_VERSION:
            msg = f"link model has version {data.get('version')}, allowed is {LINK_VERSION}; measure it again"
            raise ValueError(msg)
        return cls(
            world_size=data["world_size"],
            backend=data["backend"],
            fingerprint=data["fingerprint"],
            source=data["source"],
            launch_ms=data["launch_ms"],
            notes=data["notes"],
            curves={
                name: Curve(
                    nbytes=tuple(curve["nbytes"]),
                    ms=tuple(curve["ms"]),
                    spread_ms=tuple(curve["spread_ms"]),
                    valid_to=float("inf") if curve["valid_to"] is None else curve["valid_to"],
                )
                for name, curve in data["curves"].items()
            },
        )
