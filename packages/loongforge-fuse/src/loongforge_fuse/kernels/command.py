"""``python -m loongforge_fuse kernels build|list|check|tune``: compile, show, gate, choose by measurement.

Only ``tune`` needs a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from loongforge_fuse.kernels import store
from loongforge_fuse.kernels.catalog import (
    FAMILIES,
    MAX_FRAME_ELSEWHERE,
    MAX_REGISTERS,
    REGISTERS,
    TUNED_FOR,
    catalog,
)
from loongforge_fuse.kernels.compiler import CompiledKernel, KernelCompileError, compile_kernel
from loongforge_fuse.kernels.specs import ARCHITECTURES, KernelSpec


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``kernels`` command to a command line."""
    parser = commands.add_parser("kernels", help="compile, list, check and tune the CUDA kernels")
    parser.add_argument("action", choices=("build", "list", "check", "tune"))
    parser.add_argument(
        "--arch", action="append", help=f"such as sm_90; repeatable; default: {', '.join(ARCHITECTURES)}"
    )
    parser.add_argument("--family", choices=tuple(FAMILIES), help="only this family")
    parser.add_argument("--match", help="only kernels whose name contains this")
    parser.add_argument("--out", type=Path, help="build: directory for the cubins; default: the user cache")
    parser.add_argument("--jobs", type=int, default=1, help="compiler processes, default 1")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 when a kernel fails to compile or misses a gate."""
    if arguments.action == "tune":
        return _tune(arguments.match)
    specs = [s for s in catalog(arguments.family) if not arguments.match or arguments.match in s.name]
    chosen = arguments.arch or ARCHITECTURES
    tasks = [(spec, arch) for arch in chosen for spec in specs if spec.runs_on(arch)]
    folder = arguments.out or store.user_cache()
    kernels: list[CompiledKernel] = []
    failures = 0
    for spec, arch, outcome in _compiled(tasks, arguments.jobs):
        if isinstance(outcome, str):
            failures += 1
            _say(f"FAILED {arch} {spec.name}: {outcome}")
            continue
        problems = gate(outcome)
        failures += bool(problems)
        kernels.append(outcome)
        if arguments.action == "build":
            store.save(outcome, folder)
        if arguments.action == "list" or problems:
            _say(_line(outcome) + "".join(f"  PROBLEM: {p}" for p in problems))
    if arguments.action == "build":
        store.write_manifest(kernels, folder)
        size = sum(p.stat().st_size for p in folder.glob("*.cubin.z"))
        _say(f"{len(kernels)} kernels in {folder}, {size / 2**20:.1f} MiB")
    _say(f"{len(kernels)} compiled, {failures} with problems")
    return 1 if failures else 0


def _tune(match: str | None) -> int:
    import torch

    if not torch.cuda.is_available():
        _say("kernels tune measures on an NVIDIA GPU; there is none here")
        return 1
    from loongforge_fuse.autotune import Autotuner, Decision
    from loongforge_fuse.ops.tuning import Job, jobs, tune

    def show(job: Job, decision: Decision) -> None:
        micros = ", ".join(f"{way}: {decision.micros.get(way, float('inf')):.1f}" for way in job.ways)
        _say(f"{job.name}: {decision.winner}  (us for all buffers: {micros})")

    tuner = Autotuner()
    tune(tuner, [job for job in jobs() if not match or match in job.name], report=show)
    _say(f"decisions in {tuner.path}")
    return 0


def gate(kernel: CompiledKernel) -> list[str]:
    """Return what is wrong with a kernel's machine code, empty when nothing is."""
    report, problems = kernel.report, []
    if report.double_operations:
        problems.append(f"{report.double_operations} float64 operations")
    # Row plans are tuned for sm_90; elsewhere a small frame costs some speed and nothing else.
    if report.spill_bytes + report.stack_bytes > (0 if kernel.arch == TUNED_FOR else MAX_FRAME_ELSEWHERE):
        problems.append(f"{report.spill_bytes} bytes spilled, {report.stack_bytes} bytes of stack")
    # So do registers, as long as a block can be launched.
    fits = REGISTERS // kernel.spec.block // 8 * 8
    limit = min(fits, MAX_REGISTERS if kernel.arch == TUNED_FOR else 255)
    if report.registers > limit:
        problems.append(f"{report.registers} registers, limit {limit}")
    if kernel.spec.vector and not report.vector_loads + report.vector_stores:
        problems.append("no 16-byte access")
    return problems


def _outcome(task: tuple[KernelSpec, str]) -> tuple[KernelSpec, str, CompiledKernel | str]:
    spec, arch = task
    try:
        return spec, arch, compile_kernel(spec, arch)
    except KernelCompileError as error:
        return spec, arch, str(error)


def _compiled(
    tasks: list[tuple[KernelSpec, str]], jobs: int
) -> Iterator[tuple[KernelSpec, str, CompiledKernel | str]]:
    if jobs <= 1:
        yield from map(_outcome, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_outcome, tasks, chunksize=8)


def _line(kernel: CompiledKernel) -> str:
    report = kernel.report
    access = f"16-byte loads {report.vector_loads:2} stores {report.vector_stores:2}"
    return (
        f"{kernel.arch:7} {kernel.spec.name:104} registers {report.registers:3}  spill {report.spill_bytes}"
        f"  shared {report.shared_bytes:5}  {access}  {report.code_bytes} B"
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
