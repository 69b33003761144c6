"""Kill a training at random moments with SIGKILL, resume it each time, and compare every loss with an
undisturbed run.

Figures: kills (how many), lost_steps (mean number of recorded steps that a resume has to do again),
unequal_losses (steps whose loss differs from the undisturbed run in any bit).
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _common import finish, parser, result, spread
from loongforge.checkpoint import find_newest
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.ranks import Ranks
from loongforge.records import read_metrics
from loongforge.rng import seed_rank
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from torch.utils.data import DataLoader

STEPS = 600


def train(run: Path, seed: int) -> None:
    """Train to the end, resuming from whatever is there; checkpoints every 3 steps in the background."""
    torch.set_num_threads(1)
    config = TrainConfig(
        output=str(run),
        steps=STEPS,
        accumulation=4,
        seed=seed,
        learning_rate=1e-2,
        control=False,
        ema_decay=0.9,
        log_interval=10**9,
        checkpoint=CheckpointConfig(every=3, keep_last=2),
    )
    seed_rank(seed, 0)
    loader = DataLoader(ToyData(52), batch_size=2, shuffle=True, collate_fn=collate)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    parts = build_parts(config, ToyModel(dropout=0.3), BatchSource(loader, fingerprint="toy"), ranks)
    Session(config, parts).train()


def start(run: Path, seed: int) -> int:
    """Fork a training; returns its pid."""
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        code = 1
        try:
            train(run, seed)
            code = 0
        finally:
            os._exit(code)
    return pid


def last_step(run: Path) -> int:
    """Return the last recorded step, 0 before the first."""
    try:
        return max((int(str(record["step"])) for record in read_metrics(run)), default=0)
    except FileNotFoundError:
        return 0


def one_run(folder: Path, seed: int, kills: int, rng: random.Random) -> tuple[int, list[float], int]:
    """Kill one run up to ``kills`` times and let it end; returns (kills, steps lost at each, unequal
    losses).
    """
    whole, broken = folder / "whole", folder / "broken"
    pid = start(whole, seed)
    assert os.waitpid(pid, 0)[1] == 0
    done, lost = 0, []
    while True:
        pid = start(broken, seed)
        deadline = time.monotonic() + (rng.uniform(0.01, 1.2) if done < kills else 600)
        ended = False
        while time.monotonic() < deadline:
            if os.waitpid(pid, os.WNOHANG)[0]:
                ended = True
                break
            time.sleep(0.002)
        if ended:
            break
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        done += 1
        found = find_newest(broken).folder
        lost.append(float(last_step(broken) - (int(found.name.rsplit("_", 1)[1]) if found else 0)))
    expected = {r["step"]: r["loss"] for r in read_metrics(whole)}
    got = {r["step"]: r["loss"] for r in read_metrics(broken)}
    unequal = sum(1 for step in range(1, STEPS + 1) if expected.get(step) != got.get(step, "missing"))
    shutil.rmtree(folder)
    return done, lost, unequal


def main() -> None:
    """Run until the asked number of kills is reached."""
    arguments = parser(__doc__).parse_args()
    wanted = 10 if arguments.quick else 200
    rng = random.Random(0)
    rows, kills, lost, unequal = [], 0, [], 0
    torch.set_num_threads(1)
    # Optimizers import this at first use, for seconds; forked trainings would pay it again and again.
    importlib.import_module("torch._dynamo")

    while kills < wanted:
        folder = Path(tempfile.mkdtemp(prefix="loongforge_chaos_"))
        done, steps, wrong = one_run(folder, seed=len(rows), kills=wanted - kills, rng=rng)
        kills, unequal = kills + done, unequal + wrong
        lost += steps
        rows.append({"run": len(rows), "steps": STEPS, "kills": done, "unequal_losses": wrong})
    rows.append({"run": "all", "kills": kills, "lost_steps": spread(lost), "unequal_losses": unequal})
    figures = {"kills": kills, "lost_steps": sum(lost) / len(lost), "unequal_losses": unequal}
    note = (
        "lost_steps: mean number of recorded steps that a resume has to do again; "
        "a checkpoint is begun every 3 steps in the background"
    )
    finish(
        result("resume_chaos", rows=rows, figures=figures, repetitions=kills, notes=[note]), arguments.json
    )


if __name__ == "__main__":
    main()
