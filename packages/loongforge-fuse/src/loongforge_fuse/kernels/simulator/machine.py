"""Execution: threads as generators, barriers and shuffles as points where they wait for each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loongforge_fuse.kernels.simulator.memory import Memory, SimulationError
from loongforge_fuse.kernels.simulator.translate import load_module
from loongforge_fuse.kernels.specs import KernelSpec

__all__ = ["SharedArray", "SimulationError", "simulate"]
WARP = 32
BARRIERS = 16  # of a block
_Number = Any  # Python int or numpy.float32
# Kind, value offered or number of the barrier, lane mask of a shuffle or threads of the barrier.
_Event = tuple[str, Any, int]


@dataclass(kw_only=True)
class _Thread:
    """One thread: its place, what it waits for, and how many barriers it has passed."""

    number: int
    body: Generator[_Event, Any, None]
    waits: _Event | None = None
    answer: Any = None
    done: bool = False
    block_epoch: int = 0
    warp_epoch: int = 0
    some_epoch: int = 0
    some: int = 0  # barrier of some warps that the thread has passed last

    @property
    def warp(self) -> int:
        return self.number // WARP


@dataclass(kw_only=True)
class _Access:
    """When and by whom a slot of shared memory was touched."""

    thread: int
    block_epoch: int
    warp_epoch: int
    some_epoch: int


class SharedArray:
    """A shared array of 4-byte slots; each half of a slot may be written on its own."""

    def __init__(self, size: int, block: Block) -> None:
        self.size, self._block = size, block
        self._halves: list[Any] = [None] * (2 * size)  # the lower one also holds a value stored whole
        self._whole = [True] * size
        self._writes: list[_Access | None] = [None] * size
        self._reads: list[list[_Access]] = [[] for _ in range(size)]

    def begin_copy(self, place: int, words: list[int]) -> None:
        """Begin to bring words to the slots from `place`, in the open group of the current thread."""
        self._block.groups()[-1].append((self, place, words))

    def close_group(self) -> None:
        """Close the open group of the current thread and open another."""
        self._block.groups().append([])

    def await_groups(self, left: int) -> None:
        """Let all closed groups of the current thread but the last `left` arrive."""
        groups = self._block.groups()
        while len(groups) - 1 > left:
            for array, place, words in groups.pop(0):
                for i, word in enumerate(words):
                    array[place + i] = word

    def _check(self, place: int, *, write: bool) -> None:
        if not 0 <= place < self.size:
            message = f"thread {self._block.current.number}: shared slot {place} of {self.size}"
            raise SimulationError(message)
        before = [*self._reads[place]] if write else []
        last = self._writes[place]
        if last is not None:
            before.append(last)
        for other in before:
            if not self._block.ordered(other):
                message = (
                    f"thread {self._block.current.number}: {'write' if write else 'read'} of shared slot"
                    f" {place} races with thread {other.thread}: no barrier between"
                )
                raise SimulationError(message)

    def _now(self) -> _Access:
        thread = self._block.current
        return _Access(
            thread=thread.number,
            block_epoch=thread.block_epoch,
            warp_epoch=thread.warp_epoch,
            some_epoch=thread.some_epoch,
        )

    def __getitem__(self, place: int) -> _Number:
        self._check(place, write=False)
        now = self._now()
        self._reads[place] = [r for r in self._reads[place] if r.block_epoch == now.block_epoch] + [now]
        low, high = self._halves[2 * place : 2 * place + 2]
        found = low if self._whole[place] else (None if low is None or high is None else low | high << 16)
        if found is None:
            message = f"thread {now.thread}: read of shared slot {place}, which was never written"
            raise SimulationError(message)
        return found

    def __setitem__(self, place: int, value: _Number) -> None:
        self._check(place, write=True)
        self._halves[2 * place], self._whole[place] = value, True
        self._writes[place], self._reads[place] = self._now(), []

    def store_half(self, half: int, value: int) -> None:
        """Write 16 bits; the two halves of a slot may have different writers."""
        place = half // 2
        if not 0 <= place < self.size:
            message = f"thread {self._block.current.number}: shared slot {place} of {self.size}"
            raise SimulationError(message)
        if self._whole[place]:
            self._halves[2 * place : 2 * place + 2], self._whole[place] = [None, None], False
        self._halves[half] = value & 0xFFFF
        self._writes[place] = self._now()


_Copy = tuple[SharedArray, int, list[int]]  # where to, the first slot, what arrives


@dataclass
class _Index:
    x: int = 0
    y: int = 0
    z: int = 0


class _Arrays:
    """``cuda.local`` or ``cuda.shared``: makes arrays."""

    def __init__(self, make: Callable[[int], object]) -> None:
        self._make = make

    def array(self, size: int, dtype: object, alignment: int | None = None) -> object:
        """Make an array; what it holds before it is written is an error to use."""
        return self._make(size)


@dataclass
class Block:
    """One block of threads, and what kernels see as the module ``cuda``."""

    memory: Memory
    threads: list[_Thread] = field(default_factory=list)
    shared_arrays: list[SharedArray] = field(default_factory=list)
    threadIdx: _Index = field(default_factory=_Index)
    blockIdx: _Index = field(default_factory=_Index)
    blockDim: _Index = field(default_factory=_Index)
    gridDim: _Index = field(default_factory=_Index)

    def __post_init__(self) -> None:
        self.current: _Thread = None  # type: ignore[assignment]  # set before a thread runs
        self._made: dict[int, int] = {}
        self._copies: dict[int, list[list[_Copy]]] = {}
        self.local = _Arrays(lambda size: [None] * size)
        self.shared = _Arrays(self._shared)

    def begin(self, x: int, y: int) -> None:
        """Become the block at (x, y)."""
        self.blockIdx = _Index(x, y)
        self.shared_arrays.clear()
        self._made.clear()
        self._copies.clear()

    def groups(self) -> list[list[_Copy]]:
        """Return the groups of copies that the current thread has under way, the last one still open."""
        return self._copies.setdefault(self.current.number, [[]])

    def _shared(self, size: int) -> SharedArray:
        """Return the n-th shared array that a thread asks for; all threads ask in one order."""
        turn = self._made.get(self.current.number, 0)
        self._made[self.current.number] = turn + 1
        if turn == len(self.shared_arrays):
            self.shared_arrays.append(SharedArray(size, self))
        return self.shared_arrays[turn]

    @staticmethod
    def jit(**_: object) -> Callable[[Callable[..., object]], Callable[..., object]]:
        """Stand for ``cuda.jit`` of device functions: they stay Python functions."""
        return lambda function: function

    def ordered(self, other: _Access) -> bool:
        """Tell whether an earlier access is separated from the current thread by a barrier."""
        mine = self.current
        if other.thread == mine.number or other.block_epoch < mine.block_epoch:
            return True
        if other.thread // WARP == mine.warp and other.warp_epoch < mine.warp_epoch:
            return True
        # Threads that have passed a barrier of some warps together: what the other did before it is over.
        together = 0 < mine.some == self.threads[other.thread].some
        return together and other.some_epoch < mine.some_epoch


def simulate(
    spec: KernelSpec,
    memory: Memory,
    grid: tuple[int, int],
    arguments: Sequence[int | float],
    *,
    seed: int = 0,
    blocks: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Run a kernel on `memory`.

    Args:
        spec: which kernel.
        memory: holds the buffers that the addresses among the arguments point to.
        grid: blocks in x and y.
        arguments: as for a launch.
        seed: order in which threads run between two barriers.
        blocks: only these blocks; None: all of them.

    Raises:
        ValueError: the number of arguments or the grid is impossible.
        TypeError: an argument has another type than a launch takes.
        SimulationError: a wrong access, a race, a shuffle that lanes miss, or a barrier some never reach.
    """
    if len(arguments) != len(spec.arguments):
        message = f"{spec.name} takes {len(spec.arguments)} arguments, got {len(arguments)}"
        raise ValueError(message)
    for value, letter in zip(arguments, spec.arguments, strict=True):
        if type(value) is not (float if letter == "f" else int):
            message = f"{spec.name}: argument of kind {letter!r} is {value!r}"
            raise TypeError(message)
    if not (0 < grid[0] < 2**31 and 0 < grid[1] < 2**16):
        message = f"{spec.name}: no grid of {grid[0]} x {grid[1]} blocks exists"
        raise ValueError(message)
    memory.begin_launch()
    order = random.Random(seed)
    device = Block(memory)
    module, options = load_module(spec.module, device), dict(spec.options)
    maker = module[spec.maker]
    if "block" in maker.__code__.co_varnames[: maker.__code__.co_kwonlyargcount]:
        options["block"] = spec.block
    kernel = maker(**options)
    values = [
        module["float32"](v) if k == "f" else int(v) for k, v in zip(spec.arguments, arguments, strict=True)
    ]
    chosen = blocks if blocks is not None else [(x, y) for y in range(grid[1]) for x in range(grid[0])]
    device.blockDim, device.gridDim = _Index(spec.block, 1, 1), _Index(*grid, 1)
    with np.errstate(all="ignore"):
        for x, y in chosen:
            device.begin(x, y)
            first = (y * grid[0] + x) * spec.block
            _run_block(device, kernel, values, first, order)


