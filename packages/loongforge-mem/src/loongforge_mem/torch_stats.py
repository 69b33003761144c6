"""torch.cuda.memory statistics answered from our counters while our allocator is the global one.

torch's own functions raise then, because a replaced allocator has no statistics interface.
"""

from __future__ import annotations

from typing import Any

from loongforge_mem import _core

ZERO = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}


def nested_stats(device: int) -> dict[str, Any]:
    """Return the statistics of ``device`` in the nested shape of
    ``torch.cuda.memory_stats_as_nested_dict``.
    """
    ours = _core.global_stats(device)
    if ours is None:
        return {}

    def group(name: str) -> dict[str, dict[str, int]]:
        whole = {key: ours[f"{name}.{key}"] for key in ZERO}
        return {"all": whole, "small_pool": dict(ZERO), "large_pool": dict(whole)}

    free = {**ZERO, "current": ours["free_bytes"], "peak": ours["free_bytes"]}
    segments = {
        "current": ours["device_allocs"] - ours["device_frees"],
        "peak": ours["device_allocs"],
        "allocated": ours["device_allocs"],
        "freed": ours["device_frees"],
    }
    return {
        "allocation": group("allocations"),
        "segment": {"all": segments, "small_pool": dict(ZERO), "large_pool": dict(segments)},
        "active": group("allocations"),
        "inactive_split": {"all": dict(ZERO), "small_pool": dict(ZERO), "large_pool": dict(ZERO)},
        "allocated_bytes": group("granted_bytes"),
        "reserved_bytes": group("reserved_bytes"),
        "active_bytes": group("granted_bytes"),
        "inactive_split_bytes": {"all": free, "small_pool": dict(ZERO), "large_pool": dict(free)},
        "requested_bytes": group("requested_bytes"),
        "num_alloc_retries": 0,
        "num_ooms": ours["ooms"],
        "num_sync_all_streams": ours["synchronizations"],
        "num_device_alloc": ours["device_allocs"],
        "num_device_free": ours["device_frees"],
        "oversize_allocations": dict(ZERO),
        "oversize_segments": dict(ZERO),
        "max_split_size": -1,
    }


def answer_torch_statistics() -> None:
    """Replace the functions of torch.cuda.memory that would raise."""
    import torch
    from torch.cuda import memory
    from torch.cuda._utils import _get_device_index as index

    def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
        started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return nested_stats(index(device, optional=True)) if started else {}

    def reset_peak_memory_stats(device: Any = None) -> None:
        _core.global_reset(index(device, optional=True))

    def reset_accumulated_memory_stats(device: Any = None) -> None:
        _core.global_reset(index(device, optional=True), totals=True)

    for replacement in (memory_stats_as_nested_dict, reset_peak_memory_stats, reset_accumulated_memory_stats):
        replacement.__doc__ = f"{replacement.__name__} answered by loongforge_mem."
        setattr(memory, replacement.__name__, replacement)
        if hasattr(torch.cuda, replacement.__name__):
            setattr(torch.cuda, replacement.__name__, replacement)
