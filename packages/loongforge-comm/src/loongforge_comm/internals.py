"""The few private corners of torch that this package stands on, in one place, each with its reason."""
# ruff: noqa: SLF001

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import Variable


def current_backward() -> int:
    """Number of the backward this thread is executing, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the innermost running backward has computed all gradients, before it returns."""
    Variable._execution_engine.queue_callback(callback)


def nested_backward() -> bool:
    """Whether the running backward was started inside another one (reentrant checkpoint, inner backward).

    Seen from the Python stack: on the main thread the outermost call to the engine is there as well, on a
    device thread only inner ones are.
    """
    frame = sys._getframe(1)
    depth = 0
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    return depth > (1 if threading.current_thread() is threading.main_thread() else 0)


def accumulates(parameter: Tensor) -> bool:
    """Whether the running backward will add into ``parameter.grad``; False under ``torch.autograd.grad``."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))


def cloned_default_store() -> dist.Store:
    """A second connection to the store of the default group: a blocking wait on the shared one stops
    everybody.
    """
    store = dist.distributed_c10d._get_default_store()
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    return clone


def multi_get(store: dist.Store, keys: list[str]) -> list[bytes]:
    """Values of keys that exist, in one round trip where the store can."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return list(store.multi_get(keys))
    return [store.get(key) for key in keys]


def wait_slice(work: dist.Work, limit_s: float) -> bool:
    """Wait up to ``limit_s`` seconds for a collective on host memory; False when the time ran out.

    A slice that ran out and a failed transfer are both RuntimeError; only the first leaves the work open. A
    work that completed between the timeout and the question says what it is when asked again.
    """
    begin = time.perf_counter()
    try:
        work.wait(timedelta(seconds=limit_s))
    except RuntimeError:
        if time.perf_counter() - begin < 0.9 * limit_s:
            raise
        if not work.is_completed():
            return False
        work.wait()
    return True


def abort_groups(groups: Iterable[dist.ProcessGroup], limit_s: float) -> None:
    """Abort those of the groups that have device communicators; the host gets control back.

    All at once: ending one whose peer is stopped may take as long as the group's time limit, and which of
    them a device waits in is not known. Returns after ``limit_s`` seconds at the latest.
    """
    threads = [
        threading.Thread(target=abort_group, args=(group,), name="loongforge-comm-abort", daemon=True)
        for group in groups
        if "nccl" in str(dist.get_backend_config(group)).lower()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))


def flatten(tensors: list[Tensor]) -> Tensor:
    """Concatenate dense tensors of one dtype."""
    return _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Cut a flat tensor into views shaped as ``like``."""
    return list(_unflatten_dense_tensors(flat, like))  # type: ignore[no-untyped-call]


def cuda_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream on ``device``."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def cuda_event() -> torch.cuda.Event:
    """A timing event recorded now on the current stream."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def original_module(model: torch.nn.Module) -> torch.nn.Module | None:
    """The module inside a ``torch.compile`` wrapper, ``None`` for a plain module."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else None


def buffer_table(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers, as it looks them up itself: replaced buffers appear in it."""
    return module._buffers


def ignore_in_stock_ddp(model: torch.nn.Module, names: list[str]) -> None:
    """Tell ``DistributedDataParallel`` to leave these parameters and buffers alone (its only way to do
    so).
    """
    mark = torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    mark(model, names)  # type: ignore[no-untyped-call]


def all_groups() -> list[dist.ProcessGroup]:
    """Every process group that torch knows in this process."""
    return list(dist.distributed_c10d._world.pg_map)


_aborts = 0


def aborts() -> int:
    """How many groups were aborted in this process: what was under way in them is half done."""
    return _aborts


def set_group_timeout(group: dist.ProcessGroup, limit_s: float) -> None:
    """Change the time limit of collectives that are started from now on; torch's own call is private too."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group)


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort the device communicators of a group; torch has no public call for one group (2.9 to 2.14)."""
    global _aborts  # counted before: whoever sees that a collective has ended sees why
    _aborts += 1
    backend = group._get_backend(torch.device("cuda"))
    for name in ("abort", "_abort"):
        end = getattr(backend, name, None)
        if callable(end):
            end()
            return
