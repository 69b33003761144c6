"""Preparing the columns of the step benchmark, their turns in rounds, profiles, ratios and figures."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

import _common
import _groot_full as groot
import torch
from _gpu_use import Samples
from _step_columns import Bench, Column, Step, build

WARM_STEPS = 5
TIMED_STEPS = 2
"""Steps that tell how many more fit into a turn."""
PROFILED = 3
"""Steps in a profile."""
GIB = 2**30
WATCHED = ("clocks.sm", "power.draw")
"""What the driver is asked during the rounds: a GPU at its power limit lowers its clocks."""


@dataclass
class Turn:
    """A prepared column with its row and the times of its turns.

    Attributes:
        name: The column's name.
        column: The column; None when preparing it failed.
        row: Its row of the result.
        steps: Timed steps in a turn.
        ms: Milliseconds per step, one value per round; None where the round failed.
        host_ms: Milliseconds per step until the last one was handed to the device, one value per round.
        losses: Loss of the last step of every round.
        clock_mhz: Median clock of the multiprocessors in every round in which the driver told it.
        power_w: Median power, likewise.
    """

    name: str
    column: Column | None
    row: dict[str, object]
    steps: int = 1
    ms: list[float | None] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    clock_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)

    def fill_row(self) -> None:
        """Put what was measured so far into the row."""
        known = [v for v in self.ms if v is not None]
        if known:
            self.row["steps"] = self.steps
            self.row["ms"] = _common.spread(known)
            self.row["host_ms"] = round(statistics.median(self.host_ms), 2)
            for name, values in (("clock_mhz", self.clock_mhz), ("power_w", self.power_w)):
                if values:
                    self.row[name] = _common.spread(values)
            self.row["turns_ms"] = [round(v, 2) for v in known]
            self.row["turns_host_ms"] = [round(v, 2) for v in self.host_ms]
            self.row["turns_loss"] = [round(v, 4) for v in self.losses]


class Deadline:
    """Seconds left of the budget of the whole run."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left(self) -> float:
        """Return the seconds left, at least 0."""
        return max(self._end - time.monotonic(), 0.0)


@contextlib.contextmanager
def limited(seconds: float, *, again: float = 5.0) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds, also amid compiling, and ``again`` after others."""

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        message = f"stopped after {seconds:.0f} s"
        raise TimeoutError(message)

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: an exception that falls into a callback of a weak reference is lost.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1), again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def problem(error: BaseException) -> str:
    """Return an error with the end of its trace."""
    return f"{type(error).__name__}: {str(error)[:600]}\n{traceback.format_exc()[-1200:]}"


def prepare(
    name: str,
    bench: Bench,
    stack: contextlib.ExitStack,
    *,
    limit: float,
    base_gib: float,
    turn_s: float,
    least_steps: int,
) -> Turn:
    """Build a column and take its first steps, in which it compiles and captures.

    Args:
        name: The column.
        bench: What columns share.
        stack: Closed when the measurement is over.
        limit: Seconds it may take.
        base_gib: What model and shared optimizer hold, added to the column's own memory.
        turn_s: Seconds of a turn: every column works for the same time, so that filling the device's queue
            and draining it weigh alike, and so do its clocks.
        least_steps: Steps of a turn at least.
    """
    row: dict[str, object] = {"column": name}
    cuda = bench.device == "cuda"
    started = time.perf_counter()
    before, steps = 0, least_steps
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        with contextlib.ExitStack() as preparing, limited(limit):
            column = build(name, bench, stack, preparing)
            for _ in range(WARM_STEPS):
                loss = column.step()
            row["loss"] = round(float(loss), 4)
            taken_s = timed(column, TIMED_STEPS, cuda=cuda).whole_s / TIMED_STEPS
            steps = max(least_steps, round(turn_s / taken_s))
    except Exception as error:
        row["error"] = problem(error)
        column = None
    row["prepare_s"] = round(time.perf_counter() - started, 1)
    if column is not None:
        row.update(column.facts)
        if cuda:
            own = torch.cuda.max_memory_allocated() - before
            row["peak_gib"] = round(base_gib + own / GIB, 1)
            row["stays_gib"] = round((torch.cuda.memory_allocated() - before) / GIB, 1)
    clean(bench)
    return Turn(name=name, column=column, row=row, steps=steps)


def clean(bench: Bench) -> None:
    """Drop gradients and garbage between columns."""
    bench.model.zero_grad(set_to_none=True)
    gc.collect()


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What some steps took since ``time.perf_counter`` was ``began``, and the loss of the last one."""

    began: float
    whole_s: float
    host_s: float
    loss: float


