"""Commands that talk to a running training: profile-step, monitor-comm, switch-strategy, debug-dmf, stop."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

Pid = Annotated[int | None, typer.Option(help="Process id of a rank of the training.")]
Run = Annotated[Path | None, typer.Option(help="Run directory, instead of a process id.")]
Rank = Annotated[int, typer.Option(help="Rank in the run directory.")]


def profile_step(
    pid: Pid = None,
    run: Run = None,
    rank: Rank = 0,
    duration: Annotated[float, typer.Option(help="Seconds to observe.")] = 60.0,
    output: Annotated[Path | None, typer.Option(help="JSON file; standard output by default.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Also record a torch profiler trace (Chrome format) here.")
    ] = None,
) -> int:
    """Profile a running training: step phases, communication, allocation, data stages, fusion success.

    Observing costs nothing; a trace slows the observed steps.
    """
    from loongforge.control.client import ask

    where = str(trace.resolve()) if trace is not None else None
    path = _socket(pid, run, rank)
    answer = ask(path, "profile", timeout_s=duration + 150, duration_s=duration, trace=where)
    text = json.dumps(answer, indent=1) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text)
        sys.stdout.write(f"{output}\n")
    return 0


def monitor_comm(
    pid: Pid = None,
    run: Run = None,
    rank: Rank = 0,
    interval: Annotated[float, typer.Option(help="Seconds between two lines.")] = 10.0,
    count: Annotated[int, typer.Option(help="Lines to print; 0 goes on until Ctrl-C.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> int:
    """Show live communication: exposed time, overlap, and the counters of the gradient scheduler."""
    from loongforge.control.client import ask

    path, printed = _socket(pid, run, rank), 0
    while True:
        answer = ask(path, "comm")
        sys.stdout.write(json.dumps(answer) + "\n" if as_json else comm_line(answer) + "\n")
        sys.stdout.flush()
        printed += 1
        if count and printed >= count:
            return 0
        time.sleep(interval)


def comm_line(answer: dict[str, object]) -> str:
    """Return one line for an answer about communication."""
    recent = [entry for entry in list(answer["recent"]) if isinstance(entry, dict)]  # type: ignore[call-overload]
    if not recent:
        return "no step yet"
    parts = [f"step {recent[-1]['step']}"]
    for name, unit in (("comm_exposed_ms", "ms"), ("comm_overlap", ""), ("backward_ms", "ms")):
        values = [float(entry[name]) for entry in recent if entry[name] is not None]
        text = f"{sum(values) / len(values):.2f} {unit}".strip() if values else "not measured"
        parts.append(f"{name.removesuffix('_ms').replace('_', ' ')} {text}")
    stats = answer.get("stats")
    if isinstance(stats, dict):
        parts += [f"{key} {value:g}" for key, value in stats.items() if isinstance(value, (int, float))]
    return "  ".join(parts)


def switch_strategy(
    strategy: Annotated[str, typer.Option(help="hybrid or simple.")],
    pid: Pid = None,
    run: Run = None,
    rank: Rank = 0,
) -> int:
    """Change the communication strategy of a running training, on all ranks at the same step."""
    from loongforge.control.client import ask

    answer = ask(_socket(pid, run, rank), "switch", timeout_s=150, strategy=strategy)
    sys.stdout.write(f"strategy {answer['strategy']} from step {answer['from_step']}\n")
    return 0


def stop(pid: Pid = None, run: Run = None, rank: Rank = 0) -> int:
    """End a running training at its next step border, on all ranks, with a checkpoint.

    A signal does the same for a training of fixed ranks; in an elastic one only the ranks that get it leave.
    """
    from loongforge.control.client import ask

    answer = ask(_socket(pid, run, rank), "stop", timeout_s=150)
    sys.stdout.write(f"ends after step {answer['step']}\n")
    return 0


def debug_dmf(
    pid: Pid = None,
    run: Run = None,
    rank: Rank = 0,
    last: Annotated[int, typer.Option(help="Windows to show.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Show the fusion trace: which windows were fused or replayed, and why others were not.

    Asks a live process; with --run of a training that has ended, reads its records.
    """
    answer = _dmf(pid, run, rank, last)
    if as_json:
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return 0
    for kind in ("fus", "graph"):
        share = answer[f"{kind}ed_share" if kind == "fus" else "graph_share"]
        reasons = answer["fusion_reasons" if kind == "fus" else "graph_reasons"]
        what = "fused" if kind == "fus" else "replayed"
        text = "not measured" if not isinstance(share, float) else f"{share:.1%} of windows"
        sys.stdout.write(f"{what} {text}\n")
        for reason, number in dict(reasons).items():  # type: ignore[call-overload]
            sys.stdout.write(f"  {number} x {reason}\n")
    for entry in list(answer["trace"]):  # type: ignore[call-overload]
        micro = " ".join("nan" if loss is None else f"{loss:.4f}" for loss in entry.get("micro_losses") or [])
        how = "fused" if entry["fused"] else f"separate ({entry['fusion_reason']})"
        sys.stdout.write(f"step {entry['step']}  {how}  losses {micro}\n")
    return 0


def _dmf(pid: int | None, run: Path | None, rank: int, last: int) -> dict[str, object]:
    from loongforge.control.client import ask
    from loongforge.errors import ControlError

    try:
        return ask(_socket(pid, run, rank), "dmf", last=last)
    except ControlError:
        if run is None or not (run / "metrics.jsonl").exists():
            raise
    from loongforge.records import read_metrics
    from loongforge.report.summary import summarise

    records = read_metrics(run, rank=rank)[-last:]
    summary = summarise(records)
    return {
        "fused_share": summary.fused_share,
        "fusion_reasons": dict(summary.fusion_reasons),
        "graph_share": summary.graph_share,
        "graph_reasons": dict(summary.graph_reasons),
        "trace": records,
    }


def _socket(pid: int | None, run: Path | None, rank: int) -> Path:
    from loongforge.control.paths import socket_of

    return socket_of(pid=pid, run=run, rank=rank)