def _run_block(
    device: Block, kernel: Callable[..., Any], values: list[Any], first: int, order: random.Random
) -> None:
    size = device.blockDim.x
    device.threads = [_Thread(number=n, body=_body(kernel, values)) for n in range(size)]
    ready = list(device.threads)
    while ready:
        order.shuffle(ready)
        for thread in ready:
            _advance(device, thread, first)
        ready = _released(device)
        if not ready and not all(t.done for t in device.threads):
            waiting = {t.waits[0] for t in device.threads if t.waits is not None}
            message = f"block {device.blockIdx.x}, {device.blockIdx.y} waits for ever at {sorted(waiting)}"
            raise SimulationError(message)


def _body(kernel: Callable[..., Any], values: list[Any]) -> Generator[_Event, Any, None]:
    result = kernel(*values)
    if result is not None:  # a kernel with barriers or shuffles is a generator
        yield from result


def _advance(device: Block, thread: _Thread, first: int) -> None:
    device.current, device.threadIdx = thread, _Index(thread.number)
    device.memory.thread = first + thread.number
    try:
        thread.waits = thread.body.send(thread.answer) if thread.waits else next(thread.body)
    except StopIteration:
        thread.done, thread.waits = True, None


def _released(device: Block) -> list[_Thread]:
    """Return the threads whose barrier or shuffle is complete."""
    alive = [t for t in device.threads if not t.done]
    if alive and all(t.waits is not None and t.waits[0] == "block" for t in alive):
        for thread in alive:
            thread.block_epoch += 1
            thread.answer = None
        return alive
    ready = _past_some(alive)
    for start in range(0, len(device.threads), WARP):
        warp = device.threads[start : start + WARP]
        kinds = {t.waits[0] if t.waits is not None else "end" for t in warp}
        if kinds == {"shuffle"}:
            _exchange(warp)
            ready += warp
        elif kinds == {"warp"}:
            for thread in warp:
                thread.warp_epoch += 1
                thread.answer = None
            ready += warp
        elif "shuffle" in kinds and kinds - {"shuffle"}:
            where = f"warp {start // WARP} of block {device.blockIdx.x}"
            message = f"{where}: not all lanes take part in a shuffle, they are at {sorted(kinds)}"
            raise SimulationError(message)
    return ready


def _past_some(alive: list[_Thread]) -> list[_Thread]:
    """Return the threads whose barrier of some warps is complete."""
    waiting: dict[tuple[int, int], list[_Thread]] = {}
    for thread in alive:
        if thread.waits is not None and thread.waits[0] == "some":
            waiting.setdefault((int(thread.waits[1]), int(thread.waits[2])), []).append(thread)
    ready = []
    for (which, count), threads in waiting.items():
        if not 0 < which < BARRIERS or count % WARP or len(threads) > count:
            message = f"{len(threads)} threads wait at barrier {which} (1 to {BARRIERS - 1}) for {count}"
            raise SimulationError(message)
        if len(threads) == count:
            for thread in threads:
                thread.some, thread.some_epoch, thread.answer = which, thread.some_epoch + 1, None
            ready += threads
    return ready


def _exchange(warp: list[_Thread]) -> None:
    masks = {t.waits[2] for t in warp if t.waits is not None}
    if len(masks) != 1:
        message = f"lanes shuffle over different distances {sorted(masks)}"
        raise SimulationError(message)
    offered = [t.waits[1] for t in warp if t.waits is not None]
    (mask,) = masks
    for lane, thread in enumerate(warp):
        thread.answer = offered[lane ^ mask]
