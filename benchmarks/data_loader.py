"""Samples per second of the loader against others, first epoch and cached, and what decoding it wastes.

Batch 16, 2 workers, full-size uint8 frames, 16-step action window, whole epochs including the first batch,
workers already running. ``--rivals`` measures LeRobot 0.4.4 (both backends), SPDL, torchcodec and plain
PyAV in an environment of their own, made with uv in $LOONGFORGE_RIVAL_ENV (default:
~/.cache/loongforge/rivals); without it those rows are skipped with a reason. Loaders take turns in rounds,
and ratios are taken within rounds.

A full run takes some minutes; on a shared machine it can be taken in parts of three to four minutes each:
``--rivals --sets g1_pick_v30 --skip-wait``, the same for ``h264_g30_two_cameras``, and last
``--sets --rows-from PART1 PART2``, which measures the wait and writes everything.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from _common import finish, parser, result, spread
from _data_rival_host import RIVALS, Rival, rival_python
from loongforge_data.dataset import open_dataset
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.synthetic import write_dataset
from loongforge_data.video import VideoFile

BATCH, WORKERS = 16, 2
FASTEST_STEP = 0.067
"""Seconds of the fastest step measured with such a batch: a GR00T N1.6 shaped model, CUDA graph, one H200."""
Row = dict[str, object]


def shared_data() -> Path | None:
    """Return the folder of real data sets: $LOONGFORGE_TEST_DATA, or shared/data beside a parent folder."""
    named = os.environ.get("LOONGFORGE_TEST_DATA")
    places = [Path(named)] if named else [p / "shared" / "data" for p in Path(__file__).resolve().parents]
    return next((place for place in places if (place / "g1_pick_v30").is_dir()), None)


def data_sets(folder: Path, names: Sequence[str] | None, *, quick: bool) -> dict[str, Path]:
    """Return the sets to measure: the real one if it is there, and a generated one; only those named, if
    any are.
    """
    shared = shared_data()
    real = {} if shared is None else {"g1_pick_v30": shared / "g1_pick_v30"}
    made = folder / "h264_g30_two_cameras"
    if names is not None and made.name not in names:
        return {name: path for name, path in real.items() if name in names or not names}
    write_dataset(
        made,
        episodes=3 if quick else 8,
        frames=150 if quick else 240,
        cameras=2,
        size=(480, 640),
        codec="h264",
        gop=30,
        version="3.0",
        fps=30,
    )
    return {**(real if names is None or "g1_pick_v30" in names else {}), made.name: made}


class Ours:
    """The loader under test; a repetition is one whole epoch, the first batch included."""

    def __init__(self, root: Path, *, shuffle: str, cache: Path | None = None) -> None:
        dataset = open_dataset(root, window={"action": range(16)})
        self.name = "loongforge-data" + (" cached" if cache else "")
        self.shuffle = shuffle
        self.loader: ADFEDataLoader = ADFEDataLoader(
            dataset, BATCH, WORKERS, shuffle=shuffle, cache=cache, persistent_workers=True, lookahead=False
        )
        # Workers start; with a cache, this epoch fills it.
        for number, _ in enumerate(self.loader):
            if cache is None and number == 3:
                break
        self.loader.set_epoch(1)
        self.before = self.loader.stats()

    def rate(self) -> float:
        """Return samples per second of the next epoch."""
        start = time.perf_counter()
        count = sum(len(batch["index"]) for batch in self.loader)
        return count / (time.perf_counter() - start)

    def facts(self) -> Row:
        """Return what decoding cost."""
        after = self.loader.stats()
        used = _number(after["used_frames"]) - _number(self.before["used_frames"])
        decoded = _number(after["decoded_frames"]) - _number(self.before["decoded_frames"])
        return {"decoded_per_used": decoded / used if used else None, "slots": after["queue_slots"]}

    def close(self) -> None:
        """Stop its workers."""
        self.loader.close()


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


class Floor:
    """Decoding alone: random frames of the first file by one thread, nothing converted or moved."""

    name, shuffle = "decode only, one thread", "full"

    def __init__(self, root: Path) -> None:
        self.video = VideoFile(sorted(root.glob("videos/**/*.mp4"))[0])
        self.random = random.Random(0)

    def rate(self) -> float:
        """Return frames per second."""
        wanted = [self.random.randrange(len(self.video)) for _ in range(200)]
        start = time.perf_counter()
        for index in wanted:
            for _ in self.video.decode([index]):
                pass
        return len(wanted) / (time.perf_counter() - start)

    def facts(self) -> Row:
        """Return nothing more."""
        return {}

    def close(self) -> None:
        """Close the file."""
        self.video.close()


def wait_share(root: Path, *, quick: bool) -> Row:
    """Measure the wait with a consumer that works a fixed time for which supply suffices; also memory and
    open files of the trainer and its workers, epoch by epoch.
    """
    dataset = open_dataset(root, window={"action": range(16)})
    loader: ADFEDataLoader = ADFEDataLoader(dataset, BATCH, WORKERS, shuffle="full", persistent_workers=True)
    for _ in loader:  # workers start, every slot is touched
        pass
    started = time.perf_counter()
    for _ in loader:
        pass
    # Half as much again as a batch costs here and now, so that supply suffices.
    step = max(FASTEST_STEP, 1.5 * (time.perf_counter() - started) / len(loader))
    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    memory, files, shares, waits = [], [], [], []
    for _ in range(3 if quick else 20):
        before, start = _number(loader.stats()["data_wait_ms"]), time.perf_counter()
        for _ in loader:
            waits.append(_number(loader.stats()["last_data_wait_ms"]))
            time.sleep(step)
        wall = 1e3 * (time.perf_counter() - start)
        shares.append((_number(loader.stats()["data_wait_ms"]) - before) / wall)
        memory.append(sum(p.memory_full_info().uss for p in family if p.is_running()) / 2**20)
        files.append(max(p.num_fds() for p in family if p.is_running()))
    loader.close()
    waits.sort()
    return {
        "loader": "loongforge-data, fixed steps",
        "step_ms": 1e3 * step,
        "shuffle": "full",
        "data_wait_share": spread(shares),
        "wait_ms_p50": waits[len(waits) // 2],
        "wait_ms_p99": waits[int(0.99 * len(waits))],
        "wait_ms_max": waits[-1],
        "uss_mib": [round(value, 1) for value in memory],
        "open_files": files,
        "epochs": len(shares),
    }


def measure(
    name: str, root: Path, *, quick: bool, python: Path | None, reason: str, rivals: Sequence[str]
) -> list[Row]:
    """Measure everything on one set, in turns: each round runs every loader once."""
    import torch

    torch.set_num_threads(1)
    repetitions, batches = (2, 10) if quick else (5, 12)
    rows: list[Row] = [{"loader": kind, "skipped": reason} for kind in rivals if python is None]
    with tempfile.TemporaryDirectory() as cache:
        entrants: list[Ours | Floor | Rival] = [Floor(root)]
        entrants += [Rival(python, kind, root, batches=batches) for kind in rivals if python is not None]
        entrants += [Ours(root, shuffle=kind) for kind in ("full", "block")]
        entrants.append(Ours(root, shuffle="full", cache=Path(cache)))
        rates: list[list[float]] = [[] for _ in entrants]
        for _ in range(repetitions):
            for entrant, found in zip(entrants, rates, strict=True):
                value = entrant.rate()
                if value is not None:
                    found.append(value)
        base = next((r for e, r in zip(entrants, rates, strict=True) if e.name == "lerobot-pyav"), [])
        for entrant, found in zip(entrants, rates, strict=True):
            row: Row = {"loader": entrant.name, "shuffle": entrant.shuffle, **entrant.facts()}
            if found:
                row["samples_per_s"] = spread(found)
            if found and len(found) == len(base):
                row["vs_lerobot"] = spread([a / b for a, b in zip(found, base, strict=True)])
            rows.append(row)
            entrant.close()
    return [{"set": name, **row} for row in rows]


def figures(rows: Sequence[Row]) -> Mapping[str, float | None]:
    """Return the figures: ratios on the real set where it is there, waste on the set the claim names."""

    def ratio(data: str, loader: str, shuffle: str) -> float | None:
        for row in rows:
            values = row.get("vs_lerobot")
            if (row["set"], row["loader"], row.get("shuffle")) == (data, loader, shuffle) and isinstance(
                values, dict
            ):
                return float(values["median"])
        return None

    def waste(data: str, shuffle: str) -> float | None:
        found = [
            r for r in rows if (r["set"], r["loader"], r.get("shuffle")) == (data, "loongforge-data", shuffle)
        ]
        value = found[0]["decoded_per_used"] if found else None
        return float(value) if isinstance(value, float) else None

    sets = [str(name) for name in dict.fromkeys(row["set"] for row in rows)]
    main = sets[0]
    result_: dict[str, float | None] = {
        "vs_lerobot_exact": ratio(main, "loongforge-data", "full"),
        "vs_lerobot_block": ratio(main, "loongforge-data", "block"),
        "vs_lerobot_cached": ratio(main, "loongforge-data cached", "full"),
        "lerobot_torchcodec_vs_pyav": ratio(main, "lerobot-torchcodec", "full"),
        "decode_waste_exact": waste("g1_pick_v30", "full"),
        "decode_waste_block": waste("h264_g30_two_cameras", "block"),
    }
    for name in sets[1:]:
        for kind, loader, shuffle in (
            ("exact", "loongforge-data", "full"),
            ("block", "loongforge-data", "block"),
            ("cached", "loongforge-data cached", "full"),
        ):
            result_[f"vs_lerobot_{kind}_{name}"] = ratio(name, loader, shuffle)
    shares = [row["data_wait_share"] for row in rows if isinstance(row.get("data_wait_share"), dict)]
    result_["data_wait_share"] = (
        statistics.median(s["median"] for s in shares if isinstance(s, dict)) if shares else None
    )
    for row in rows:
        memory, files = row.get("uss_mib"), row.get("open_files")
        if isinstance(memory, list) and isinstance(files, list):
            # The first epoch against the last: growth per epoch would show here twenty times over.
            result_["memory_last_epoch_over_first"] = memory[-1] / memory[0]
            result_["open_files_most"] = max(files)
    return result_


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--rivals", action="store_true", help="also measure other loaders")
    arguments.add_argument(
        "--rivals-only", nargs="*", choices=RIVALS, default=RIVALS, help="of the others, these"
    )
    arguments.add_argument("--sets", nargs="*", help="only these sets")
    arguments.add_argument("--skip-wait", action="store_true", help="leave out the fixed-step part")
    arguments.add_argument(
        "--rows-from", nargs="*", type=Path, default=[], help="add the rows of earlier parts"
    )
    options = arguments.parse_args()
    python, reason = None, "not asked for: use --rivals"
    if options.rivals:
        try:
            python = rival_python()
        except (RuntimeError, subprocess.CalledProcessError) as error:
            reason = str(error)
    rows: list[Row] = [row for path in options.rows_from for row in json.loads(path.read_text())["rows"]]
    with tempfile.TemporaryDirectory() as folder:
        sets = data_sets(Path(folder), options.sets, quick=options.quick)
        for name, root in sets.items() if options.sets != [] else ():
            rows += measure(
                name, root, quick=options.quick, python=python, reason=reason, rivals=options.rivals_only
            )
        if not options.skip_wait:
            first = next(iter(sets))
            rows.append({"set": first, **wait_share(sets[first], quick=options.quick)})
    outcome = result(
        "data_loader",
        rows=rows,
        figures=figures(rows),
        repetitions=2 if options.quick else 5,
        notes=["frames full size, uint8 (LeRobot: float32); batch 16; 2 worker processes or threads"],
    )
    finish(outcome, options.json)


if __name__ == "__main__":
    sys.exit(main())
