"""Packets of one video stream by decode position, with seeks whose landing is checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import av

from loongforge_data.errors import VideoError
from loongforge_data.video.h264 import length_size
from loongforge_data.video.hardware import open_on_gpu
from loongforge_data.video.index import VideoIndex
from loongforge_data.video.probe import open_container, video_stream

if TYPE_CHECKING:
    from av import Packet
    from av.video.codeccontext import VideoCodecContext


class PacketReader:
    """An open container and its decoder.

    Args:
        path: The file.
        index: Its frame table.
        threads: FFmpeg threads of the decoder.
        gpu: Decode on the GPU, see `hardware`.

    Attributes:
        codec: The decoder; packets are marked by the caller (`copy_opaque` is on).
        position: Decode position of the packet that `take` returns next.
        unit_size: Bytes of the length in front of H.264 units; 0 for other formats and framings.
        closed: True after `close`.
    """

    codec: VideoCodecContext

    def __init__(self, path: str, index: VideoIndex, *, threads: int, gpu: bool = False) -> None:
        self.path = path
        self.closed = True
        self._gpu = gpu
        self._index = index
        self._threads = threads
        self._by_stamp: dict[int, int] | None = None
        self._open()

    def _open(self) -> None:
        self._container = open_on_gpu(self.path) if self._gpu else open_container(self.path)
        try:
            self._stream = video_stream(self._container, self.path)
            self.codec = self._stream.codec_context
            self.codec.thread_count = self._threads
            if self._threads == 1:
                self.codec.thread_type = "SLICE"
            self.codec.copy_opaque = not self._gpu  # marks do not survive the download from the GPU
            self.unit_size = length_size(self.codec.extradata) if self._index.codec == "h264" else 0
        except BaseException:
            self._container.close()
            raise
        self.closed = False
        self._packets: Iterator[Packet] | None = None
        self._rewound()

    def _rewound(self) -> None:
        """Read on from where the container stands.

        One generator serves all seeks until it ends: PyAV 18 loses about 150 bytes with each one left early.
        """
        if self._packets is None:
            self._packets = self._container.demux(self._stream)
        self._peeked: Packet | None = None
        self.position = 0

    def close(self) -> None:
        """Release the decoder and the file. Closing twice is allowed."""
        if not self.closed:
            self.closed = True
            self._peeked = self._packets = None
            self._container.close()

    def take(self) -> Packet | None:
        """Return the next packet with content; None at the end of the stream."""
        packet = self._peeked
        self._peeked = None
        while packet is None or not packet.size:
            if self._packets is None:
                return None
            try:
                packet = next(self._packets, None)
            except (av.error.FFmpegError, EOFError):
                # The pass that made the frame table stopped here too: nothing follows.
                packet = None
            if packet is None:
                self._packets = None
                return None
        self.position += 1
        return packet

    def skip_to(self, position: int) -> None:
        """Read past packets without decoding them.

        Raises:
            VideoError: The file ends before the position.
        """
        while self.position < position:
            if self.take() is None:
                msg = f"packet {position} is gone: the file has changed since it was opened"
                raise VideoError(msg, path=self.path)

    def seek(self, position: int) -> None:
        """Go to a packet at or before a decode position, and empty the decoder.

        A seek can land behind the wanted packet (HEVC with two-frame GOPs, odd tables). So the first packet
        after it is identified; when it lies too far, an earlier key packet is aimed at, and at last the file
        is opened again and read from its start.
        """
        if self._index.seekable:
            keys = self._index.keys
            slot = int(keys.searchsorted(position))
            for key in (position, *(int(keys[s]) for s in (slot - 1, slot - 2) if s >= 0)):
                if self._seek_once(key, position):
                    return
        self.close()
        self._open()

    def _seek_once(self, key: int, position: int) -> bool:
        """Seek to a key packet's time; False when the demuxer ends up past the wanted position."""
        try:
            self._container.seek(int(self._index.seek[key]), stream=self._stream, backward=True)
        except av.error.FFmpegError:
            return False
        self._rewound()
        packet = self.take()
        landed = None if packet is None else self._position_of(packet)
        if landed is None or landed > position:
            return False
        self._peeked = packet
        self.position = landed
        return True

    def _position_of(self, packet: Packet) -> int | None:
        stamp = packet.dts if self._index.estimated else packet.pts
        if stamp is None:
            return None
        if self._by_stamp is None:
            self._by_stamp = {int(value): i for i, value in enumerate(self._index.stamps)}
        return self._by_stamp.get(stamp)
