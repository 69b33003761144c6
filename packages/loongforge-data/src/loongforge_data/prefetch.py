"""L0: bytes from disk into memory before a decoder asks for them.

`ReadAhead` looks at the jobs that wait on the board and asks the system for exactly the byte ranges of the
groups of pictures they need: ``advise`` (posix_fadvise, returns at once) or ``populate`` (maps the file
and reads the pages in, which blocks this thread only). Decoders read files with ``read``, never through a
mapping, so a file that is truncated while it is in use gives an error and not a signal; ``populate`` too
gets an error code from the kernel.

`RangeFile` is the same idea for sources that are read by range (object stores through fsspec): a seekable
file over cached blocks that can be filled ahead.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from loongforge_data._core import Ring
from loongforge_data.planning import TARGET_FIELDS
from loongforge_data.workers.jobs import DecodeJob, decode

if TYPE_CHECKING:
    from typing_extensions import Buffer

Mode = Literal["advise", "populate", "off"]
MODES: tuple[Mode, ...] = ("advise", "populate", "off")
_MADV_POPULATE_READ = 22  # Linux 5.14 and later; the mmap module does not name it
_MERGE_BYTES = 64 << 10
_MAX_TABLES = 64
_MAX_JOBS = 256
_IDLE_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """Bytes [start, stop) of a file."""

    start: int
    """First byte."""
    stop: int
    """One past the last byte."""


def merge_ranges(ranges: Sequence[ByteRange], gap: int = _MERGE_BYTES) -> list[ByteRange]:
    """Join ranges that overlap or lie within ``gap`` bytes of each other; sorted by start. O(n log n)."""
    result: list[ByteRange] = []
    for piece in sorted(ranges, key=lambda r: r.start):
        if result and piece.start <= result[-1].stop + gap:
            result[-1] = ByteRange(start=result[-1].start, stop=max(result[-1].stop, piece.stop))
        else:
            result.append(piece)
    return result


@dataclass(frozen=True, kw_only=True)
class PacketTable:
    """Where the packets of a video file lie, in decode order."""

    offsets: npt.NDArray[np.int64]
    """First byte of each packet."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each packet."""


def packet_table(path: str) -> PacketTable | None:
    """Return the packet positions from the container's own index; None when it has none."""
    import av

    with av.open(path) as container:
        entries = container.streams.video[0].index_entries
        if not len(entries):
            return None
        rows = [(entry.pos, entry.size) for entry in entries]
    table = np.asarray(rows, dtype=np.int64)
    return PacketTable(offsets=table[:, 0], sizes=table[:, 1])


def frame_ranges(path: str, frames: Sequence[int], table: PacketTable) -> list[ByteRange]:
    """Return the byte ranges that decoding these display indices reads: from the key packet to the last
    one needed.
    """
    from loongforge_data.video import video_index

    index = video_index(path)
    found = []
    for frame in frames:
        if not 0 <= frame < len(index) or index.start[frame] < 0:
            continue
        first, last = int(index.start[frame]), int(index.order[frame])
        if last < len(table.offsets):
            offsets, sizes = table.offsets[first : last + 1], table.sizes[first : last + 1]
            found.append(ByteRange(start=int(offsets.min()), stop=int((offsets + sizes).max())))
    return merge_ranges(found)


