"""How the norm kernels spread rows over threads and blocks, and their specifications. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from loongforge_fuse.kernels.specs import KernelSpec


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How a row is spread over threads.

    Attributes:
        threads: threads per row.
        vectors: vectors each thread holds; threads * vectors covers the row.
        block: threads per block; a multiple of `threads`.
        each: elements of a vector, 8 or 4.
        ahead: forward only: a fixed grid walks the rows and loads ahead, instead of a grid over all rows.
        min_blocks: blocks that must fit on a multiprocessor; 0: the compiler's choice.
    """

    threads: int
    vectors: int
    block: int
    each: int = 8
    ahead: bool = False
    min_blocks: int = 0

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
    return RowPlan(
        threads=threads, vectors=vectors, block=threads, each=each, ahead=not residual and width == 1536
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
        module="norm",
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
        module="norm",
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


def column_spec(y: str) -> KernelSpec:
    """Return the specification of the kernel that adds the partial column sums into type `y`."""
    return KernelSpec(
        module="norm",
        maker="column_sums",
        options={"y": y},
        arguments="PPqq",
        block=1024,
        vector=False,
    )
