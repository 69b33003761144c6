"""Process groups of one generation: made from the run's store, given up without waiting for the lost."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from loongforge_comm.internals import abort_groups, all_groups, set_group_timeout

ABORT_LIMIT_S = 10.0


def make_groups(
    store: dist.Store,
    *,
    number: int,
    rank: int,
    world_size: int,
    backend: str,
    connect_s: float,
    timeout_s: float,
) -> None:
    """Make the default group of a generation; everything that asks torch.distributed sees it from now on.

    torch's NCCL watchdog ends the process when a peer is gone, before anybody could go on without it. It is
    told to leave errors to us; aborted collectives are noticed by :meth:`Membership.check`.

    Args:
        store: the run's; each generation has its own part of it.
        number: of the generation.
        rank: of this process.
        world_size: number of ranks.
        backend: torch's name of it.
        connect_s: longest wait for the others' connections: one may have been lost since it was here.
        timeout_s: limit of collectives later.

    Raises:
        RuntimeError: a connection could not be made.
    """
    if "nccl" in backend:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"groups/{number}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=connect_s),
    )
    for group in all_groups():
        set_group_timeout(group, timeout_s)


def give_up_groups(*, broken: bool, timeout_s: float) -> None:
    """Leave all groups of this process.

    With a rank lost, collectives are under way that will never end, and torch waits for them when the last
    reference to their group goes (a Gloo group: until its time limit). Device groups are aborted; all are
    then held by a thread until the limit is over, so that nobody waits: so long they keep their connections.
    """
    if not dist.is_initialized():
        return
    if broken:
        abort_devices()
        _RETIRED.add(list(all_groups()), timeout_s)
    dist.destroy_process_group()


def abort_devices() -> None:
    """End what the devices of this process wait in for ever, within ten seconds."""
    abort_groups(all_groups(), ABORT_LIMIT_S)


class _Retired:
    """Holds groups until their collectives have run into the time limit; one thread for all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[float, list[dist.ProcessGroup]]] = []
        self._running = False

    def add(self, groups: list[dist.ProcessGroup], seconds: float) -> None:
        with self._lock:
            self._held.append((time.monotonic() + seconds, groups))
            if not self._running:
                self._running = True
                # At the end of the process the thread is frozen, not cleared: the end does not wait either.
                threading.Thread(target=self._run, name="loongforge-comm-retired", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._held:
                    self._running = False
                    return
                until, groups = min(self._held, key=lambda entry: entry[0])
            time.sleep(max(0.0, until - time.monotonic()))
            with self._lock:
                self._held = [entry for entry in self._held if entry[1] is not groups]
            groups.clear()  # the last reference, given up here where nobody waits


_RETIRED = _Retired()
