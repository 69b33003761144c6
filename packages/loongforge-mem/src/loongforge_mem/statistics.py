"""Statistics that callers read: flat dictionaries with units in the names."""

from __future__ import annotations

import weakref
from collections.abc import Callable

Stats = dict[str, int | float | str | bool | None]

_sources: list[weakref.WeakMethod] = []


def register(source: Callable[[], Stats]) -> None:
    """Make ``source`` (a bound method) the one that :func:`get_mla_stats` asks; dies with its object."""
    _sources[:] = [s for s in _sources if s() is not None]
    _sources.append(weakref.WeakMethod(source))


def unregister(source: Callable[[], Stats]) -> None:
    """Forget ``source``."""
    _sources[:] = [s for s in _sources if (live := s()) is not None and live != source]


def get_mla_stats() -> Stats:
    """Return the memory statistics of the orchestrator made last.

    Always there: ``mode``, ``global_pool_used_gb`` (GiB of live blocks), ``global_pool_reserved_gb``,
    ``freelist_fragmentation`` (1 - largest free run / free bytes), ``alloc_ms`` (milliseconds spent in the
    allocations and frees of the last step), ``planned_hit_rate``, ``placement`` (``"plan"``, ``"run_fit"``,
    ``"profiling"`` or None) and ``placement_reason``. Without an orchestrator the values are zero and
    ``mode`` is ``"off"``.
    """
    for source in reversed(_sources):
        method = source()
        if method is not None:
            return dict(method())
    return empty_stats("off")


def empty_stats(mode: str) -> Stats:
    """Return the keys that every mode reports, with zeros."""
    return {
        "mode": mode,
        "active": False,
        "reason": None,
        "global_pool_used_gb": 0.0,
        "global_pool_reserved_gb": 0.0,
        "freelist_fragmentation": 0.0,
        "internal_waste": 0.0,
        "reserve_overhead": 0.0,
        "alloc_ms": 0.0,
        "planned_hit_rate": 0.0,
        "placement": None,
        "placement_reason": None,
        "steps": 0,
    }