def timed(column: Column, steps: int, *, cuda: bool) -> Timed:
    """Time some steps: all of them, and until the host has handed over the last one."""
    wait(cuda)
    started = time.perf_counter()
    for _ in range(steps):
        loss = column.step()
    handed = time.perf_counter()
    wait(cuda)
    whole = time.perf_counter() - started
    return Timed(began=started, whole_s=whole, host_s=handed - started, loss=float(loss))


def take_turns(turns: Sequence[Turn], bench: Bench, gpu: Samples) -> None:
    """Run one round: each column takes a few steps, one column after the other.

    Args:
        turns: The columns.
        bench: What they share.
        gpu: Samples of :data:`WATCHED`.
    """
    cuda = bench.device == "cuda"
    bench.start_again()
    for turn in turns:
        if turn.column is None:
            continue
        bench.store(half=turn.column.half)
        try:
            turn.column.step()
            took = timed(turn.column, turn.steps, cuda=cuda)
            if not math.isfinite(took.loss):
                message = f"the loss is {took.loss}: what such steps take is no time of a training"
                raise ArithmeticError(message)
            turn.ms.append(took.whole_s / turn.steps * 1e3)
            turn.host_ms.append(took.host_s / turn.steps * 1e3)
            turn.losses.append(took.loss)
            seen = gpu.medians(took.began, took.began + took.whole_s)
            if seen is not None:
                turn.clock_mhz.append(seen[0])
                turn.power_w.append(seen[1])
        except Exception as error:
            turn.row["error"] = problem(error)
            turn.column = None
            turn.ms.append(None)
        turn.fill_row()
    clean(bench)


def wait(cuda: bool) -> None:
    """Wait for the device."""
    if cuda:
        torch.cuda.synchronize()


