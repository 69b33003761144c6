"""What records, guards, watchdog and control cost, and what a client of a live run costs.

Records: the step of the recipe gr00t_n1_6_tiny (on the GPU where there is one) over batches made
beforehand, with and without records in turns (`_record_pairs.py`): each 16 steps give one ratio, of processor
time on the CPU and of the wall clock on a GPU, and the figure is the trimmed mean of the ratios. Beside it
stands the ratio of the training thread's processor time, which sees less of what else the machine does. The
direct cost in microseconds is taken the same way on a step so small that hardly anything else is left of it;
what single operations of a record cost right after such a step stands in rows of its own.

Clients: two ranks under torchrun train; a client attaches to the ranks in turn (status, then a profile),
detaches, and lets as much time pass, 50 times. Steps that lie wholly inside a span are compared with those
of its neighbour, and so is the processor time that both ranks used.

Figures: record_overhead (share of the step), record_processor_share, record_cost_us, attach_overhead (share
by which a step is longer while a client is attached), attaches; each with its 95 % interval (bootstrap over
pairs) beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _common import finish, parser, result, spread
from _record_pairs import Pair, interval, part_costs, take_pairs, trimmed_mean
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.control.client import ask
from loongforge.control.paths import socket_of
from loongforge.errors import ControlError
from loongforge.ranks import Ranks, choose_device, join
from loongforge.recipes import get_recipe
from loongforge.records import read_metrics
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel
from loongforge.testing import collate as collate_toy
from torch import nn

Rows = list[dict[str, object]]
Figures = dict[str, float | int | str | None]
Step = tuple[float, float]
"""Milliseconds per step: wall clock, processor time of both ranks."""


def data_set(folder: Path) -> Path:
    """Write a small data set of robot video, once."""
    from loongforge_data.synthetic import write_dataset

    target = folder / "data"
    if not target.exists():
        write_dataset(target, episodes=2, frames=40, cameras=2, size=(96, 128), codec="h264", seed=0, fps=30)
    return target


def recipe_batches(folder: Path, count: int) -> tuple[nn.Module, list[object], str]:
    """Return the tiny model with ready batches; a toy where PyAV is missing."""
    try:
        target = data_set(folder)
    except ImportError:
        model, ready = toy_batches(count, hidden=2048)
        return model, ready, "toy model (PyAV is missing)"
    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options({})
    model = recipe.build_model(options, 0)
    data = recipe.build_dataset(str(target), options)
    collate = recipe.build_collate(data, model, options)
    return model, [collate([data[8 * n + i] for i in range(8)]) for n in range(count)], recipe.name


def toy_batches(count: int, *, hidden: int) -> tuple[nn.Module, list[object]]:
    """Return the toy model with ready batches."""
    toy = ToyData(8 * count)
    return ToyModel(hidden=hidden), [collate_toy([toy[8 * n + i] for i in range(8)]) for n in range(count)]


def open_session(run: Path, model: nn.Module, ready: list[object], device: torch.device) -> Session:
    """Return a session with records, guards, watchdog and control, not yet running."""
    config = TrainConfig(
        output=str(run),
        steps=10**6,
        schedule="constant",
        log_interval=10**9,
        probe_interval=0,
        checkpoint=CheckpointConfig(every=0),
    )
    ranks = Ranks(rank=0, world_size=1, device=device)
    session = Session(config, build_parts(config, model, BatchSource(ready), ranks))
    session._open_sinks()
    session.watchdog.start()
    return session


def one_clock(pairs: Sequence[Pair], name: str) -> list[tuple[float, float]]:
    """Return the pairs by one clock: wall or processor."""
    return [(getattr(with_records, name), getattr(without, name)) for with_records, without in pairs]


def worker(folder: Path) -> None:
    """Train one of two ranks until SIGTERM; torchrun starts it."""
    torch.set_num_threads(1)
    ranks = join("cuda" if torch.cuda.device_count() > 1 else "cpu")
    model, ready, _ = recipe_batches(folder, 8)
    config = TrainConfig(
        output=str(folder / "two"),
        steps=10**6,
        schedule="constant",
        log_interval=10**9,
        probe_interval=0,
        checkpoint=CheckpointConfig(every=0),
    )
    Session(config, build_parts(config, model, BatchSource(ready), ranks)).train()
    ranks.close()


@contextmanager
def two_ranks(folder: Path) -> Iterator[Path]:
    """Train on two ranks under torchrun (Gloo on the CPU, NCCL on two GPUs); yields the run directory."""
    run, log = folder / "two", (folder / "two.log").open("w")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, __file__, "--worker", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or len(read_metrics(run, rank=1)) < 20:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "two.log").read_text()[-3000:])
            time.sleep(0.5)
        yield run
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of time, and the processor time both ranks used in it, seconds."""

    began: float
    ended: float
    processor: float


