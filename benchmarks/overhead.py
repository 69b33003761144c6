"""What records, guards, watchdog and control cost: the same steps with them and without, in alternating
blocks.

The step is that of the recipe gr00t_n1_6_tiny (on the GPU where there is one) over batches made beforehand,
so that the loader adds no noise. Figures: record_overhead (share of the step), attach_overhead (share by
which the step is longer while a client attaches, profiles and detaches, 50 times).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _common import finish, parser, result, spread
from loongforge.clock import StepClock
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.ranks import Ranks, choose_device
from loongforge.recipes import get_recipe
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel
from loongforge.testing import collate as collate_toy
from torch import nn

CLIENT = """
import contextlib
import sys
from pathlib import Path
from loongforge.control.client import ask
from loongforge.control.paths import socket_of
from loongforge.errors import ControlError
path = socket_of(run=Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    ask(path, "status")
    with contextlib.suppress(ControlError):  # no step may have ended in so short a time
        ask(path, "profile", duration_s=float(line), timeout_s=60)
    print("detached", flush=True)
"""
STEPS_ATTACHED = 10


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


def batches(folder: Path, count: int) -> tuple[nn.Module, list[object], str]:
    """Return a model, ready batches, and what they are: the tiny recipe, or a toy where PyAV is missing."""
    try:
        from loongforge_data.synthetic import write_dataset

        target = folder / "data"
        write_dataset(target, episodes=2, frames=40, cameras=2, size=(96, 128), codec="h264", seed=0, fps=30)
        recipe = get_recipe("gr00t_n1_6_tiny")
        options = recipe.options({})
        model = recipe.build_model(options, 0)
        data = recipe.build_dataset(str(target), options)
        collate = recipe.build_collate(data, model, options)
        return model, [collate([data[8 * n + i] for i in range(8)]) for n in range(count)], recipe.name
    except ImportError:
        toy = ToyData(8 * count)
        ready = [collate_toy([toy[8 * n + i] for i in range(8)]) for n in range(count)]
        return ToyModel(hidden=2048), list(ready), "toy model (PyAV is missing)"


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


def main() -> None:
    """Measure both overheads."""
    arguments = parser(__doc__).parse_args()
    device = choose_device("auto")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="loongforge_overhead_"))
    model, ready, what = batches(folder, 8)
    config = TrainConfig(
        output=str(folder / "run"),
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
    recorder = session.parts.recorder
    blocks, steps = (6, 10) if arguments.quick else (40, 25)
    timed(session, steps, device)
    with_records, without = [], []
    for number in range(2 * blocks):
        bare = (number + number // 2) % 2 == 0  # order A B B A, against drift
        session.parts.recorder = NoRecorder() if bare else recorder
        session.engine.new_clock = NoClock if bare else StepClock
        (without if bare else with_records).append(timed(session, steps, device))
    session.parts.recorder, session.engine.new_clock = recorder, StepClock
    base = statistics.median(without)
    record_overhead = statistics.median(with_records) / base - 1
    attach, alone = attached(session, device, config.output, quick=arguments.quick)
    attach_overhead = statistics.median(attach) / statistics.median(alone) - 1
    session.close()
    rows = [
        {"what": "without records", "step_ms": spread(without)},
        {"what": "with records, guards, watchdog, control", "step_ms": spread(with_records)},
        {"what": "no client", "step_ms": spread(alone)},
        {"what": "clients attach and detach", "step_ms": spread(attach)},
    ]
    figures = {
        "record_overhead": record_overhead,
        "attach_overhead": attach_overhead,
        "step_ms": base,
        "device": str(device),
        "model": what,
    }
    finish(result("overhead", rows=rows, figures=figures, repetitions=blocks), arguments.json)


def attached(
    session: Session, device: torch.device, run: str, *, quick: bool
) -> tuple[list[float], list[float]]:
    """Return step times of blocks in which a client attaches, profiles and detaches, and of blocks between
    them.
    """
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdout.readline()
    attach, alone = [], []
    for number in range(20 if quick else 100):
        if (number + number // 2) % 2:
            alone.append(timed(session, STEPS_ATTACHED, device))
            continue
        expected = 1e-3 * (alone[-1] if alone else 1.0) * STEPS_ATTACHED
        client.stdin.write(f"{0.7 * expected}\n")
        client.stdin.flush()
        attach.append(timed(session, STEPS_ATTACHED, device))
        client.stdout.readline()
    client.stdin.close()
    client.wait(60)
    return attach, alone


if __name__ == "__main__":
    main()
