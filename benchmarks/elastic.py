"""Take ranks out of a training that goes on and let new ones in, again and again; beside it, stop and resume.

A training on several ranks loses one after the other, by SIGKILL and by SIGSTOP in turns, at random moments;
each time a new process joins. Beside it the way without membership: all ranks end, all are started again, and
the newest checkpoint resumes.

Figures: losses (ranks taken out), joins, unequal_weights (ranks whose weights differ from another's at the
end, in any bit), steps_lost (recorded steps that were done again), loss_pause_s and join_pause_s (median time
without a step; the wait for heartbeats is part of the first), restart_pause_s (the same for stop and resume),
heartbeat_s.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _common import finish, parser, result, spread
from loongforge.config import CheckpointConfig, ElasticConfig, PillarConfig, TrainConfig
from loongforge.control.client import ask
from loongforge.control.paths import socket_of
from loongforge.elastic.notice import read
from loongforge.elastic.supervise import Supervisor
from loongforge.ranks import join
from loongforge.records import read_metrics
from loongforge.runs import build_run
from loongforge_comm.testing import free_port
from loongforge_data.synthetic import write_dataset
from torch import distributed as dist

HEARTBEAT_S = 4.0
LIMIT_S = 120.0
SETTLED_STEPS = 12
"""Steps of a generation before the next trouble."""


def configuration(arguments: dict[str, str]) -> TrainConfig:
    """Return the run's configuration on every process."""
    elastic = arguments["way"] == "elastic"
    return TrainConfig(
        dataset=arguments["dataset"],
        recipe="gr00t_n1_6_tiny",
        output=arguments["run"],
        steps=100_000,
        batch_size=4,
        workers=1,
        schedule="constant",
        device=arguments["device"],
        log_interval=10**9,
        probe_interval=0,
        pillars=PillarConfig(mem="auto", fuse="off"),
        checkpoint=CheckpointConfig(every=0 if elastic else 10, keep_last=2),
        elastic=ElasticConfig(
            enabled=elastic,
            check_every=5,
            heartbeat_s=HEARTBEAT_S,
            store=arguments["store"] if elastic else "",
        ),
    )


def work(arguments: dict[str, str]) -> None:
    """Be one rank; at the end write what the weights hash to."""
    torch.set_num_threads(1)
    # Where a rank hangs stands in its log before the script gives up.
    faulthandler.dump_traceback_later(LIMIT_S / 2, repeat=True)
    config = configuration(arguments)
    if arguments["way"] == "fixed":
        ranks = join(config.device, timeout_s=LIMIT_S)
        model = (run := build_run(config, ranks=ranks)).model
        run.session.train()
        name = str(ranks.rank)
    else:
        if arguments["role"] == "founder":
            supervisor = Supervisor.found(config)
        else:
            supervisor = Supervisor.rejoin(read(Path(arguments["run"])), limit_s=LIMIT_S)
        supervisor.train()
        model, name = supervisor.model, str(supervisor.members.member)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    (Path(arguments["run"]) / f"weights.{name}").write_text(digest.hexdigest())


class Crew:
    """The processes of one run."""

    def __init__(self, run: Path, way: str, *, ranks: int, device: str, dataset: str, store: int) -> None:
        self.run, self.ranks = run, ranks
        self.arguments = {
            "run": str(run), "way": way, "device": device, "dataset": dataset, "store": f"127.0.0.1:{store}",
        }  # fmt: skip
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """By place: the local rank, and so the device."""

    def found(self) -> None:
        """Start all ranks together."""
        port = free_port()
        for place in range(self.ranks):
            named = {"RANK": place, "WORLD_SIZE": self.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                     "TORCHELASTIC_RUN_ID": self.run.name}  # fmt: skip
            self.start(place, "founder", {key: str(value) for key, value in named.items()})

    def start(self, place: int, role: str, variables: dict[str, str]) -> None:
        """Start one process at a place."""
        log = (self.run / f"{place}.{time.monotonic_ns()}.log").open("wb")
        environment = {**os.environ, "LOCAL_RANK": str(place), "GLOO_SOCKET_IFNAME": "lo", **variables}
        text = json.dumps({**self.arguments, "role": role})
        self.processes[place] = subprocess.Popen(
            [sys.executable, __file__, "--worker", text], env=environment, stdout=log, stderr=log
        )

    def end(self) -> None:
        """Ask the run to end, wait, and kill what is left."""
        ask(socket_of(run=self.run, rank=0), "stop", timeout_s=LIMIT_S)
        for process in self.processes.values():
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def kill(self) -> None:
        """End all processes now."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def steps(self) -> list[tuple[float, int]]:
        """Return (time, step) of rank 0's records, in order of time."""
        try:
            return sorted((float(r["time_unix"]), int(r["step"])) for r in read_metrics(self.run, rank=0))
        except FileNotFoundError:
            return []


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until something holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            message = f"{what} did not happen within {LIMIT_S:.0f} s"
            raise TimeoutError(message)
        time.sleep(0.05)


def pause_at(steps: list[tuple[float, int]], moment: float) -> float:
    """Return the time between the two steps that a moment lies between."""
    times = [when for when, _ in steps]
    return next((b - a for a, b in itertools.pairwise(times) if a <= moment <= b), float("nan"))


