# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Loads that tell the memory what will be read next to them."""

from __future__ import annotations

from llvmlite import ir
from numba import int64, uint32
from numba.core.extending import intrinsic

from loongforge_fuse.kernels.source import lowering as low
from loongforge_fuse.kernels.source.intrinsics import ADDRESS


@intrinsic
def load_word_of_run(typingctx, address, offset):
    """Load one 32-bit word at byte `offset` (a multiple of 4); the 256 bytes around it go to the L2 cache.

    For runs that begin and end anywhere and go on in another block: the memory is asked for whole pieces
    once, instead of for what one warp needs of them.
    """

    def codegen(context, builder, signature, args):
        pointer = low.global_pointer(builder, args[0], args[1], low.I32)
        place = builder.ptrtoint(pointer, low.I64)
        kind = ir.FunctionType(low.I32, [low.I64])
        code = "ld.global.L2::256B.u32 $0, [$1];"
        return builder.call(ir.InlineAsm(kind, code, "=r,l", side_effect=True), [place])

    return uint32(ADDRESS, int64), codegen
