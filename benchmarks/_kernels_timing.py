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


def device_time(calls: list[Call], repetitions: int) -> list[float]:
    """Return seconds per call, one value per repetition, of calls replayed from one graph."""
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
    values = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        values.append(start.elapsed_time(end) * 1e-3 / len(calls))
    del graph
    return values


def host_time(call: Call, repetitions: int, inner: int = 200) -> list[float]:
    """Return host seconds per call; the queue is drained before each round and never full."""
    for _ in range(50):
        call()
    values = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        values.append((time.perf_counter() - start) / inner)
    torch.cuda.synchronize()
    return values


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
        self.repetitions = 7 if quick else 25
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

    def copy_bandwidth(self, size: int) -> float:
        """Median bandwidth of a device copy that moves about `size` bytes, at most 1 GiB, measured now."""
        # bf16, read and written; whole MiB, because odd sizes take a slower copy, and not a power of two,
        # because then source and target fall on the same memory channels.
        n = min(size // 4, 195 * 2**20) // 2**19 * 2**19

        def make() -> tuple[Call, int]:
            a = torch.randint(0, 2**15, (n,), device="cuda", dtype=torch.int16).view(BF16)
            b = torch.empty_like(a)
            return lambda: b.copy_(a), 4 * n

        calls, moved = rotating(make)
        return moved / statistics.median(device_time(calls, self.repetitions))

    def bandwidth(self, name: str, make: Callable[[], tuple[Call, int]], **extra: object) -> float:
        """Measure a kernel and the copy of as many bytes beside it; return its share of the copy."""
        calls, size = rotating(make)
        values = device_time(calls, self.repetitions)
        copy = self.copy_bandwidth(size)
        spread = _common.spread([size / v / 1e12 for v in values])
        share = spread["median"] * 1e12 / copy
        self.rows.append(
            {"part": "bandwidth", "case": name, "MB": round(size / 1e6, 1), "TB/s": spread,
             "copy_TB/s": copy / 1e12, "share": share, **extra}
        )  # fmt: skip
        return share
