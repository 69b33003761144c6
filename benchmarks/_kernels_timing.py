"""How the kernel benchmark measures: device time by graph replays, host time, and collected rows."""

from __future__ import annotations

import contextlib
import statistics
import time
import traceback
from collections.abc import Callable, Iterator

import _common
import torch
from torch import Tensor

BF16 = torch.bfloat16
L2_BYTES = 64 * 2**20
Call = Callable[[], object]


def captured(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls, which has run three times; what they hold must live as long."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    return graph


def replay_times(graphs: list[torch.cuda.CUDAGraph], calls: list[int], repetitions: int) -> list[list[float]]:
    """Return for each graph seconds per call of the `calls` it was captured from, one value per repetition.

    The graphs take turns, so that a clock that drifts is the same for all. Each runs once more in front of
    the time that is taken, so that no launch is waited for, and what a graph leaves in the caches to be
    written is written in its own time.
    """
    values: list[list[float]] = [[] for _ in graphs]
    for _ in range(repetitions):
        for way, graph in enumerate(graphs):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            values[way].append(start.elapsed_time(end) * 1e-3 / calls[way])
    return values


def warm_host(ways: list[Call], seconds: float = 1.0) -> None:
    """Call the ways in turns for a while, so that the host's clock is up and its caches are filled.

    A process that has only waited for the GPU begins slow: a torch GELU took 9.7 us at the start of one
    run and 7.1 us at its end. A training loop launches all the time; what it pays is the latter.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for call in ways:
            for _ in range(50):
                call()
        torch.cuda.synchronize()


def host_times(ways: list[Call], repetitions: int, inner: int = 200) -> list[list[float]]:
    """Return for each way host seconds per call; the queue is drained before each round and never full.

    The ways take turns, so that a busy host is as busy for all.
    """
    warm_host(ways, 0.05)
    values: list[list[float]] = [[] for _ in ways]
    for _ in range(repetitions):
        for way, call in enumerate(ways):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(inner):
                call()
            values[way].append((time.perf_counter() - start) / inner)
    torch.cuda.synchronize()
    return values


def ratio(ours: list[float], others: list[float]) -> float:
    """Return the median of ours / others, turn by turn."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def rotating(make: Callable[[], tuple[Call, int]]) -> tuple[list[Call], int]:
    """Make calls on separate buffers until they exceed the L2 cache four times over."""
    calls, total, size = [], 0, 0
    while total < 4 * L2_BYTES or len(calls) < 2:
        call, size = make()
        calls.append(call)
        total += size
        if len(calls) == 64:
            break
    return calls, size


def bf(*shape: int) -> Tensor:
    """Random bf16 values on the GPU."""
    return torch.randn(*shape, device="cuda").to(BF16)


class Run:
    """Collects rows and figures; a failing part is recorded, not fatal."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.repetitions = 15 if quick else 25
        self.rows: list[dict[str, object]] = []
        self.figures: dict[str, float | int | bool | str | None] = {}
        self.notes: list[str] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Report the time of a section and record its failure."""
        start = time.time()
        try:
            yield
        except Exception as error:  # one broken part must not waste the rest
            self.notes.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"[{name}: {time.time() - start:.0f} s]", flush=True)

    def copies(self, size: int) -> tuple[list[Call], int]:
        """Return device copies that move about `size` bytes each, at most 1 GiB, and how many they move."""
        # bf16, read and written; whole MiB, because odd sizes take a slower copy, and not a power of two,
        # because then source and target fall on the same memory channels.
        n = min(size // 4, 195 * 2**20) // 2**19 * 2**19

        def make() -> tuple[Call, int]:
            a = torch.randint(0, 2**15, (n,), device="cuda", dtype=torch.int16).view(BF16)
            b = torch.empty_like(a)
            return lambda: b.copy_(a), 4 * n

        return rotating(make)

    def bandwidth(self, name: str, make: Callable[[], tuple[Call, int]], **extra: object) -> float:
        """Measure a kernel and the copy of as many bytes in turns; return its share of the copy."""
        calls, size = rotating(make)
        copies, moved = self.copies(size)
        ways = [calls * -(-8 // len(calls)), copies * -(-8 // len(copies))]
        graphs = [captured(way) for way in ways]
        values, others = replay_times(graphs, [len(way) for way in ways], self.repetitions)
        spread = _common.spread([size / v / 1e12 for v in values])
        copy = _common.spread([moved / v / 1e12 for v in others])
        share = 1.0 / ratio([v / size for v in values], [v / moved for v in others])
        self.rows.append(
            {"part": "bandwidth", "case": name, "MB": round(size / 1e6, 1), "TB/s": spread,
             "copy_TB/s": copy, "share": share, **extra}
        )  # fmt: skip
        return share
