"""The memory orchestrator: labels, steps, statistics and state over one of the modes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loongforge_mem import _core
from loongforge_mem.addresses import AddressBook, named_tensors
from loongforge_mem.backends import Backend, global_backend, host_backend
from loongforge_mem.config import GIB, Label, MemoryConfig, Mode
from loongforge_mem.state import fingerprint, load_state, make_state
from loongforge_mem.statistics import Stats, empty_stats, register, unregister
from loongforge_mem.trace import Trace

if TYPE_CHECKING:
    import torch


class MemoryOrchestrator:
    """Watches or owns the memory of a training loop.

    Usage::

        orchestrator = MemoryOrchestrator(MemoryConfig(mode="advisor")).attach(model, optimizer)
        for batch in loader:
            with orchestrator.step():
                loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
        print(orchestrator.stats())

    Mode ``advisor`` traces the first ``watch_steps`` steps and plans from them; ``global`` records the steps
    of the real allocator and serves them by run fit or by a plan (``MemoryConfig.plan``); ``pool`` gives
    ``label("persistent")`` a memory pool; ``off`` does nothing. Where a mode cannot work (no GPU),
    ``stats()["reason"]`` says why; without a GPU, mode ``global`` runs on host memory and places what the
    watched steps allocate.

    Raises:
        ValueError: bad settings.
        RuntimeError: mode ``global`` on a GPU that was used before.
    """

    def __init__(self, config: MemoryConfig | None = None) -> None:
        self.config = config or MemoryConfig()
        self._mode = Mode(self.config.mode)
        self._reason: str | None = None
        self._model: torch.nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[Any] = []
        self._backend: Backend | None = None
        self._mirror: _core.Heap | None = None
        self._pool: Any = None
        self._steps = 0
        self._report: dict[str, Any] = {}
        self._trace: Trace | None = None
        self._planned_bytes = 0
        self._last_alloc_ms = 0.0
        self._closed = False
        self._label_before: int | None = None
        self._book: AddressBook | None = None
        self._choose_backend()
        if self._backend is not None:
            self._backend.set_plan_rule(*self.config.plan_rule)
        register(self.stats)

    def attach(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> MemoryOrchestrator:
        """Learn the module tree, so that labels, phases and reports have names; returns itself."""
        self._model, self._optimizer = model, optimizer
        self._book = AddressBook(named_tensors(model))
        self._relabel(model)
        self._handles += [
            model.register_forward_pre_hook(lambda *_: self.phase("forward")),
            model.register_forward_hook(lambda *_: self.phase("backward")),
        ]
        if optimizer is not None:
            self._handles += [
                optimizer.register_step_pre_hook(lambda *_: self._optimizer_begins()),
                optimizer.register_step_post_hook(lambda *_: self._optimizer_ends()),
            ]
        return self

    @contextlib.contextmanager
    def step(self) -> Iterator[MemoryOrchestrator]:
        """Mark one training step: forward, backward, optimizer and zeroing of gradients.

        Raises:
            RuntimeError: a step is open already.
        """
        if self._mode is Mode.OFF or self._closed:
            yield self
            return
        if self._backend is None:
            with self._watched():
                yield self
            self._steps += 1
            return
        source = self._backend.begin_step(self._stream())
        self._report = {"source": source}
        whole = False
        try:
            with self._watched():
                yield self
            whole = True
        finally:
            self._report = self._backend.end_step(whole)
            self._steps += 1
            self._last_alloc_ms = self._report["call_ns"] / 1e6

    def phase(self, name: str) -> None:
        """Name the phase the step enters; :meth:`attach` does it for forward, backward and optimizer."""
        if self._backend is None or ("torch" in sys.modules and sys.modules["torch"].compiler.is_compiling()):
            return
        self._backend.phase(name)

    @contextlib.contextmanager
    def label(self, name: str | Label) -> Iterator[None]:
        """Give allocations made inside (by this thread) a label; the label before comes back, also on errors.

        Raises:
            ValueError: unknown label.
        """
        label = Label.parse(name)
        if self._mode is Mode.OFF or self._closed:
            yield
            return
        if self._pool is not None and label is not Label.EPHEMERAL:
            import torch

            with torch.cuda.use_mem_pool(self._pool):
                yield
            return
        before = _core.set_label(label)
        try:
            yield
        finally:
            _core.set_label(before)

    def stats(self) -> Stats:
        """Return flat statistics; the keys of :func:`loongforge_mem.get_mla_stats` and those of the
        allocator.

        Sizes end in ``_bytes`` or ``_gb`` (GiB), times in ``_ms`` or ``_ns``, fractions are in 0..1.
        """
        out = empty_stats(self._mode.value)
        out["steps"] = self._steps
        out["reason"] = self._reason
        out["active"] = self._mode is not Mode.OFF and not self._closed
        raw = self._raw()
        if raw is not None:
            out.update(raw)
            out["global_pool_used_gb"] = raw["requested_bytes.current"] / GIB
            out["global_pool_reserved_gb"] = raw["reserved_bytes.current"] / GIB
            out["freelist_fragmentation"] = raw["external_fragmentation"]
            out["alloc_ms"] = self._last_alloc_ms
        if self._mode in (Mode.ADVISOR, Mode.POOL):
            out.update(_torch_figures())
        if self._report:
            allocations = int(self._report.get("allocations", 0))
            hits = int(self._report.get("planned_hits", 0))
            out["planned_hit_rate"] = hits / allocations if allocations else 0.0
            out["step_source"] = self._report.get("source")
            for key in ("allocations", "planned_hits", "peak_requested_bytes", "survivors", "device_calls"):
                if key in self._report:
                    out[f"step_{key}"] = self._report[key]
        if self._trace is not None:
            out["watched_allocations"] = self._trace.num_allocations
            out["planned_bytes"] = self._planned_bytes
        return out

    def moved(self) -> list[str]:
        """Return the names of parameters and buffers that lie elsewhere than at :meth:`attach`.

        Persistent tensors never move by themselves; ``.to()``, ``assign=True`` and re-initialisation move
        them, and a graph captured before that is stale.
        """
        if self._book is None or self._model is None:
            return []
        return self._book.moved(dict(named_tensors(self._model)))

    @property
    def trace(self) -> Trace | None:
        """The trace of the last watched step."""
        return self._trace

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, the free list and the live table, relative to the base; plain data, JSON-ready."""
        parts = self._backend.state() if self._backend is not None else None
        return make_state(self._mode.value, fingerprint(self._model, self._optimizer), parts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the plan of a saved state.

        Raises:
            ValueError: another format version, or the state belongs to another model; says which part
                differs.
        """
        parts = load_state(state, fingerprint(self._model, self._optimizer))
        if parts is not None and self._backend is not None and self.config.plan is not False:
            self._backend.set_plan(parts)

    def trim(self) -> int:
        """Give unused memory back to the device (host, driver); returns the bytes. Waits for the device."""
        return self._backend.trim() if self._backend is not None else 0

    def close(self) -> None:
        """Remove the hooks from model and optimizer. The allocator itself lives as long as the process."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._closed = True
        unregister(self.stats)

    def _choose_backend(self) -> None:
        if self._mode in (Mode.OFF, Mode.ADVISOR):
            return
        usable = _usable_gpu()
        wants_gpu = self.config.backend in ("cuda", "vmm") or (
            self.config.backend == "auto" and usable is None
        )
        if not wants_gpu:
            self._backend = host_backend(self.config)
            self._mirror = self._backend.heap
            self._reason = None if self.config.backend == "host" else usable
            return
        if usable is not None:
            msg = f"backend {self.config.backend!r} needs a GPU: {usable}; use backend 'auto' or 'host'"
            raise RuntimeError(msg)
        backend = "cuda" if self.config.backend == "auto" else self.config.backend
        if self._mode is Mode.GLOBAL:
            self._take_global(backend)
        else:
            import torch

            from loongforge_mem.allocator import pool_allocator

            self._pool = torch.cuda.MemPool(pool_allocator(self.config))  # type: ignore[arg-type]

    def _take_global(self, backend: str) -> None:
        from loongforge_mem.allocator import install_global_allocator, installed

        if installed() is None:
            install_global_allocator(
                self.config.pool_gb,
                backend=backend,
                grow_mb=self.config.grow_mb,
                limit_gb=self.config.limit_gb,
                timing=self.config.timing,
            )
        import torch

        self._backend = global_backend(backend, torch.cuda.current_device())

    def _raw(self) -> dict[str, Any] | None:
        if self._backend is not None:
            return self._backend.stats()
        if self._pool is not None:
            import torch

            return _core.global_stats(torch.cuda.current_device())
        return None

    def _stream(self) -> int:
        if self._backend is not None and self._backend.device is not None:
            import torch

            return int(torch.cuda.current_stream(self._backend.device).cuda_stream)
        return 0

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        mirrors = self._mirror is not None
        if self._steps >= self.config.watch_steps and not mirrors:
            yield
            return
        if (mirrors and self.config.watch_steps == 0) or "torch" not in sys.modules:
            yield
            return
        if self._backend is not None and self._backend.device is not None:
            yield
            return
        from loongforge_mem.mirror import watch_step

        with watch_step(self._mirror, self._model, self._optimizer) as watch:
            yield
        self._trace = watch.trace(f"step {self._steps + 1}")
        self._planned_bytes = watch.plan_bytes()

    def _relabel(self, model: torch.nn.Module) -> None:
        if self._backend is not None and self._backend.device is not None:
            held = (*model.parameters(), *model.buffers())
            addresses = [t.untyped_storage().data_ptr() for t in held if t.is_cuda]
            _core.global_relabel(self._backend.device, addresses, Label.PERSISTENT)

    def _optimizer_begins(self) -> None:
        self.phase("optimizer")
        if self._backend is not None and self._optimizer is not None and not self._optimizer.state:
            # The first step makes the optimizer's state: it stays, so it must not lie among activations.
            self._label_before = _core.set_label(Label.MIGRATABLE)

    def _optimizer_ends(self) -> None:
        self.phase("after optimizer")
        if self._label_before is not None:
            _core.set_label(self._label_before)
            self._label_before = None


def _usable_gpu() -> str | None:
    """Return None when a GPU is usable, else the reason why not."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} is built without CUDA"
    if (error := _core.driver_error()) is not None:
        return error
    return None if torch.cuda.device_count() > 0 else "no CUDA device is visible"


def _torch_figures() -> Stats:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    raw = torch.cuda.memory_stats()
    allocated, reserved = raw["allocated_bytes.all.current"], raw["reserved_bytes.all.current"]
    return {
        "global_pool_used_gb": allocated / GIB,
        "global_pool_reserved_gb": reserved / GIB,
        "freelist_fragmentation": 1.0 - allocated / reserved if reserved else 0.0,
        "reserved_bytes.peak": raw["reserved_bytes.all.peak"],
        "requested_bytes.peak": raw["requested_bytes.all.peak"],
    }
