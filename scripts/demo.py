"""Train the tiny recipe on a small robot data set on the CPU: what ``make demo`` runs.

Without DATASET a seeded LeRobot data set is synthesised first: moving shapes whose motion is the action, two
cameras, h264. Ends by printing the path of metrics.jsonl and of the checkpoint.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STEPS = int(os.environ.get("DEMO_STEPS", "120"))
FOLDER = Path(os.environ.get("DEMO_DIR", "runs/demo"))


def main() -> int:
    """Make or take the data set, and run the same command a user would type."""
    dataset = os.environ.get("DATASET") or str(synthesise(FOLDER / "data"))
    arguments = [
        "train",
        *("--dataset", dataset),
        *("--recipe", "gr00t_n1_6_tiny"),
        *("--steps", str(STEPS)),
        *("--seed", "0"),
        *("--output", str(FOLDER / "run")),
        *("--resume", "never", "--earlier-run", "move"),
        *("--device", "cpu"),
        *("--batch-size", "8"),
        *("--learning-rate", "1e-3"),
        *("--set", "log_interval=10"),
        *sys.argv[1:],
    ]
    sys.stderr.write(f"$ loongforge {' '.join(arguments)}\n")
    from loongforge.cli import run
    from loongforge.records import read_metrics

    code = run(arguments)
    if code == 0:
        losses = [float(str(record["loss"])) for record in read_metrics(FOLDER / "run")]
        first, last = sum(losses[:10]) / len(losses[:10]), sum(losses[-10:]) / len(losses[-10:])
        print(f"mean loss of the first 10 steps {first:.3f}, of the last 10 {last:.3f}")
    return code


def synthesise(folder: Path) -> Path:
    """Write a small LeRobot v2.1 data set unless it is there already."""
    if not (folder / "meta" / "info.json").exists():
        from loongforge_data.synthetic import write_dataset

        sys.stderr.write(f"synthesising 6 episodes of 60 frames in {folder}\n")
        write_dataset(folder, episodes=6, frames=60, cameras=2, size=(96, 128), codec="h264", seed=0, fps=30)
    return folder


if __name__ == "__main__":
    sys.exit(main())
