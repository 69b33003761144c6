"""The GR00T `meta/modality.json`: named slices of state and action, camera names, annotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loongforge_data.errors import LayoutError
from loongforge_data.formats.info import Feature, read_json


@dataclass(frozen=True, kw_only=True)
class Group:
    """A named slice [start, stop) of a column."""

    column: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Modality:
    """Content of `modality.json`.

    Attributes:
        state: Slices by group name, of `observation.state` unless the file names another column.
        action: Slices by group name, of `action` unless the file names another column.
        video: Feature key of the camera by its new name.
        annotation: Column by annotation key (without the prefix "annotation.").
    """

    state: Mapping[str, Group]
    action: Mapping[str, Group]
    video: Mapping[str, str]
    annotation: Mapping[str, str]


def read_modality(root: Path, features: Mapping[str, Feature]) -> Modality | None:
    """Read `meta/modality.json`; None when the set has none.

    Raises:
        LayoutError: A slice, camera or column does not fit the declared features.
    """
    path = root / "meta" / "modality.json"
    if not path.exists():
        return None
    raw = read_json(path)
    return Modality(
        state=_groups(raw.get("state"), "observation.state", features, path),
        action=_groups(raw.get("action"), "action", features, path),
        video=_renamed(raw.get("video"), "observation.images.", path),
        annotation=_renamed(raw.get("annotation"), "annotation.", path),
    )


def _groups(value: object, default: str, features: Mapping[str, Feature], path: Path) -> Mapping[str, Group]:
    groups = {}
    for name, entry in _entries(value, path):
        column = entry.get("original_key") or default
        start, stop = entry.get("start"), entry.get("end")
        if not isinstance(column, str) or not isinstance(start, int) or not isinstance(stop, int):
            msg = f"group {name!r} needs whole numbers 'start' and 'end', found {dict(entry)}"
            raise LayoutError(msg, path=path)
        feature = features.get(column)
        if feature is None:
            msg = f"group {name!r} slices column {column!r}, which is not a feature"
            raise LayoutError(msg, path=path)
        size = feature.shape[0] if feature.shape else 1
        if not 0 <= start < stop <= size:
            msg = f"group {name!r} is [{start}:{stop}) of {column!r}, which has {size} values"
            raise LayoutError(msg, path=path)
        groups[name] = Group(column=column, start=start, stop=stop)
    return groups


def _renamed(value: object, prefix: str, path: Path) -> Mapping[str, str]:
    result = {}
    for name, entry in _entries(value, path):
        original = entry.get("original_key")
        result[name] = original if isinstance(original, str) else prefix + name
    return result


def _entries(value: object, path: Path) -> list[tuple[str, Mapping[str, object]]]:
    if value is None:
        return []
    if not isinstance(value, dict):
        msg = f"modality.json needs objects by name, found {type(value).__name__}"
        raise LayoutError(msg, path=path)
    return [(name, entry if isinstance(entry, dict) else {}) for name, entry in value.items()]
