"""Samples per second of the loader against others, first epoch and cached, and what decoding it wastes.

Batch 16, 2 workers, full-size uint8 frames, 16-step action window, whole epochs including the first batch,
workers already running. ``--rivals`` measures LeRobot 0.4.4 (both backends), SPDL, torchcodec and plain
PyAV in an environment of their own, made with uv in $LOONGFORGE_RIVAL_ENV (default:
~/.cache/loongforge/rivals); without it those rows are skipped with a reason. Ratios compare medians of one
run on one machine.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from _common import finish, parser, result, spread
from loongforge_data.dataset import open_dataset
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.synthetic import write_dataset

BATCH, WORKERS = 16, 2
RIVALS = ("lerobot-pyav", "lerobot-torchcodec", "torchcodec", "spdl", "pyav")
RIVAL_PACKAGES = ("lerobot==0.4.4", "torch==2.10.*", "spdl==0.8.0", "spdl-io==0.8.0")
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


def ours(root: Path, *, shuffle: str, repetitions: int, cache: Path | None = None) -> Row:
    """Measure epochs of the loader; the cached figure leaves out the epoch that fills the cache."""
    import torch

    torch.set_num_threads(1)
    dataset = open_dataset(root, window={"action": range(16)})
    loader: ADFEDataLoader = ADFEDataLoader(
        dataset, BATCH, WORKERS, shuffle=shuffle, cache=cache, persistent_workers=True
    )
    for number, _ in enumerate(loader):
        if cache is None and number == 3:
            break
    loader.set_epoch(1)
    before = loader.stats()
    rates = []
    for _ in range(repetitions):
        start = time.perf_counter()
        count = sum(len(batch["index"]) for batch in loader)
        rates.append(count / (time.perf_counter() - start))
    after = loader.stats()
    loader.close()
    change = {k: _number(after[k]) - _number(before[k]) for k in ("decoded_frames", "used_frames")}
    used = change["used_frames"]
    return {
        "loader": "loongforge-data" + (" cached" if cache else ""),
        "shuffle": shuffle,
        "samples_per_s": spread(rates),
        "decoded_per_used": change["decoded_frames"] / used if used else None,
        "slots": after["queue_slots"],
        "restarts": after["worker_restarts"],
    }


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def decode_floor(root: Path, *, repetitions: int) -> Row:
    """Measure decoding alone: random frames of the first file by one thread, nothing converted or moved."""
    import random

    from loongforge_data.video import VideoFile

    path = sorted(root.glob("videos/**/*.mp4"))[0]
    rates = []
    with VideoFile(path) as video:
        number = random.Random(0)
        for _ in range(repetitions):
            wanted = [number.randrange(len(video)) for _ in range(200)]
            start = time.perf_counter()
            for index in wanted:
                for _ in video.decode([index]):
                    pass
            rates.append(len(wanted) / (time.perf_counter() - start))
    return {"loader": "decode only, one thread", "shuffle": "full", "samples_per_s": spread(rates)}


def rival(python: Path, kind: str, root: Path, *, repetitions: int, batches: int) -> Row:
    """Measure another loader in its environment."""
    libraries = python.parent.parent / "ffmpeg"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    script = Path(__file__).with_name("_data_rivals.py")
    command = [
        str(python),
        str(script),
        kind,
        str(root),
        "--repetitions",
        str(repetitions),
        "--batches",
        str(batches),
    ]
    row: Row = {"loader": kind, "shuffle": "full"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
        if done.returncode or not last.startswith("{"):
            return {**row, "skipped": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
        return {**row, "samples_per_s": spread(json.loads(last)["rates"])}
    except subprocess.TimeoutExpired:
        return {**row, "skipped": "took more than 600 s"}


def rival_python() -> Path:
    """Make the rivals' environment if it is absent and return its interpreter."""
    folder = Path(os.environ.get("LOONGFORGE_RIVAL_ENV", Path.home() / ".cache" / "loongforge" / "rivals"))
    python = folder / "bin" / "python"
    if not python.exists():
        uv = shutil.which("uv")
        if uv is None:
            msg = "uv is not installed, so the rivals' environment cannot be made"
            raise RuntimeError(msg)
        subprocess.run([uv, "venv", "--python", "3.11", str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "--python", str(python), *RIVAL_PACKAGES], check=True)
    _link_ffmpeg(folder)
    return python


