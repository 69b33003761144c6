"""How the norm kernels spread rows over threads and blocks, and their specifications. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops.columns import FOLLOWING

_MARKS = ("late", "shared", "apart", "turned", "early", "fetch")


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How a row is spread over threads, and rows over blocks.

    Attributes:
        threads: threads per row.
        vectors: vectors each thread holds; threads * vectors covers the row.
        block: threads per block; a multiple of `threads`.
        each: elements of a vector, 8 or 4.
        ahead: forward only: a fixed grid walks the rows and loads ahead, instead of a grid over all rows.
        late: forward only: gain and offset are read where they are used, not held from the start.
        shared: forward only: gain and offset are copied to shared memory from the start and read there.
        min_blocks: blocks that must fit on a multiprocessor; 0: the compiler's choice.
        waves: blocks on each multiprocessor where a fixed grid walks the rows without column sums.
        rows_each: backward with column sums: rows that a block has at least, since its partial sums cost as
            much as a row.
        stages: backward, of bf16: rows ahead that are copied to shared memory; 0: one, held in registers.
        apart: backward: the rows of a block have barriers of their own and do not wait for each other.
        turned: backward: each group of rows begins at another of its rows.
        early: backward with column sums: the kernel that adds partial sums may start before this one ends.
        fetch: backward: the second-level cache is asked for the row after the next one, from 9.0 on.
    """

    threads: int
    vectors: int
    block: int
    each: int = 8
    ahead: bool = False
    late: bool = False
    shared: bool = False
    min_blocks: int = 0
    waves: int = 24
    rows_each: int = 4
    stages: int = 0
    apart: bool = False
    turned: bool = False
    early: bool = False
    fetch: bool = False

    @property
    def name(self) -> str:
        """Short text that tells plans apart."""
        walk = f" ahead {self.waves}" if self.ahead else f" waves {self.waves}"
        limit = f" min {self.min_blocks}" if self.min_blocks else ""
        stages = f" stages {self.stages}" if self.stages else ""
        spread = f"{self.threads}x{self.vectors}x{self.each} block {self.block}"
        marks = "".join(f" {mark}" for mark in _MARKS if getattr(self, mark))
        return f"{spread}{walk}{limit} rows {self.rows_each}{stages}{marks}"

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


