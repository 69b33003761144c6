"""Decoded frames on local disk: later epochs read pixels instead of decoding.

One directory per (data set fingerprint, transform); in it, per video file, a pair of files:

* ``NAME.pixels``: frame ``i`` at byte ``i * frame_bytes``, a sparse file;
* ``NAME.sums``: a 64-byte header, then one 64-bit checksum per frame; 0 means "not there".

A frame is written first and its checksum last, so a reader in any process sees a frame whole or not at
all; a torn or damaged frame does not fit its checksum and counts as absent. Frames are read with ``pread``
straight into the place they are wanted: a file that somebody truncates can give an error, never a signal.

The size is bounded: before a new video file's frames are added, the least recently used pairs are removed
until everything fits. Ranks and workers on one machine share the directory; a lock file covers eviction only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from loongforge_data._core import checksum
from loongforge_data.layout import ImageLayoutLike

FORMAT = 1
_HEADER = struct.Struct("<8sIIQQ")
_MAGIC = b"LFCACHE\0"
_HEADER_BYTES = 64
_MAX_OPEN = 32
_TOUCH_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Where decoded frames are kept and how many."""

    directory: str
    """A directory on local disk; made when absent."""
    max_bytes: int = 64 << 30
    """Most bytes of pixels in the directory, over all data sets."""
    fingerprint: str = ""
    """What the frames belong to; the loader fills it in from the data set."""

    def __post_init__(self) -> None:
        if self.max_bytes < 1 << 20:
            msg = f"max_bytes is {self.max_bytes}, allowed is at least 1 MiB"
            raise ValueError(msg)


class CachedFile:
    """The cached frames of one video file, open."""

    def __init__(self, stem: Path, frame_bytes: int) -> None:
        self.frame_bytes = frame_bytes
        self._stem = stem
        self._pixels = os.open(f"{stem}.pixels", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._sums = os.open(f"{stem}.sums", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            os.close(self._pixels)
            raise
        self._used = 0.0
        head = _HEADER.pack(_MAGIC, FORMAT, 0, frame_bytes, 0)
        found = os.pread(self._sums, len(head), 0)
        if found != head:
            # New, or of another version or size: start over. Two processes that do so write the same header.
            os.ftruncate(self._sums, 0)
            os.pwrite(self._sums, head.ljust(_HEADER_BYTES, b"\0"), 0)

    def read_into(self, index: int, target: memoryview) -> bool:
        """Read a frame; False when it is not there or damaged."""
        raw = os.pread(self._sums, 8, _HEADER_BYTES + 8 * index)
        if len(raw) < 8:
            return False
        (expected,) = struct.unpack("<Q", raw)
        if expected == 0:
            return False
        if os.preadv(self._pixels, [target], index * self.frame_bytes) != self.frame_bytes:
            return False
        if checksum(target) != expected:
            os.pwrite(self._sums, bytes(8), _HEADER_BYTES + 8 * index)
            return False
        self._touch()
        return True

    def write(self, index: int, frame: memoryview) -> None:
        """Keep a frame: pixels first, checksum last."""
        os.pwrite(self._pixels, frame, index * self.frame_bytes)
        os.pwrite(self._sums, struct.pack("<Q", checksum(frame)), _HEADER_BYTES + 8 * index)
        self._touch()

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self._used > _TOUCH_SECONDS:
            self._used = now
            with suppress(OSError):
                os.utime(self._sums)

    def gone(self) -> bool:
        """Return whether the files were evicted since they were opened."""
        return os.fstat(self._sums).st_nlink == 0

    def close(self) -> None:
        """Close both files."""
        os.close(self._pixels)
        os.close(self._sums)


class FrameCache:
    """The cache as one worker thread sees it: a bounded set of open files, and eviction."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self._root = Path(config.directory)
        self._root.mkdir(parents=True, exist_ok=True)
        self._open: OrderedDict[Path, CachedFile] = OrderedDict()
        self._budgeted: set[Path] = set()

    @contextmanager
    def open(self, path: str, layout: ImageLayoutLike) -> Iterator[_Frames]:
        """Lend the cached frames of a video file under a transform."""
        stem = self._stem(path, layout)
        frame_bytes = layout.height * layout.width * layout.channels
        file = self._open.get(stem)
        if file is not None and file.gone():
            file.close()
            del self._open[stem]
            self._budgeted.discard(stem)
            file = None
        if file is None:
            stem.parent.mkdir(parents=True, exist_ok=True)
            file = self._open[stem] = CachedFile(stem, frame_bytes)
            while len(self._open) > _MAX_OPEN:
                _, old = self._open.popitem(last=False)
                old.close()
        self._open.move_to_end(stem)
        yield _Frames(self, stem, file)

    def _stem(self, path: str, layout: ImageLayoutLike) -> Path:
        transform = (layout.height, layout.width, layout.channels, layout.size, layout.crop, FORMAT)
        group = hashlib.sha256(repr((self.config.fingerprint, transform)).encode()).hexdigest()[:24]
        state = Path(path).stat()
        name = repr((os.path.abspath(path), state.st_size, state.st_mtime_ns))  # noqa: PTH100 - text only
        return self._root / group / hashlib.sha256(name.encode()).hexdigest()[:24]

    def admit(self, stem: Path, wanted: int) -> bool:
        """Make room for a video file's frames; False when they cannot fit."""
        if stem in self._budgeted:
            return True
        if wanted > self.config.max_bytes:
            return False
        with (self._root / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._evict(stem, wanted)
            # The full size counts from now on, however few frames are written yet.
            os.truncate(f"{stem}.pixels", wanted)
        self._budgeted.add(stem)
        return True

    def _evict(self, keep: Path, wanted: int) -> None:
        found: list[tuple[float, int, Path]] = []
        for sums in self._root.glob("*/*.sums"):
            pixels = sums.with_suffix(".pixels")
            with suppress(OSError):
                found.append((sums.stat().st_mtime, pixels.stat().st_size, pixels))
        found = [entry for entry in found if entry[2].with_suffix("") != keep]
        total = sum(size for _, size, _ in found)
        for _, size, pixels in sorted(found):
            if total + wanted <= self.config.max_bytes:
                break
            with suppress(OSError):
                pixels.with_suffix(".sums").unlink()
                pixels.unlink()
                total -= size

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


class _Frames:
    """Cached frames of one video file, with the right to add to them."""

    def __init__(self, cache: FrameCache, stem: Path, file: CachedFile) -> None:
        self._cache = cache
        self._stem = stem
        self._file = file
        self.frame_bytes = file.frame_bytes

    def read_into(self, index: int, target: memoryview) -> bool:
        """Read a frame into place; False when it is not cached."""
        return self._file.read_into(index, target)

    def write(self, index: int, frame: memoryview, *, count: int) -> None:
        """Keep a frame of a file of ``count`` frames, if there is room. A full disk only means no caching."""
        if not self._cache.admit(self._stem, count * self.frame_bytes):
            return
        with suppress(OSError):
            self._file.write(index, frame)