def profile(turn: Turn, bench: Bench) -> None:
    """Count the kernels of a column's step and add up their time by family, and the time without any.

    A few steps follow each other as they do in training, so that gaps are those of steady work.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    if turn.column is None or bench.device != "cuda":
        return
    step: Step = turn.column.step
    try:
        bench.store(half=turn.column.half)
        step()
        with torch_profile(activities=[ProfilerActivity.CUDA]) as taken:
            for _ in range(PROFILED):
                step()
            torch.cuda.synchronize()
    except Exception as error:
        turn.row["profile_error"] = problem(error)
        return
    spent: Counter[str] = Counter()
    tops: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in taken.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.device_time <= 0:
            continue
        spent[groot.category(event.name)] += event.device_time
        tops[event.name[:110]] += event.device_time
        calls[event.name[:110]] += 1
        spans.append((event.time_range.start, event.time_range.end))
    turn.row["kernels"] = round(sum(calls.values()) / PROFILED)
    turn.row["gpu_busy_ms"] = per_step(sum(spent.values()))
    turn.row.update({f"{family}_ms": per_step(t) for family, t in sorted(spent.items())})
    turn.row["gaps"] = gaps(spans)
    turn.row["top"] = [
        [name, per_step(t), round(calls[name] / PROFILED, 1)] for name, t in tops.most_common(40)
    ]


def per_step(microseconds: float) -> float:
    """Return milliseconds per profiled step."""
    return round(microseconds / 1e3 / PROFILED, 2)


def gaps(spans: list[tuple[float, float]]) -> dict[str, float]:
    """Return where the GPU had no kernel, ms per step, by the length of the gap, and how many there were.

    ``span_ms`` is from the first kernel's start to the last one's end, ``some_ms`` that with any kernel.
    """
    found: dict[str, float] = {"span_ms": 0.0, "some_ms": 0.0}
    classes = (("below_5_us", 5.0), ("5_to_50_us", 50.0), ("above_50_us", float("inf")))
    count = Counter[str]()
    if not spans:
        return found
    spans.sort()
    begin, end = spans[0]
    idle: Counter[str] = Counter()
    for start, stop in spans[1:]:
        if start > end:
            label = next(name for name, limit in classes if start - end < limit)
            idle[label] += start - end
            count[label] += 1
        end = max(end, stop)
    found["span_ms"] = per_step(end - begin)
    found["some_ms"] = per_step(end - begin - sum(idle.values()))
    for label, _ in classes:
        found[f"{label}_ms"] = per_step(idle[label])
        found[f"{label}_count"] = round(count[label] / PROFILED, 1)
    return found


def ratios(turns: Mapping[str, Turn], theirs: str, ours: str) -> list[float]:
    """Return theirs / ours in time for every round in which both ran.

    Taken within rounds, since the host's speed, and with it every eager column, drifts from round to round.
    """
    if theirs not in turns or ours not in turns:
        return []
    pairs = zip(turns[theirs].ms, turns[ours].ms, strict=False)
    return [a / b for a, b in pairs if a is not None and b is not None]


def is_exact(name: str) -> bool:
    """Whether a column is one of ours that computes what the rivals compute."""
    kind, *options = name.split("+")
    return kind in {"ours", "graph_fused_compile"} and "fp8" not in options


def fastest(turns: Mapping[str, Turn], wanted: Callable[[str], bool]) -> str | None:
    """Return the wanted column with the smallest median, None without one."""
    known = {
        name: statistics.median(v for v in turn.ms if v is not None)
        for name, turn in turns.items()
        if wanted(name) and any(v is not None for v in turn.ms)
    }
    return min(known, key=lambda name: known[name]) if known else None


def median_ms(turns: Mapping[str, Turn], name: str | None) -> float | None:
    """Return the median of a column, None without measurements."""
    known = [v for v in turns[name].ms if v is not None] if name in turns else []
    return statistics.median(known) if known else None


def summarise(turns: Mapping[str, Turn]) -> tuple[dict[str, float | None], list[dict[str, object]]]:
    """Return the published figures, and a row for each ratio with its spread."""
    ours = fastest(turns, is_exact)
    low = fastest(turns, lambda name: name.startswith("ours") and "fp8" in name)
    figures: dict[str, float | None] = {"step_ms": median_ms(turns, ours)}
    rows: list[dict[str, object]] = []
    for figure, theirs in (
        ("vs_eager_4x4", "eager_4x4"),
        ("vs_eager_1x16", "eager_1x16"),
        ("vs_stock_4x4", "stock_4x4"),
        ("vs_stock_1x16", "stock_1x16"),
        ("vs_compile_1x16", "compile_1x16"),
        ("vs_compile_regions_1x16", "compile_regions_1x16"),
    ):
        found = ratios(turns, theirs, ours) if ours else []
        figures[figure] = statistics.median(found) if found else None
        if found:
            rows.append({"column": f"{theirs} / {ours}", "ratio": _common.spread(found)})
    figures["compile_1x16_measured"] = float(bool(median_ms(turns, "compile_1x16")))
    counts = [turns[n].row.get("kernels") for n in ("eager_4x4", "fused_eager") if n in turns]
    figures["launches_ratio"] = (
        counts[0] / counts[1]
        if len(counts) == 2 and all(isinstance(c, int) and c > 0 for c in counts)
        else None
    )
    figures["step_fp8_ms"] = median_ms(turns, low)
    for figure in ("float8_loss_deviation",):
        value = turns[low].row.get(figure) if low else None
        figures[figure] = value if isinstance(value, float) else None
    return figures, rows
