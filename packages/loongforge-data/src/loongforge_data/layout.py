"""Where everything of a batch lies in its slot: one array per camera, then the packed rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loongforge_data.transport import align

HEADER_BYTES = 64


class ImageLayoutLike(Protocol):
    """Shape of the decoded pictures of one camera."""

    @property
    def frames(self) -> int | None:
        """Length of the time axis; None without one."""

    @property
    def height(self) -> int:
        """Rows."""

    @property
    def width(self) -> int:
        """Columns."""

    @property
    def channels(self) -> int:
        """Channels."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Size to resize to, or None."""

    @property
    def crop(self) -> tuple[int, int, int, int] | None:
        """Crop before the resize, or None."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Where one camera's pictures of a whole batch lie in a slot."""

    key: str
    """Camera."""
    offset: int
    """First byte in the slot."""
    shape: tuple[int, ...]
    """Shape of one sample: (T, H, W, C) or (H, W, C)."""
    frame_bytes: int
    """Bytes of one picture."""
    frames: int
    """Pictures per sample."""


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Where everything of a batch of ``samples`` lies in its slot.

    Pictures are numbered camera by camera, sample by sample, slot of the window by slot; the table is the
    item after the last picture.
    """

    samples: int
    """Samples of the batch."""
    blocks: tuple[Block, ...]
    """Cameras."""
    table_offset: int
    """First byte of the packed rest."""

    @property
    def pictures(self) -> int:
        """Number of pictures."""
        return sum(block.frames for block in self.blocks) * self.samples


def batch_layout(images: Mapping[str, ImageLayoutLike], samples: int) -> BatchLayout:
    """Lay out a batch: one contiguous array (samples, [T,] H, W, C) per camera, then the table."""
    offset, blocks = HEADER_BYTES, []
    for key, image in images.items():
        picture = (image.height, image.width, image.channels)
        frames = image.frames or 1
        shape = picture if image.frames is None else (image.frames, *picture)
        size = image.height * image.width * image.channels
        blocks.append(Block(key=key, offset=align(offset), shape=shape, frame_bytes=size, frames=frames))
        offset = align(offset) + samples * frames * size
    return BatchLayout(samples=samples, blocks=tuple(blocks), table_offset=align(offset))


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """A batch with the slot it goes to."""

    sequence: int
    """Number of the batch, unique over the life of the pipeline."""
    slot: int
    """Slot."""
    indices: npt.NDArray[np.int64]
    """Samples."""
    layout: BatchLayout
    """Where things go."""
