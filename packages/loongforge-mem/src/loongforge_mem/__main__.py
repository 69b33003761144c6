"""Command line: ``loongforge-mem replay|report|selfcheck``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from loongforge_mem.report import analyse, draw_timeline
from loongforge_mem.snapshot import load_snapshot
from loongforge_mem.trace import Trace, load_trace, policies, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 a check failed, 2 bad input."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "selfcheck":
            return _selfcheck(options.only, quick=options.quick)
        trace = load_any(options.trace, device=options.device)
        if options.command == "replay":
            return _replay(trace, options.policy, options.repeats)
        report = analyse(trace, top=options.top)
        sys.stdout.write(report.text() + "\n")
        if options.png:
            draw_timeline(report, options.png)
    except (OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def load_any(path: str | Path, *, device: int | None = None) -> Trace:
    """Read one of our traces (JSON) or a torch memory snapshot (pickle), told apart by the first byte."""
    with Path(path).open("rb") as file:
        first = file.read(1)
    return load_trace(path) if first in (b"{", b" ", b"\n") else load_snapshot(path, device=device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loongforge-mem", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("replay", "place a recorded step under one or all policies"),
        ("report", "peak, holders, fragmentation and advice for a recorded step"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("trace", help="trace (.json) or torch memory snapshot (.pickle)")
        command.add_argument("--device", type=int, help="device of a snapshot (default: the busiest)")
        if name == "replay":
            command.add_argument("--policy", choices=[*policies(), "all"], default="all")
            command.add_argument("--repeats", type=int, default=5, help="timed runs (default 5)")
        else:
            command.add_argument("--png", metavar="FILE", help="draw the timeline of live memory")
            command.add_argument("--top", type=int, default=10, help="holders to list (default 10)")
    check = commands.add_parser("selfcheck", help="check the allocator on this machine's GPU")
    check.add_argument("--quick", action="store_true", help="fewer rounds")
    check.add_argument("--only", default="", help="comma-separated names of checks")
    return parser


def _replay(trace: Trace, policy: str, repeats: int) -> int:
    chosen = policies() if policy == "all" else [policy]
    head = f"{'policy':<14} {'high water':>12} {'reserve':>8} {'internal':>8} {'external':>8} {'p99 pair':>9}"
    sys.stdout.write(f"{trace.num_allocations} allocations. {trace.source}\n{head}\n")
    for name in chosen:
        r = simulate(trace, name, repeats=repeats)
        sys.stdout.write(
            f"{name:<14} {int(r['high_water_bytes']) / 2**20:>8.1f} MiB {float(r['reserve_overhead']):>8.2%} "
            f"{float(r['internal_waste']):>8.2%} {float(r['external_fragmentation']):>8.2%} "
            f"{r['pair_p99_ns']:>6} ns\n"
        )
    return 0


def _selfcheck(only: str, *, quick: bool) -> int:
    from loongforge_mem import selfcheck

    wanted = [x for x in only.split(",") if x] or list(selfcheck.CHECKS)
    unknown = [x for x in wanted if x not in selfcheck.CHECKS]
    if unknown:
        msg = f"checks {unknown} are unknown; allowed: {list(selfcheck.CHECKS)}"
        raise ValueError(msg)
    script = (
        "import json, sys; from loongforge_mem import selfcheck as s; "
        f"print(json.dumps(s.CHECKS[sys.argv[1]](ours=True, quick={quick})))"
    )
    failed = 0
    for name in wanted:
        done = subprocess.run(
            [sys.executable, "-c", script, name], capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            sys.stdout.write(f"{name:<10} failed   {reason}\n")
            failed += 1
            continue
        out = json.loads(done.stdout.splitlines()[-1])
        good = selfcheck.passed(name, out)
        failed += not good
        sys.stdout.write(f"{name:<10} {'passed' if good else 'failed'}   {out}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