def processor_time(pids: Sequence[int]) -> float:
    """Return the seconds of processor time that processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def attach(run: Path, *, rounds: int, span_s: float) -> list[tuple[Span, Span]]:
    """Attach and detach ``rounds`` times, in the order A B B A; returns the spans (attached, alone)."""
    sockets = [socket_of(run=run, rank=rank) for rank in (0, 1)]
    pids = [int(str(ask(path, "status")["pid"])) for path in sockets]
    spans = []
    for number in range(rounds):
        pair = {}
        for attached in (True, False) if number % 2 else (False, True):
            began, used = time.time(), processor_time(pids)
            if attached:
                ask(sockets[number % 4 // 2], "status")
                with contextlib.suppress(ControlError):  # no step may have ended in so short a time
                    ask(sockets[number % 4 // 2], "profile", duration_s=span_s, timeout_s=60)
            else:
                time.sleep(span_s)
            pair[attached] = Span(began=began, ended=time.time(), processor=processor_time(pids) - used)
        spans.append((pair[True], pair[False]))
    return spans


def step_in(span: Span, steps: Sequence[tuple[float, float]]) -> Step | None:
    """Return (median time, processor time of both ranks) of a step that lies inside a span, milliseconds."""
    inside = [ms for ended, ms in steps if span.began <= ended - 1e-3 * ms and ended <= span.ended]
    if not inside:
        return None
    median = statistics.median(inside)
    return median, span.processor / (span.ended - span.began) * statistics.mean(inside)


def attach_pairs(folder: Path, *, quick: bool) -> list[tuple[Step, Step]]:
    """Return the cost of a step (attached, alone) of each round."""
    with two_ranks(folder) as run:
        spans = attach(run, rounds=10 if quick else 50, span_s=0.8)
        steps = [(float(r["time_unix"]), float(r["step_ms"])) for r in read_metrics(run, rank=0)]  # type: ignore[arg-type]
    found = [(step_in(attached, steps), step_in(alone, steps)) for attached, alone in spans]
    return [(a, b) for a, b in found if a is not None and b is not None]


def share_rows(
    name: str,
    pairs: Sequence[tuple[float, float]],
    middle: Callable[[Sequence[float]], float] = statistics.median,
) -> tuple[dict[str, object], Figures]:
    """Return the row and the figures of one overhead."""
    ratios = [a / b - 1 for a, b in pairs]
    low, high = interval(ratios, middle)
    row = {
        "what": name,
        "pairs": len(pairs),
        "with_ms": spread([a for a, _ in pairs]),
        "without_ms": spread([b for _, b in pairs]),
        "overhead": spread(ratios),
        "interval": f"[{low:.4f}, {high:.4f}]",
    }
    figures: Figures = {
        f"{name}_overhead": middle(ratios),
        f"{name}_low": low,
        f"{name}_high": high,
    }
    return row, figures


def measure_records(folder: Path, device: torch.device, *, quick: bool) -> tuple[Rows, Figures]:
    """Return rows and figures of what records cost."""
    # On the CPU records cost processor time and nothing else, and that does not see what else runs here.
    clock = "processor" if device.type == "cpu" else "wall"
    model, ready, what = recipe_batches(folder, 8)
    session = open_session(folder / "run", model, ready, device)
    pairs = take_pairs(session, device, seconds=8 if quick else 48)
    session.close()
    rows: Rows = []
    found: dict[str, Figures] = {}
    for name in ("wall", "processor"):
        row, found[name] = share_rows("record", one_clock(pairs, name), trimmed_mean)
        rows.append({**row, "model": what, "clock": name})
    step_ms = statistics.median(without for _, without in one_clock(pairs, "wall"))
    processor = found["processor"]

    model, ready = toy_batches(8, hidden=1)
    session = open_session(folder / "direct", model, ready, device)
    direct = [
        1e3 * (a - b) for a, b in one_clock(take_pairs(session, device, seconds=3 if quick else 12), clock)
    ]
    parts = part_costs(session, device, folder, rounds=20 if quick else 100)
    session.close()
    low, high = interval(direct, trimmed_mean)
    cost = trimmed_mean(direct)
    rows.append(
        {
            "what": "records on an empty step, us",
            "pairs": len(direct),
            "overhead": spread(direct),
            "interval": f"[{low:.1f}, {high:.1f}]",
            "clock": clock,
        }
    )
    rows += [{"what": f"{name}, us", "overhead": spread(values)} for name, values in parts.items()]
    return rows, {
        **found[clock],
        "record_processor_share": processor["record_overhead"],
        "record_processor_low": processor["record_low"],
        "record_processor_high": processor["record_high"],
        "record_cost_us": cost,
        "record_cost_low_us": low,
        "record_cost_high_us": high,
        "record_cost_share": cost / 1e3 / step_ms,
        "step_ms": step_ms,
    }


def measure_clients(folder: Path, *, quick: bool) -> tuple[Rows, Figures]:
    """Return rows and figures of what clients of a live run cost."""
    pairs = attach_pairs(folder, quick=quick)
    wall, figures = share_rows("attach", [(attached[0], alone[0]) for attached, alone in pairs])
    processor, found = share_rows("attach_processor", [(attached[1], alone[1]) for attached, alone in pairs])
    rows: Rows = [{**wall, "clock": "wall"}, {**processor, "clock": "processor time of both ranks"}]
    name = "attach_processor_overhead"
    return rows, {**figures, name: found[name], "attaches": len(pairs)}


def main() -> None:
    """Measure both overheads; a part that fails leaves its error in the notes."""
    options = parser(__doc__)
    options.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--parts", default="records,clients", help="what to measure, comma-separated")
    arguments = options.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker)
        return
    device = choose_device("auto")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="loongforge_overhead_"))
    rows: Rows = []
    figures: Figures = {"record_overhead": None, "attach_overhead": None, "device": str(device)}
    notes = [f"cores: {len(os.sched_getaffinity(0))}; the ranks of the second part fill two"]
    parts = {
        "records": lambda: measure_records(folder, device, quick=arguments.quick),
        "clients": lambda: measure_clients(folder, quick=arguments.quick),
    }
    wanted = arguments.parts.split(",")
    if unknown := set(wanted) - set(parts):
        options.error(f"--parts has {', '.join(sorted(unknown))}; allowed: {', '.join(parts)}")
    for name in wanted:
        try:
            more, found = parts[name]()
        except (RuntimeError, OSError, ImportError, ControlError) as error:
            notes.append(f"not measured: {type(error).__name__}: {str(error)[-500:]}")
            continue
        rows += more
        figures |= found
    outcome = result(
        "overhead", rows=rows, figures=figures, repetitions=10 if arguments.quick else 50, notes=notes
    )
    finish(outcome, arguments.json)


if __name__ == "__main__":
    main()
