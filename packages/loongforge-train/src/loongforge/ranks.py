"""Ranks of a run and what they agree on before they act.

The process group is initialised only when torchrun's environment variables are there. Small agreements travel
over a CPU (Gloo) group of their own, so that they never wait for the GPU and never mix with gradient
collectives.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from loongforge.errors import AgreementError, ConfigError

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Watcher(Protocol):
    """What notices that another rank does not answer any more (``loongforge_comm.Membership``)."""

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for a collective on host memory, or raise when a rank is lost."""
        ...

    def commit(self) -> None:
        """Wait until the device has done what it was given, and raise when a rank was lost."""
        ...


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What one rank brings to the agreement at the start of a step."""

    micro_batches: int
    """Micro-batches this rank has for the window; 0 at the end of its epoch."""
    valid: float
    """Valid elements of the loss in the window; -1 when the model does not count them."""
    stop: bool = False
    """A signal asked this rank to stop."""
    failed: bool = False
    """This rank cannot go on."""
    command: int = 0
    """Code of a control command that must run on all ranks at the same step border."""
    step_ms: float = 0.0
    """Duration of this rank's last step."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The outcome of a vote, equal on all ranks."""

    micro_batches: int
    """Least number of any rank."""
    most: int
    """Largest number of any rank."""
    valid: float
    """Sum over the ranks; -1 when a rank does not count."""
    stop: bool
    failed: bool
    command: int
    slowest_rank: int
    stopping: tuple[int, ...] = ()
    """Ranks that a signal asked to stop."""


