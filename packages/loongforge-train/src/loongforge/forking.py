"""What a forked child of a training process must leave alone: the objects of the parent's GPU.

torch's DataLoader forks its workers, and an epoch or a second run starts them when the process has long used
the GPU. A child inherits everything, unreachable cycles that hold events and tensors too; when its garbage
collector frees one of those, the driver, which does not survive a fork, raises in a destructor and the worker
is gone ("DataLoader worker is killed by signal: Aborted").
"""

from __future__ import annotations

import gc
import os
from functools import cache
from threading import local

_before = local()


def _pause() -> None:
    _before.enabled = gc.isenabled()
    gc.disable()


def _go_on() -> None:
    if _before.enabled:
        gc.enable()


def _leave_to_the_parent() -> None:
    gc.freeze()
    _go_on()


@cache
def protect_forked_children() -> None:
    """Let children that this process forks from now on never collect what they inherit; once a process.

    Objects that a child makes itself are collected as ever. Costs a child no memory: what it does not free it
    does not write to either, so pages stay shared.
    """
    os.register_at_fork(before=_pause, after_in_parent=_go_on, after_in_child=_leave_to_the_parent)
