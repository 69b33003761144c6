"""How rows that are quantised are spread over threads and blocks, and the specification. Pure arithmetic."""

from __future__ import annotations

from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops.norm_plan import RowPlan

ACTIVATIONS = ("none", "gelu_tanh", "silu_mul")
FLOAT8_CAPABILITY = 89
"""Compute capability, times ten, from which on there are conversions to e4m3, and products of it."""
_WARP_VECTORS = 160  # up to as many a warp takes a row, without a barrier
_PAIRED_VECTORS = 256  # up to as many a thread holds two: few rows then fill the device too
_MAX_VECTORS = 2048
_MAX_THREADS = 1024


def job_of(width: int, activation: str) -> str:
    """Name the choice between plans."""
    return f"quantise_rows {width}" + ("" if activation == "none" else f" {activation}")


def _plan(count: int, vectors: int, activation: str, warps: int = 48) -> RowPlan:
    """Return the plan of so many vectors a thread, with registers for up to `warps` warps at a time.

    Blocks of fewer than three warps would be too many, so there a block takes several rows.
    """
    threads = _threads(count, vectors)
    block = threads * -(-96 // threads) if threads > 32 else 128
    held = 4 * vectors * (2 if activation == "silu_mul" else 1)
    # With fewer beside what a thread holds it would spill. Registers are given in eights, from four files.
    registers = -(-(held + 16) // 8) * 8
    fits = min(warps, 4 * (512 // registers))
    return RowPlan(threads=threads, vectors=vectors, block=block, min_blocks=max(1, 32 * fits // block))


def _threads(count: int, vectors: int) -> int:
    """Return the threads of a row of `count` vectors, in whole warps, when each holds `vectors`."""
    return -(-count // (32 * vectors)) * 32


def plan_of(width: int, activation: str) -> RowPlan | None:
    """Return the plan for rows of `width` elements, or None when no kernel takes such a row."""
    count = width // 8
    if width % 8 or not count or count > _MAX_VECTORS:
        return None
    if count <= 16:
        return RowPlan(threads=max(4, 1 << (count - 1).bit_length()), vectors=1, block=128)
    # A thread holds both inputs of a gated activation.
    most = _WARP_VECTORS // 2 if activation == "silu_mul" else _WARP_VECTORS
    if count <= most:
        return _plan(count, -(-count // 32), activation)
    if count <= _PAIRED_VECTORS:
        return _plan(count, 2, activation)
    # The first that leaves the fewest threads without a vector.
    fits = [v for v in (3, 4, 2) if _threads(count, v) <= _MAX_THREADS]
    return _plan(count, min(fits, key=lambda v: _threads(count, v) * v), activation)


def ways_of(width: int, activation: str) -> dict[str, RowPlan]:
    """Return plans by name, the default first; empty where no kernel fits."""
    first = plan_of(width, activation)
    if first is None:
        return {}
    count, plans = width // 8, [first]
    if count > 64:
        # One vector needs so few registers that there is nothing to limit.
        spreads = ((1, 60), (2, 48), (2, 60), (3, 48), (3, 60), (4, 48), (4, 60))
        plans += [_plan(count, v, activation, w) for v, w in spreads if _threads(count, v) <= _MAX_THREADS]
    return {_name(plan): plan for plan in plans}


def _name(plan: RowPlan) -> str:
    limit = f" min {plan.min_blocks}" if plan.min_blocks else ""
    return f"{plan.threads}x{plan.vectors} block {plan.block}{limit}"


def quantise_spec(plan: RowPlan, width: int, x: str, activation: str) -> KernelSpec:
    """Return the specification of a variant."""
    return KernelSpec(
        module="quantise",
        maker="quantise_rows",
        options={
            "x": x,
            "activation": activation,
            "threads": plan.threads,
            "vectors": plan.vectors,
            "sure": min(plan.vectors, width // 8 // plan.threads),
        },
        arguments="PPPPqq",
        block=plan.block,
        # The other types need more registers and would spill under the limit.
        min_blocks=plan.min_blocks if x == "bf16" else 0,
        capability=FLOAT8_CAPABILITY,
    )
