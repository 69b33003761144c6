"""Group and strategy overrides by parameter name, read from YAML (``mdg_config``)."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from loongforge_comm.gradients import GradientSpec
from loongforge_comm.plan import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class GroupOverride:
    """One named group.

    Attributes:
        name: label in tables and messages.
        patterns: glob patterns of parameter names; the first group that matches a name wins.
        strategy: forced strategy, ``None`` to choose by predicted time.
    """

    name: str
    patterns: tuple[str, ...]
    strategy: str | None = None


def load_overrides(path: Path | None) -> tuple[GroupOverride, ...]:
    """Read overrides::

    groups:
      - name: vision
        match: ["vision.*"]
        strategy: ring          # optional: ring, tree, direct, all_gather
    """
    if path is None:
        return ()
    data = yaml.safe_load(Path(path).read_text())
    entries = data.get("groups") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        msg = f"{path}: top level is {type(data).__name__}, allowed is a mapping with a list under 'groups'"
        raise ValueError(msg)  # noqa: TRY004 - the content of a file is a value
    return tuple(_override(path, position, entry) for position, entry in enumerate(entries))


def _override(path: Path, position: int, entry: object) -> GroupOverride:
    where = f"{path}: groups[{position}]"
    if not isinstance(entry, dict) or not {"name", "match"} <= set(entry) <= {"name", "match", "strategy"}:
        keys = sorted(entry) if isinstance(entry, dict) else entry
        msg = f"{where} has {keys}, allowed are the keys 'name', 'match' and optionally 'strategy'"
        raise ValueError(msg)
    strategy = entry.get("strategy")
    allowed = [name for name in STRATEGIES if name != "sparse"]
    if strategy is not None and strategy not in allowed:
        msg = f"{where}.strategy is {strategy!r}, allowed are {', '.join(allowed)}"
        raise ValueError(msg)
    match = entry["match"]
    patterns = (match,) if isinstance(match, str) else tuple(map(str, match))
    return GroupOverride(name=str(entry["name"]), patterns=patterns, strategy=strategy)


def apply_overrides(
    specs: Sequence[GradientSpec], overrides: Sequence[GroupOverride]
) -> tuple[GradientSpec, ...]:
    """Label gradients with the first group whose pattern matches."""
    return tuple(_labelled(spec, overrides) for spec in specs)


def _labelled(spec: GradientSpec, overrides: Sequence[GroupOverride]) -> GradientSpec:
    for group in overrides:
        if any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in group.patterns):
            return replace(spec, group=group.name, strategy=group.strategy)
    return spec
