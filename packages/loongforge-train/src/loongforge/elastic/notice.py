"""The notice in a run directory: where to ask to be let into the run, and who is in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loongforge.config import TrainConfig, build_config, to_dict
from loongforge.errors import ControlError

if TYPE_CHECKING:
    from loongforge_comm import Membership

NOTICE_FILE = "members.json"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One generation of a run, for people."""

    generation: int
    step: int
    ranks: int
    left: tuple[int, ...]
    joined: tuple[int, ...]
    time_unix: float


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What a process needs to join."""

    address: str
    """Of the run's store."""
    backend: str
    """Of its process groups."""
    config: TrainConfig
    """Of the run."""
    changes: tuple[Change, ...]
    """All generations so far."""


def post(run: Path, members: Membership, config: TrainConfig, *, backend: str) -> None:
    """Write the notice of the present generation (rank 0); the changes before it stay."""
    now = members.generation
    change = Change(
        generation=now.number,
        step=now.step,
        ranks=now.world_size,
        left=now.left,
        joined=now.joined,
        time_unix=time.time(),
    )
    before = read(run).changes if now.number and (run / NOTICE_FILE).exists() else ()
    content = {
        "address": members.address,
        "backend": backend,
        "config": _given(to_dict(config)),
        "changes": [asdict(entry) for entry in (*before, change)],
    }
    run.mkdir(parents=True, exist_ok=True)
    temporary = run / f".{NOTICE_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(content, indent=1))
    temporary.replace(run / NOTICE_FILE)


def _given(values: Mapping[str, object]) -> dict[str, object]:
    """Leave out what is not set; it is not set there either."""
    return {
        key: _given(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }


def ranks_over_time(run: Path) -> str:
    """Return one line about how many ranks an elastic run had when, "" for any other run."""
    if not (run / NOTICE_FILE).exists():
        return ""
    parts = []
    for change in read(run).changes:
        since = f" from step {change.step + 1}" if change.generation else ""
        who = [
            f"{name} {', '.join(map(str, m))}"
            for name, m in (("left", change.left), ("joined", change.joined))
            if m
        ]
        parts.append(f"{change.ranks}{since}" + (f" (member {'; '.join(who)})" if who else ""))
    return f"ranks: {', '.join(parts)}\n"


def read(run: Path) -> Notice:
    """Read the notice of a run.

    Raises:
        ControlError: There is none, or it cannot be read.
    """
    path = run / NOTICE_FILE
    try:
        content = json.loads(path.read_text())
        return Notice(
            address=content["address"],
            backend=content["backend"],
            config=build_config(content["config"]),
            changes=tuple(
                Change(**{**entry, "left": tuple(entry["left"]), "joined": tuple(entry["joined"])})
                for entry in content["changes"]
            ),
        )
    except FileNotFoundError as error:
        msg = f"{path} does not exist: is {run} the directory of a run that was started with --elastic?"
        raise ControlError(msg) from error
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path} cannot be read ({error}): it belongs to another version, or is damaged"
        raise ControlError(msg) from error