def _link_ffmpeg(folder: Path) -> None:
    """Give torchcodec the FFmpeg libraries that PyAV's wheel brings, under the names it looks for."""
    target = folder / "ffmpeg"
    target.mkdir(exist_ok=True)
    for library in folder.glob("lib/python*/site-packages/av.libs/*"):
        stem, _, version = library.name.partition(".so.")
        plain = f"{stem.split('-')[0]}.so.{version.split('.')[0]}"
        for name in (library.name, plain):
            if not (target / name).exists():
                (target / name).symlink_to(library.resolve())


def wait_share(root: Path, *, quick: bool) -> Row:
    """Measure the wait with a consumer that works a fixed time for which supply suffices; also memory and
    files.
    """
    dataset = open_dataset(root, window={"action": range(16)})
    loader: ADFEDataLoader = ADFEDataLoader(dataset, BATCH, WORKERS, shuffle="full", persistent_workers=True)
    list(loader)
    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    memory, files, shares = [], [], []
    for _ in range(3 if quick else 20):
        before, start = _number(loader.stats()["data_wait_ms"]), time.perf_counter()
        for _ in loader:
            time.sleep(0.04)
        wall = 1e3 * (time.perf_counter() - start)
        shares.append((_number(loader.stats()["data_wait_ms"]) - before) / wall)
        memory.append(sum(p.memory_full_info().uss for p in family if p.is_running()) / 2**20)
        files.append(max(p.num_fds() for p in family if p.is_running()))
    loader.close()
    return {
        "loader": "loongforge-data, 40 ms steps",
        "shuffle": "full",
        "data_wait_share": spread(shares),
        "uss_mib_first": memory[0],
        "uss_mib_last": memory[-1],
        "open_files_most": max(files),
        "epochs": len(shares),
    }


def measure(
    name: str, root: Path, *, quick: bool, python: Path | None, reason: str, rivals: Sequence[str]
) -> list[Row]:
    """Measure everything on one set."""
    repetitions, batches = (2, 10) if quick else (5, 12)
    rows: list[Row] = [decode_floor(root, repetitions=repetitions)]
    rows += [
        {"loader": kind, "skipped": reason}
        if python is None
        else rival(python, kind, root, repetitions=repetitions, batches=batches)
        for kind in rivals
    ]
    rows += [ours(root, shuffle=kind, repetitions=repetitions) for kind in ("full", "block")]
    with tempfile.TemporaryDirectory() as cache:
        rows.append(ours(root, shuffle="full", repetitions=repetitions, cache=Path(cache)))
    return [{"set": name, **row} for row in rows]


def figures(rows: Sequence[Row]) -> Mapping[str, float | None]:
    """Return the figures: ratios on the real set where it is there, waste on the set the claim names."""

    def median(data: str, loader: str, shuffle: str) -> float | None:
        for row in rows:
            values = row.get("samples_per_s")
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

    def against(data: str, loader: str, shuffle: str, other: str) -> float | None:
        mine, theirs = median(data, loader, shuffle), median(data, other, "full")
        return mine / theirs if mine and theirs else None

    sets = [str(name) for name in dict.fromkeys(row["set"] for row in rows)]
    main = sets[0]
    result_: dict[str, float | None] = {
        "vs_lerobot_exact": against(main, "loongforge-data", "full", "lerobot-pyav"),
        "vs_lerobot_block": against(main, "loongforge-data", "block", "lerobot-pyav"),
        "vs_lerobot_cached": against(main, "loongforge-data cached", "full", "lerobot-pyav"),
        "vs_lerobot_torchcodec_exact": against(main, "loongforge-data", "full", "lerobot-torchcodec"),
        "decode_waste_exact": waste("g1_pick_v30", "full"),
        "decode_waste_block": waste("h264_g30_two_cameras", "block"),
    }
    for name in sets[1:]:
        for kind, loader, shuffle in (
            ("exact", "loongforge-data", "full"),
            ("block", "loongforge-data", "block"),
            ("cached", "loongforge-data cached", "full"),
        ):
            result_[f"vs_lerobot_{kind}_{name}"] = against(name, loader, shuffle, "lerobot-pyav")
    shares = [row["data_wait_share"] for row in rows if isinstance(row.get("data_wait_share"), dict)]
    result_["data_wait_share"] = (
        statistics.median(s["median"] for s in shares if isinstance(s, dict)) if shares else None
    )
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
    # A full run takes some minutes; on a shared machine it can be taken in parts (--sets, --skip-wait,
    # --rows-from).
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
