"""Our allocator behind torch's hooks: for the whole process, or for a memory pool.

Nothing here runs at import; torch is needed from the first call on.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loongforge_mem import _core
from loongforge_mem.config import MemoryConfig

if TYPE_CHECKING:
    pass

CHECK_FAIL_SYMBOL = "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"
ALLOC_CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What :func:`install_global_allocator` set up.

    Attributes:
        hooks: names of the torch hooks that are connected.
        missing_hooks: hooks this torch does not offer; what they do is silently absent.
        raises_oom: whether a failed allocation raises torch's error (otherwise torch sees a null tensor).
        backend: ``"cuda"``, ``"vmm"`` or ``"host"``.
    """

    hooks: tuple[str, ...]
    missing_hooks: tuple[str, ...]
    raises_oom: bool
    backend: str


_installed: Installed | None = None
_pool_allocator: object | None = None


def installed() -> Installed | None:
    """Return what was installed in this process, or None."""
    return _installed


def install_global_allocator(
    pool_gb: float | None = None,
    *,
    backend: str = "cuda",
    grow_mb: int = 256,
    limit_gb: float | None = None,
    timing: bool = True,
) -> Installed:
    """Make every CUDA tensor of this process come from our pool. Call it before anything touches CUDA.

    Args:
        pool_gb: GiB reserved in one driver block at the first allocation; None grows on demand.
        backend: ``"cuda"`` (driver blocks: IPC and NCCL registration work) or ``"vmm"`` (in chunks).
        grow_mb: smallest growth in MiB; 0 never grows.
        limit_gb: most GiB ever taken; None is no limit.
        timing: time each call (about 50 ns).

    Raises:
        RuntimeError: torch has no CUDA, CUDA was used already, or another allocator is installed.
        OSError: the CUDA driver cannot be opened.
        ValueError: a value out of range, or ``torch.backends.cudnn.benchmark`` is on (torch cannot serve it
            with any replaced allocator).
    """
    global _installed
    import torch

    if backend not in ("cuda", "vmm"):
        msg = f"backend is {backend!r}; allowed here: 'cuda', 'vmm'"
        raise ValueError(msg)
    config = MemoryConfig(
        mode="global",
        pool_gb=pool_gb,
        backend="cuda",
        grow_mb=grow_mb,
        limit_gb=limit_gb,
        timing=timing,
    )
    if _installed is not None:
        msg = "the LoongForge allocator is installed already; torch allows one change per process"
        raise RuntimeError(msg)
    require_hooks(torch)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        msg = (
            "CUDA is initialised already, so torch keeps its allocator; call install_global_allocator() "
            "first thing in the program, before any tensor or model goes to the GPU"
        )
        raise RuntimeError(msg)
    if torch.backends.cudnn.benchmark:
        msg = (
            "torch.backends.cudnn.benchmark is True, which asks the allocator for a cache report that torch "
            "cannot give for any replaced allocator; set it to False"
        )
        raise ValueError(msg)
    warn_about_alloc_conf("the global allocator")
    _core.configure(
        backend,
        initial_bytes=config.initial_bytes,
        grow_bytes=grow_mb << 20,
        limit_bytes=config.limit_bytes,
    )
    raises_oom = connect_errors(torch)
    _core.set_timing(timing)
    table = _core.c_abi()
    custom = _hooks().custom(table["alloc"], table["free"])
    connected, missing = connect_hooks(custom, table)
    _hooks().change(custom)
    _installed = Installed(hooks=connected, missing_hooks=missing, raises_oom=raises_oom, backend=backend)
    from loongforge_mem.torch_stats import answer_torch_statistics

    answer_torch_statistics()
    return _installed


def require_hooks(torch: object) -> None:
    """Raise RuntimeError when this torch cannot take an allocator."""
    if not hasattr(getattr(torch, "_C", None), "_cuda_customAllocator"):
        version = getattr(torch, "__version__", "?")
        msg = f"torch {version} has no CUDA, so no allocator to replace; use mode 'advisor' or 'off'"
        raise RuntimeError(msg)


@dataclass(frozen=True, kw_only=True)
class _Hooks:
    custom: Callable[[int, int], object]
    change: Callable[[object], None]


def _hooks() -> _Hooks:
    """Return torch's two entry points; their Python wrappers take a library path, not addresses."""
    native = importlib.import_module("torch._C")
    return _Hooks(
        custom=getattr(native, "_cuda_customAllocator"),  # noqa: B009
        change=getattr(native, "_cuda_changeCurrentAllocator"),  # noqa: B009
    )


def connect_hooks(custom: object, table: dict[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Set every hook that ``custom`` offers; return the names of those connected and those missing."""
    connected, missing = ["alloc", "free"], []
    for name, address in table.items():
        if not name.startswith("set_"):
            continue
        setter = getattr(custom, name, None)
        if setter is None:
            missing.append(name)
            continue
        setter(address)
        connected.append(name)
    return tuple(connected), tuple(missing)


def connect_errors(torch: object) -> bool:
    """Tell the native part where torch raises its errors; False when libc10 does not export it."""
    library = Path(str(getattr(torch, "__file__", ""))).parent / "lib" / "libc10.so"
    if not library.exists():
        return False
    try:
        function = getattr(ctypes.CDLL(str(library)), CHECK_FAIL_SYMBOL)
    except (OSError, AttributeError):
        return False
    address = ctypes.cast(function, ctypes.c_void_p).value
    if not address:
        return False
    _core.set_check_fail(address)
    return True


def warn_about_alloc_conf(what: str) -> None:
    """Warn about allocator settings in the environment that have no effect together with ``what``."""
    for variable in ALLOC_CONF_VARIABLES:
        value = os.environ.get(variable, "")
        ignored = [x for x in value.split(",") if x.strip().lower().startswith(("expandable", "backend"))]
        if ignored:
            warnings.warn(
                f"{variable} sets {', '.join(ignored)}, which has no effect with {what}; unset it, or use "
                "mode 'advisor' to keep torch's own allocator",
                UserWarning,
                stacklevel=3,
            )


def pool_allocator(config: MemoryConfig) -> object:
    """Return the allocator object for ``torch.cuda.MemPool``, made once per process.

    Raises:
        RuntimeError: torch has no CUDA.
        OSError: the CUDA driver cannot be opened.
    """
    global _pool_allocator
    import torch

    require_hooks(torch)
    if _installed is not None:
        msg = "the global allocator is installed, which has no memory pools; use mode 'global'"
        raise RuntimeError(msg)
    if _pool_allocator is None:
        warn_about_alloc_conf("a pool with its own allocator")
        _core.configure(
            "cuda" if config.backend == "auto" else config.backend,
            initial_bytes=config.initial_bytes,
            grow_bytes=config.grow_mb << 20,
            limit_bytes=config.limit_bytes,
        )
        _core.set_timing(config.timing)
        table = _core.c_abi()
        _pool_allocator = _hooks().custom(table["pool_alloc"], table["free"])
    return _pool_allocator
