"""Adding up partial sums that the blocks of a kernel left behind, and the plans for it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops._common import CODES, resolve

_BLOCK = 256
# Lines of threads in a block. With few partial sums for a column more lines would have nothing to add.
MANY, FEW = 32, 4
_FEW_CHUNKS = 64
_AHEAD = (
    12  # rows in flight for a thread: 264 partial sums, two blocks a processor, are one round of 32 lines
)
_calls: dict[Hashable, Function] = {}


def column_spec(y: str, lines: int) -> KernelSpec:
    """Return the specification of the kernel that adds the partial column sums into type `y`."""
    return KernelSpec(
        module="columns",
        maker="column_sums",
        options={"y": y, "lines": lines, "ahead": _AHEAD},
        arguments="PPqq",
        block=_BLOCK,
    )


def add_partials(part: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Add the chunks of each group: (groups, chunks, width) float32 to (groups, width), rounded once.

    The order of the additions depends on the shape alone.

    Args:
        part: contiguous; at least one chunk; the width is a multiple of 4.
        dtype: type of the result.
        name: operator that counts a fallback.
    """
    groups, chunks, width = part.shape
    lines = FEW if chunks <= _FEW_CHUNKS else MANY
    device = part.get_device()
    key = (device, dtype, lines)
    call = _calls.get(key)
    if call is None and dtype in CODES:
        call = resolve(name, _calls, key, column_spec(CODES[dtype], lines), device)
    if call is None:
        return part.sum(1).to(dtype)
    out = torch.empty((groups, width), dtype=dtype, device=part.device)
    blocks = -(-width // (4 * (_BLOCK // lines)))
    call.run(blocks, groups, (part.data_ptr(), out.data_ptr(), width, chunks))
    return out
