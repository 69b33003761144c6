"""Helpers for tests: several ranks on one machine, each joined with a limit, and snapshots of graphs."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import multiprocessing
import os
import pickle
import secrets
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loongforge_comm.config import SchedulerConfig
from loongforge_comm.link import LinkModel
from loongforge_comm.mdg import ModuleDependencyGraph
from loongforge_comm.scheduler import GradientScheduler

T = TypeVar("T")


class RankError(AssertionError):
    """A rank failed, did not end in time, or gave no result; the message holds each rank's story."""


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that nobody listens on and no outgoing connection can take.

    A port that the system hands out lies in the range of outgoing connections: one of those (of a collective
    library that opens many, for example) may have it before the store listens. Ports below are asked for by
    number only.

    Raises:
        OSError: None of a hundred was free.
    """
    for _ in range(100):
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    message = "no free TCP port among 100 between 20000 and 32000 on 127.0.0.1"
    raise OSError(message)


def run_ranks(
    target: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float = 90.0,
    collective_timeout_s: float = 30.0,
    allow_dead: tuple[int, ...] = (),
    backend: str = "gloo",
) -> list[T | None]:
    """Run ``target(rank, world_size, *args)`` in spawned processes with an initialised group; return results
    by rank.

    Args:
        target: a function at the top level of a file.
        world_size: number of processes.
        args: picklable arguments.
        timeout_s: seconds until unfinished processes are killed and RankError is raised.
        collective_timeout_s: timeout of the default process group.
        allow_dead: ranks that may die or hang (they are killed at the end); their result is ``None``.
        backend: process group backend.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            context.Process(
                target=_enter,
                args=(
                    _address(target),
                    rank,
                    world_size,
                    port,
                    folder,
                    collective_timeout_s,
                    backend,
                    allow_dead,
                    args,
                ),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        waited_for = [p for rank, p in enumerate(processes) if rank not in allow_dead]
        for process in waited_for:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, p in enumerate(processes) if p.is_alive() and rank not in allow_dead]
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(10.0)
        results: list[T | None] = []
        story = [f"rank {rank} did not end within {timeout_s:g} s" for rank in late]
        for rank, process in enumerate(processes):
            file = Path(folder) / str(rank)
            kind, value = pickle.loads(file.read_bytes()) if file.is_file() else ("none", None)
            results.append(value if kind == "result" else None)
            if rank in allow_dead:
                continue
            if kind == "error":
                story.append(f"rank {rank} raised\n{value}")
            elif process.exitcode != 0 or kind == "none":
                story.append(f"rank {rank} ended with exit code {process.exitcode} and no result")
        if story:
            raise RankError("\n".join(story))
        return results


def _address(target: Callable[..., object]) -> tuple[str, str]:
    """File and name of a function: test modules are often not importable by name in a new process."""
    file = inspect.getsourcefile(target)
    if file is None or "." in target.__qualname__:
        msg = f"target is {target.__qualname__!r}, allowed are functions at the top level of a file"
        raise ValueError(msg)
    return file, target.__qualname__


def _load(address: tuple[str, str]) -> Callable[..., object]:
    file, name = address
    spec = importlib.util.spec_from_file_location(f"rank_program_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        msg = f"cannot load {file}"
        raise ImportError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function: Callable[..., object] = getattr(module, name)
    return function


def _enter(
    address: tuple[str, str],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    collective_timeout_s: float,
    backend: str,
    allow_dead: tuple[int, ...],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.TCPStore(
            "127.0.0.1", port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60)
        )
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=collective_timeout_s),
        )
        outcome = ("result", _load(address)(rank, world_size, *args))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    file = Path(folder) / str(rank)
    file.with_suffix(".tmp").write_bytes(pickle.dumps(outcome))
    file.with_suffix(".tmp").replace(file)
    if outcome[0] == "result":
        # Rank 0 hosts the store: it leaves last.
        others = [Path(folder) / str(other) for other in range(1, world_size) if other not in allow_dead]
        deadline = time.monotonic() + 20.0
        while rank == 0 and time.monotonic() < deadline and not all(f.is_file() for f in others):
            time.sleep(0.01)
        dist.destroy_process_group()
    os._exit(0 if outcome[0] == "result" else 1)


