"""Sound from any container, by sample: priming trimmed, windows cut by count and not by stamp.

Time 0 is the first sample of the sound itself. Encoder priming is trimmed where the container tells its
length (mp4, mp3 with a LAME header, opus, matroska); raw ADTS (.aac) does not, so its sound starts 1024
samples late and a note says so. The padding an encoder adds at the end is trimmed where the container states
a duration in samples.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
from numpy.typing import NDArray

from loongforge_data.errors import AudioError
from loongforge_data.files import file_state
from loongforge_data.modalities.resample import resample, resampled_length
from loongforge_data.modalities.wav import is_wav, read_wav

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class AudioSource:
    """A sound window around each sample.

    Attributes:
        rate: Samples per second of the result.
        before: Seconds before the time of the sample.
        after: Seconds after it.
        channels: Channels of the result: 1 mixes all, another number must be the track's own (or repeat 1).
        camera: Feature key of the camera whose video file carries the sound; or
        path: Template of a sound file per episode, e.g. "audio/mic/episode_{episode_index:06d}.wav".
    """

    rate: int
    before: float
    after: float = 0.0
    channels: int = 1
    camera: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        """Demand exactly one place the sound comes from, and a window with an extent."""
        if (self.camera is None) == (self.path is None):
            msg = f"a sound needs either camera or path, got camera={self.camera!r} and path={self.path!r}"
            raise ValueError(msg)
        if self.rate < 1 or self.channels < 1 or self.before + self.after <= 0:
            msg = (
                "a sound needs a positive rate, channels and a window with an extent; got "
                f"{self.rate}, {self.channels}, {self.before} + {self.after} s"
            )
            raise ValueError(msg)

    @property
    def samples(self) -> int:
        """Length of the window in samples: the same for every sample of the data set."""
        return round((self.before + self.after) * self.rate)


@dataclass(frozen=True, kw_only=True)
class AudioTrack:
    """All samples of one sound track at its own rate.

    Attributes:
        path: The file.
        samples: (channels, samples) float32 in [-1, 1].
        rate: Samples per second.
        start: Time of the first sample on the clock of the container, in seconds; what places the sound
            against the pictures of the same file.
        notes: Remarks: sizes cut, priming unknown, gaps between packets.
    """

    path: str
    samples: NDArray[np.float32]
    rate: int
    start: Fraction
    notes: tuple[str, ...]

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.samples.shape[1] / self.rate

    def window(
        self,
        start: float,
        stop: float,
        *,
        rate: int | None = None,
        channels: int | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return the sound between two times, in seconds since the first sample.

        Borders are rounded to whole output samples, each border by itself: windows that share a border share
        no sample and leave none out.

        Args:
            start: Start in seconds; may lie before the sound.
            stop: End in seconds; may lie after it.
            rate: Samples per second of the result; None keeps the track's.
            channels: Channels of the result, see `mix`; None keeps the track's.

        Returns:
            (channels, n) float32 and a bool mask (n,), True where there is no sound and the value is 0.
        """
        new_rate = rate or self.rate
        first, last = _sample_at(start, new_rate), _sample_at(stop, new_rate)
        if last < first:
            msg = f"window ends before it starts: {start} s to {stop} s"
            raise ValueError(msg)
        total = resampled_length(self.samples.shape[1], self.rate, new_rate)
        inside = (min(max(first, 0), total), min(max(last, 0), total))
        mixed = mix(self.samples, channels)
        result = np.zeros((mixed.shape[0], last - first), np.float32)
        mask = np.ones(last - first, np.bool_)
        if inside[0] < inside[1]:
            part = resample(mixed, self.rate, new_rate, start=inside[0], stop=inside[1])
            result[:, inside[0] - first : inside[1] - first] = part
            mask[inside[0] - first : inside[1] - first] = False
        return result, mask

    def converted(self, *, rate: int, channels: int | None = None) -> NDArray[np.float32]:
        """Return the whole sound at another rate: round(samples x ratio) of them."""
        return resample(mix(self.samples, channels), self.rate, rate)


def _sample_at(seconds: float, rate: int) -> int:
    """Round a time to a sample number, halves up; a float a hair off a whole sample counts as that sample."""
    exact = Fraction(seconds).limit_denominator(10**9) * rate
    return int((exact + Fraction(1, 2)) // 1)


def mix(samples: NDArray[np.float32], channels: int | None) -> NDArray[np.float32]:
    """Change the number of channels: to 1 by the mean of all, from 1 by repetition.

    Raises:
        AudioError: Another change is wanted; it would need a speaker layout.
    """
    have = samples.shape[0]
    if channels is None or channels == have:
        return samples
    if channels == 1:
        return samples.mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32)
    if have == 1:
        return np.repeat(samples, channels, axis=0)
    msg = f"sound has {have} channels, {channels} are wanted; only mixing to 1 and repeating 1 are defined"
    raise AudioError(msg)


