"""Decoding the frames of one job straight into their places: from the frame cache, or from the video file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from loongforge_data.convert import frame_into
from loongforge_data.layout import ImageLayoutLike

if TYPE_CHECKING:
    from loongforge_data.cache import FrameCache

MAX_OPEN = 16
MAX_DECODER_BYTES = 256 << 20


class Places(Protocol):
    """Where frames go."""

    def buffer(self, slot: int) -> memoryview:
        """Return the writable bytes of a slot."""

    def stored(self, slot: int, sequence: int, item: int) -> None:
        """Note that an item is in place."""


Place = tuple[int, int, int, int]
"""slot, sequence, item, byte offset"""


class FrameReader:
    """Reads frames for one thread. Holds a bounded set of open decoders.

    Args:
        layouts: Per camera, how pictures are cropped and resized.
        cache: Decoded frames on disk, or None.
        count: Called with a counter's name and an amount.
        max_open: Most idle decoders.
        gpu: Decode on the GPU where it gives the CPU's frames.
    """

    def __init__(
        self,
        layouts: Mapping[str, ImageLayoutLike],
        *,
        cache: FrameCache | None = None,
        count: Callable[[str, int], None] | None = None,
        max_open: int = MAX_OPEN,
        gpu: bool = False,
    ) -> None:
        self._layouts = layouts
        self._cache = cache
        self._count = count or (lambda name, amount: None)
        # Imported here: data sets without video need no decoder library.
        from loongforge_data.video import DecoderPool

        self._pool = DecoderPool(max_open=max_open, max_bytes=MAX_DECODER_BYTES, gpu=gpu)
        self._gpu = gpu
        self._seen = {"decoded": 0, "opened": 0, "seeks": 0}

    def read(
        self, key: str, path: str, wanted: Mapping[int, Sequence[Place]], places: Places
    ) -> dict[int, BaseException]:
        """Put frames in place. Returns the display indices that could not be read, each with its error."""
        rest = dict(wanted)
        if self._cache is not None:
            rest = self._from_cache(key, path, rest, places)
        if not rest:
            return {}
        try:
            self._decode(key, path, rest, places)
        except Exception as error:
            if len(rest) == 1:
                return {next(iter(rest)): error}
        # One bad frame must not take its neighbours along: read what is left one by one.
        failed: dict[int, BaseException] = {}
        for index in list(rest):
            try:
                self._decode(key, path, {index: rest[index]}, places)
                del rest[index]
            except Exception as error:
                failed[index] = error
        return failed

    def _from_cache(
        self, key: str, path: str, wanted: dict[int, Sequence[Place]], places: Places
    ) -> dict[int, Sequence[Place]]:
        cache = self._cache
        if cache is None:
            return wanted
        layout = self._layouts[key]
        rest = {}
        with cache.open(path, layout) as frames:
            for index, targets in wanted.items():
                slot, offset = targets[0][0], targets[0][3]
                target = places.buffer(slot)[offset : offset + frames.frame_bytes]
                if frames.read_into(index, target):
                    self._spread(target, targets, places)
                    self._count("cache_hits", 1)
                else:
                    self._count("cache_misses", 1)
                    rest[index] = targets
        return rest

    def _decode(self, key: str, path: str, wanted: dict[int, Sequence[Place]], places: Places) -> None:
        layout = self._layouts[key]
        size = layout.height * layout.width * layout.channels
        done: list[int] = []
        started = time.perf_counter_ns()
        converting = 0
        try:
            with self._pool.checkout(path) as video:
                before = video.counters.decoded
                try:
                    for index, frame in video.decode(sorted(wanted)):
                        targets = wanted[index]
                        slot, _, _, offset = targets[0]
                        target = places.buffer(slot)[offset : offset + size]
                        since = time.perf_counter_ns()
                        frame_into(
                            frame,
                            target,
                            size=layout.size,
                            crop=layout.crop,
                            rotation=int(frame.rotation) % 360,
                        )
                        # Counted before the frame is marked: who sees the batch sees its counts too.
                        self._count("decoded_frames", video.counters.decoded - before)
                        self._count("used_frames", 1)
                        if self._gpu:
                            self._count("gpu_frames" if video.on_gpu else "gpu_refused_frames", 1)
                        before = video.counters.decoded
                        self._spread(target, targets, places)
                        converting += time.perf_counter_ns() - since
                        if self._cache is not None:
                            with self._cache.open(path, layout) as frames:
                                frames.write(index, target, count=len(video))
                        done.append(index)
                finally:
                    self._count("decoded_frames", video.counters.decoded - before)
        finally:
            for index in done:
                del wanted[index]
            self._count("convert_ns", converting)
            self._count("decode_ns", time.perf_counter_ns() - started - converting)
        if wanted:
            missing = sorted(wanted)
            from loongforge_data.errors import VideoError

            msg = f"frames {missing[:5]} have no picture"
            raise VideoError(msg, path=path)

    def _spread(self, target: memoryview, targets: Sequence[Place], places: Places) -> None:
        """Copy a frame to its other places and note all of them."""
        for slot, sequence, item, offset in targets[1:]:
            places.buffer(slot)[offset : offset + len(target)] = target
            places.stored(slot, sequence, item)
        slot, sequence, item, _ = targets[0]
        places.stored(slot, sequence, item)

    def stats(self) -> dict[str, int]:
        """Return the decoder pool's counters."""
        return self._pool.stats()

    def close(self) -> None:
        """Close decoders."""
        self._pool.close()
