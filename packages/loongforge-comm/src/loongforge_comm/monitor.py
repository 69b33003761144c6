"""Live view of a running scheduler, from the status file its first rank writes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

STALE_S = 30.0


def read_status(path: Path) -> dict[str, object]:
    """The last status; ValueError says what to do when there is none."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        msg = f"{path} does not exist; set SchedulerConfig(status_path=...) in the training run"
        raise ValueError(msg) from error
    except json.JSONDecodeError as error:
        msg = f"{path} is not a status file ({error})"
        raise ValueError(msg) from error
    if not isinstance(data, dict):
        msg = f"{path} holds {type(data).__name__}, allowed is a JSON object written by the scheduler"
        raise ValueError(msg)  # noqa: TRY004 - the content of a file is a value
    return data


def render(status: Mapping[str, object], *, now: float) -> Group:
    """Tables for a terminal: summary line, groups, ranks."""
    age = now - _number(status.get("time_unix"))
    state = "closed" if status.get("closed") else "stale" if age > STALE_S else "live"
    head = Text(
        f"step {status.get('step')}  {state}, {age:.0f} s old  plan {status.get('plan_hash')} "
        f"({status.get('plan_source')}, {status.get('strategy')})  overlap {_percent(status.get('overlap'))} "
        " "
        f"exposed {_ms(status.get('exposed_ms'))} ms (mean {_ms(status.get('exposed_ms_mean'))})"
    )
    groups = Table(title="collectives by group", title_justify="left")
    for column in ("group", "buckets", "MiB", "mean ms", "P95 ms"):
        groups.add_column(column, justify="left" if column == "group" else "right")
    for name, entry in _mapping(status.get("groups")).items():
        row = _mapping(entry)
        groups.add_row(
            str(name),
            f"{_number(row.get('buckets')):.0f}",
            f"{_number(row.get('mib')):.3f}",
            _ms(row.get("mean_ms")),
            _ms(row.get("p95_ms")),
        )
    ranks = Table(title="ranks (waiting corrected by the minimum over ranks)", title_justify="left")
    for column in ("rank", "backward ms", "waiting ms", ""):
        ranks.add_column(column, justify="right")
    table = _mapping(status.get("ranks"))
    waiting, backward = _mapping(table.get("waiting_ms")), _mapping(table.get("backward_ms"))
    for rank in backward:
        note = "waited for" if str(table.get("waited_for")) == str(rank) else ""
        ranks.add_row(str(rank), _ms(backward[rank]), _ms(waiting.get(rank)), note)
    return Group(head, groups, ranks) if backward else Group(head, groups)


def watch(path: Path, *, interval_s: float, as_json: bool, once: bool, console: Console | None = None) -> int:
    """Show the status until interrupted, or once; returns an exit code (1: the run was closed or never
    wrote).
    """
    console = console or Console()
    if as_json:
        while True:
            status = read_status(path)
            console.file.write(json.dumps(status) + "\n")
            console.file.flush()
            if once or status.get("closed"):
                return 0
            time.sleep(interval_s)
    status = read_status(path)
    if once:
        console.print(render(status, now=time.time()))
        return 0
    with Live(render(status, now=time.time()), console=console, auto_refresh=False) as live:
        while not status.get("closed"):
            time.sleep(interval_s)
            status = read_status(path)
            live.update(render(status, now=time.time()), refresh=True)
    return 0


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _ms(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, (int, float)) else "-"


def _percent(value: object) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, (int, float)) else "-"
