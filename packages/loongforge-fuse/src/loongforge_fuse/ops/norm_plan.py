"""How the norm kernels spread rows over threads and blocks, and their specifications. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from loongforge_fuse.kernels.specs import KernelSpec


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How a row is spread over threads.

    Attributes:
        threads: threads per row.
        vectors: vectors of 8 elements each thread holds; threads * vectors covers the row.
        block: threads per block; a multiple of `threads`.
        ahead: forward only: a fixed grid walks the rows and loads ahead, instead of a grid over all rows.
        max_registers: limit per thread; 0: the compiler's choice.
    """

    threads: int
    vectors: int
    block: int
    ahead: bool = False
    max_registers: int = 0


def _narrow(count: int) -> int:
    """Return the smallest power of two of lanes, from 4, that holds `count` <= 32 vectors."""
    lanes = 4
    while lanes < count:
        lanes *= 2
    return lanes


def forward_plan(width: int) -> RowPlan | None:
    """Return the plan for rows of `width` elements, or None when no kernel takes such a row."""
    count = width // 8
    if width % 8 or not count or count > 2048:
        return None
    if count <= 32:
        return RowPlan(threads=_narrow(count), vectors=1, block=128)
    # Two vectors a thread where they fill the row; one where they would not and the block stays small.
    vectors = 2 if count % 64 == 0 or count > 512 else 1
    threads = -(-count // (32 * vectors)) * 32
    return RowPlan(threads=threads, vectors=vectors, block=threads)


def backward_plan(width: int, *, columns: bool) -> RowPlan | None:
    """Return the plan of the backward kernel; with `columns` a block holds one row at a time."""
    count = width // 8
    if width % 8 or not count or count > 1024:
        return None
    if count <= 32:
        threads = 32 if columns else _narrow(count)
        return RowPlan(threads=threads, vectors=1, block=32 if columns else 128)
    vectors = 1 if count <= 640 else 2
    threads = -(-count // (32 * vectors)) * 32
    return RowPlan(threads=threads, vectors=vectors, block=threads)


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
            "full": plan.threads * plan.vectors * 8 == width,
            "ahead": plan.ahead,
        },
        arguments="PPPPPPPPqqqqf",
        block=plan.block,
        max_registers=plan.max_registers,
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
            "full": plan.threads * plan.vectors * 8 == width,
        },
        arguments="PPPPPPPPPqqqq",
        block=plan.block,
        max_registers=plan.max_registers,
    )


def column_spec() -> KernelSpec:
    """Return the specification of the kernel that adds the partial column sums."""
    return KernelSpec(
        module="norm", maker="column_sums", options={"y": "f32"}, arguments="PPqq", block=1024, vector=False
    )


def chunking(group_rows: int, groups: int, wanted: int, step: int) -> tuple[int, int]:
    """Return (rows per chunk, chunks per group) so that about `wanted` blocks share the rows.

    A chunk is a multiple of `step`, the rows a block takes at a time.
    """
    per_group = max(1, min(-(-group_rows // step), -(-wanted // groups)))
    chunk = -(-group_rows // per_group)
    chunk = -(-chunk // step) * step
    return chunk, -(-group_rows // chunk)
