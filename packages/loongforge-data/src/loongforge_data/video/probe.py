"""Build the frame table of a file, and keep it in memory for as long as the file does not change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
from numpy.typing import NDArray

from loongforge_data.errors import VideoError
from loongforge_data.files import FileState, file_state
from loongforge_data.video.index import UNSET, PacketOrder, PacketTable, VideoIndex, order_packets
from loongforge_data.video.mp4 import read_samples

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

_CACHE_BYTES = 256 << 20
_FALLBACK_RATE = Fraction(30)
_HIDING = (b"vp08",)  # keep packets of frames that are never shown


class IndexCache:
    """Frame tables by path, valid while size and modification time stay equal; least recently used go first.

    Args:
        max_bytes: Upper bound for the arrays held, in bytes.
    """

    def __init__(self, *, max_bytes: int = _CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, tuple[int, int, VideoIndex]] = OrderedDict()
        self._bytes = 0

    def get(self, state: FileState) -> VideoIndex | None:
        """Return the table of a file, or None when it is unknown or the file has changed."""
        with self._lock:
            entry = self._entries.get(state.path)
            if entry is None or entry[:2] != (state.size, state.mtime_ns):
                return None
            self._entries.move_to_end(state.path)
            return entry[2]

    def put(self, state: FileState, index: VideoIndex) -> None:
        """Keep a table, and drop the least recently used ones over the bound."""
        with self._lock:
            old = self._entries.pop(state.path, None)
            if old is not None:
                self._bytes -= old[2].nbytes
            self._entries[state.path] = (state.size, state.mtime_ns, index)
            self._bytes += index.nbytes
            while self._bytes > self.max_bytes and len(self._entries) > 1:
                _, (_, _, dropped) = self._entries.popitem(last=False)
                self._bytes -= dropped.nbytes


_indices = IndexCache()


def video_index(path: str | Path) -> VideoIndex:
    """Return the frame table of a file, from memory when the file has not changed since the last call.

    Raises:
        VideoError: The file is missing, empty, an LFS pointer, unfinished, or has no decodable video stream.
    """
    state = usable(path)
    known = _indices.get(state)
    if known is not None:
        return known
    container = open_container(state.path)
    try:
        index = read_index(container, state.path)
    finally:
        container.close()
    _indices.put(state, index)
    return index


def key_frames(path: str | Path) -> NDArray[np.int64]:
    """Return the display indices of a file's key frames, increasing.

    The index of a plain mp4 is enough for them, which is several times quicker than the whole frame table.

    Raises:
        VideoError: As `video_index`.
    """
    state = usable(path)
    known = _indices.get(state)
    samples = read_samples(state.path, None) if known is None else None
    if (
        samples is not None
        and samples.coding not in _HIDING
        and len(np.unique(samples.pts)) == len(samples.pts)
    ):
        display = np.empty(len(samples.pts), np.int64)
        display[np.argsort(samples.pts, kind="stable")] = np.arange(len(samples.pts))
        return np.sort(display[samples.key])
    index = video_index(state.path) if known is None else known
    shown = index.display[index.keys].astype(np.int64)
    return np.sort(shown[shown >= 0])


def usable(path: str | Path) -> FileState:
    """Return the state of a video file that can be handed to a decoder.

    Raises:
        VideoError: The file is missing, empty or an LFS pointer.
    """
    state = file_state(path)
    if state.problem is not None:
        msg = f"video {state.problem}"
        raise VideoError(msg, path=state.path)
    return state


def open_container(path: str) -> InputContainer:
    """Open a video file, with errors that say what is wrong with it."""
    try:
        return av.open(path, "r", metadata_errors="ignore")
    except (av.error.FFmpegError, EOFError, OSError) as error:
        msg = (
            f"video cannot be opened: {_reason(error)}; an unfinished file (the writer was stopped before it "
            "wrote the index) or a damaged one has to be recorded or downloaded again"
        )
        raise VideoError(
            msg,
            path=path,
        ) from error


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return str(text).strip() or type(error).__name__


def video_stream(container: InputContainer, path: str) -> VideoStream:
    """Return the first real video stream (not a cover picture), with a decoder behind it."""
    pictures = [s for s in container.streams.video if "attached_pic" not in str(s.disposition)]
    if not pictures:
        kinds = ", ".join(sorted({s.type for s in container.streams})) or "none"
        hint = "; an unfinished file has lost the description of its streams" if "data" in kinds else ""
        msg = f"file has no video stream (streams: {kinds}){hint}"
        raise VideoError(msg, path=path)
    stream = pictures[0]
    if stream.codec_context is None:
        available = ", ".join(sorted(name for name in ("h264", "hevc", "libdav1d", "vp9", "mpeg4", "ffv1")))
        msg = f"no decoder for this video stream; decoders at hand: {available}"
        raise VideoError(msg, path=path)
    return stream


def read_index(container: InputContainer, path: str) -> VideoIndex:
    """Make the frame table: from the index of a plain mp4, else by one pass over the packets.

    The pass uses up the container's read position.
    """
    stream = video_stream(container, path)
    packets = _plain_mp4(container, stream, path) or _demux(container, stream)
    if not len(packets):
        msg = f"video has no frames{': ' + packets.problem if packets.problem else ''}"
        raise VideoError(msg, path=path)
    rate = stream.average_rate or stream.guessed_rate or Fraction(0)
    time_base = stream.time_base or Fraction(1, 1000)
    estimated = bool((packets.pts == UNSET).any())
    if estimated:
        # Raw streams: the container invents 25 per second, the codec may know better.
        base_rate = Fraction(stream.codec_context.framerate or stream.guessed_rate or rate) or _FALLBACK_RATE
        time_base = 1 / base_rate
        order = order_packets(packets, emitted=_emission_order(path))
    elif len(np.unique(packets.pts[packets.picture])) < int(packets.picture.sum()):
        # Equal stamps do not tell which frame comes first: only the decoder knows.
        order = order_packets(packets, emitted=_emission_order(path))
    else:
        order = order_packets(packets)
    return _assemble(path, stream, order, Fraction(time_base), Fraction(rate), estimated, packets.problem)


def _assemble(
    path: str,
    stream: VideoStream,
    order: PacketOrder,
    time_base: Fraction,
    rate: Fraction,
    estimated: bool,  # noqa: FBT001 - private
    problem: str | None,
) -> VideoIndex:
    codec = stream.codec_context
    return VideoIndex(
        path=path,
        pts=order.pts,
        order=order.order,
        display=order.display,
        keys=order.keys,
        start=order.start,
        seek=order.seek,
        stamps=order.stamps,
        time_base=time_base,
        rate=rate,
        declared_frames=int(stream.frames or 0),
        width=int(codec.width),
        height=int(codec.height),
        codec=_codec_name(codec.name),
        pixel_format=str(codec.pix_fmt or ""),
        color_range=int(codec.color_range or 0),
        color_space=int(codec.colorspace or 2),
        estimated=estimated,
        seekable=order.seekable,
        problem=problem,
    )


def _codec_name(decoder: str) -> str:
    return {"libdav1d": "av1", "libaom-av1": "av1", "libvpx-vp9": "vp9", "libvpx": "vp8"}.get(
        decoder, decoder
    )


def _plain_mp4(container: InputContainer, stream: VideoStream, path: str) -> PacketTable | None:
    """Return the packets of an mp4 from its index; None where only the packets themselves can tell."""
    if "mp4" not in container.format.name or _codec_name(stream.codec_context.name) == "vp8":
        return None
    samples = read_samples(path, stream.id)
    if samples is None or stream.time_base != Fraction(1, samples.timescale):
        return None
    shown = np.ones(len(samples.pts), np.bool_)
    return PacketTable(pts=samples.pts, dts=samples.dts, key=samples.key, picture=shown)


def _demux(container: InputContainer, stream: VideoStream) -> PacketTable:
    """Read all packets; this uses up the container's read position."""
    pts: list[int] = []
    dts: list[int] = []
    key: list[bool] = []
    shown: list[bool] = []
    problem = None
    vp8 = _codec_name(stream.codec_context.name) == "vp8"
    try:
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            # VP8 keeps frames that are never shown in packets of their own (bit 4 of the first byte).
            hidden = packet.is_discard or (vp8 and not bytes(packet)[0] & 0x10)
            pts.append(UNSET if packet.pts is None else packet.pts)
            dts.append(UNSET if packet.dts is None else packet.dts)
            key.append(packet.is_keyframe)
            shown.append(not hidden)
    except (av.error.FFmpegError, EOFError) as error:
        problem = f"packets end early: {_reason(error)}"
    return PacketTable(
        pts=np.array(pts, np.int64),
        dts=np.array(dts, np.int64),
        key=np.array(key, np.bool_),
        picture=np.array(shown, np.bool_),
        problem=problem,
    )


def _emission_order(path: str) -> list[int]:
    """Decode the whole file once and return the decode positions in the order frames come out."""
    emitted: list[int] = []
    container = open_container(path)
    try:
        stream = video_stream(container, path)
        stream.codec_context.thread_count = 1
        stream.codec_context.copy_opaque = True
        position = 0
        for packet in container.demux(stream):
            if packet.size:
                packet.opaque = (position,)  # a fresh object: PyAV keeps these by identity
                position += 1
            try:
                emitted += [mark[0] for frame in packet.decode() if isinstance(mark := frame.opaque, tuple)]
            except av.error.InvalidDataError:
                continue
    except (av.error.FFmpegError, EOFError):
        pass
    finally:
        container.close()
    return emitted


def frame_count(path: str | Path) -> int:
    """Return the number of frames that are really there: that of the frame table, not of the header.

    Costs about 0.5 ms for a plain mp4, whose index is enough, and one pass over the packets for others.
    """
    return len(video_index(path))
