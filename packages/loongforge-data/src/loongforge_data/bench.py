"""``loongforge-data bench DIR``: how fast this data set loads here, and which stage limits it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from loongforge_data.dataset import open_dataset
from loongforge_data.errors import DataError
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.telemetry import Stat


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(list(argv))
    try:
        report = measure(options)
    except (DataError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    text = json.dumps(report, indent=1) if options.json else table(report)
    sys.stdout.write(text + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loongforge-data bench", description=__doc__)
    parser.add_argument("root", type=Path, help="data set directory")
    parser.add_argument("--batch-size", type=int, default=16, help="samples per batch (default: 16)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--shuffle", choices=("none", "full", "block"), default="full", help="default: full")
    parser.add_argument("--image-size", type=int, nargs=2, metavar=("H", "W"), help="resize pictures")
    parser.add_argument("--action-window", type=int, default=16, help="action steps per sample (default: 16)")
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="pause of the consumer per batch (default: 0)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="time to measure (default: 10)")
    parser.add_argument("--cache", type=Path, help="directory of a frame cache")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def measure(options: argparse.Namespace) -> dict[str, Stat]:
    """Load for the given time, over as many epochs as it takes; returns rates and the loader's statistics."""
    window = {"action": range(options.action_window)} if options.action_window > 0 else None
    dataset = open_dataset(
        options.root,
        window=window,
        image_size=None if options.image_size is None else (options.image_size[0], options.image_size[1]),
    )
    if len(dataset) == 0:
        msg = "the data set has no samples"
        raise DataError(msg, path=options.root)
    loader: ADFEDataLoader[dict[str, object]] = ADFEDataLoader(
        dataset,
        options.batch_size,
        options.workers,
        shuffle=options.shuffle,
        cache=options.cache,
        persistent_workers=True,
        infinite=True,
    )
    with loader:
        start = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        first = time.perf_counter()
        before = loader.stats()
        while time.perf_counter() - first < options.seconds:
            next(iterator)
            if options.step_ms > 0:
                time.sleep(options.step_ms / 1e3)
        wall = time.perf_counter() - first
        after = loader.stats()
    samples = _number(after["samples"]) - _number(before["samples"])
    return {
        "samples_per_s": samples / wall,
        "batches_per_s": (_number(after["batches"]) - _number(before["batches"])) / wall,
        "frames_per_s": (_number(after["used_frames"]) - _number(before["used_frames"])) / wall,
        "first_batch_ms": 1e3 * (first - start),
        "data_wait_share": (_number(after["data_wait_ms"]) - _number(before["data_wait_ms"])) / (1e3 * wall),
        "measured_s": wall,
        **after,
    }


def _number(value: Stat) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


_STAGES: Sequence[tuple[str, Sequence[str]]] = (
    ("rate", ("samples_per_s", "batches_per_s", "frames_per_s", "first_batch_ms", "measured_s")),
    ("L0 read ahead", ("readahead_bytes",)),
    ("L1 decode", ("decoded_frames", "used_frames", "decode_waste", "decode_ms", "convert_ms")),
    ("frame cache", ("cache_hits", "cache_misses", "cache_hit_rate")),
    (
        "workers",
        ("workers", "worker_busy", "worker_busy_ms", "worker_idle_ms", "worker_jobs", "worker_restarts"),
    ),
    (
        "ring",
        (
            "queue_slots",
            "slot_bytes",
            "slots_reason",
            "queue_ready_batches",
            "queue_filling_batches",
            "queue_slots_in_use",
            "queue_queued_jobs",
            "fill_ms_mean",
            "copied_batches",
        ),
    ),
    ("consumer", ("data_wait_ms", "data_wait_share", "step_ms_p95", "skipped_samples")),
)


def table(report: dict[str, Stat]) -> str:
    """Return the report as one table, by stage."""
    lines = []
    for stage, names in _STAGES:
        for name in names:
            lines.append((stage, name, _text(report.get(name))))
            stage = ""
    width = max(len(stage) for stage, _, _ in lines), max(len(name) for _, name, _ in lines)
    body = [f"{stage:<{width[0]}}  {name:<{width[1]}}  {value:>14}" for stage, name, value in lines]
    return "\n".join([*body, "", _verdict(report)])


def _text(value: Stat) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _verdict(report: dict[str, Stat]) -> str:
    share = _number(report.get("data_wait_share"))
    if share < 0.01:
        return "The consumer waits for data less than 1 % of the time: loading does not limit it."
    busy = _number(report.get("worker_busy"))
    if busy > 0.85:
        decode, convert = _number(report.get("decode_ms")), _number(report.get("convert_ms"))
        what = "decoding" if decode >= convert else "conversion"
        return (
            f"The consumer waits {share:.0%} of the time and workers are busy: {what} limits. More workers, "
            "shuffle='block', a smaller image_size or a frame cache help, in this order of effort."
        )
    return (
        f"The consumer waits {share:.0%} of the time while workers idle: more slots (slot_mb) or a larger "
        "prefetch_factor help."
    )
