"""Command line: `loongforge-data info | validate | preview | convert | synthesize | stats | bench`.

Data goes to stdout, remarks to stderr. Exit codes: 0 fine, 1 the data set has errors, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from loongforge_data.errors import DataError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:
        from loongforge_data.bench import main as bench

        return bench(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:
        return 0
    except (DataError, ValueError) as error:
        _remark(f"error: {error}")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loongforge-data", description="Look at, check and convert robot data sets."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = _command(commands, "info", "what a data set holds", _info)
    info.add_argument("--json", action="store_true", help="print JSON instead of text")
    check = _command(commands, "validate", "list every problem of a data set", _validate)
    check.add_argument("--decode", action="store_true", help="also decode every frame of every video")
    check.add_argument("--json", action="store_true", help="print one JSON object per problem")
    preview = _command(
        commands, "preview", "write a contact sheet and a plot of the actions as PNG", _preview
    )
    preview.add_argument(
        "--output", type=Path, default=Path(), help="directory for the pictures (default: .)"
    )
    preview.add_argument("--episode", type=int, help="episode index (default: the first)")
    preview.add_argument("--columns", type=int, default=8, help="frames per camera (default: 8)")
    convert = _command(commands, "convert", "write a v3.0 copy of a v2.0 or v2.1 data set", _convert)
    convert.add_argument("target", type=Path, help="directory to create")
    convert.add_argument(
        "--video-file-mb", type=float, default=200.0, help="size of video files (default: 200)"
    )
    convert.add_argument("--data-file-mb", type=float, default=100.0, help="size of tables (default: 100)")
    stats = _command(commands, "stats", "compute statistics of state and action from the data", _stats)
    stats.add_argument("--mask", action="store_true", help="leave values out that are not finite")
    stats.add_argument("--images", type=int, default=0, metavar="N", help="also N pictures per camera")
    stats.add_argument("--write", action="store_true", help="write meta/stats.json instead of printing")
    _add_synthesize(commands)
    commands.add_parser("bench", help="measure the loader stage by stage", add_help=False)
    return parser


def _command(commands, name, text, run) -> argparse.ArgumentParser:  # type: ignore[no-untyped-def] # noqa: ANN001
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text.capitalize() + "."
    )
    command.add_argument("dataset", type=Path, help="data set directory")
    command.set_defaults(run=run)
    return command


def _add_synthesize(commands) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
    make = _command(commands, "synthesize", "write a seeded toy data set of moving shapes", _synthesize)
    make.add_argument("--episodes", type=int, default=4, help="number of episodes (default: 4)")
    make.add_argument("--frames", type=int, default=60, help="frames per episode (default: 60)")
    make.add_argument("--cameras", type=int, default=2, help="number of cameras (default: 2)")
    make.add_argument("--size", type=int, nargs=2, default=(96, 96), metavar=("H", "W"), help="pixels")
    make.add_argument("--codec", default="h264", help="h264, hevc, av1, vp9 or mpeg4 (default: h264)")
    make.add_argument("--gop", type=int, default=2, help="frames from key frame to key frame (default: 2)")
    make.add_argument("--version", default="2.1", help="layout: 2.1 or 3.0 (default: 2.1)")
    make.add_argument("--seed", type=int, default=0, help="seed of the motion (default: 0)")
    make.add_argument("--fps", type=int, default=30, help="frames per second (default: 30)")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _remark(text: str) -> None:
    sys.stderr.write(text + "\n")


def _info(options: argparse.Namespace) -> int:
    from loongforge_data.dataset import open_dataset
    from loongforge_data.summary import as_text, summarize

    facts = summarize(open_dataset(options.dataset, on_mismatch="skip_episode"))
    _say(json.dumps(facts, indent=2, ensure_ascii=False) if options.json else as_text(facts))
    return 0


def _validate(options: argparse.Namespace) -> int:
    from loongforge_data.validate import validate_dataset

    report = validate_dataset(options.dataset, decode=options.decode)
    for finding in report.findings:
        _say(json.dumps(finding.as_dict(), ensure_ascii=False) if options.json else str(finding))
    errors, warnings = len(report.errors), len(report.findings) - len(report.errors)
    _remark(f"{errors} errors, {warnings} warnings")
    return 1 if errors else 0


def _preview(options: argparse.Namespace) -> int:
    from loongforge_data.preview import write_preview

    for path in write_preview(
        options.dataset, options.output, episode=options.episode, columns=options.columns
    ):
        _say(str(path))
    return 0


def _convert(options: argparse.Namespace) -> int:
    from loongforge_data.formats.upgrade import convert_to_v30

    done = convert_to_v30(
        options.dataset,
        options.target,
        video_file_mb=options.video_file_mb,
        data_file_mb=options.data_file_mb,
    )
    _say(
        f"{options.target}: {done.episodes} episodes, {done.frames} frames, {done.data_files} tables, "
        f"{done.video_files} videos"
    )
    return 0


def _stats(options: argparse.Namespace) -> int:
    from loongforge_data.dataset import open_dataset
    from loongforge_data.stats import image_stats, table_stats

    dataset = open_dataset(options.dataset, cameras=None if options.images else ())
    arrays = dataset.rows.arrays
    keys = [key for key, array in arrays.items() if array.dtype.kind == "f"]
    result = table_stats(arrays, keys, policy="mask" if options.mask else "raise")
    if options.images:
        result |= {key: image_stats(dataset, key, samples=options.images) for key in dataset.cameras}
    plain = {key: {n: v.tolist() for n, v in entry.items()} for key, entry in result.items()}
    text = json.dumps(plain, indent=1)
    if options.write:
        path = options.dataset / "meta" / "stats.json"
        partial = path.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(path)
        text = str(path)
    _say(text)
    return 0


def _synthesize(options: argparse.Namespace) -> int:
    from loongforge_data.synthetic import write_dataset

    path = write_dataset(
        options.dataset,
        episodes=options.episodes,
        frames=options.frames,
        cameras=options.cameras,
        size=tuple(options.size),
        codec=options.codec,
        gop=options.gop,
        version=options.version,
        seed=options.seed,
        fps=options.fps,
    )
    _say(str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
