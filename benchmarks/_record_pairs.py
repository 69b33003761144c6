"""Pairs of steps with and without records, and what the parts of a record cost right after a step.

A pair is 16 steps in the order A B B A, four times over: eight with records, eight without, so that what
drifts meets both alike, and the eight with records hold one gathering of a GPU run with its copy, its texts
and its write. The device is waited for between pairs only: on a GPU the tiny step is bound by its host, whose
time is what records cost.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from loongforge.batches import Tally, tally
from loongforge.clock import StepClock
from loongforge.recorder import MOST_GATHERED
from loongforge.records import StepRecord
from loongforge.session import Session

TRIMMED = 0.2
"""Share of the pairs left out at either end before the mean: what a disturbed pair says is dropped on both
sides, and of undisturbed ones more is used than by the median."""


class NoClock(StepClock):
    """A clock that measures nothing."""

    __slots__ = ()

    def __init__(self, device: torch.device) -> None:
        self.began = self.ended = 0.0

    def have_window(self) -> None:
        """Note nothing."""

    def enter(self, phase: str) -> None:
        """Mark nothing."""

    def finish(self) -> None:
        """Mark nothing."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Milliseconds per step of one side of a pair."""

    wall: float
    processor: float
    """Processor time of the training thread."""


Pair = tuple[Cost, Cost]
"""With records, without."""


def drop(*_: object, **__: object) -> None:
    """Record nothing: no counters of the pillars, no record, no sinks."""


def count_nothing(window: Sequence[object]) -> Tally:
    """Count nothing."""
    return None, None, []


Side = tuple[Callable[..., None], type[StepClock], Callable[[Sequence[object]], Tally]]


def take_pairs(session: Session, device: torch.device, *, seconds: float) -> list[Pair]:
    """Return pairs for about so many seconds, at least 8."""
    engine, recorder = session.engine, session.parts.recorder
    record = engine._record
    if device.type == "cuda":
        recorder._write_every_s = math.inf  # by number: one gathering in every pair
    sides: dict[bool, Side] = {True: (record, StepClock, tally), False: (drop, NoClock, count_nothing)}
    for _ in range(2 * MOST_GATHERED):
        border_to_border(session)
    pairs: list[Pair] = []
    ends = time.perf_counter() + seconds
    while len(pairs) < 8 or time.perf_counter() < ends:
        spent = {True: [0.0, 0.0], False: [0.0, 0.0]}
        first = len(pairs) % 2 == 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for side in (first, not first, not first, first) * (MOST_GATHERED // 2):
            engine._record, engine.new_clock, engine.count = sides[side]  # type: ignore[method-assign]
            began, used = time.perf_counter(), time.thread_time()
            border_to_border(session)
            spent[side][1] += time.thread_time() - used
            spent[side][0] += time.perf_counter() - began
        costs = [
            Cost(wall=1e3 * wall / MOST_GATHERED, processor=1e3 * processor / MOST_GATHERED)
            for wall, processor in (spent[True], spent[False])
        ]
        pairs.append((costs[0], costs[1]))
    engine._record, engine.new_clock, engine.count = sides[True]  # type: ignore[method-assign]
    return pairs


def border_to_border(session: Session) -> None:
    """Do one step with all that the session does around it."""
    session.engine.run_step()
    session.watchdog.beat(session.engine.at.step)
    session._at_border()


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the highest and the lowest :data:`TRIMMED` of the values."""
    ordered = sorted(values)
    cut = int(TRIMMED * len(ordered))
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def interval(values: Sequence[float], middle: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """Return the 95 % interval of a middle, by bootstrap over the values."""
    rng = random.Random(0)
    found = sorted(middle(rng.choices(values, k=len(values))) for _ in range(2000))
    return found[50], found[1949]


def part_costs(
    session: Session, device: torch.device, folder: Path, *, rounds: int
) -> dict[str, list[float]]:
    """Return microseconds of parts of a record, each taken right after a step without records."""
    engine = session.engine
    engine._record, engine.new_clock, engine.count = drop, NoClock, count_nothing  # type: ignore[method-assign]
    parts = operations(device, folder)
    found: dict[str, list[float]] = {name: [] for name in parts}
    order, rng = list(parts), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            border_to_border(session)
            began = time.perf_counter()
            parts[name]()
            found[name].append(1e6 * (time.perf_counter() - began))
    return found


def operations(device: torch.device, folder: Path) -> dict[str, Callable[[], object]]:
    """Return the single operations of a record by name."""
    record = StepRecord(
        step=1234, epoch=1, rank=0, time_unix=1.7e9 + 0.123456, loss=1.2345678, micro_losses=[1.2345678],
        grad_norm=0.12345678, lr=1e-4, samples=8, tokens=480, step_ms=34.123456, data_wait_ms=0.0123456,
        h2d_ms=0.1234567, forward_ms=12.345678, backward_ms=15.678901, optimizer_ms=3.2109876,
        checkpoint_ms=0.0, fused=False, fusion_reason="off", data={"host_wait_ms": 0.012345678},
    )  # fmt: skip
    descriptor = os.open(folder / "lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    lines = (record.to_json() * MOST_GATHERED).encode()
    parts: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "text of a record": record.to_json,
        f"write of {MOST_GATHERED} lines": lambda: os.write(descriptor, lines),
    }
    if device.type != "cuda":
        return parts
    stream = torch.cuda.current_stream(device)
    first, last, asked = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
    for event in (first, last, asked):
        event.record(stream)
    torch.cuda.synchronize(device)
    scalars = [torch.zeros((), device=device) for _ in range(4 * MOST_GATHERED)]
    packed = torch.stack(scalars)
    host = torch.empty(packed.shape, pin_memory=True)
    return {
        **parts,
        "current stream": lambda: torch.cuda.current_stream(device),
        "event recorded": lambda: asked.record(stream),
        "time between events": lambda: first.elapsed_time(last),
        "event asked": last.query,
        f"{len(scalars)} values packed": lambda: torch.stack(scalars),
        "copy to pinned memory": lambda: host.copy_(packed, non_blocking=True),
        "allocator looked at": lambda: torch.cuda.memory_stats_as_nested_dict(device),
    }
