"""How many multiprocessors the matrix products of one part of the work may take."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def leaving_free(multiprocessors: int) -> Iterator[None]:
    """Let matrix products leave some multiprocessors to others; 0 changes nothing."""
    # The one way that torch has is experimental and says so in a warning.
    put = getattr(torch._C, "_set_sm_carveout_experimental", None)  # noqa: SLF001
    get = getattr(torch._C, "_get_sm_carveout_experimental", None)  # noqa: SLF001
    if not multiprocessors or put is None or get is None:
        yield
        return
    before = get()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        put(multiprocessors)
        try:
            yield
        finally:
            put(before)
