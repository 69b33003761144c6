"""A bounded set of open decoders, shared by the threads of one process."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loongforge_data.video.file import OnDamage, VideoFile

# Decoders inherited through fork: kept so that nobody closes what the parent still uses.
_inherited: list[object] = []

# Pictures a decoder may hold: 16 references of H.264/HEVC level limits plus the one in work.
_PICTURES = 17


class DecoderPool:
    """Least-recently-used set of idle `VideoFile` objects with a bound on their number and memory.

    `checkout` gives a decoder to one user at a time; a second user of the same path gets a second decoder.
    After `fork` the child starts with an empty pool: decoders of the parent are never touched there.

    Args:
        max_open: Largest number of idle decoders kept (each holds one file descriptor).
        max_bytes: Bound for the estimated memory of idle decoders, in bytes.
        threads: FFmpeg threads per decoder.
        on_damage: Handed to `VideoFile`.
        gpu: Handed to `VideoFile`.
    """

    def __init__(
        self,
        *,
        max_open: int = 32,
        max_bytes: int = 512 << 20,
        threads: int = 1,
        on_damage: OnDamage = "raise",
        gpu: bool = False,
    ) -> None:
        if max_open < 1:
            msg = f"max_open must be at least 1, got {max_open}"
            raise ValueError(msg)
        if max_bytes < 1:
            msg = f"max_bytes must be at least 1, got {max_bytes}"
            raise ValueError(msg)
        self.max_open = max_open
        self.max_bytes = max_bytes
        self._threads = threads
        self._on_damage: OnDamage = on_damage
        self._gpu = gpu
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, VideoFile] = OrderedDict()
        self._by_path: dict[str, list[int]] = {}
        self._bytes = 0
        self._serial = 0
        self._opened = 0
        self._hits = 0
        self._finished = {"decoded": 0, "passed_by": 0, "used": 0, "seeks": 0, "restarts": 0, "damaged": 0}

    def _own(self) -> None:
        if self._pid != os.getpid():
            _inherited.append(self._idle)
            self._reset()

    @contextmanager
    def checkout(self, path: str | Path) -> Iterator[VideoFile]:
        """Lend a decoder for a file; it comes back to the pool at the end of the block.

        A decoder whose block raised is closed instead of kept, since its state is unknown.
        """
        self._own()
        video = self._claim(str(path)) or VideoFile(
            path, threads=self._threads, on_damage=self._on_damage, gpu=self._gpu
        )
        try:
            yield video
        except BaseException:
            self._retire(video)
            raise
        self._give_back(video)

    def _claim(self, path: str) -> VideoFile | None:
        with self._lock:
            serials = self._by_path.get(path)
            if not serials:
                self._opened += 1
                return None
            serial = serials.pop()
            if not serials:
                del self._by_path[path]
            video = self._idle.pop(serial)
            self._bytes -= _cost(video)
            self._hits += 1
        if video.is_current():
            return video
        self._retire(video)
        with self._lock:
            self._opened += 1
            self._hits -= 1
        return None

    def _give_back(self, video: VideoFile) -> None:
        dropped: list[VideoFile] = []
        with self._lock:
            self._serial += 1
            self._idle[self._serial] = video
            self._by_path.setdefault(video.path, []).append(self._serial)
            self._bytes += _cost(video)
            while self._idle and (len(self._idle) > self.max_open or self._bytes > self.max_bytes):
                serial, oldest = self._idle.popitem(last=False)
                self._by_path[oldest.path].remove(serial)
                if not self._by_path[oldest.path]:
                    del self._by_path[oldest.path]
                self._bytes -= _cost(oldest)
                dropped.append(oldest)
        for old in dropped:
            self._retire(old)

    def _retire(self, video: VideoFile) -> None:
        with self._lock:
            for name, value in video.stats().items():
                self._finished[name] += value
        video.close()

    def stats(self) -> dict[str, int]:
        """Return counters: decoders idle, their bytes (estimated), files opened, reuses, and decode work."""
        self._own()
        with self._lock:
            totals = dict(self._finished)
            for video in self._idle.values():
                for name, value in video.stats().items():
                    totals[name] += value
            return {
                "idle": len(self._idle),
                "idle_bytes": self._bytes,
                "opened": self._opened,
                "reused": self._hits,
                **totals,
            }

    def close(self) -> None:
        """Close all idle decoders. Decoders lent out close when they come back over the bound."""
        self._own()
        with self._lock:
            videos = list(self._idle.values())
            self._idle.clear()
            self._by_path.clear()
            self._bytes = 0
        for video in videos:
            self._retire(video)


def _cost(video: VideoFile) -> int:
    """Estimate the memory of an open decoder: its pictures at 3 bytes a pixel, and its frame table."""
    return video.index.width * video.index.height * 3 * _PICTURES // 2 + video.index.nbytes + (1 << 20)
