"""Exact access to video frames: frame table, random access, bounded set of decoders."""

from loongforge_data.video.file import DecodeCounters, OnDamage, VideoFile
from loongforge_data.video.index import VideoIndex
from loongforge_data.video.pool import DecoderPool
from loongforge_data.video.probe import key_frames, video_index

__all__ = [
    "DecodeCounters",
    "DecoderPool",
    "OnDamage",
    "VideoFile",
    "VideoIndex",
    "key_frames",
    "video_index",
]
