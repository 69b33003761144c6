"""Seeded toy data sets on disk: moving shapes whose motion is the action.

A coloured disc moves towards one of two squares; the task text says which. The state is the disc's position
and velocity, the action its next displacement and whether it has arrived, so picture, state and text together
decide the action and there is something to learn. Each frame carries a bar code of its episode and frame
number in its top rows, so that a test can tell which frame it was given.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from loongforge_data.formats.statfiles import Stats
from loongforge_data.scene import TARGETS, EpisodeTrack, paint_code, read_code, render, simulate

__all__ = [
    "EpisodeTrack",
    "camera_names",
    "check_size",
    "encode_video",
    "paint_code",
    "read_code",
    "render",
    "simulate",
    "write_dataset",
]

_CAMERA_NAMES = ("front", "wrist")
_STATS_SAMPLE = 16  # pictures per episode that enter the image statistics
_ENCODERS = {
    "h264": ("libx264", "yuv420p"),
    "hevc": ("libx265", "yuv420p"),
    "av1": ("libsvtav1", "yuv420p"),
    "vp9": ("libvpx-vp9", "yuv420p"),
    "mpeg4": ("mpeg4", "yuv420p"),
}


def encode_video(
    path: Path,
    pictures: Sequence[NDArray[np.uint8]],
    *,
    fps: int,
    codec: str = "h264",
    gop: int = 2,
    options: Mapping[str, str] | None = None,
) -> None:
    """Encode RGB pictures as an mp4 of constant rate.

    Raises:
        ValueError: The codec is unknown, or refuses the picture size.
    """
    if codec not in _ENCODERS:
        msg = f"codec must be one of {', '.join(_ENCODERS)}; got {codec!r}"
        raise ValueError(msg)
    encoder, pixel_format = _ENCODERS[codec]
    height, width = pictures[0].shape[:2]
    check_size(height, width, codec)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SVT_LOG", "1")  # errors only: the AV1 encoder prints a page per file otherwise
    container = av.open(str(path), "w")
    try:
        stream = container.add_stream(encoder, rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        context = stream.codec_context
        context.gop_size = gop
        context.thread_count = 1
        context.options = {**_quality(codec, gop), **(options or {})}
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame = frame.reformat(format=pixel_format, threads=1)
            frame.pts = number
            frame.time_base = Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    finally:
        container.close()


def check_size(height: int, width: int, codec: str) -> None:
    """Refuse picture sizes an encoder would refuse in the middle of a recording.

    Raises:
        ValueError: The size is odd where the codec's 4:2:0 layout needs even sizes, or below 16 pixels.
    """
    if min(height, width) < 16:
        msg = f"pictures must be at least 16 x 16 pixels, got {height} x {width}"
        raise ValueError(msg)
    if codec in ("h264", "hevc") and (height % 2 or width % 2):
        msg = (
            f"{codec} with yuv420p needs even sizes, got {height} x {width}; pad to "
            f"{height + height % 2} x {width + width % 2} or use codec='av1'"
        )
        raise ValueError(msg)


def _quality(codec: str, gop: int) -> dict[str, str]:
    if codec == "h264":
        # mbtree reads beyond its look-ahead and makes the size of a file differ from run to run.
        parameters = f"keyint={gop}:min-keyint={gop}:scenecut=0:mbtree=0"
        return {"crf": "18", "preset": "veryfast", "x264-params": parameters}
    if codec == "hevc":
        # With B-frames, x265 gives clips shorter than its delay packets without a valid decode time.
        parameters = f"keyint={gop}:min-keyint={gop}:scenecut=0:cutree=0:bframes=0"
        parameters += ":log-level=error:pools=1:frame-threads=1"
        return {"crf": "20", "preset": "ultrafast", "x265-params": parameters}
    if codec == "av1":
        return {"crf": "30", "preset": "12", "svtav1-params": f"keyint={gop}:lp=1"}
    if codec == "vp9":
        return {"crf": "25", "b": "0", "deadline": "realtime", "cpu-used": "8"}
    return {"qscale": "3"}


def write_dataset(
    root: str | Path,
    *,
    episodes: int = 4,
    frames: int | Sequence[int] = 60,
    cameras: int = 2,
    size: tuple[int, int] = (96, 96),
    codec: str = "h264",
    gop: int = 2,
    version: str = "2.1",
    seed: int = 0,
    fps: int = 30,
    video_file_mb: float = 200.0,
) -> Path:
    """Write a small data set; the content is a pure function of the arguments.

    Args:
        root: Directory to create; it must not exist or be empty.
        episodes: Number of episodes.
        frames: Frames per episode: one number, or one per episode.
        cameras: Number of cameras: the first sees the scene ("front"), the next follows the disc ("wrist").
        size: (height, width) of the pictures in pixels.
        codec: "h264", "hevc", "av1", "vp9" or "mpeg4".
        gop: Distance of key frames, in frames.
        version: Layout, "2.1" or "3.0".
        seed: Seed of the motion.
        fps: Frames per second.
        video_file_mb: Size at which v3.0 video files roll over, in MB.

    Returns:
        The directory.

    Raises:
        ValueError: An argument is out of range, or the directory is not empty.
    """
    lengths = [frames] * episodes if isinstance(frames, int) else [int(n) for n in frames]
    target = Path(root)
    _check(target, episodes, lengths, cameras, version, fps, gop)
    check_size(size[0], size[1], codec)
    if version == "2.1":
        _write_v21(target, lengths, cameras, size, codec, gop, seed, fps)
        return target
    from loongforge_data.formats.upgrade import convert_to_v30

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=target.name, dir=target.parent))
    try:
        _write_v21(scratch / "v21", lengths, cameras, size, codec, gop, seed, fps)
        convert_to_v30(scratch / "v21", target, video_file_mb=video_file_mb)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _check(
    target: Path, episodes: int, lengths: Sequence[int], cameras: int, version: str, fps: int, gop: int
) -> None:
    if target.exists() and any(target.iterdir()):
        msg = f"{target} is not empty; choose a new directory or remove it first"
        raise ValueError(msg)
    if len(lengths) != episodes:
        msg = f"frames names {len(lengths)} lengths for {episodes} episodes"
        raise ValueError(msg)
    if any(n < 1 for n in lengths) or fps < 1 or gop < 1 or cameras < 0:
        msg = (
            f"frames, fps and gop must be at least 1 and cameras at least 0; got {lengths}, {fps}, {gop} and "
            f"{cameras}"
        )
        raise ValueError(msg)
    if version not in ("2.1", "3.0"):
        msg = f"version must be '2.1' or '3.0', got {version!r}"
        raise ValueError(msg)


def camera_names(cameras: int) -> list[str]:
    """Return the feature keys of the cameras."""
    names = [*_CAMERA_NAMES, *(f"extra_{n}" for n in range(2, cameras))][:cameras]
    return [f"observation.images.{name}" for name in names]


def _write_v21(
    root: Path,
    lengths: Sequence[int],
    cameras: int,
    size: tuple[int, int],
    codec: str,
    gop: int,
    seed: int,
    fps: int,
) -> None:
    keys = camera_names(cameras)
    meta = root / "meta"
    meta.mkdir(parents=True)
    tasks = [f"Move the red disc onto the {name} square." for name in TARGETS]
    episode_lines, stats_lines, first = [], [], 0
    for episode, length in enumerate(lengths):
        track = simulate(seed, episode, length)
        columns = _columns(track, episode, length, first, fps)
        stats: dict[str, dict[str, object]] = {}
        _write_rows(root / f"data/chunk-000/episode_{episode:06d}.parquet", columns)
        for key, array in columns.items():
            stats[key] = _vector_stats(array)
        for camera, key in enumerate(keys):
            pictures = [render(track, t, camera=camera, size=size, episode=episode) for t in range(length)]
            path = root / f"videos/chunk-000/{key}/episode_{episode:06d}.mp4"
            encode_video(path, pictures, fps=fps, codec=codec, gop=gop)
            stats[key] = _image_stats(pictures)
        episode_lines.append({"episode_index": episode, "tasks": [tasks[track.goal]], "length": length})
        stats_lines.append({"episode_index": episode, "stats": stats})
        first += length
    _write_lines(meta / "episodes.jsonl", episode_lines)
    _write_lines(meta / "episodes_stats.jsonl", stats_lines)
    _write_lines(meta / "tasks.jsonl", [{"task_index": i, "task": task} for i, task in enumerate(tasks)])
    info = _info(lengths, keys, size, codec, fps, len(tasks))
    (meta / "info.json").write_text(json.dumps(info, indent=4) + "\n")


def _columns(
    track: EpisodeTrack, episode: int, length: int, first: int, fps: int
) -> dict[str, NDArray[np.generic]]:
    steps = np.arange(length, dtype=np.int64)
    return {
        "observation.state": track.state,
        "action": track.action,
        "timestamp": (steps / fps).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(length, episode, np.int64),
        "index": steps + first,
        "task_index": np.full(length, track.goal, np.int64),
    }


def _write_rows(path: Path, columns: Mapping[str, NDArray[np.generic]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for key, array in columns.items():
        values = pa.array(array.reshape(-1))
        arrays[key] = pa.FixedSizeListArray.from_arrays(values, array.shape[1]) if array.ndim == 2 else values
    pq.write_table(pa.table(arrays), path, compression="snappy")


def _vector_stats(array: NDArray[np.generic]) -> dict[str, object]:
    values = array.reshape(len(array), -1).astype(np.float64)
    return {
        "min": values.min(axis=0).tolist(),
        "max": values.max(axis=0).tolist(),
        "mean": values.mean(axis=0).tolist(),
        "std": values.std(axis=0).tolist(),
        "count": [len(values)],
    }


def _image_stats(pictures: Sequence[NDArray[np.uint8]]) -> dict[str, object]:
    chosen = [pictures[i] for i in np.unique(np.linspace(0, len(pictures) - 1, _STATS_SAMPLE).astype(int))]
    values = np.stack(chosen).astype(np.float64) / 255.0
    shaped: Stats = {
        "min": values.min(axis=(0, 1, 2)),
        "max": values.max(axis=(0, 1, 2)),
        "mean": values.mean(axis=(0, 1, 2)),
        "std": values.std(axis=(0, 1, 2)),
    }
    return {**{k: v.reshape(3, 1, 1).tolist() for k, v in shaped.items()}, "count": [len(chosen)]}


def _write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _info(
    lengths: Sequence[int], keys: Sequence[str], size: tuple[int, int], codec: str, fps: int, tasks: int
) -> dict[str, object]:
    def plain(dtype: str, shape: list[int], names: list[str] | None = None) -> dict[str, object]:
        return {"dtype": dtype, "shape": shape, "names": names}

    features: dict[str, object] = {
        "observation.state": plain("float32", [4], ["x", "y", "dx", "dy"]),
        "action": plain("float32", [3], ["dx", "dy", "arrived"]),
    }
    for key in keys:
        features[key] = {
            "dtype": "video",
            "shape": [*size, 3],
            "names": ["height", "width", "channel"],
            "info": {
                "video.height": size[0],
                "video.width": size[1],
                "video.codec": codec,
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": fps,
                "video.channels": 3,
                "has_audio": False,
            },
        }
    features["timestamp"] = plain("float32", [1])
    features.update(
        {key: plain("int64", [1]) for key in ("frame_index", "episode_index", "index", "task_index")}
    )
    return {
        "codebase_version": "v2.1",
        "robot_type": "synthetic_disc",
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_tasks": tasks,
        "total_videos": len(lengths) * len(keys),
        "total_chunks": 1,
        "chunks_size": 1000,
        "fps": fps,
        "splits": {"train": f"0:{len(lengths)}"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        if keys
        else None,
        "features": features,
    }
