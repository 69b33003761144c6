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

    def wait(self, index: int, flight: Flight) -> None:
        """Return when the bucket has landed.

        Raises:
            RankFailureError: naming rank, bucket, group and time.
        """
        begin = time.monotonic()
        if self._liveness is not None:
            self._liveness.bucket = index
        while True:
            try:
                if flight.wait(SLICE_S):
                    return
            except RuntimeError as error:
                raise self._failure(index, begin, "the connection broke", error) from error
            waited = time.monotonic() - begin
            silent = self._liveness.silent() if self._liveness is not None else ()
            if silent:
                raise self._failure(index, begin, "a rank is silent", None, silent)
            if waited > self._timeout_s:
                raise self._failure(index, begin, f"the limit of {self._timeout_s:g} s passed", None)

    def _failure(
        self,
        index: int,
        begin: float,
        what: str,
        error: RuntimeError | None,
        silent: tuple[int, ...] = (),
    ) -> RankFailureError:
        ranks = silent or self._find_silent()
        elapsed = time.monotonic() - begin
        bucket = self.plan.buckets[index] if self.plan is not None else None
        where = f"bucket {index}"
        if bucket is not None:
            first = bucket.pieces[0].name if bucket.pieces else "-"
            where += (
                f" (group {bucket.group}, {bucket.strategy}, {bucket.nbytes / 2**20:.3f} MiB from {first})"
            )
        if ranks and self._liveness is not None:
            who = ", ".join(self._liveness.describe(rank) for rank in ranks)
        elif self._liveness is not None and self._liveness.store_silent_s > self._liveness.timeout_s / 2:
            who = f"unknown rank: the store has not answered for {self._liveness.store_silent_s:.1f} s either"
        elif self._liveness is not None:
            who = "no silent rank: all ranks send heartbeats, one may be slow or in another collective"
        else:
            who = "unknown rank (heartbeats are off)"
        if self._liveness is not None:
            self._liveness.fail(ranks)
        msg = f"step {self.step}, {where}: {what} after {elapsed:.1f} s, waiting for {who}"
        if error is not None:
            msg += f"; backend: {str(error).splitlines()[0][:200]}"
        return RankFailureError(
            msg,
            ranks=ranks,
            bucket=index,
            group=bucket.group if bucket is not None else None,
            elapsed_s=elapsed,
        )

    def _find_silent(self) -> tuple[int, ...]:
        """After an error: watch the heartbeats a little longer with a stricter limit to learn whose
        stopped.
        """
        live = self._liveness
        if live is None:
            return ()
        limit = min(live.timeout_s, 3 * live.interval_s + 0.2)
        deadline = time.monotonic() + limit + 2 * live.interval_s
        while time.monotonic() < deadline:
            silent = live.silent(limit)
            if silent:
                return silent
            time.sleep(min(0.05, live.interval_s / 4))
        return ()
