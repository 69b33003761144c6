"""Statistics as data sets ship them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loongforge_data.errors import LayoutError
from loongforge_data.formats.info import DatasetInfo, read_json, read_jsonl

_MERGED = ("min", "max", "mean", "std", "count")

Stats = Mapping[str, NDArray[np.float64]]
"""Arrays by name: min, max, mean, std, count, and quantiles q01, q10, q50, q90, q99 where they are known."""


def read_stats(root: Path, info: DatasetInfo) -> Mapping[str, Stats]:
    """Return statistics per feature: from `meta/stats.json`, else merged from `meta/episodes_stats.jsonl`.

    An empty mapping means the set ships none. Quantiles of merged episodes are left out: they are not a
    function of the episodes' quantiles.
    """
    whole = root / "meta" / "stats.json"
    if whole.exists():
        entries = read_json(whole).items()
        return {key: _arrays(value, key, whole) for key, value in entries if isinstance(value, dict)}
    lines = root / "meta" / "episodes_stats.jsonl"
    if not lines.exists():
        return {}
    by_feature: dict[str, list[Stats]] = {}
    for row in read_jsonl(lines):
        stats = row.get("stats")
        for key, value in stats.items() if isinstance(stats, dict) else ():
            by_feature.setdefault(key, []).append(_arrays(value, key, lines))
    for key, parts in by_feature.items():
        shapes = {tuple((name, part[name].shape) for name in _MERGED if name in part) for part in parts}
        if len(shapes) > 1 or any(name not in part for part in parts for name in _MERGED):
            msg = (
                f"statistics of {key!r} differ in shape between episodes or lack one of {', '.join(_MERGED)}"
            )
            raise LayoutError(msg, path=lines)
    return {key: merge_stats(parts) for key, parts in by_feature.items()}


def _arrays(value: object, key: str, path: Path) -> Stats:
    if not isinstance(value, dict):
        msg = f"statistics of {key!r} must be an object, found {type(value).__name__}"
        raise LayoutError(msg, path=path)
    try:
        return {name: np.asarray(entry, np.float64) for name, entry in value.items()}
    except (ValueError, TypeError) as error:
        msg = f"statistics of {key!r} are not plain numbers: {error}"
        raise LayoutError(msg, path=path) from error


def merge_stats(parts: Sequence[Stats]) -> Stats:
    """Merge min, max, mean, std (population) and count of disjoint parts, in float64."""
    counts = np.array([float(part["count"].reshape(-1)[0]) for part in parts])
    total = counts.sum()
    means = np.stack([part["mean"] for part in parts])
    weights = (counts / total).reshape((-1,) + (1,) * (means.ndim - 1))
    mean = (weights * means).sum(axis=0)
    squares = np.stack([part["std"] for part in parts]) ** 2 + (means - mean) ** 2
    return {
        "min": np.stack([part["min"] for part in parts]).min(axis=0),
        "max": np.stack([part["max"] for part in parts]).max(axis=0),
        "mean": mean,
        "std": np.sqrt((weights * squares).sum(axis=0)),
        "count": np.array([total]),
    }