def request(path: str, ranges: Sequence[ByteRange], mode: Mode) -> int:
    """Ask the system for byte ranges of a file; returns how many bytes were asked for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        asked = 0
        for piece in ranges:
            stop = min(piece.stop, size)
            if stop <= piece.start:
                continue
            if mode == "populate":
                _populate(descriptor, piece.start, stop)
            else:
                os.posix_fadvise(descriptor, piece.start, stop - piece.start, os.POSIX_FADV_WILLNEED)
            asked += stop - piece.start
        return asked
    finally:
        os.close(descriptor)


def _populate(descriptor: int, start: int, stop: int) -> None:
    first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with (
        mmap.mmap(descriptor, stop - first, access=mmap.ACCESS_READ, offset=first) as mapped,
        suppress(OSError),
    ):
        # The kernel answers with an error where the file ends early; nothing here touches the pages itself.
        mapped.madvise(_MADV_POPULATE_READ)


class ReadAhead(threading.Thread):
    """Looks at waiting decode jobs and asks for their bytes. One per loader, in a worker process.

    Args:
        ring: The board.
        mode: How to ask.
        count: Called with a counter's name and an amount.
        most_jobs: Jobs looked at in one step.
    """

    def __init__(
        self,
        ring: Ring,
        mode: Mode,
        count: Callable[[str, int], None],
        *,
        most_jobs: int = _MAX_JOBS,
    ) -> None:
        super().__init__(name="loongforge-data-l0", daemon=True)
        self._ring = ring
        self._board = ring.board()
        self._mode = mode
        self._count = count
        self._most = most_jobs
        self._tables: OrderedDict[str, PacketTable | None] = OrderedDict()
        self._next = 0

    def run(self) -> None:
        """Work until the ring stops."""
        while not self._ring.stopped():
            if not self.step():
                self._board.wait_work(_IDLE_SECONDS)

    def step(self) -> int:
        """Ask for the bytes of jobs not seen before; returns how many jobs that were."""
        found = self._board.peek(self._next, self._most)
        wanted: dict[str, set[int]] = {}
        for serial, payload in found:
            self._next = max(self._next, serial + 1)
            with suppress(
                Exception
            ):  # a payload may be replaced while it is read; its job is then under way anyway
                job = decode(payload)
                if isinstance(job, DecodeJob):
                    table = np.frombuffer(job.targets, dtype=np.int64).reshape(-1, TARGET_FIELDS)
                    wanted.setdefault(job.path, set()).update(table[:, 0].tolist())
        for path, frames in wanted.items():
            with suppress(
                OSError, ValueError
            ):  # a bad file is the decoder's to report, with the samples it concerns
                table_ = self._table(path)
                if table_ is not None:
                    self._count(
                        "readahead_bytes",
                        request(path, frame_ranges(path, sorted(frames), table_), self._mode),
                    )
        return len(found)

    def _table(self, path: str) -> PacketTable | None:
        if path not in self._tables:
            self._tables[path] = packet_table(path)
            while len(self._tables) > _MAX_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(path)
        return self._tables[path]


class RangeSource(Protocol):
    """Bytes that are read by range."""

    def size(self) -> int:
        """Return the number of bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""


class LocalSource:
    """A local file, read with ``pread``."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size(self) -> int:
        """Return the file's size now."""
        return os.fstat(self._descriptor).st_size

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), fewer where the file ends."""
        return os.pread(self._descriptor, stop - start, start)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class FsspecSource:
    """A file of any fsspec file system, e.g. ``s3://bucket/video.mp4`` (extra ``remote``)."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            msg = f"{url} needs fsspec: install loongforge-data[remote]"
            raise ImportError(msg) from error
        self._files, self._path = fsspec.core.url_to_fs(url)

    def size(self) -> int:
        """Return the object's size."""
        return int(self._files.size(self._path))

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        return bytes(self._files.cat_file(self._path, start=start, end=stop))


class RangeFile(io.RawIOBase):
    """A seekable read-only file over a `RangeSource`, in cached blocks; what a container reader needs.

    Args:
        source: Where bytes come from.
        block_bytes: Bytes fetched at once.
        most_bytes: Bytes kept; least recently used blocks go first.
    """

    def __init__(
        self, source: RangeSource, *, block_bytes: int = 1 << 18, most_bytes: int = 64 << 20
    ) -> None:
        super().__init__()
        if block_bytes < 1 or most_bytes < block_bytes:
            msg = (
                f"block_bytes is {block_bytes} and most_bytes {most_bytes}, allowed is 1 <= block_bytes <= "
                f"most_bytes"
            )
            raise ValueError(msg)
        self._source = source
        self._size = source.size()
        self._block = block_bytes
        self._most = most_bytes // block_bytes
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._position = 0
        self.fetched_bytes = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        """Read into a buffer; 0 at the end."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view) and self._position < self._size:
            block, inside = divmod(self._position, self._block)
            data = self._fetch(block)[inside : inside + len(view) - done]
            if not data:
                break
            view[done : done + len(data)] = data
            done += len(data)
            self._position += len(data)
        return done

    def prefetch(self, ranges: Sequence[ByteRange]) -> None:
        """Fetch ranges now; neighbouring blocks that are missing are read in one request."""
        for piece in merge_ranges(ranges):
            first, last = piece.start // self._block, (min(piece.stop, self._size) - 1) // self._block
            missing = [block for block in range(first, last + 1) if block not in self._blocks]
            for run in _runs(missing):
                data = self._source.read(run[0] * self._block, min((run[-1] + 1) * self._block, self._size))
                self.fetched_bytes += len(data)
                for number, block in enumerate(run):
                    self._keep(block, data[number * self._block : (number + 1) * self._block])

    def _fetch(self, block: int) -> bytes:
        data = self._blocks.get(block)
        if data is None:
            data = self._source.read(block * self._block, min((block + 1) * self._block, self._size))
            self.fetched_bytes += len(data)
            self._keep(block, data)
        else:
            self._blocks.move_to_end(block)
        return data

    def _keep(self, block: int, data: bytes) -> None:
        self._blocks[block] = data
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def _runs(blocks: Sequence[int]) -> list[list[int]]:
    """Group numbers that follow each other."""
    result: list[list[int]] = []
    for block in blocks:
        if result and block == result[-1][-1] + 1:
            result[-1].append(block)
        else:
            result.append([block])
    return result
