"""Two GPUs with NCCL against stock DDP: correctness, speed, link, graphs, lost ranks, slow link, model error.

Each section runs in two processes of its own with its own time limit; the JSON is written after every
section, and inside a section after every part, so that a failure or a limit loses one part only. NVLink
multicast stays off. ``--backend gloo`` is a dry run on CPUs with small models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

import _common
import torch
import torch.distributed as dist
from _two_gpu_sections import SECTIONS, Part
from _two_gpu_slow_link import RATES, limited_loopback
from loongforge_comm.testing import free_port

LIMITS_S = {"main": 120, "full": 230, "kill": 40, "stop": 40, "algorithms": 40, "sockets": 60, "slow": 80}
SPEED_KEYS = ("vs_default", "vs_best", "vs_find_unused", "vs_static_graph", "overlap", "overlap_by_events")
ONE_RANK = ("kill", "stop")
"""Sections whose second rank never ends by itself."""


def worker(options: argparse.Namespace) -> None:
    """One rank of one section."""
    warnings.filterwarnings("ignore")
    rank = options.rank
    store = dist.TCPStore("127.0.0.1", options.port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    if options.backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        options.backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    SECTIONS[options.section](Part(Path(options.out), writes=rank == 0), options)
    os._exit(0)


def environment(section: str) -> dict[str, str]:
    """Variables of a section's ranks."""
    result = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", **os.environ}
    if section == "algorithms":
        result |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING,COLL,INIT"}
    if section in ("sockets", "slow"):
        result |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
        result |= {"GLOO_SOCKET_IFNAME": "lo"}
    if section in ONE_RANK:
        result |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    return result


