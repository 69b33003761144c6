"""`meta/info.json`: version, rate, path templates and the declared features."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Literal, cast

import numpy as np

from loongforge_data.errors import LayoutError
from loongforge_data.files import file_state

Kind = Literal["array", "string", "image", "video", "language", "audio"]
Version = Literal["2.0", "2.1", "3.0"]
Json = Mapping[str, object]

_MEDIA = ("image", "video", "string", "language", "audio")

STANDARD = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""Columns every data set has; declared or not."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One declared feature.

    Attributes:
        key: Name of the feature, e.g. "observation.state".
        dtype: Declared dtype: a numpy name, or "image", "video", "string", "language", "audio".
        shape: Declared shape without the time axis; images and videos are (height, width, channels).
        names: Flat names of the components, or None. For display only.
        info: Media facts the writer noted (a hint, the files decide).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    names: tuple[str, ...] | None = None
    info: Json = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """What the feature is: numbers, text, or a medium."""
        if self.dtype in _MEDIA:
            return cast(Kind, self.dtype)
        return "array"

    @property
    def is_depth(self) -> bool:
        """True for a depth map in any of the spellings writers have used."""
        return bool(self.info.get("is_depth_map") or self.info.get("video.is_depth_map"))


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Content of `meta/info.json`.

    Attributes:
        version: Layout: "2.0", "2.1" or "3.0".
        fps: Frames per second, exact.
        features: Declared features by key.
        data_path: Template of the parquet files.
        video_path: Template of the video files, or None when there are none.
        chunks_size: Episodes (v2) or files (v3) per chunk folder.
        robot_type: Name of the robot, or None.
        raw: The file as it is, for fields that are not interpreted here.
    """

    version: Version
    fps: Fraction
    features: Mapping[str, Feature]
    data_path: str
    video_path: str | None
    chunks_size: int
    robot_type: str | None
    raw: Json

    @property
    def cameras(self) -> tuple[str, ...]:
        """Keys of the features stored as video, in declared order."""
        return tuple(key for key, feature in self.features.items() if feature.kind == "video")


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object, with errors that name the file and say what it is instead."""
    state = file_state(path)
    if state.problem is not None:
        msg = f"metadata {state.problem}"
        raise LayoutError(msg, path=path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        msg = f"metadata is not valid JSON: {error}"
        raise LayoutError(msg, path=path) from error
    if not isinstance(value, dict):
        msg = f"metadata must be a JSON object, found {type(value).__name__}"
        raise LayoutError(msg, path=path)
    return value


def read_jsonl(path: Path) -> list[dict[str, object]]:
    """Read one JSON object per line; blank lines are allowed."""
    state = file_state(path)
    if state.problem is not None:
        msg = f"metadata {state.problem}"
        raise LayoutError(msg, path=path)
    rows: list[dict[str, object]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            msg = f"line {number} is not valid JSON: {error}"
            raise LayoutError(msg, path=path) from error
        if not isinstance(value, dict):
            msg = f"line {number} must be a JSON object, found {type(value).__name__}"
            raise LayoutError(msg, path=path)
        rows.append(value)
    return rows


def read_info(root: Path) -> DatasetInfo:
    """Read `meta/info.json`.

    Raises:
        LayoutError: The file is missing, empty, an LFS pointer, not JSON, or lacks a field that is needed.
    """
    path = root / "meta" / "info.json"
    if not root.is_dir():
        msg = "data set directory does not exist"
        raise LayoutError(msg, path=root)
    raw = read_json(path)
    version = _version(raw, path)
    features = raw.get("features")
    if not isinstance(features, dict) or not features:
        msg = "info.json declares no features (field 'features' is missing or empty)"
        raise LayoutError(msg, path=path)
    data_path = raw.get("data_path")
    if not isinstance(data_path, str):
        msg = f"info.json has no path template 'data_path' (found {data_path!r})"
        raise LayoutError(msg, path=path)
    video_path = raw.get("video_path")
    return DatasetInfo(
        version=version,
        fps=_fps(raw.get("fps"), path),
        features={key: _feature(key, value, path) for key, value in features.items()},
        data_path=data_path,
        video_path=video_path if isinstance(video_path, str) else None,
        chunks_size=_positive(raw.get("chunks_size"), 1000),
        robot_type=str(raw["robot_type"]) if isinstance(raw.get("robot_type"), str) else None,
        raw=raw,
    )


def _version(raw: Json, path: Path) -> Version:
    text = str(raw.get("codebase_version", "")).strip().lstrip("v")
    if text in ("2.0", "2.1", "3.0"):
        return cast(Version, text)
    msg = f"layout version {raw.get('codebase_version')!r} is not supported; supported: v2.0, v2.1, v3.0"
    raise LayoutError(
        msg,
        path=path,
    )


def _fps(value: object, path: Path) -> Fraction:
    try:
        if isinstance(value, int | float):
            fps = Fraction(value).limit_denominator(1001)
        else:
            fps = Fraction(str(value))
    except (ValueError, ZeroDivisionError, OverflowError):
        fps = Fraction(0)
    if fps <= 0:
        msg = f"fps must be a positive number, found {value!r}"
        raise LayoutError(msg, path=path)
    return fps


def _positive(value: object, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _feature(key: str, value: object, path: Path) -> Feature:
    if not isinstance(value, dict) or not isinstance(value.get("dtype"), str):
        msg = f"feature {key!r} must be an object with 'dtype' and 'shape', found {value!r}"
        raise LayoutError(msg, path=path)
    shape = value.get("shape") or []
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        msg = f"feature {key!r} has shape {shape!r}, expected a list of whole numbers"
        raise LayoutError(msg, path=path)
    info = value.get("info") or value.get("video_info") or {}
    if value["dtype"] not in _MEDIA and not _is_number(value["dtype"]):
        msg = f"feature {key!r} has dtype {value['dtype']!r}; known: numpy numbers, {', '.join(_MEDIA)}"
        raise LayoutError(msg, path=path)
    return Feature(
        key=key,
        dtype=value["dtype"],
        shape=tuple(shape),
        names=_names(value.get("names")),
        info=info if isinstance(info, dict) else {},
    )


def _is_number(dtype: str) -> bool:
    try:
        return np.dtype(dtype).kind in "biuf"
    except (TypeError, ValueError):
        return False


def _names(value: object) -> tuple[str, ...] | None:
    """Flatten the shapes `names` comes in: a list, nested lists, a dict of lists, a text, or null."""
    if value is None:
        return None
    if isinstance(value, dict):
        value = list(value.values()) if any(isinstance(v, list) for v in value.values()) else list(value)
    if isinstance(value, list):
        flat: list[str] = []
        for item in value:
            flat += _names(item) or ()
        return tuple(flat)
    return (str(value),)
