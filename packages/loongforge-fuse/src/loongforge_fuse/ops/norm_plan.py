"""How the norm kernels spread rows over threads and blocks, and their specifications. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loongforge_fuse.kernels.specs import KernelSpec


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How a row is spread over threads, and rows over blocks.

    Attributes:
        threads: threads per row.
        vectors: vectors each thread holds; threads * vectors covers the row.
        block: threads per block; a multiple of `threads`.
        each: elements of a vector, 8 or 4.
        ahead: forward only: a fixed grid walks the rows and loads ahead, instead of a grid over all rows.
        min_blocks: blocks that must fit on a multiprocessor; 0: the compiler's choice.
        waves: blocks on each multiprocessor where a fixed grid walks the rows without column sums.
        rows_each: backward with column sums: rows that a block has at least, since its partial sums cost as
            much as a row.
    """

    threads: int
    vectors: int
    block: int
    each: int = 8
    ahead: bool = False
    min_blocks: int = 0
    waves: int = 24
    rows_each: int = 4

    @property
    def name(self) -> str:
        """Short text that tells plans apart."""
        walk = f" ahead {self.waves}" if self.ahead else f" waves {self.waves}"
        limit = f" min {self.min_blocks}" if self.min_blocks else ""
        return (
            f"{self.threads}x{self.vectors}x{self.each} block {self.block}{walk}{limit} rows {self.rows_each}"
        )

    def full(self, width: int) -> bool:
        """Tell whether the threads fill a row of `width` elements exactly."""
        return self.threads * self.vectors * self.each == width


def _narrow(count: int) -> int:
    """Return the smallest power of two of lanes, from 4, that holds `count` <= 32 vectors."""
    lanes = 4
    while lanes < count:
        lanes *= 2
    return lanes