def launch(section: str, options: argparse.Namespace, out: Path, limit_s: float) -> list[int | None]:
    """Start both ranks, end them at the limit; exit codes of those waited for, ``None`` past the limit."""
    port = free_port()
    variables = environment(section)
    processes = []
    for rank in range(2):
        command = [sys.executable, __file__, "--worker", "--section", section, "--rank", str(rank)]
        command += ["--port", str(port), "--backend", options.backend, "--out", str(out)]
        command += ["--quick"] if options.quick else []
        log = {"NCCL_DEBUG_FILE": str(out.parent / f"nccl{rank}.txt")} if section == "algorithms" else {}
        processes.append(subprocess.Popen(command, env={**variables, **log}))
    deadline = time.monotonic() + limit_s
    codes: list[int | None] = []
    for process in processes[:1] if section in ONE_RANK else processes:
        try:
            codes.append(process.wait(max(1.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in processes:
        process.kill()
        process.wait()
    return codes


def run_section(section: str, options: argparse.Namespace, limit_s: float) -> dict[str, object]:
    """One section: its exit codes and what its first rank wrote; ``slow`` runs behind a limited loopback."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        about: dict[str, object] = {}
        if section == "slow":
            about["rate"] = RATES[options.backend]
            prefix, about["skipped"] = limited_loopback(RATES[options.backend])
            if not prefix:
                return about | {"exit_codes": [], "seconds": 0.0, "parts": {}}
            command = [*prefix, sys.executable, __file__, "--launch", "--section", section]
            command += ["--backend", options.backend, "--out", str(out), "--budget-s", str(limit_s)]
            command += ["--quick"] if options.quick else []
            done = subprocess.run(command, check=False, timeout=limit_s + 30)
            codes: list[int | None] = [done.returncode]
        else:
            codes = launch(section, options, out, limit_s)
        found = json.loads(out.read_text()) if out.is_file() else {}
    return about | {"exit_codes": codes, "seconds": time.monotonic() - begin, "parts": found}


def figures(sections: dict[str, dict[str, object]]) -> dict[str, object]:
    """Flat figures from whatever sections succeeded."""

    def result(section: str, part: str) -> dict[str, object]:
        entry = sections.get(section, {}).get("parts", {}).get(part, {})
        value = entry.get("result") if isinstance(entry, dict) else None
        return value if isinstance(value, dict) else {}

    flat: dict[str, object] = {}
    for kind in ("fp32", "bf16"):
        gaps = [v for v in result("main", f"correctness_{kind}").values() if isinstance(v, float)]
        flat[f"largest_gap_{kind}"] = max(gaps) if gaps else None
    flat["largest_gap_full_bf16"] = result("full", "correctness").get("largest_gap")
    for name in ("accumulation_1", "accumulation_4", "gpu_bound_1", "gpu_bound_4"):
        for key in (*SPEED_KEYS, "exposed_ms", "model_error"):
            flat[f"{name}_{key}"] = result("full", name).get(key)
    for name in ("sockets", "slow"):
        for key in (*SPEED_KEYS, "model_error"):
            flat[f"{name}_{key}"] = result(name, name).get(key)
    for kind in ONE_RANK:
        flat[f"{kind}_named"] = result(kind, kind).get("named")
        flat[f"{kind}_s"] = result(kind, kind).get("s")
    for key, value in result("main", "graph_replay").items():
        flat[f"graph_{key}"] = value
    return flat


def passes(sections: dict[str, dict[str, object]]) -> int:
    """Most passes of a speed part; each part's own number stands in its result."""
    results = [
        entry["result"] for outcome in sections.values() for entry in outcome.get("parts", {}).values()
    ]
    return max((r.get("passes", 1) for r in results if isinstance(r, dict)), default=1)


def rows_of(section: str, outcome: dict[str, object]) -> list[dict[str, object]]:
    """One row per part, or one that says why there is none."""
    if not outcome["parts"]:
        reason = outcome.get("skipped") or f"no result, exit codes {outcome['exit_codes']}"
        return [{"section": section, "part": "-", "state": "skipped", "result": reason}]
    rows = []
    for part, entry in outcome["parts"].items():
        failed = isinstance(entry["result"], dict) and "error" in entry["result"]
        row = {"section": section, "part": part, "state": "failed" if failed else "ok"}
        rows.append(row | {"seconds": entry["seconds"], "result": _short(entry["result"])})
    if section not in ONE_RANK and any(code != 0 for code in outcome["exit_codes"]):
        reason = f"ended at the limit or by an error, exit codes {outcome['exit_codes']}"
        rows.append({"section": section, "part": "the rest", "state": "lost", "result": reason})
    return rows


def _short(value: object) -> str:
    if isinstance(value, dict):
        long = ("plan", "stats", "times_ms", "link", "sample", "groups", *SPEED_KEYS, "overlaps_by_events")
        value = {k: v for k, v in value.items() if k not in long}
    return json.dumps(value)[:1200]


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = _common.parser(__doc__)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument(
        "--sections", default=",".join(LIMITS_S), help="comma-separated, most important first"
    )
    parser.add_argument("--budget-s", type=float, default=500.0, help="seconds for everything")
    for name in ("worker", "launch"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    for name in ("rank", "port"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    for name in ("section", "out"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the sections within the budget, write after each, print the table last."""
    options = arguments()
    if options.worker:
        worker(options)
        return
    if options.launch:
        codes = launch(options.section, options, Path(options.out), options.budget_s)
        sys.exit(any(codes))
    begin = time.monotonic()
    sections: dict[str, dict[str, object]] = {}
    rows: list[dict[str, object]] = []
    outcome: dict[str, object] = {}
    for section in options.sections.split(","):
        left = options.budget_s - (time.monotonic() - begin)
        if left < 15:
            rows.append({"section": section, "part": "-", "state": "no time left"})
        else:
            sections[section] = run_section(section, options, min(LIMITS_S[section], left))
            rows += rows_of(section, sections[section])
        outcome = _common.result(
            "two_gpu", rows=rows, figures=figures(sections), repetitions=passes(sections)
        )
        outcome["sections"] = sections
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    _common.finish({k: v for k, v in outcome.items() if k != "sections"}, None)


if __name__ == "__main__":
    main()
