"""Waits for a bucket in slices, and turns a timeout or a broken connection into an error with names."""

from __future__ import annotations

import time

from loongforge_comm.channels import Flight
from loongforge_comm.errors import RankFailureError
from loongforge_comm.liveness import Liveness
from loongforge_comm.plan import CommPlan

SLICE_S = 0.25


class BucketWaiter:
    """Waits for flights of a plan's buckets under one time limit."""

    def __init__(self, liveness: Liveness | None, *, timeout_s: float) -> None:
        self._liveness = liveness
        self._timeout_s = timeout_s
        self.plan: CommPlan | None = None
        self.step = 0
        self.on_device = False
        self.lost: tuple[int, ...] = ()
        self._index = 0

    def sent(self) -> None:
        """This rank has sent every bucket of a backward; heartbeats say so, which shows who lags behind."""
        if self._liveness is not None:
            self._liveness.sent += 1

    def wait(self, index: int, flight: Flight) -> None:
        """Return when the bucket has landed (CUDA: when the current stream will wait for it).

        Raises:
            RankFailureError: naming rank, bucket, group and time.
        """
        begin = time.monotonic()
        self._index = index
        self.on_device = flight.stream is not None
        while True:
            self.check()
            try:
                if flight.wait(SLICE_S):
                    return
            except RuntimeError as error:
                raise self._failure(begin, "the connection broke", error) from error
            silent = self._liveness.silent() if self._liveness is not None else ()
            if silent:
                raise self._failure(begin, "a rank is silent", None, silent)
            if time.monotonic() - begin > self._timeout_s:
                raise self._failure(begin, f"the limit of {self._timeout_s:g} s passed", None)

    def check(self) -> None:
        """Raise when the heartbeat thread has given up on a rank (CUDA, where the host does not wait for
        buckets).
        """
        if self.lost:
            raise self._failure(time.monotonic(), "a rank was lost", None, self.lost)

    def message(self, what: str, ranks: tuple[int, ...], elapsed_s: float) -> str:
        """The sentence with step, bucket, group, time and ranks."""
        bucket = self.plan.buckets[self._index] if self.plan is not None else None
        where = f"bucket {self._index}" if bucket is not None else "a bucket of stock DDP"
        if bucket is not None:
            first = bucket.pieces[0].name if bucket.pieces else "-"
            where += (
                f" (group {bucket.group}, {bucket.strategy}, {bucket.nbytes / 2**20:.3f} MiB from {first})"
            )
        live = self._liveness
        if ranks and live is not None:
            who = ", ".join(live.describe(rank) for rank in ranks)
        elif live is not None and live.store_silent_s > live.timeout_s / 2:
            who = f"unknown rank: the store has not answered for {live.store_silent_s:.1f} s either"
        elif live is not None:
            who = "no rank by name: all send heartbeats and have sent as much as this one"
        else:
            who = "unknown rank (heartbeats are off)"
        return f"step {self.step}, {where}: {what} after {elapsed_s:.1f} s, waiting for {who}"

    def _failure(
        self, begin: float, what: str, error: RuntimeError | None, silent: tuple[int, ...] = ()
    ) -> RankFailureError:
        ranks = silent or self._find_silent()
        if not ranks and self._liveness is not None:
            ranks = self._liveness.behind()
        elapsed = time.monotonic() - begin
        text = self.message(what, ranks, elapsed)
        if error is not None:
            text += f"; backend: {str(error).splitlines()[0][:200]}"
        if self._liveness is not None:
            self._liveness.fail(ranks)
        group = self.plan.buckets[self._index].group if self.plan is not None else None
        return RankFailureError(text, ranks=ranks, bucket=self._index, group=group, elapsed_s=elapsed)

    def _find_silent(self) -> tuple[int, ...]:
        """After an error: watch the heartbeats under a stricter limit to learn whose have stopped.

        Found twice, two beats apart: a rank that only waits for a processor has sent one by then.
        """
        live = self._liveness
        if live is None:
            return ()
        limit = min(live.timeout_s, 3 * live.interval_s + 0.2)
        deadline = time.monotonic() + live.timeout_s + 2 * live.interval_s
        while time.monotonic() < deadline:
            first = live.silent(limit)
            if first:
                time.sleep(2 * live.interval_s)
                still = set(first) & set(live.silent(limit))
                if still:
                    return tuple(sorted(still))
            time.sleep(min(0.05, live.interval_s / 4))
        return ()
