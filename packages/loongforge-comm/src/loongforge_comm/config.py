"""Configuration of the gradient scheduler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

Strategy = Literal["hybrid", "simple"]
Mode = Literal["hooks", "simple", "plan-only"]
Compression = Literal["off", "bf16"]
BufferPolicy = Literal["forward", "off"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Settings of :class:`loongforge_comm.GradientScheduler`; every rank must use equal values."""

    strategy: Strategy = "hybrid"
    """``hybrid``: planned buckets, an algorithm for each. ``simple``: uniform buckets, the backend's ring."""
    mode: Mode = "hooks"
    """``hooks``: own buckets beside backward. ``simple``: plain all-reduce after backward. ``plan-only``: the
    plan drives stock ``DistributedDataParallel``, whose buckets stay as they are; call ``scheduler.module``
    instead of the model."""
    rebuild_interval: int = 5000
    """Optimizer steps between plan rebuilds from measured ready times; 0 never rebuilds."""
    warmup_steps: int = 3
    """Synchronised steps measured before the first rebuild; 0 keeps the first plan until
    ``rebuild_interval``."""
    timeout_s: float = 600.0
    """Seconds a bucket may take before the step fails with the silent rank's name."""
    agree_timeout_s: float = 60.0
    """Seconds to wait for the other ranks at an agreement (start, rebuild, switch)."""
    heartbeat_interval_s: float = 1.0
    """Seconds between heartbeats of the background thread; 0 starts no thread."""
    heartbeat_timeout_s: float = 10.0
    """Seconds without a heartbeat after which a rank counts as silent."""
    device_times_every: int = 10
    """On CUDA one synchronised backward of so many is timed by events (microseconds per bucket), and every
    one while the plan is being learned; 0: only then."""
    heartbeat_every: int = 100
    """Optimizer steps between exchanges of per-rank timings (who is waited for); 0 never."""
    compress: Compression = "off"
    """``bf16`` sends float32 buckets as bfloat16 (relative error up to 2^-8 per addend); ``off`` loses
    nothing."""
    simple_bucket_mib: float = 25.0
    """Bucket size in MiB of strategy ``simple``."""
    max_bucket_mib: float | None = None
    """Largest bucket in MiB; larger tensors are split. ``None``: no limit, tensors stay whole."""
    local_parameters: Collection[str] = ()
    """Glob patterns of parameters that stay per rank: neither broadcast nor averaged."""
    group_overrides: Path | None = None
    """YAML file that names groups and strategies by parameter pattern (``mdg_config``)."""
    buffers: BufferPolicy = "forward"
    """``forward``: rank 0's module buffers are broadcast before each synchronised forward, as stock DDP does.
    ``off``: only at start and in ``sync_buffers()``."""
    find_unused_parameters: bool = False
    """Passed to stock DDP in mode ``plan-only``; the other modes never need it."""
    broadcast_initial: bool = True
    """Broadcast parameters and buffers of rank 0 at start, frozen ones too."""
    link_budget_s: float = 1.5
    """Seconds spent measuring the link when no link model or plan is given."""
    link_cache: Path | None = None
    """Folder where measured link models are kept, one file per topology fingerprint. ``None``: no file."""
    status_path: Path | None = None
    """File that rank 0 rewrites at most once a second for ``python -m loongforge_comm monitor``; in mode
    ``plan-only`` it also turns the timing of buckets on. ``None``: no file."""
    nccl_algorithms: bool = False
    """Give tree and ring buckets NCCL communicators of their own with a forced algorithm (memory each)."""
    allow_single_rank: bool = False
    """Stay active on a group of one rank (tests, graph capture); otherwise such a scheduler does nothing."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("strategy", Strategy),
            ("mode", Mode),
            ("compress", Compression),
            ("buffers", BufferPolicy),
        ):
            _one_of(name, getattr(self, name), get_args(kind))
        for name in ("rebuild_interval", "warmup_steps", "device_times_every", "heartbeat_every"):
            if getattr(self, name) < 0:
                msg = f"{name} is {getattr(self, name)}, allowed are whole numbers >= 0 (0 turns it off)"
                raise ValueError(msg)
        for name in ("timeout_s", "agree_timeout_s", "heartbeat_timeout_s", "simple_bucket_mib"):
            if not getattr(self, name) > 0:
                msg = f"{name} is {getattr(self, name)}, allowed are values > 0"
                raise ValueError(msg)
        if self.max_bucket_mib is not None and not self.max_bucket_mib > 0:
            msg = f"max_bucket_mib is {self.max_bucket_mib}, allowed are values > 0, or None for no limit"
            raise ValueError(msg)
        if self.heartbeat_interval_s < 0 or self.heartbeat_interval_s * 2 > self.heartbeat_timeout_s:
            msg = (
                f"heartbeat_interval_s is {self.heartbeat_interval_s} with heartbeat_timeout_s "
                f"{self.heartbeat_timeout_s}, allowed are 0 (off) up to half the timeout; raise the timeout"
            )
            raise ValueError(msg)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        msg = f"{name} is {value!r}, allowed are {', '.join(map(repr, allowed))}"
        raise ValueError(msg)


def agreed_settings(config: SchedulerConfig) -> dict[str, str]:
    """What must be equal on all ranks: everything but local paths."""
    return {k: str(v) for k, v in asdict(config).items() if k not in ("status_path", "link_cache")}


def check_strategy(name: str) -> None:
    """ValueError unless ``name`` is a scheduler strategy."""
    _one_of("strategy", name, get_args(Strategy))
