"""Process groups of one generation: made from the run's store, given up without waiting for the lost."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from loongforge_comm.internals import abort_group, all_groups

ABORT_LIMIT_S = 10.0


def make_groups(
    store: dist.Store, *, number: int, rank: int, world_size: int, backend: str, timeout_s: float
) -> None:
    """Make the default group of a generation; everything that asks torch.distributed sees it from now on.

    torch's NCCL watchdog ends the process when a peer is gone, before anybody could go on without it. It is
    told to leave errors to us; aborted collectives are noticed by :meth:`Membership.check`.
    """
    if "nccl" in backend:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"groups/{number}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def give_up_groups(*, broken: bool, timeout_s: float) -> None:
    """Leave all groups of this process.

    With a rank lost, collectives are under way that will never end, and torch waits for them when the last
    reference to their group goes (a Gloo group: until its time limit). Device groups are aborted; all are
    then held by a thread until the limit is over, so that nobody waits.
    """
    if not dist.is_initialized():
        return
    if broken:
        abort_devices()
        _hold(timeout_s)
    dist.destroy_process_group()


def abort_devices() -> None:
    """End what the devices of this process wait in for ever; the host gets control back.

    All groups at once: which of them a device waits in is not known, and ending one may take long. Returns
    after ten seconds at the latest.
    """
    groups = [g for g in all_groups() if "nccl" in str(dist.get_backend_config(g)).lower()]
    threads = [
        threading.Thread(target=abort_group, args=(group,), name="loongforge-comm-abort", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + ABORT_LIMIT_S
    for thread in threads:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))


def _hold(seconds: float) -> None:
    def keep(groups: list[dist.ProcessGroup]) -> None:
        # The thread's own variable is the last reference. At the end of the process the thread is frozen,
        # not cleared, so that the end does not wait either.
        time.sleep(seconds)
        groups.clear()

    groups = list(all_groups())
    threading.Thread(target=keep, args=(groups,), name="loongforge-comm-retired", daemon=True).start()