class AudioCache:
    """Decoded tracks by path, least recently used out first; a changed file is read again."""

    def __init__(self, *, max_bytes: int = _CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tracks: OrderedDict[str, tuple[int, int, AudioTrack]] = OrderedDict()
        self._bytes = 0

    def get(self, path: str | Path) -> AudioTrack:
        """Return a track, decoding the file if it is not known."""
        state = file_state(path)
        version = (state.size, state.mtime_ns)
        with self._lock:
            entry = self._tracks.get(state.path)
            if entry is not None and entry[:2] == version:
                self._tracks.move_to_end(state.path)
                return entry[2]
        track = read_audio(path)
        with self._lock:
            old = self._tracks.pop(state.path, None)
            self._bytes += track.samples.nbytes - (old[2].samples.nbytes if old else 0)
            self._tracks[state.path] = (*version, track)
            while self._bytes > self.max_bytes and len(self._tracks) > 1:
                _, (_, _, dropped) = self._tracks.popitem(last=False)
                self._bytes -= dropped.samples.nbytes
        return track


def read_audio(path: str | Path) -> AudioTrack:
    """Decode the first sound track of a file.

    Raises:
        AudioError: The file is missing, empty, an LFS pointer, damaged, or has no sound.
    """
    state = file_state(path)
    if state.problem is not None:
        msg = f"sound {state.problem}"
        raise AudioError(msg, path=path)
    if is_wav(path):
        wav = read_wav(path)
        if wav is not None:
            return AudioTrack(
                path=str(path), samples=wav.samples, rate=wav.rate, start=Fraction(0), notes=wav.notes
            )
    try:
        container = av.open(str(path), "r", metadata_errors="ignore")
    except (av.error.FFmpegError, EOFError, OSError) as error:
        msg = f"sound cannot be opened: {error}"
        raise AudioError(msg, path=path) from error
    try:
        return _decode(container, str(path))
    finally:
        container.close()


def _decode(container: InputContainer, path: str) -> AudioTrack:
    if not container.streams.audio:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "none"
        msg = f"file has no sound (streams: {kinds})"
        raise AudioError(msg, path=path)
    stream = container.streams.audio[0]
    notes: list[str] = []
    parts: list[NDArray[np.float32]] = []
    first: Fraction | None = None
    count = 0
    try:
        for frame in container.decode(stream):
            if first is None:
                first = _stamp(frame) or Fraction(0)
            elif frame.pts is not None:
                gap = (_stamp(frame) or first) - first - Fraction(count, frame.sample_rate)
                _note_gap(notes, gap, count, frame.sample_rate, stream)
            part = _planar(frame)
            if parts and part.shape[0] != parts[0].shape[0]:
                have = parts[0].shape[0]
                msg = f"number of channels changes from {have} to {part.shape[0]} at sample {count}"
                raise AudioError(msg, path=path)
            parts.append(part)
            count += part.shape[1]
    except (av.error.FFmpegError, EOFError) as error:
        msg = f"sound is damaged after {count} samples: {error.__class__.__name__}"
        raise AudioError(msg, path=path) from error
    if not count:
        msg = "file holds no samples of sound"
        raise AudioError(msg, path=path)
    samples = np.concatenate(parts, axis=1)
    samples = _trim_tail(samples, container, stream, notes)
    if container.format.name == "aac":
        notes.append("raw ADTS does not state its priming: the sound starts about 1024 samples late")
    return AudioTrack(
        path=path,
        samples=samples,
        rate=int(stream.rate),
        start=first or Fraction(0),
        notes=tuple(notes),
    )


def _planar(frame: av.AudioFrame) -> NDArray[np.float32]:
    """Return (channels, samples) float32 of any sample format."""
    array = frame.to_ndarray()
    if not frame.format.is_planar:
        array = array.reshape(-1, frame.layout.nb_channels).T
    kind = frame.format.name.removesuffix("p")
    if kind == "u8":
        return (array.astype(np.float32) - 128.0) / 128.0
    if array.dtype.kind == "i":
        return (array.astype(np.float64) / float(1 << (8 * array.dtype.itemsize - 1))).astype(np.float32)
    return np.ascontiguousarray(array, np.float32)


def _stamp(frame: av.AudioFrame) -> Fraction | None:
    if frame.pts is None or frame.time_base is None:
        return None
    return Fraction(frame.pts) * frame.time_base


def _note_gap(notes: list[str], gap: Fraction, count: int, rate: int, stream: AudioStream) -> None:
    """Note where stamps and counted samples part by more than the rounding of the stamps."""
    slack = 2 * Fraction(stream.time_base or Fraction(1, 1000)) + Fraction(2, rate)
    if abs(gap) > slack and not any(note.startswith("stamps") for note in notes):
        notes.append(
            f"stamps and samples part by {float(gap) * 1e3:.1f} ms at sample {count}; samples are counted"
        )


def _trim_tail(
    samples: NDArray[np.float32], container: InputContainer, stream: AudioStream, notes: list[str]
) -> NDArray[np.float32]:
    """Cut the padding of the last packet where an mp4 edit list states the duration."""
    if "mp4" not in container.format.name or not stream.duration or not stream.time_base:
        return samples
    length = round(Fraction(stream.duration) * stream.time_base * stream.rate)
    surplus = samples.shape[1] - length
    if 0 < surplus <= 4096:
        notes.append(f"{surplus} samples of padding cut at the end")
        return np.ascontiguousarray(samples[:, :length])
    return samples
