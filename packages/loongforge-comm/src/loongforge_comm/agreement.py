"""Decisions that all ranks take together, over the store, with the missing or differing rank named."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from loongforge_comm.errors import PlanMismatchError, RankFailureError
from loongforge_comm.internals import cloned_default_store, multi_get


def group_store(ranks: Sequence[int], label: str) -> dist.Store:
    """A private store connection for the ranks of a group, under ``label``.

    The connection is cloned because a blocking wait on the shared one would hold up everybody else's use of
    it.
    """
    prefix = f"loongforge_comm/{label}/{'-'.join(map(str, ranks)) if len(ranks) < 16 else hash(tuple(ranks))}"
    return dist.PrefixStore(prefix, cloned_default_store())


class Agreement:
    """Exchanges small JSON values between the ranks of a group.

    Every rank must call the same sequence of exchanges. A rank that does not appear within the timeout is
    named.
    Cost: one store write and one batched read per rank and exchange.
    """

    def __init__(self, store: dist.Store, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        """Set up without communication.

        Args:
            store: private store of the group.
            ranks: global ranks of the group.
            rank: this process's global rank.
            timeout_s: seconds to wait for the others.
        """
        self._store = store
        self._ranks = tuple(ranks)
        self._rank = rank
        self._timeout_s = timeout_s
        self._sequence = 0
        self._written: list[str] = []

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that take part."""
        return self._ranks

    def exchange(self, topic: str, value: object, *, timeout_s: float | None = None) -> list[object]:
        """Give ``value`` and return the values of all ranks in rank order.

        Raises:
            RankFailureError: a rank did not give its value in time.
        """
        self._sequence += 1
        prefix = f"{self._sequence}/{topic}"
        limit = timeout_s if timeout_s is not None else self._timeout_s
        self._written.append(f"{prefix}/{self._rank}")
        self._store.set(self._written[-1], json.dumps(value))
        keys = [f"{prefix}/{rank}" for rank in self._ranks]
        begin = time.monotonic()
        try:
            self._store.wait(keys, timedelta(seconds=limit))
        except Exception as error:
            missing = tuple(r for r, key in zip(self._ranks, keys, strict=True) if not self._there(key))
            elapsed = time.monotonic() - begin
            names = ", ".join(map(str, missing)) or "unknown (the store host does not answer)"
            msg = (
                f"agreement {topic!r} number {self._sequence}: no answer from rank {names} after "
                f"{elapsed:.1f} s "
                f"(limit {limit:g} s); every rank must reach the same call, or agree_timeout_s must grow"
            )
            raise RankFailureError(msg, ranks=missing, elapsed_s=elapsed) from error
        values = [json.loads(raw) for raw in multi_get(self._store, keys)]
        self._forget()
        return values

    def require_equal(self, topic: str, value: object, remedy: str) -> None:
        """Raise PlanMismatchError on every rank when the values differ; the message names who differs how."""
        values = self.exchange(topic, value)
        if all(other == values[0] for other in values):
            return
        kinds: dict[str, list[int]] = {}
        for rank, other in zip(self._ranks, values, strict=True):
            kinds.setdefault(json.dumps(other)[:200], []).append(rank)
        parts = "; ".join(f"rank {', '.join(map(str, who))}: {what}" for what, who in kinds.items())
        msg = f"{topic} differs between ranks ({parts}); {remedy}"
        raise PlanMismatchError(msg)

    def _there(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except Exception:
            return False

    def _forget(self) -> None:
        """Remove this rank's value of two exchanges ago: all ranks gave a later one, so all have read it."""
        if len(self._written) > 2:
            try:
                self._store.delete_key(self._written.pop(0))
            except RuntimeError:  # a store without deletion keeps some bytes per exchange
                self._written.clear()
