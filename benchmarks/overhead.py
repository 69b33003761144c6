"""What records, guards, watchdog and control cost, and what a client of a live run costs.

Records: the step of the recipe gr00t_n1_6_tiny (on the GPU where there is one) over batches made
beforehand, in short blocks with and without records, in the order A B B A; each pair of neighbours gives
one ratio. The direct cost in microseconds is taken the same way on a step so small that hardly anything
else is left of it.

Clients: two ranks under torchrun train; a client attaches to the ranks in turn (status, then a profile),
detaches, and lets as much time pass, 50 times. Steps that lie wholly inside a span are compared with those
of its neighbour.

Figures: record_overhead (share of the step), record_cost_us, attach_overhead (share by which a step is
longer while a client is attached), attaches; each overhead with its 95 % interval (bootstrap over pairs)
beside it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _common import finish, parser, result, spread
from loongforge.clock import StepClock
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.control.client import ask
from loongforge.control.paths import socket_of
from loongforge.errors import ControlError
from loongforge.ranks import Ranks, choose_device
from loongforge.recipes import get_recipe
from loongforge.records import read_metrics
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel
from loongforge.testing import collate as collate_toy
from torch import nn

Span = tuple[float, float]


class NoClock(StepClock):
    """A clock that measures nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time nothing."""
        yield

    host_phase = phase


class NoRecorder:
    """A recorder that drops everything."""

    listeners: list[object] = []  # noqa: RUF012

    def submit(self, pending: object) -> None:
        """Drop the step."""

    def note_checkpoint(self, ms: float) -> None:
        """Drop the time."""


def data_set(folder: Path) -> Path:
    """Write a small data set of robot video."""
    from loongforge_data.synthetic import write_dataset

    target = folder / "data"
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


def timed(session: Session, steps: int, device: torch.device) -> float:
    """Return milliseconds per step of a block."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        session.engine.run_step()
        session.watchdog.beat(session.engine.at.step)
        session._at_border()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / steps


def with_and_without(
    session: Session, device: torch.device, *, pairs: int, steps: int
) -> list[tuple[float, float]]:
    """Return (with records, without) milliseconds per step of neighbouring blocks, in the order A B B A."""
    recorder = session.parts.recorder
    timed(session, steps, device)
    found = []
    for number in range(pairs):
        block = {}
        for bare in (True, False) if number % 2 else (False, True):
            session.parts.recorder = NoRecorder() if bare else recorder
            session.engine.new_clock = NoClock if bare else StepClock
            block[bare] = timed(session, steps, device)
        found.append((block[False], block[True]))
    session.parts.recorder, session.engine.new_clock = recorder, StepClock
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by bootstrap."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


@contextmanager
def two_ranks(folder: Path) -> Iterator[Path]:
    """Train on two ranks under torchrun (Gloo on the CPU, NCCL on two GPUs); yields the run directory."""
    run = folder / "two"
    device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "loongforge", "train", "--dataset", str(data_set(folder)), "--recipe", "gr00t_n1_6_tiny",
        "--steps", "1000000", "--output", str(run), "--workers", "0", "--device", device,
        "--checkpoint-every", "0", "--set", "probe_interval=0", "--set", "log_interval=1000000",
    ]  # fmt: skip
    log = (folder / "two.log").open("w")
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


def attach(run: Path, *, rounds: int, span_s: float) -> list[tuple[Span, Span]]:
    """Attach and detach ``rounds`` times, in the order A B B A; returns the spans (attached, alone)."""
    sockets = [socket_of(run=run, rank=rank) for rank in (0, 1)]
    spans = []
    for number in range(rounds):
        pair = {}
        for attached in (True, False) if number % 2 else (False, True):
            began = time.time()
            if attached:
                ask(sockets[number % 4 // 2], "status")
                with contextlib.suppress(ControlError):  # no step may have ended in so short a time
                    ask(sockets[number % 4 // 2], "profile", duration_s=span_s, timeout_s=60)
            else:
                time.sleep(span_s)
            pair[attached] = (began, time.time())
        spans.append((pair[True], pair[False]))
    return spans


def step_in(span: Span, steps: Sequence[tuple[float, float]]) -> float | None:
    """Return the median time of the steps that lie inside a span."""
    inside = [ms for ended, ms in steps if span[0] <= ended - 1e-3 * ms and ended <= span[1]]
    return statistics.median(inside) if inside else None


def attach_pairs(folder: Path, *, quick: bool) -> list[tuple[float, float]]:
    """Return (attached, alone) milliseconds per step of each round."""
    with two_ranks(folder) as run:
        spans = attach(run, rounds=10 if quick else 50, span_s=0.8)
        steps = [(float(r["time_unix"]), float(r["step_ms"])) for r in read_metrics(run, rank=0)]  # type: ignore[arg-type]
    found = [(step_in(attached, steps), step_in(alone, steps)) for attached, alone in spans]
    return [(a, b) for a, b in found if a is not None and b is not None]


def share_rows(name: str, pairs: Sequence[tuple[float, float]]) -> tuple[dict[str, object], dict[str, float]]:
    """Return the row and the figures of one overhead."""
    ratios = [a / b - 1 for a, b in pairs]
    low, high = interval(ratios)
    row = {
        "what": name,
        "pairs": len(pairs),
        "with_ms": spread([a for a, _ in pairs]),
        "without_ms": spread([b for _, b in pairs]),
        "overhead": spread(ratios),
        "interval": f"[{low:.4f}, {high:.4f}]",
    }
    figures = {f"{name}_overhead": statistics.median(ratios), f"{name}_low": low, f"{name}_high": high}
    return row, figures


def main() -> None:
    """Measure both overheads; a part that fails leaves its error in the notes."""
    arguments = parser(__doc__).parse_args()
    device = choose_device("auto")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="loongforge_overhead_"))
    rows: list[dict[str, object]] = []
    figures: dict[str, float | int | str | None] = {"record_overhead": None, "attach_overhead": None}
    notes = [f"cores: {len(os.sched_getaffinity(0))}; the ranks of the second part fill two"]

    model, ready, what = recipe_batches(folder, 8)
    session = open_session(folder / "run", model, ready, device)
    pairs = with_and_without(session, device, pairs=12 if arguments.quick else 60, steps=6)
    session.close()
    row, found = share_rows("record", pairs)
    rows.append({**row, "model": what})
    step_ms = statistics.median(without for _, without in pairs)
    figures |= {**found, "step_ms": step_ms, "device": str(device)}

    model, ready = toy_batches(8, hidden=1)
    session = open_session(folder / "direct", model, ready, device)
    pairs = with_and_without(session, device, pairs=10 if arguments.quick else 40, steps=100)
    session.close()
    costs = [1e3 * (a - b) for a, b in pairs]
    rows.append({"what": "records on an empty step, us", "pairs": len(pairs), "overhead": spread(costs)})
    figures["record_cost_us"] = statistics.median(costs)
    figures["record_cost_share"] = statistics.median(costs) / 1e3 / step_ms

    try:
        pairs = attach_pairs(folder, quick=arguments.quick)
        row, found = share_rows("attach", pairs)
        rows.append(row)
        figures |= {**found, "attaches": len(pairs)}
    except (RuntimeError, OSError, ImportError, ControlError) as error:
        notes.append(f"two ranks under torchrun did not run: {type(error).__name__}: {str(error)[-500:]}")
    finish(
        result("overhead", rows=rows, figures=figures, repetitions=len(pairs), notes=notes), arguments.json
    )


if __name__ == "__main__":
    main()
