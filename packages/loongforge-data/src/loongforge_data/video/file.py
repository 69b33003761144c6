"""Exact random access to the frames of one video file."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import av

from loongforge_data.errors import DamagedVideoError, VideoError
from loongforge_data.files import file_state
from loongforge_data.video.h264 import is_disposable
from loongforge_data.video.hardware import TOLERANCE, Refusal, differs, restore_tags, tellable
from loongforge_data.video.index import Rule, VideoIndex
from loongforge_data.video.probe import video_index
from loongforge_data.video.reader import PacketReader

if TYPE_CHECKING:
    from types import TracebackType

    from av import Packet, VideoFrame

OnDamage = Literal["raise", "skip"]

# Packets read past instead of a seek: reading one costs about 5 us, a seek about 100 us.
_SKIP_LIMIT = 24


@dataclass(kw_only=True)
class DecodeCounters:
    """What decoding has cost so far.

    Attributes:
        decoded: Packets handed to the decoder.
        passed_by: Packets left out because they are not wanted and no other frame refers to them.
        used: Frames given to the caller.
        seeks: Seeks in the container.
        restarts: Second attempts from an earlier key packet, because the first did not give the frame.
        damaged: Packets the decoder refused.
    """

    decoded: int = 0
    passed_by: int = 0
    used: int = 0
    seeks: int = 0
    restarts: int = 0
    damaged: int = 0


class VideoFile:
    """One open video file. `decode` gives exactly the frames a full sequential decode gives.

    Not thread-safe, and not to be used across `fork`: take one from a `DecoderPool` where that matters.

    Args:
        path: The file.
        threads: FFmpeg threads of this decoder. 1 is right wherever several files are decoded side by side.
        on_damage: `raise` stops at a packet that cannot be decoded; `skip` leaves out the frames it takes
            with it and lists them in `missing` and `suspects`.
        gpu: Decode on the GPU where its first frame equals the CPU's; `refusal` says why it is not.

    Raises:
        VideoError: The file is missing, empty, an LFS pointer, unfinished, or has no decodable video.
    """

    def __init__(
        self, path: str | Path, *, threads: int = 1, on_damage: OnDamage = "raise", gpu: bool = False
    ) -> None:
        if on_damage not in ("raise", "skip"):
            msg = f"on_damage must be 'raise' or 'skip', got {on_damage!r}"
            raise ValueError(msg)
        if threads < 1:
            msg = f"threads must be at least 1, got {threads}"
            raise ValueError(msg)
        self.path = str(path)
        state = file_state(self.path)
        self._version = (state.size, state.mtime_ns)
        self.index: VideoIndex = video_index(self.path)
        self.counters = DecodeCounters()
        self.missing: set[int] = set()
        self.suspects: set[int] = set()
        self._on_damage = on_damage
        self._rotation: int | None = None
        self._ready: deque[tuple[int, VideoFrame]] = deque()
        self._last: tuple[int, VideoFrame] | None = None
        self._run = 0  # number of the current run: frames of earlier ones are stale
        self._gpu = False
        self.refusal: Refusal | None = None
        self._reader = PacketReader(self.path, self.index, threads=threads)
        self._restart()
        if gpu:
            self._move_to_gpu(threads)

    # -- opening and closing ---------------------------------------------------------------------------

    def _move_to_gpu(self, threads: int) -> None:
        """Decode on the GPU from now on, if its first frame equals the CPU's; else stay and say why."""
        if not tellable(self.index):
            self.refusal = Refusal.STAMPS
            return
        first, on_cpu = self.index.first_decodable, self._reader
        try:
            reference = self.frame(first)
            self._last = None
            self._restart()
            self._reader = PacketReader(self.path, self.index, threads=threads, gpu=True)
            self._gpu = True
            fits = differs(self.frame(first), reference) <= TOLERANCE
            self.refusal = None if fits else Refusal.DIFFERS
        except (VideoError, av.error.FFmpegError):
            self.refusal = Refusal.CODEC
        if self.refusal is None:
            on_cpu.close()
            return
        if self._gpu:
            self._reader.close()
        self._gpu, self._reader, self._last = False, on_cpu, None
        self._restart()

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU decodes this file."""
        return self._gpu

    def _restart(self) -> None:
        """Forget the current run: the decoder holds nothing that may be given out."""
        self._run_start = -1  # decode position where the decoder was started; -1 when it holds nothing
        self._ended = False
        self._emitted = -1
        self._ready.clear()

    def close(self) -> None:
        """Release the decoder and the file. Closing twice is allowed."""
        self._ready.clear()
        self._last = None
        self._reader.close()

    def __enter__(self) -> VideoFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_current(self) -> bool:
        """Return whether the file on disk is still the one this decoder was opened on."""
        state = file_state(self.path)
        return (state.size, state.mtime_ns) == self._version

    # -- facts -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of frames."""
        return len(self.index)

    @property
    def rotation(self) -> int:
        """Degrees counter-clockwise by which the display matrix turns the picture: 0, 90, 180 or 270.

        The first call decodes one frame, since the matrix is known only with a frame.
        """
        if self._rotation is None:
            self._rotation = self.frame(self.index.first_decodable).rotation % 360
        return self._rotation

    @property
    def displayed_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the upright picture, after rotation."""
        height, width = self.index.height, self.index.width
        return (width, height) if self.rotation in (90, 270) else (height, width)

    def at(self, seconds: float, *, rule: Rule = "nearest", tolerance: float | None = None) -> int:
        """Return the display index of the frame at a time since the first frame; see `VideoIndex.at`."""
        return self.index.at(seconds, rule=rule, tolerance=tolerance)

    def stats(self) -> dict[str, int]:
        """Return the counters as a flat dict."""
        return asdict(self.counters)

    # -- decoding --------------------------------------------------------------------------------------

    def frame(self, index: int) -> VideoFrame:
        """Return one frame by display index.

        Raises:
            VideoError: The index is outside the file, or the frame has no picture.
        """
        for _, frame in self.decode((index,)):
            return frame
        msg = f"frame {index} has no picture: it was lost to a damaged packet"
        raise VideoError(msg, path=self.path)

    def decode(self, indices: Iterable[int]) -> Iterator[tuple[int, VideoFrame]]:
        """Yield (display index, frame) for the wanted frames, each once, in display order.

        Frames of one GOP are decoded once; the decoder goes on forward where that is no more work than a
        seek. With `on_damage="skip"` frames that cannot be had are left out and added to `missing`.

        Args:
            indices: Display indices in any order; repeats are allowed.

        Raises:
            VideoError: An index is outside the file, or a frame has no picture.
            DamagedVideoError: A packet cannot be decoded and `on_damage` is "raise".
        """
        wanted = sorted(set(indices))
        if wanted and (wanted[0] < 0 or wanted[-1] >= len(self.index)):
            bad = wanted[0] if wanted[0] < 0 else wanted[-1]
            msg = (
                f"frame {bad} does not exist: the file has {len(self.index)} frames, indices go from 0 to "
                f"{len(self.index) - 1}"
            )
            raise VideoError(
                msg,
                path=self.path,
            )
        if self._reader.closed:
            msg = "the video file is closed; open a new VideoFile"
            raise VideoError(msg, path=self.path)
        for target in wanted:
            frame = self._fetch(target)
            if frame is None:
                self.missing.add(target)
                continue
            self.counters.used += 1
            yield target, frame

    def _fetch(self, target: int) -> VideoFrame | None:
        if self._last is not None and self._last[0] == target:
            return self._last[1]
        if self.index.start[target] < 0:
            self._no_picture(target, "no key frame comes before it, the file was cut there")
            return None
        for attempt, start in enumerate(self._starts(target)):
            if attempt:
                self.counters.restarts += 1
            self._prepare(target, start, fresh=attempt > 0)
            frame = self._run_to(target)
            if frame is not None:
                self._last = (target, frame)
                return frame
            if self._on_damage == "skip" and target in self.suspects:
                break
        self._no_picture(target, "the decoder gives no picture for it from any key frame before it")
        return None

    def _no_picture(self, target: int, reason: str) -> None:
        if self._on_damage == "raise":
            msg = f"frame {target} (at {float(self.index.times[target]):.3f} s) has no picture: {reason}"
            raise VideoError(
                msg,
                path=self.path,
            )

    def _starts(self, target: int) -> Iterator[int]:
        """Yield key packets to start from: the right one, the one before it, then the start of the file."""
        first = int(self.index.start[target])
        yield first
        slot = int(self.index.keys.searchsorted(first))
        if slot > 0:
            yield int(self.index.keys[slot - 1])
        if slot > 1:
            yield int(self.index.keys[0])

    def _prepare(self, target: int, start: int, *, fresh: bool) -> None:
        """Bring the decoder to where feeding packets leads to the target with the least work."""
        running = self._run_start >= 0 and not fresh
        # The frame is still to come out of the running decoder, and no key packet lies in between.
        if running and self._emitted < target and start <= self._reader.position:
            first_shown = int(self.index.display[self._run_start])
            if target >= first_shown and (self._ready or not self._ended):
                return
        gap = start - self._reader.position
        if fresh or self._ended or not 0 <= gap <= _SKIP_LIMIT:
            self.counters.seeks += 1
            self._reader.seek(start)
            self._restart()
        self._reader.skip_to(start)
        if running or fresh:
            self._reader.codec.flush_buffers()
        self._ready.clear()
        self._run_start = start
        self._run += 1
        self._emitted = int(self.index.display[start]) - 1
        self._ended = False

    def _run_to(self, target: int) -> VideoFrame | None:
        """Feed packets until the target comes out; None when it is passed by or the file ends."""
        while True:
            while self._ready:
                index, frame = self._ready.popleft()
                if index > target:
                    self._ready.appendleft((index, frame))
                    return None
                self._emitted = index
                if index == target:
                    return frame
            if self._ended:
                return None
            self._feed(target)

    def _feed(self, target: int) -> None:
        """Give the decoder one packet and keep the frames that come out, except stale ones."""
        packet = self._reader.take()
        position = self._reader.position - 1
        try:
            if packet is None:
                self._ended = True
                frames = self._reader.codec.decode(None)
            elif self._passed_by(packet, position, target):
                self.counters.passed_by += 1
                return
            else:
                # A fresh tuple each time: PyAV keeps these by object identity, so a shared small int of a
                # frame still alive would vanish together with that frame.
                packet.opaque = (self._run, position)
                self.counters.decoded += 1
                frames = self._reader.codec.decode(packet)
        except av.error.InvalidDataError as error:
            self._damaged(position, target, error)
            return
        first_shown = int(self.index.display[self._run_start])
        for frame in frames:
            if self._gpu:
                restore_tags(frame, self.index)
            index = self._index_of(frame)
            # A frame from before the last seek, or a leading picture whose references were not decoded.
            if index < first_shown or self.index.order[index] > position:
                continue
            if frame.is_corrupt and not self._accept_corrupt(index):
                continue
            self._ready.append((index, frame))

    def _passed_by(self, packet: Packet, position: int, target: int) -> bool:
        """Return whether a packet is shown before the target and nothing refers to it: not worth decoding."""
        if not self._reader.unit_size or not 0 <= int(self.index.display[position]) < target:
            return False
        return is_disposable(memoryview(packet), self._reader.unit_size)

    def _index_of(self, frame: VideoFrame) -> int:
        """Return the display index of a decoded frame, or -1 for a frame that is not of this run."""
        token = frame.opaque
        if token is None:
            return -1 if self.index.estimated or frame.pts is None else self._by_pts(frame.pts)
        run, position = token
        if run != self._run or position >= len(self.index.display):
            return -1
        return int(self.index.display[position])

    def _by_pts(self, pts: int) -> int:
        """Return the display index of a time stamp, for decoders that do not carry the packet's mark."""
        index = int(self.index.pts.searchsorted(pts))
        return index if index < len(self.index) and int(self.index.pts[index]) == pts else -1

    def _accept_corrupt(self, index: int) -> bool:
        self.suspects.add(index)
        if self._on_damage == "raise":
            msg = (
                f"frame {index} (at {float(self.index.times[index]):.3f} s) is marked as damaged by the "
                "decoder; use on_damage='skip' to go on without it"
            )
            raise DamagedVideoError(
                msg,
                path=self.path,
            )
        return False

    def _damaged(self, position: int, target: int, error: BaseException) -> None:
        """Handle a packet the decoder refuses: the frames up to the next key packet are suspect."""
        self.counters.damaged += 1
        index = int(self.index.display[position]) if 0 <= position < len(self.index.display) else -1
        if index < 0:
            return
        keys = self.index.keys
        after = int(keys.searchsorted(position, side="right"))
        last = int(keys[after]) if after < len(keys) else len(self.index.display)
        self.suspects.update(int(i) for i in self.index.display[position:last] if i >= 0)
        if self._on_damage == "raise":
            self._run_start = -1
            self._ready.clear()
            msg = (
                f"packet {position} (frame {index}, at {float(self.index.times[index]):.3f} s) cannot be "
                f"decoded while reading frame {target}: {error.__class__.__name__}; use on_damage='skip' to "
                "go on without the frames it takes with it"
            )
            raise DamagedVideoError(
                msg,
                path=self.path,
            ) from error
