"""Adding up partial sums that the blocks of a kernel left behind, and the plans for it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops._common import CODES, resolve

# Lines of threads in a block. With few partial sums for a column more lines would have nothing to add.
MOST, MANY, FEW = 64, 32, 4
_FEW_CHUNKS = 64
FOLLOWING = 90  # compute capability from which on a kernel may start before the one in front has ended
# Rows in flight for a thread: 264 partial sums, two blocks a processor, are one round of 32 lines; and 16, as
# where groups of rows have partial sums of their own, one of 4 lines, which more room would only slow down.
_AHEAD, _AHEAD_OF_FEW = 12, 4
_calls: dict[Hashable, Function] = {}


def _block(lines: int) -> int:
    """Return the threads of a block: eight of a line, or 64 where there are few lines."""
    return 512 if lines == MOST else 256


def column_spec(y: str, lines: int, *, follows: bool = False, brief: bool = False) -> KernelSpec:
    """Return the specification of the kernel that adds the partial column sums into type `y`; `brief`: of at
    most 16 chunks.
    """
    return KernelSpec(
        module="columns",
        maker="column_sums",
        options={"y": y, "lines": lines, "ahead": _AHEAD_OF_FEW if brief else _AHEAD, "follows": follows},
        arguments="PPqq",
        block=_block(lines),
        follows=follows,
        capability=FOLLOWING if follows else 0,
    )


def add_partials(part: Tensor, dtype: torch.dtype, name: str, *, follows: bool = False) -> Tensor:
    """Add the chunks of each group: (groups, chunks, width) float32 to (groups, width), rounded once.

    The order of the additions depends on the shape alone.

    Args:
        part: contiguous; at least one chunk; the width is a multiple of 4.
        dtype: type of the result.
        name: operator that counts a fallback.
        follows: the kernel that made the partial sums lets the next one start before it ends.
    """
    groups, chunks, width = part.shape
    lines = FEW if chunks <= _FEW_CHUNKS else MANY if chunks <= MANY * _AHEAD else MOST
    device = part.get_device()
    brief = chunks <= FEW * _AHEAD_OF_FEW
    key = (device, dtype, lines, follows, brief)
    call = _calls.get(key)
    if call is None and dtype in CODES:
        call = resolve(
            name, _calls, key, column_spec(CODES[dtype], lines, follows=follows, brief=brief), device
        )
    if call is None:
        return part.sum(1).to(dtype)
    out = torch.empty((groups, width), dtype=dtype, device=part.device)
    blocks = -(-width // (4 * (_block(lines) // lines)))
    call.run(blocks, groups, (part.data_ptr(), out.data_ptr(), width, chunks))
    return out
