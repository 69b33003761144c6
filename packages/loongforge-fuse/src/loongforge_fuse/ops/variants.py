"""Which of several kernels for one job runs: the default, or what a measurement on this GPU has chosen.

A *job* is a text such as ``"masked_unfold u8 14"``; its *ways* are names of kernels or launch plans that
compute the same. The first way is the default. ``tuning.tune`` measures the ways of all jobs and keeps the
decisions with those of the autotuner; they are read when a job's kernel is loaded first, never in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from loongforge_fuse.autotune import Autotuner

PREFIX = "kernel|"
_forced: dict[str, str] = {}
_clearers: list[Callable[[], None]] = []
_tuners: list[Autotuner] = []


def chosen(job: str, ways: Sequence[str]) -> str:
    """Return the way to use for `job`: forced, else decided by measurement, else the first one."""
    name = _forced.get(job)
    if name is None:
        if not _tuners:
            _tuners.append(Autotuner())
        decision = _tuners[0].known(PREFIX + job)
        name = None if decision is None else decision.winner
    # A decision of an older version may name a way that is gone.
    return name if name is not None and name in ways else ways[0]


def in_turn(job: str, ways: Sequence[str]) -> tuple[str, ...]:
    """Return the way to use for `job`, and after it the default, in case the first has no kernel here.

    A decision was made on one form of a job, for example bf16; its other forms may lack that kernel where
    nothing can be compiled.
    """
    return tuple(dict.fromkeys((chosen(job, ways), ways[0])))


def forget_on_change(clear: Callable[[], None]) -> None:
    """Register what drops loaded kernels; called whenever a choice may have changed."""
    _clearers.append(clear)


def reload(tuner: Autotuner | None = None) -> None:
    """Read decisions anew, from `tuner` or the user cache, and drop loaded kernels."""
    _tuners.clear()
    if tuner is not None:
        _tuners.append(tuner)
    for clear in _clearers:
        clear()


@contextmanager
def forced(job: str, way: str) -> Iterator[None]:
    """Use `way` for `job` inside the context, whatever was decided."""
    before = _forced.get(job)
    _forced[job] = way
    for clear in _clearers:
        clear()
    try:
        yield
    finally:
        _forced.pop(job)
        if before is not None:
            _forced[job] = before
        for clear in _clearers:
            clear()