def forward_plan(
    width: int, *, residual: bool, large: bool, layer: bool, modulate: bool = False
) -> RowPlan | None:
    """Return the plan for rows of `width` elements, or None when no kernel takes such a row.

    Without a residual a row moves half the bytes, so its fixed costs weigh more: there gain and offset of
    LayerNorm wait in shared memory. Blocks that run at a time are of few groups of rows, and find them in the
    same cache. Other rows of up to 1152 elements go to one warp without a barrier.

    Args:
        width: elements of a row.
        residual: whether a residual is added.
        large: whether the tensor is too large for the caches; small ones were measured on their own.
        layer: LayerNorm, which reads an offset besides the gain and takes a mean; else RMSNorm.
        modulate: whether gain and offset are those of a group of rows; measured apart from plain weights.
    """
    count = width // 8
    if width % 8 or not count or count > 2048:
        return None
    if count <= 32:
        return RowPlan(threads=_narrow(count), vectors=1, block=128)
    if layer and not residual and width in _SHARED:
        return _shared(width)
    if width == 1536 and residual:
        return RowPlan(threads=128, vectors=3, block=128, each=4)
    if width == 2048 and residual and modulate and not large:
        return RowPlan(threads=256, vectors=1, block=256)
    if not residual and width % 128 == 0 and width % 256 and width <= 1152:
        return RowPlan(threads=32, vectors=width // 128, block=96, each=4)
    threads, vectors, each = _spread(width)
    return RowPlan(threads=threads, vectors=vectors, block=threads, each=each)


def _shared(width: int) -> RowPlan:
    """Return the forward plan of an entry of ``_SHARED``."""
    threads, vectors, each, fits = _SHARED[width]
    return RowPlan(threads=threads, vectors=vectors, block=threads, each=each, shared=True, min_blocks=fits)


def backward_plan(
    width: int, *, columns: bool, large: bool = True, layer: bool = True, modulate: bool = False
) -> RowPlan | None:
    """Return the plan of the backward kernel, or None when no kernel takes such a row.

    Args:
        width: elements of a row.
        columns: whether column sums are made.
        large: whether the tensor is too large for the caches; small ones were measured on their own.
        layer: LayerNorm, which has twice the column sums; else RMSNorm.
        modulate: whether gain and offset are those of a group of rows; measured apart from plain weights.
    """
    count = width // 8
    if width % 8 or not count or count > 1024:
        return None
    if count <= 32:
        threads = 32 if columns else _narrow(count)
        return RowPlan(threads=threads, vectors=1, block=32 if columns else 128)
    threads, vectors, each = _spread(width)
    if columns and large and layer and (width, modulate) in _WALKED:
        return _WALKED[width, modulate]
    if columns and width in _STAGED:
        # As measured; the one case of RMSNorm has half the column sums and wants the same plan for all sizes.
        return _staged(_STAGED[width][1 if not large and (layer or width != 2048) else 0])
    # Two warps a row take two rows a block: half the partial sums, and no register too many.
    rows = 2 if columns and threads == 64 else 1
    # Registers hold the column sums: without this the compiler takes one block less.
    return RowPlan(
        threads=threads,
        vectors=vectors,
        block=rows * threads,
        each=each,
        min_blocks=512 // (rows * threads) if columns and threads <= 256 else 0,
    )


def _staged(form: tuple[int, int, int, int, int, int, bool]) -> RowPlan:
    """Return the plan of an entry of ``_STAGED``."""
    threads, vectors, each, rows, fits, stages, apart = form
    return RowPlan(
        threads=threads, vectors=vectors, block=rows * threads, each=each, min_blocks=fits, stages=stages,
        apart=apart, early=True,
    )  # fmt: skip


# (threads, vectors, elements): other ways to spread a row, to choose from by measurement. One warp for a row,
# or half a warp, has no barrier and pays once for what each warp of a row pays.
_FORWARD_SPREADS = {
    2048: ((128, 2, 8), (256, 1, 8)),
    1536: ((96, 2, 8), (128, 3, 4)),
    1152: ((96, 3, 4), (32, 9, 4)),
}
# The same with gain and offset read late: (..., blocks that fit with the registers this leaves; 0: as many as
# the compiler makes fit), and for blocks that walk the rows as many as fit.
_LATE = {
    2048: ((128, 2, 8, 12),),
    1536: ((96, 2, 8, 0), (32, 6, 8, 0)),
    1152: ((96, 3, 4, 0), (32, 9, 4, 12)),
}
_LATE_AHEAD = {
    2048: ((128, 2, 8, 8),),
    1536: ((96, 2, 8, 10),),
    1152: ((96, 3, 4, 12),),
}
# The same with gain and offset in shared memory.
_SHARED = {2048: (128, 2, 8, 12), 1536: (96, 2, 8, 16), 1152: (96, 3, 4, 16)}
# Backward with column sums, first the default of large tensors, then that of small ones: (threads, vectors,
# elements, rows of a block, blocks that fit, rows that are copied ahead to shared memory, whether rows have
# barriers of their own). Several rows in a block leave fewer partial sums behind, more blocks wait less for
# each other; own barriers do both.
_STAGED = {
    2048: (
        (128, 2, 8, 2, 2, 2, True),
        (128, 2, 8, 4, 1, 0, True),
        (128, 2, 8, 2, 2, 2, False),
    ),
    1536: (
        (96, 2, 8, 5, 1, 0, True),
        (96, 2, 8, 1, 5, 0, False),
        (128, 3, 4, 5, 1, 0, True),
        (96, 2, 8, 2, 2, 3, True),
    ),
    1152: (
        (96, 3, 4, 3, 2, 3, True),
        (96, 3, 4, 3, 2, 3, True),
        (96, 3, 4, 2, 3, 3, True),
    ),
}
# As measured for large tensors of LayerNorm, by width and whether groups of rows are modulated.
_WALKED = {
    (1536, False): replace(_staged((128, 3, 4, 5, 1, 0, True)), fetch=True),
    (1536, True): replace(_staged((96, 2, 8, 5, 1, 0, True)), fetch=True, turned=True),
    (2048, True): replace(_staged((128, 2, 8, 4, 1, 0, True)), turned=True),
}
_ELSEWHERE = {2048: 0, 1536: 1, 1152: 2}  # entries for other GPUs and types: blocks of at most 256 threads


def forward_ways(
    width: int, *, residual: bool, large: bool, layer: bool, modulate: bool = False
) -> dict[str, RowPlan]:
    """Return plans of the forward kernel by name, the default first; empty where no kernel fits."""
    first = forward_plan(width, residual=residual, large=large, layer=layer, modulate=modulate)
    if first is None:
        return {}
    plans = [first]
    for threads, vectors, each in _FORWARD_SPREADS.get(width, ()):
        # Of rows of one or two warps a block takes several: blocks of fewer than 3 warps are too many.
        plan = RowPlan(threads=threads, vectors=vectors, block=threads * -(-96 // threads), each=each)
        # A warp that holds a whole row has no registers for the next one.
        plans += [plan, replace(plan, ahead=True, waves=16)] if 32 < threads <= 128 else [plan]
    for threads, vectors, each, fits in () if residual else _LATE.get(width, ()):
        block = threads * -(-96 // threads)
        plan = RowPlan(threads=threads, vectors=vectors, block=block, each=each, late=True, min_blocks=fits)
        plans.append(plan)
    if not residual and width in _SHARED:
        plans.append(_shared(width))
    for threads, vectors, each, fits in () if residual else _LATE_AHEAD.get(width, ()):
        plan = RowPlan(threads=threads, vectors=vectors, block=threads, each=each, late=True)
        plans.append(replace(plan, ahead=True, waves=fits))
    return {plan.name: plan for plan in plans if plan.block % 32 == 0}


def backward_ways(
    width: int, *, columns: bool, modulate: bool = False, large: bool = True, layer: bool = True
) -> dict[str, RowPlan]:
    """Return plans of the backward kernel by name, the default first."""
    first = backward_plan(width, columns=columns, large=large, layer=layer, modulate=modulate)
    if first is None:
        return {}
    if not columns:
        return {plan.name: plan for plan in (first, replace(first, waves=40))}
    plans = [first]
    if width in _STAGED:
        staged = [_staged(form) for form in _STAGED[width]]
        # What is copied ahead needs no other way to be there early.
        staged += [replace(plan, fetch=True) for plan in staged if not plan.stages and plan.apart]
        plans += [*staged, elsewhere(first, width)]
        if modulate:
            # Groups of rows are walked side by side.
            plans += [replace(plan, turned=True) for plan in staged if plan.apart and plan.stages < 3]
    return {plan.name: plan for plan in plans}


def elsewhere(plan: RowPlan, width: int) -> RowPlan:
    """Return the backward plan for other GPUs and types than `plan` was measured with.

    Below compute capability 9.0 no kernel starts before the one in front of it has ended, and there, as with
    other types, rows take more registers, so a block has fewer of them.
    """
    return replace(_staged(_STAGED[width][_ELSEWHERE[width]]), early=False) if plan.early else plan


def fitted(plan: RowPlan, width: int, *, x: str, w: str, y: str) -> RowPlan:
    """Return `plan`, or for other types than it was measured with another backward plan."""
    return plan if x == w == y == "bf16" else elsewhere(plan, width)


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
            "late": plan.late and (gain != "none" or offset),
            "shared": plan.shared and (gain != "none" or offset),
        },
        arguments="PPPPPPPPqqqqf",
        block=plan.block,
        # The other types need more registers and would spill under the limit.
        min_blocks=plan.min_blocks if x == y == "bf16" else 0,
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
            # Other types would take more shared memory than a block has.
            "stages": plan.stages if x == y == "bf16" else 0,
            "apart": plan.apart,
            "turned": plan.turned,
            "early": plan.early,
            "fetch": plan.fetch and plan.full(width),
        },
        arguments="PPPPPPPPPqqq",
        block=plan.block,
        capability=FOLLOWING if plan.early or plan.fetch else 0,
        # The other types need more registers and would spill under the limit.
        min_blocks=plan.min_blocks if x == y == "bf16" and (w == x or not plan.stages) else 0,
        vector=plan.each == 8,
    )
