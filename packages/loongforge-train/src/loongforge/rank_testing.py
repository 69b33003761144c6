"""Runs a script on several ranks for tests: processes fork from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loongforge_comm.testing import free_port

PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "loongforge.session", "loongforge.testing"]


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """How one rank ended."""

    returncode: int
    stdout: str
    stderr: str


def run_ranks(
    script: str,
    arguments: Sequence[str] = (),
    *,
    folder: Path,
    ranks: int = 2,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[RankOutcome]:
    """Run Python source on ``ranks`` processes with torchrun's variables and wait for all.

    Args:
        script: Source, run as ``__main__``.
        arguments: ``sys.argv[1:]`` of each process.
        folder: Where the script and the outputs are put.
        ranks: Number of processes.
        timeout_s: Seconds after which processes that still run are killed (return code -9).
        env: Further environment variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"script_{time.monotonic_ns()}.py"
    path.write_text(script)
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes = []
    for rank in range(ranks):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            **(env or {}),
        }
        process = context.Process(target=_child, args=(str(path), list(arguments), variables, rank))
        process.start()
        processes.append(process)
    deadline = time.monotonic() + timeout_s
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(10)
        outcomes.append(
            RankOutcome(
                returncode=process.exitcode if process.exitcode is not None else -9,
                stdout=_read(path.with_suffix(f".{rank}.out")),
                stderr=_read(path.with_suffix(f".{rank}.err")),
            )
        )
    return outcomes


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _child(path: str, arguments: list[str], variables: dict[str, str], rank: int) -> None:
    os.environ.update(variables)
    # The server hands its own start method down; loader workers of the script start as anywhere.
    multiprocessing.set_start_method("fork", force=True)
    script = Path(path)
    for number, suffix in ((1, "out"), (2, "err")):
        descriptor = os.open(script.with_suffix(f".{rank}.{suffix}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv = [path, *arguments]
    code = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
