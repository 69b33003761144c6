"""Kills decode processes at random moments: does the loader hang, lose or double a sample?

A thread sends SIGKILL to a random decode process after a random pause, over and over, while epochs of
robot video are read; the victim may be claiming, decoding, writing a slot or marking it. Every batch is
compared with the reference path by sample index, and its pictures by the bar code painted into them
(episode and frame number).
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from _common import finish, parser, result
from loongforge_data.dataset import RobotDataset, open_dataset
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.pipeline import RingPipeline
from loongforge_data.synthetic import read_code, write_dataset

HANG_SECONDS = 30.0


class Killer(threading.Thread):
    """Kills workers of a loader until it has killed enough of them."""

    def __init__(self, loader: ADFEDataLoader, wanted: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.loader = loader
        self.wanted = wanted
        self.kills = 0
        self.done = threading.Event()
        self._random = random.Random(seed)
        self._struck: set[int] = set()

    def run(self) -> None:
        """Strike at random moments."""
        while self.kills < self.wanted and not self.done.is_set():
            self.done.wait(self._random.uniform(0.0, 0.2))
            pipeline = self.loader.pipeline
            if not isinstance(pipeline, RingPipeline):
                continue
            alive = [pid for pid in dict(pipeline.pids).values() if pid not in self._struck]
            if alive:
                pid = self._random.choice(alive)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self._struck.add(pid)
                    self.kills += 1


def run(dataset: RobotDataset, *, kills: int, workers: int, seed: int) -> dict[str, object]:
    """Read epochs until enough workers were killed; returns the counts."""
    lost = doubled = wrong = epochs = 0
    longest = 0.0
    loader: ADFEDataLoader = ADFEDataLoader(
        dataset, 8, workers, shuffle="full", seed=seed, persistent_workers=True, timeout=HANG_SECONDS / 2
    )
    killer = Killer(loader, kills, seed)
    killer.start()
    started = time.monotonic()
    while killer.is_alive() or epochs == 0:
        seen = np.zeros(len(dataset), dtype=np.int64)
        last = time.monotonic()
        for batch in loader:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            indices = [int(i) for i in batch["index"]]
            np.add.at(seen, indices, 1)
            for camera in dataset.cameras:
                for row in range(len(indices)):
                    code = read_code(np.asarray(batch[camera][row]))
                    wrong += code != (int(batch["episode_index"][row]), int(batch["frame_index"][row]))
        lost += int((seen == 0).sum())
        doubled += int((seen > 1).sum())
        epochs += 1
    killer.done.set()
    killer.join()
    stats = loader.stats()
    loader.close()
    return {
        "workers": workers,
        "kills": killer.kills,
        "restarts": stats["worker_restarts"],
        "jobs_redone": stats["requeued_jobs"],
        "epochs": epochs,
        "samples": epochs * len(dataset),
        "lost": lost,
        "doubled": doubled,
        "wrong_pictures": wrong,
        "longest_wait_s": round(longest, 3),
        "hangs": int(longest > HANG_SECONDS),
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    """Run with one, two and four workers."""
    import torch  # noqa: F401 - a trainer has it; loading it is no wait for data

    arguments = parser(__doc__).parse_args()
    kills = 12 if arguments.quick else 100
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "set"
        write_dataset(
            root, episodes=6, frames=60, cameras=2, size=(96, 128), codec="h264", gop=15, version="3.0"
        )
        dataset = open_dataset(root, window={"action": range(8)})
        shares = {1: kills // 4, 2: kills - kills // 4 * 2, 4: kills // 4}
        rows = [run(dataset, kills=count, workers=workers, seed=workers) for workers, count in shares.items()]
    figures: dict[str, float] = {
        name: sum(int(str(row[name])) for row in rows)
        for name in ("kills", "hangs", "lost", "doubled", "wrong_pictures")
    }
    figures["longest_wait_s"] = max(float(str(row["longest_wait_s"])) for row in rows)
    finish(result("data_kill", rows=rows, figures=figures, repetitions=len(rows)), arguments.json)


if __name__ == "__main__":
    main()