def settle(crew: Crew, after: float) -> None:
    """Wait until a few steps have ended after a moment."""
    wait_for(lambda: sum(when > after for when, _ in crew.steps()) >= SETTLED_STEPS, "a step")


def trouble(crew: Crew, cycles: int, rows: list[dict[str, object]]) -> None:
    """Lose and let in ranks, one after the other."""
    chosen = random.Random(0)
    settle(crew, 0.0)
    for cycle in range(cycles):
        time.sleep(chosen.random())
        place, stop = chosen.randrange(crew.ranks), cycle % 2 == 1
        generations = len(read(crew.run).changes)
        lost = crew.processes[place]
        lost.send_signal(signal.SIGSTOP if stop else signal.SIGKILL)
        wait_for(lambda: len(read(crew.run).changes) > generations, "a generation without the lost rank")  # noqa: B023
        lost.kill()
        settle(crew, time.time())
        paused = pause_at(crew.steps(), read(crew.run).changes[-1].time_unix)
        asked = time.time()
        crew.start(place, "joiner", {})
        wait_for(lambda: len(read(crew.run).changes) > generations + 1, "a generation with the new rank")  # noqa: B023
        came = read(crew.run).changes[-1].time_unix
        settle(crew, time.time())
        rows.append(
            {"what": "stopped" if stop else "killed", "place": place, "loss_pause_s": paused,
             "join_pause_s": pause_at(crew.steps(), came), "asked_to_joined_s": came - asked}
        )  # fmt: skip


def restarts(crew: Crew, cycles: int) -> list[float]:
    """Return for stop and resume the time from a loss until the run is past the step that it had reached."""
    pauses = []
    crew.found()
    settle(crew, 0.0)
    for _ in range(cycles):
        moment, reached = time.time(), crew.steps()[-1][1]
        crew.kill()
        crew.found()
        wait_for(lambda: bool(crew.steps()) and crew.steps()[-1][1] > reached, "the step before")  # noqa: B023
        pauses.append(next(when for when, step in crew.steps() if step > reached) - moment)
        settle(crew, time.time())
    crew.end()
    return pauses


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--worker", help=argparse.SUPPRESS)
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--ranks", type=int, default=3, help="ranks of the run; on cuda one GPU each")
    options.add_argument("--cycles", type=int, default=6, help="ranks that are lost, one after the other")
    options.add_argument("--dataset", help="LeRobot data set directory; one is made when none is given")
    arguments = options.parse_args()
    if arguments.worker:
        work(json.loads(arguments.worker))
        return
    cycles = 2 if arguments.quick else arguments.cycles
    # As `python -m loongforge_comm store` does: torch's store waits for the name service at each connection.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    folder = Path(tempfile.mkdtemp())
    dataset = arguments.dataset or str(folder / "data")
    if arguments.dataset is None:
        write_dataset(dataset, episodes=20, frames=150, size=(96, 128), seed=0)
    crews = {}
    for way in ("elastic", "fixed"):
        (folder / way).mkdir()
        crews[way] = Crew(
            folder / way,
            way,
            ranks=arguments.ranks,
            device=arguments.device,
            dataset=dataset,
            store=store.port,
        )
    rows: list[dict[str, object]] = []
    try:
        crews["elastic"].found()
        trouble(crews["elastic"], cycles, rows)
        crews["elastic"].end()
        pauses = restarts(crews["fixed"], max(1, cycles // 2))
        figures = judge(crews["elastic"], rows, pauses)
    except TimeoutError:
        for log in sorted(folder.glob("*/*.log")):
            sys.stderr.write(f"== {log.name}\n{log.read_text()[-4000:]}\n")
        raise
    finally:
        for crew in crews.values():
            crew.kill()
    shutil.rmtree(folder)
    finish(result("elastic", rows=rows, figures=figures, repetitions=cycles), arguments.json)


def judge(
    crew: Crew, rows: list[dict[str, object]], pauses: list[float]
) -> dict[str, float | int | bool | str | None]:
    """Return the figures of a run that has ended."""
    hashes = {path.name: path.read_text() for path in crew.run.glob("weights.*")}
    steps = [step for _, step in crew.steps()]
    changes = read(crew.run).changes
    rows.append({"what": "stop and resume", "restart_pause_s": spread(pauses)})
    return {
        "losses": sum(len(change.left) for change in changes),
        "joins": sum(len(change.joined) for change in changes),
        "ranks_at_the_end": len(hashes),
        "unequal_weights": sum(value != next(iter(hashes.values())) for value in hashes.values()),
        "steps_lost": len(steps) - len(set(steps)),
        "loss_pause_s": spread([float(str(r["loss_pause_s"])) for r in rows if "loss_pause_s" in r])[
            "median"
        ],
        "join_pause_s": spread([float(str(r["join_pause_s"])) for r in rows if "join_pause_s" in r])[
            "median"
        ],
        "restart_pause_s": spread(pauses)["median"],
        "heartbeat_s": HEARTBEAT_S,
    }


if __name__ == "__main__":
    main()
