"""Measure alternatives once for the shapes at hand, keep the fastest, remember the decision on disk.

The first alternative is the one to beat: another is chosen only when it is faster by a margin, so a decision
is never slower than the first alternative was when it was measured.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

FORMAT_VERSION = 1
Work = Callable[[], object]
Timer = Callable[[Work], float]


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """How to measure and where to remember.

    Attributes:
        rounds: measurements of each alternative, in turns; default 7.
        warmup: calls of each alternative before the first measurement; default 3.
        margin: share by which an alternative must beat the first one; default 0.02.
        path: file of decisions; None: in the user cache, one file per GPU model and software versions.
    """

    rounds: int = 7
    warmup: int = 3
    margin: float = 0.02
    path: Path | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.warmup < 0 or not 0.0 <= self.margin < 1.0:
            message = (
                "rounds must be at least 1, warmup at least 0, margin in [0, 1), got"
                f" {self.rounds}, {self.warmup}, {self.margin}"
            )
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The winner of one measurement and the median time of each alternative, in microseconds."""

    winner: str
    micros: Mapping[str, float]


def default_path() -> Path:
    """Return the decision file for this GPU and these versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    text = f"{device}|{torch.__version__}|{torch.version.cuda}"
    root = os.environ.get("LOONGFORGE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    base = Path(root) if root else Path.home() / ".cache"
    return base / "loongforge" / f"tuned-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def device_timer(work: Work) -> float:
    """Return the seconds one call takes, as an eager step sees it: host and device, whichever is longer."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(8):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 8


class Autotuner:
    """Decides between alternatives and remembers.

    Args:
        config: see :class:`TuneConfig`.
        timer: returns the seconds of one call of its argument; replaceable for tests.
    """

    def __init__(self, config: TuneConfig | None = None, *, timer: Timer = device_timer) -> None:
        self._config = config or TuneConfig()
        self._timer = timer
        self._decisions: dict[str, Decision] | None = None

    @property
    def path(self) -> Path:
        """File the decisions are kept in."""
        return self._config.path or default_path()

    def known(self, key: str) -> Decision | None:
        """Return the decision for `key`, from memory or disk, without measuring."""
        return self._loaded().get(key)

    def decide(self, key: str, alternatives: Mapping[str, Work]) -> Decision:
        """Return the decision for `key`; measure all alternatives when there is none.

        An alternative that raises is left out with an infinite time; the first one must work.

        Raises:
            ValueError: no alternatives.
        """
        if not alternatives:
            message = f"autotuner needs at least one alternative for {key!r}"
            raise ValueError(message)
        found = self.known(key)
        if found is not None and found.winner in alternatives:
            return found
        decision = self._measure(alternatives)
        self._loaded()[key] = decision
        self._save()
        return decision

    def decisions(self) -> dict[str, Decision]:
        """Return all decisions known."""
        return dict(self._loaded())

    def _measure(self, alternatives: Mapping[str, Work]) -> Decision:
        first = next(iter(alternatives))
        times: dict[str, list[float]] = {name: [] for name in alternatives}
        for name, work in alternatives.items():
            try:
                for _ in range(self._config.warmup):
                    work()
            except Exception:
                if name == first:
                    raise
                times.pop(name)
        for _ in range(self._config.rounds):
            for name in times:
                times[name].append(self._timer(alternatives[name]))
        medians = {name: statistics.median(values) for name, values in times.items()}
        fastest = min(medians, key=lambda name: medians[name])
        winner = fastest if medians[fastest] < medians[first] * (1 - self._config.margin) else first
        micros = {name: medians.get(name, float("inf")) * 1e6 for name in alternatives}
        return Decision(winner=winner, micros=micros)

    def _loaded(self) -> dict[str, Decision]:
        if self._decisions is None:
            self._decisions = _read(self.path)
        return self._decisions

    def _save(self) -> None:
        content = {
            "format_version": FORMAT_VERSION,
            "decisions": {
                key: {"winner": d.winner, "micros": dict(d.micros)} for key, d in self._loaded().items()
            },
        }
        path = self.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
            with os.fdopen(descriptor, "w") as stream:
                json.dump(content, stream, indent=1)
            Path(temporary).replace(path)
        except OSError:
            return  # a read-only home costs a measurement per process


def _read(path: Path) -> dict[str, Decision]:
    """Read a decision file; a missing, foreign or damaged one counts as empty."""
    try:
        content = json.loads(path.read_text())
        if content["format_version"] != FORMAT_VERSION:
            return {}
        return {
            key: Decision(winner=value["winner"], micros=value["micros"])
            for key, value in content["decisions"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
