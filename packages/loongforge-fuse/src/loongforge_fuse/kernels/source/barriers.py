# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Barriers of some warps of a block, and what a kernel and the one that follows it tell each other."""

from __future__ import annotations

from llvmlite import ir
from numba import int32, types
from numba.core.extending import intrinsic

from loongforge_fuse.kernels.source import lowering as low


@intrinsic
def some_barrier(typingctx, which, threads):
    """Wait at barrier `which` (1 to 15; 0 is that of the block) for `threads` threads, a multiple of 32."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [low.I32, low.I32])
        wait = ir.InlineAsm(kind, "bar.sync $0, $1;", "r,r,~{memory}", side_effect=True)
        builder.call(wait, args, attrs=("convergent",))
        return context.get_dummy_value()

    return types.void(int32, int32), codegen


def _make_between(code: str) -> object:
    @intrinsic
    def between(typingctx):
        """One instruction about the order of two kernels of a stream, compute capability 9.0 and above."""

        def codegen(context, builder, signature, args):
            low.effect(builder, code, "~{memory}", [])
            return context.get_dummy_value()

        return types.void(), codegen

    return between


# The next kernel of the stream, when it is one that waits itself, may start while blocks of this one run.
begin_next = _make_between("griddepcontrol.launch_dependents;")
# Wait until the kernel before has ended and what it wrote can be read.
await_last = _make_between("griddepcontrol.wait;")