class Ranks:
    """This process among its peers.

    Args:
        rank: Number of this process, from 0.
        world_size: Number of processes.
        device: Device this process computes on.
        owns_group: The process group was initialised here and is destroyed by :meth:`close`.
        timeout_s: Limit of every agreement, seconds.
        members: Notices ranks that stop answering while this one waits, in a run that outlives them.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        owns_group: bool = False,
        timeout_s: float = 600.0,
        members: Watcher | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._owns_group = owns_group
        self._members = members
        self._votes: dist.ProcessGroup | None = None
        if world_size > 1:
            self._votes = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def agree(self, vote: Vote) -> Agreement:
        """Combine the votes of all ranks: least micro-batches, summed elements, any stop, highest command."""
        mine = [
            float(vote.micro_batches),
            vote.valid,
            float(vote.stop),
            float(vote.failed),
            float(vote.command),
            vote.step_ms,
        ]
        rows = self.gather(mine)
        counted = [row[1] for row in rows]
        return Agreement(
            micro_batches=int(min(row[0] for row in rows)),
            most=int(max(row[0] for row in rows)),
            valid=sum(counted) if min(counted) >= 0 else -1.0,
            stop=any(row[2] for row in rows),
            failed=any(row[3] for row in rows),
            command=int(max(row[4] for row in rows)),
            slowest_rank=max(range(len(rows)), key=lambda index: rows[index][5]),
            stopping=tuple(index for index, row in enumerate(rows) if row[2]),
        )

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the equally long value lists of all ranks, in rank order (one small Gloo all-gather)."""
        if self.world_size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._finish(dist.all_gather(rows, mine, group=self._votes, async_op=True), "a vote")
        return [row.tolist() for row in rows]

    def _finish(self, work: dist.Work | None, what: str) -> None:
        """Wait for a collective on host memory (None: on a device, whose stream waits); in an elastic run as
        long as everybody answers.
        """
        if work is None:
            return
        if self._members is None:
            work.wait()
        else:
            self._members.wait(work, what)

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on all ranks."""
        return self.gather_text(text if self.rank == 0 else "")[0]

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's bytes on all ranks."""
        if self.world_size == 1:
            return data
        size = int(self.gather([len(data)])[0][0])
        buffer = torch.frombuffer(bytearray(data if self.rank == 0 else size), dtype=torch.uint8)
        self._finish(dist.broadcast(buffer, 0, group=self._votes, async_op=True), "a broadcast")
        return buffer.numpy().tobytes()

    def broadcast(self, values: Tensor) -> None:
        """Overwrite ``values`` with rank 0's; on the ranks' device, or on the host of a GPU run."""
        if self.world_size == 1:
            return
        group = None if values.device.type == self.device.type else self._votes
        work = dist.broadcast(values, 0, group=group, async_op=not values.is_cuda)
        self._finish(work, "a broadcast")

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order."""
        if self.world_size == 1:
            return [text]
        raw = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8)
        sizes = [int(row[0]) for row in self.gather([raw.numel()])]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: raw.numel()] = raw
        rows = [torch.empty_like(mine) for _ in sizes]
        self._finish(dist.all_gather(rows, mine, group=self._votes, async_op=True), "an exchange of texts")
        parts = (row[: size - 1].numpy() for row, size in zip(rows, sizes, strict=True))
        return [part.tobytes().decode() for part in parts]

    def require_equal(self, what: str, text: str) -> None:
        """Fail on all ranks, naming the ranks that differ, unless ``text`` is equal everywhere."""
        texts = self.gather_text(text)
        differing = [index for index, other in enumerate(texts) if other != texts[0]]
        if differing:
            first = differing[0]
            message = (
                f"ranks disagree about {what}: rank 0 has {texts[0]!r}, rank {first} has {texts[first]!r} "
                f"(differing ranks: {differing}). Start all ranks with the same files and settings"
            )
            raise AgreementError(message)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over ranks on their device; nothing is sent on one rank."""
        if self.world_size > 1:
            on_host = not values.is_cuda
            work = dist.all_reduce(values, op=dist.ReduceOp.SUM, async_op=on_host)
            self._finish(work, "a sum")
        return values

    def commit(self) -> None:
        """Make sure that the collectives of this step have ended well, before weights are changed.

        Only in an elastic run, where a failed step is done again by those that are left: on a GPU a
        collective that was given up leaves half of a sum, and the host must wait to know.
        """
        if self._members is not None:
            self._members.commit()

    @property
    def votes(self) -> dist.ProcessGroup | None:
        """The Gloo group of all ranks for small host data; None on one rank."""
        return self._votes

    def host_group(self, *, timeout_s: float) -> dist.ProcessGroup:
        """Return a new Gloo group of all ranks, for collectives of another thread (a collective itself)."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def barrier(self) -> None:
        """Wait until all ranks are here (its own group and timeout, fault C21)."""
        if self.world_size > 1:
            self._finish(dist.barrier(group=self._votes, async_op=True), "a barrier")

    def close(self) -> None:
        """Destroy what was initialised here."""
        self._votes = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def join(device: str = "auto", *, timeout_s: float = 600.0) -> Ranks:
    """Find this process's rank and device; initialise torch.distributed under torchrun only.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        timeout_s: Limit of collectives and agreements, seconds.

    Raises:
        ConfigError: The device is not there, or torchrun's variables are incomplete.
    """
    chosen = choose_device(device)
    if dist.is_initialized():
        return Ranks(
            rank=dist.get_rank(), world_size=dist.get_world_size(), device=chosen, timeout_s=timeout_s
        )
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks(rank=0, world_size=1, device=chosen)
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        message = f"RANK is set but {', '.join(missing)} is not: start the ranks with torchrun, or unset RANK"
        raise ConfigError(message)
    prefer_loopback(os.environ["MASTER_ADDR"])
    dist.init_process_group(backend=backend_of(chosen), timeout=timedelta(seconds=timeout_s))
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=chosen,
        owns_group=True,
        timeout_s=timeout_s,
    )


def backend_of(device: torch.device) -> str:
    """Return the backend for gradients on a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def prefer_loopback(address: str) -> None:
    """Let Gloo talk over the loopback interface where all ranks are on this host.

    It resolves the host name otherwise, which fails on machines without a name service.
    """
    if address in {"127.0.0.1", "localhost"} and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def choose_device(device: str) -> torch.device:
    """Turn a device setting into a device, under torchrun the one of the local rank."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if device != "auto" and not device.startswith("cuda"):
        msg = f"device is {device!r}: allowed are auto, cpu, cuda, cuda:N"
        raise ConfigError(msg)
    if not torch.cuda.is_available():
        msg = f"device is {device!r} but torch sees no CUDA device: use --device cpu, or check the driver"
        raise ConfigError(msg)
    number = device.partition(":")[2]
    if device not in {"auto", "cuda"} and not number.isdecimal():
        msg = f"device is {device!r}: allowed are auto, cpu, cuda, cuda:N"
        raise ConfigError(msg)
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        message = (
            f"device cuda:{index} does not exist: torch sees {torch.cuda.device_count()}; "
            "use fewer ranks per host"
        )
        raise ConfigError(message)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