def _spread(width: int) -> tuple[int, int, int]:
    """Return (threads, vectors, elements of a vector) for rows of more than 32 vectors.

    Rows that are filled exactly need no bounds checks, and their lanes join moments in one go.
    """
    count = width // 8
    if count % 64 == 0:
        return count // 2, 2, 8
    if width % 384 == 0 and width <= 3072:
        return width // 12, 3, 4
    vectors = 2 if count > 512 else 1
    return -(-count // (32 * vectors)) * 32, vectors, 8


def forward_plan(width: int, *, residual: bool) -> RowPlan | None:
    """Return the plan for rows of `width` elements, or None when no kernel takes such a row.

    Without a residual a row moves half the bytes, so its fixed costs weigh more: there rows of up to 1152
    elements go to one warp without a barrier, and blocks walk the rows where that was measured to be faster.
    """
    count = width // 8
    if width % 8 or not count or count > 2048:
        return None
    if count <= 32:
        return RowPlan(threads=_narrow(count), vectors=1, block=128)
    if not residual and width % 128 == 0 and width % 256 and width <= 1152:
        return RowPlan(threads=32, vectors=width // 128, block=96, each=4)
    threads, vectors, each = _spread(width)
    ahead = not residual and width == 1536
    return RowPlan(
        threads=threads, vectors=vectors, block=threads, each=each, ahead=ahead, waves=8 if ahead else 24
    )


def backward_plan(width: int, *, columns: bool) -> RowPlan | None:
    """Return the plan of the backward kernel; with `columns` a block holds one row at a time."""
    count = width // 8
    if width % 8 or not count or count > 1024:
        return None
    if count <= 32:
        threads = 32 if columns else _narrow(count)
        return RowPlan(threads=threads, vectors=1, block=32 if columns else 128)
    threads, vectors, each = _spread(width)
    # Registers hold the column sums: without this the compiler takes one block less.
    return RowPlan(
        threads=threads,
        vectors=vectors,
        block=threads,
        each=each,
        min_blocks=512 // threads if columns and threads <= 256 else 0,
    )


# (threads, vectors, elements): other ways to spread a row, to choose from by measurement.
_FORWARD_SPREADS = {
    2048: ((256, 1, 8), (64, 4, 8)),
    1536: ((192, 1, 8), (96, 2, 8), (128, 3, 4)),
    1152: ((96, 3, 4), (32, 9, 4), (288, 1, 4)),
}
_BACKWARD_SPREADS = {
    2048: ((256, 1, 8),),
    1536: ((96, 2, 8), (192, 1, 8)),
    1152: ((144, 1, 8), (288, 1, 4)),
}


def forward_ways(width: int, *, residual: bool) -> dict[str, RowPlan]:
    """Return plans of the forward kernel by name, the default first; empty where no kernel fits."""
    first = forward_plan(width, residual=residual)
    if first is None:
        return {}
    plans = [first, *((replace(first, ahead=False, waves=24),) if first.ahead else ())]
    for threads, vectors, each in _FORWARD_SPREADS.get(width, ()):
        # Of rows of one or two warps a block takes several: blocks of fewer than 3 warps are too many.
        plan = RowPlan(threads=threads, vectors=vectors, block=threads * -(-96 // threads), each=each)
        # A warp that holds a whole row has no registers for the next one.
        plans += [plan, replace(plan, ahead=True, waves=16)] if 32 < threads <= 128 else [plan]
    return {plan.name: plan for plan in plans if plan.block % 32 == 0}


def backward_ways(width: int, *, columns: bool) -> dict[str, RowPlan]:
    """Return plans of the backward kernel by name, the default first."""
    first = backward_plan(width, columns=columns)
    if first is None:
        return {}
    if not columns:
        return {plan.name: plan for plan in (first, replace(first, waves=12), replace(first, waves=40))}
    plans = [first, replace(first, rows_each=2), replace(first, rows_each=1)]
    if first.min_blocks > 2:
        # One block more would spill registers.
        plans.append(replace(first, min_blocks=first.min_blocks - 1))
    for threads, vectors, each in _BACKWARD_SPREADS.get(width, ()):
        if threads % 32 == 0:
            plans.append(
                RowPlan(threads=threads, vectors=vectors, block=threads, each=each, min_blocks=640 // threads)
            )
    return {plan.name: plan for plan in plans}


def forward_spec(
    plan: RowPlan,
    width: int,
    *,
    layer: bool,
    x: str,
    r: str,
    w: str,
    y: str,
    gain: str,
    offset: bool,
    residual: bool,
) -> KernelSpec:
    """Return the specification of a forward variant; `r` and `w` matter only with a residual or a gain."""
    return KernelSpec(
        module="norm_forward",
        maker="norm_forward",
        options={
            "layer": layer,
            "x": x,
            "r": r if residual else x,
            "w": w if gain != "none" or offset else x,
            "y": y,
            "gain": gain,
            "offset": offset,
            "residual": residual,
            "threads": plan.threads,
            "vectors": plan.vectors,
            "each": plan.each,
            "full": plan.full(width),
            "ahead": plan.ahead,
        },
        arguments="PPPPPPPPqqqqf",
        block=plan.block,
        min_blocks=plan.min_blocks,
        vector=plan.each == 8,
    )


def backward_spec(
    plan: RowPlan,
    width: int,
    *,
    layer: bool,
    x: str,
    w: str,
    y: str,
    gain: str,
    columns: bool,
    offset: bool,
    carry: bool,
) -> KernelSpec:
    """Return the specification of a backward variant."""
    return KernelSpec(
        module="norm_backward",
        maker="norm_backward",
        options={
            "layer": layer,
            "x": x,
            "w": w if gain != "none" else x,
            "y": y,
            "gain": gain,
            "columns": columns,
            "offset": offset and columns,
            "carry": carry,
            "threads": plan.threads,
            "vectors": plan.vectors,
            "each": plan.each,
            "full": plan.full(width),
        },
        arguments="PPPPPPPPPqqq",
        block=plan.block,
        # The other types need more registers and would spill under the limit.
        min_blocks=plan.min_blocks if x == y == "bf16" else 0,
        vector=plan.each == 8,
    )
