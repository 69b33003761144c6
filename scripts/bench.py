"""Run every benchmark that needs no GPU, one after the other, and keep its JSON in benchmarks/results/cpu.

Usage: python scripts/bench.py [--quick] [NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_BENCHMARKS = (
    "data_convert",
    "data_loader",
    "data_kill",
    "mem_replay",
    "comm_plan",
    "comm_hooks",
    "comm_sim",
    "comm_netns",
    "mixed_resolution",
    "graph_cache",
    "loss_curves",
    "step_flops",
    "kernels_static",
    "groot_learning",
    "groot_work",
    "resume_chaos",
    "elastic",
    "overhead",
    "planted_bottlenecks",
)


def main() -> int:
    """Run the chosen benchmarks; return the number that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(CPU_BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="pass --quick on; results are not kept")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(CPU_BENCHMARKS))
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; allowed: {', '.join(CPU_BENCHMARKS)}")
    failed = []
    for name in args.names or CPU_BENCHMARKS:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py")]
        if args.quick:
            command.append("--quick")
        else:
            command += ["--json", str(ROOT / "benchmarks" / "results" / "cpu" / f"{name}.json")]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
