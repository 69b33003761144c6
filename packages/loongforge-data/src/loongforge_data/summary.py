"""`loongforge-data info`: what a data set holds, as a dict and as text."""

from __future__ import annotations

from pathlib import Path

from loongforge_data.dataset import RobotDataset
from loongforge_data.files import file_state
from loongforge_data.video import VideoFile


def summarize(dataset: RobotDataset) -> dict[str, object]:
    """Return the facts of an open data set; opens one video file per camera."""
    lengths = [episode.length for episode in dataset.episodes]
    files = {episode.data_path for episode in dataset.episodes}
    for camera in (*dataset.cameras, *dataset.depth_cameras):
        files |= {episode.videos[camera].path for episode in dataset.episodes}
    return {
        "root": str(dataset.root),
        "version": dataset.info.version,
        "robot_type": dataset.info.robot_type,
        "fps": dataset.fps,
        "episodes": len(lengths),
        "frames": len(dataset),
        "seconds": round(len(dataset) / float(dataset.info.fps), 3),
        "episode_length": {"min": min(lengths, default=0), "max": max(lengths, default=0)},
        "tasks": [dataset.tasks[index] for index in sorted(dataset.tasks)],
        "files": len(files),
        "bytes": sum(file_state(path).size for path in files),
        "features": {
            key: {"dtype": feature.dtype, "shape": list(feature.shape)}
            for key, feature in dataset.features.items()
        },
        "cameras": {
            camera: _camera(dataset, camera) for camera in (*dataset.cameras, *dataset.depth_cameras)
        },
        "modality": dataset.modality is not None,
        "notices": list(dataset.notices),
        "skipped": [str(problem) for problem in dataset.skipped],
        "fingerprint": dataset.fingerprint,
    }


def _camera(dataset: RobotDataset, camera: str) -> dict[str, object]:
    if not dataset.episodes:
        return {}
    with VideoFile(dataset.episodes[0].videos[camera].path) as video:
        index = video.index
        keys = len(index.keys)
        return {
            "codec": index.codec,
            "pixel_format": index.pixel_format,
            "displayed_size": list(video.displayed_size),
            "rotation": video.rotation,
            "frames_per_key_frame": round(len(index) / keys, 2) if keys else None,
            "variable_rate": index.variable_rate,
        }


def as_text(facts: dict[str, object]) -> str:
    """Format the facts for a terminal."""
    lines = [f"{facts['root']}"]
    length = facts["episode_length"]
    plain = ("version", "robot_type", "fps", "episodes", "frames", "seconds", "files")
    lines += [f"  {name:<12} {facts[name]}" for name in plain]
    if isinstance(length, dict):
        lines.append(f"  {'length':<12} {length['min']} to {length['max']} frames")
    size = facts["bytes"]
    lines.append(f"  {'size':<12} {size / 1e6 if isinstance(size, int) else 0:.1f} MB")
    for title in ("cameras", "features"):
        lines.append(title)
        entries = facts[title]
        for key, entry in entries.items() if isinstance(entries, dict) else ():
            lines.append(f"  {key:<34} " + "  ".join(f"{k}={v}" for k, v in entry.items()))
    for title in ("tasks", "notices", "skipped"):
        entries = facts[title]
        if isinstance(entries, list) and entries:
            lines += [title, *(f"  {entry}" for entry in entries)]
    lines.append(f"fingerprint {facts['fingerprint']}")
    return "\n".join(lines)


def name_of(root: str | Path) -> str:
    """Return a short name of a data set directory."""
    return Path(root).resolve().name
