"""Settings of the memory orchestrator."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
MIB = 1 << 20


class Mode(enum.StrEnum):
    """What the orchestrator may do."""

    OFF = "off"
    """Nothing: stock PyTorch."""
    ADVISOR = "advisor"
    """Watch, plan and report; change nothing."""
    POOL = "pool"
    """Persistent and Migratable tensors in a memory pool of their own; torch's statistics keep working."""
    GLOBAL = "global"
    """Every device tensor is placed by us; opt-in, decided before CUDA starts."""


class Label(enum.IntEnum):
    """How long a tensor lives and who may move it. The numbers are those of the native part."""

    EPHEMERAL = 0
    """Activations and temporaries: gone by the end of the step, placed by the plan."""
    PERSISTENT = 1
    """Weights and buffers: placed once, never moved."""
    MIGRATABLE = 2
    """Gradient and optimizer buffers: may move between device and host by phase."""

    @classmethod
    def parse(cls, value: str | Label) -> Label:
        """Return the label named ``value``; raises ValueError for an unknown name."""
        if isinstance(value, Label):
            return value
        try:
            return cls[value.upper()]
        except KeyError:
            allowed = ", ".join(repr(x.name.lower()) for x in cls)
            msg = f"label {value!r} is unknown; allowed: {allowed}"
            raise ValueError(msg) from None


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Settings of :class:`loongforge_mem.MemoryOrchestrator`.

    Attributes:
        mode: ``"advisor"`` (default), ``"pool"``, ``"global"`` or ``"off"``; see :class:`Mode`.
        pool_gb: GiB reserved in one block at the start; ``None`` (default) grows on demand.
        backend: where memory comes from. ``"auto"`` (default) is ``"cuda"`` where a GPU is usable and
            ``"host"`` elsewhere; ``"vmm"`` commits virtual memory chunk by chunk (no IPC, no NCCL
            registration).
        grow_mb: smallest growth in MiB (default 256); 0 never grows beyond ``pool_gb``.
        limit_gb: most GiB ever taken from the device; ``None`` (default) is no limit of our own.
        watch_steps: steps whose tensors are traced one by one in Python (default 1 in mode advisor). A traced
            step is several times slower than a normal one; later steps cost nothing. Mode global on the host
            traces every step, because nothing else tells it what is allocated; 0 turns that off.
        plan: ``"auto"`` (default) serves steps by run fit while that wastes little and by the plan of a
            profiled step otherwise: when it saves more than ``plan_above`` of what run fit holds, or anything
            at all while less than a twentieth of it could still be had. True always plans from the second
            step on, False never. ``placement`` in the statistics tells what was chosen,
            ``placement_reason`` why.
        plan_above: share in 0..1 of the memory held that a plan must save (default 0.03); ``"auto"`` only.
        timing: time every allocation and free of our allocator (default True, about 50 ns a call).
    """

    mode: Literal["advisor", "pool", "global", "off"] | Mode = "advisor"
    pool_gb: float | None = None
    backend: Literal["auto", "host", "cuda", "vmm"] = "auto"
    grow_mb: int = 256
    limit_gb: float | None = None
    watch_steps: int = 1
    plan: bool | Literal["auto"] = "auto"
    plan_above: float = 0.03
    timing: bool = True

    def __post_init__(self) -> None:
        allowed = [m.value for m in Mode]
        mode = self.mode.value if isinstance(self.mode, Mode) else self.mode
        if mode not in allowed:
            msg = f"mode is {self.mode!r}; allowed: {allowed}"
            raise ValueError(msg)
        object.__setattr__(self, "mode", Mode(mode))
        if self.backend not in ("auto", "host", "cuda", "vmm"):
            msg = f"backend is {self.backend!r}; allowed: 'auto', 'host', 'cuda', 'vmm'"
            raise ValueError(msg)
        for name in ("pool_gb", "limit_gb"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1 << 17:
                msg = f"{name} is {value} GiB; allowed: above 0 up to 131072, or None"
                raise ValueError(msg)
        if self.pool_gb is not None and self.limit_gb is not None and self.pool_gb > self.limit_gb:
            msg = (
                f"pool_gb is {self.pool_gb} but limit_gb is {self.limit_gb}; raise limit_gb or lower pool_gb"
            )
            raise ValueError(msg)
        if not 0 <= self.grow_mb <= 1 << 20:
            msg = f"grow_mb is {self.grow_mb} MiB; allowed: 0 (never grow) to 1048576"
            raise ValueError(msg)
        if self.grow_mb == 0 and self.pool_gb is None:
            msg = "grow_mb is 0 and pool_gb is None, so there would be no memory; set one of them"
            raise ValueError(msg)
        if self.plan not in (True, False, "auto"):
            msg = f"plan is {self.plan!r}; allowed: 'auto', True (always), False (never)"
            raise ValueError(msg)
        if not 0 <= self.plan_above < 1:
            msg = f"plan_above is {self.plan_above}; allowed: a share of memory, 0 or more and below 1"
            raise ValueError(msg)
        if self.watch_steps < 0:
            msg = f"watch_steps is {self.watch_steps}; allowed: 0 or more"
            raise ValueError(msg)

    @property
    def initial_bytes(self) -> int:
        """Bytes reserved at the start, a multiple of 2 MiB."""
        if self.pool_gb is None:
            return 0
        return -(-int(self.pool_gb * GIB) // (2 * MIB)) * (2 * MIB)

    @property
    def plan_rule(self) -> tuple[str, float]:
        """Name and share of the rule in the native part."""
        if self.plan == "auto":
            return "above", self.plan_above
        return ("always" if self.plan else "never"), 0.0

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes taken from the device, or None."""
        return None if self.limit_gb is None else int(self.limit_gb * GIB)