class Scenarios:
    """Small programs that share one pair of processes; each is reported as a test of its own.

    Decorate functions that take the rank, call :meth:`run` in the rank program, and look up each outcome by
    name.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Callable[[int], None]] = {}

    def __call__(self, function: Callable[[int], None]) -> Callable[[int], None]:
        """Register ``function``."""
        self._functions[function.__name__] = function
        return function

    @property
    def names(self) -> tuple[str, ...]:
        """Names in order of definition."""
        return tuple(self._functions)

    @staticmethod
    def check(name: str, outcomes: Sequence[dict[str, str] | None]) -> None:
        """AssertionError with each rank's story when the scenario failed on one."""
        for rank, outcome in enumerate(outcomes):
            story = "no outcome" if outcome is None else outcome[name]
            if story:
                msg = f"rank {rank}\n{story}"
                raise AssertionError(msg)

    def run(self, rank: int) -> dict[str, str]:
        """Run all; the text of each failure by name, empty for success."""
        outcome = {}
        for name, function in self._functions.items():
            try:
                function(rank)
                outcome[name] = ""
            except Exception:
                outcome[name] = traceback.format_exc()
        return outcome


def tanh_mlp(seed: int = 0, *, width: int = 8, depth: int = 4) -> nn.Sequential:
    """A small seeded network."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)])


def seeded_batch(rank: int, step: int, width: int = 8) -> Tensor:
    """Five rows that differ by rank and step."""
    return torch.randn(5, width, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    """Copies of all gradients, ``None`` where there is none."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def assert_same(
    left: Sequence[Tensor | None], right: Sequence[Tensor | None], tolerance: float = 0.0
) -> None:
    """Equal within an absolute and relative tolerance; ``None`` only equals ``None``."""
    if len(left) != len(right):
        msg = f"{len(left)} tensors against {len(right)}"
        raise AssertionError(msg)
    for position, (a, b) in enumerate(zip(left, right, strict=True)):
        if (a is None) != (b is None):
            msg = f"tensor {position}: one side has none"
            raise AssertionError(msg)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_equal_on_ranks(tensors: Sequence[Tensor | None]) -> None:
    """Every rank must hold equal tensors (collective call)."""
    first, *others = values_of_ranks(list(tensors))
    for other in others:
        assert_same(first, other)  # type: ignore[arg-type]


def quick_scheduler(model: nn.Module, **settings: object) -> GradientScheduler:
    """A scheduler for tests: a given link, no heartbeats, short limits, a rebuild after two steps."""
    base: dict[str, object] = {
        "heartbeat_interval_s": 0.0,
        "warmup_steps": 2,
        "timeout_s": 20.0,
        "agree_timeout_s": 20.0,
    }
    config = SchedulerConfig(**{**base, **settings})  # type: ignore[arg-type]
    return GradientScheduler(model, config=config, link=LinkModel.from_alpha_beta(0.01, 1.0))


def values_of_ranks(value: object) -> list[object]:
    """Every rank's value, in rank order."""
    out: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def assert_snapshot(path: Path, graph: ModuleDependencyGraph) -> None:
    """Compare the shape of ``graph`` with the file; ``REWRITE_GOLDEN=1`` in the environment writes it.

    Kept are modules with calls, gradient bytes, branch and output shapes, edges, gradient order and control
    flow; times and FLOPs are not.
    """
    data = json.loads(graph.to_json())
    view = {
        "run": [data["source"], data["run"]],
        "nodes": [
            [
                n["name"],
                n["type"],
                n["calls"],
                n["gradient_bytes"],
                n["branch"],
                [o["shape"] for o in n["outputs"]],
            ]
            for n in data["nodes"]
        ],
        "edges": [f"{e['source']} -> {e['target']}" for e in data["edges"]],
        "order": [g["name"] for g in data["gradients"]],
        "control_flow": [[c["module"], c["kind"], c["detail"]] for c in data["control_flow"]],
    }
    if os.environ.get("REWRITE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        parts = (f"{json.dumps(k)}: [\n" + ",\n".join(map(json.dumps, v)) + "\n]" for k, v in view.items())
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    if not path.is_file():
        msg = f"{path} is missing; write it with REWRITE_GOLDEN=1"
        raise AssertionError(msg)
    kept = json.loads(path.read_text())
    for key, value in view.items():
        if value != kept[key]:
            unlike = [(a, b) for a, b in zip(value, kept[key], strict=False) if a != b][:3]
            msg = f"{path.name}, {key}: {len(value)} now, {len(kept[key])} kept; first differences {unlike}"
            raise AssertionError(msg)


def start_rank(target: Callable[..., object], *args: object, **environment: str) -> BaseProcess:
    """Start ``target(*args)`` in a process of its own, forked from a server that has imported torch once.

    Args:
        target: a function at the top level of a file.
        args: picklable arguments.
        environment: variables of the process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "loongforge_comm.testing"])
    process = context.Process(target=_start, args=(_address(target), args, environment), daemon=True)
    process.start()
    return process


def _start(address: tuple[str, str], args: tuple[object, ...], environment: dict[str, str]) -> None:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environment})
    torch.set_num_threads(1)
    _load(address)(*args)
