"""Command line: ``python -m loongforge_mem replay TRACE``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from loongforge_mem.trace import Trace, load_trace, policies, simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="loongforge-mem", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    replay = commands.add_parser("replay", help="place a recorded step under one or all policies")
    replay.add_argument("trace", help="trace (.json) or torch memory snapshot (.pickle)")
    replay.add_argument("--policy", choices=[*policies(), "all"], default="all")
    replay.add_argument("--repeats", type=int, default=5, help="timed runs (default 5)")
    options = parser.parse_args(arguments)
    try:
        return _replay(load_trace(options.trace), options.policy, options.repeats)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


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


if __name__ == "__main__":
    sys.exit(main())
