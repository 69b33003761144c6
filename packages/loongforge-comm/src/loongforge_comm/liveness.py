"""Heartbeats over the store: who is alive, how far each rank got, and words for the one that is missing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from loongforge_comm.internals import multi_get

WATCH_ALL_UP_TO = 32
"""Groups up to this size watch everybody; in larger ones each rank watches the next four and reads shared
suspicions."""


@dataclass(kw_only=True)
class Beat:
    """What a rank last said about itself.

    Attributes:
        count: beats so far.
        step: optimizer step it was in.
        sent: backwards whose buckets it had all sent.
        state: ``run``, ``failed`` or ``closed``.
        suspects: ranks it holds for silent.
        epoch: which composition of the group it said this in; a failure of an earlier one is over.
        seen: ``time.monotonic()`` here when the count last changed.
    """

    count: int
    step: int
    sent: int
    state: str
    suspects: tuple[int, ...]
    seen: float
    epoch: int = 0


class Liveness:
    """A background thread that writes this rank's beat and reads the others'.

    A beat comes from a Python thread: a C call that holds the interpreter lock for longer than the timeout
    looks like a stopped rank. The store's host is a single point of failure; when it does not answer, that is
    what is reported.
    """

    def __init__(
        self,
        store: dist.Store,
        ranks: Sequence[int],
        rank: int,
        *,
        interval_s: float,
        timeout_s: float,
        epoch: int = 0,
    ) -> None:
        """Set up; ``start`` begins.

        Args:
            store: private store of the group, not shared with another thread.
            ranks: global ranks of the group.
            rank: this process's global rank.
            interval_s: seconds between beats.
            timeout_s: seconds without a new beat after which a rank is silent.
            epoch: number of the group's present composition, where it changes.
        """
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        others = self._choose(ranks)
        now = time.monotonic()
        self.beats = {r: Beat(count=0, step=0, sent=0, state="run", suspects=(), seen=now) for r in others}
        self.step = 0
        self.sent = 0
        self.state = "run"
        self.suspects: tuple[int, ...] = ()
        self.epoch = epoch
        self.on_round: Callable[[], None] | None = None
        self._alarm: tuple[int, ...] = ()
        self._count = 0
        self._answered = now
        self._stop = threading.Event()
        self._on_silent: Callable[[tuple[int, ...]], None] | None = None
        self._turn = threading.Lock()  # one round at a time: an older beat must not follow a newer one
        self._view = threading.Lock()  # who is watched, and whom silence is reported to
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write the first beat and start the thread."""
        store_limit = max(1.0, min(self.timeout_s / 2, 2 * self.interval_s + 1.0))
        self._store.set_timeout(timedelta(seconds=store_limit))
        self._beat()
        now = time.monotonic()
        for beat in self.beats.values():
            beat.seen = now
        self._thread = threading.Thread(target=self._run, name="loongforge-comm-heartbeat", daemon=True)
        self._thread.start()

    @property
    def on_silent(self) -> Callable[[tuple[int, ...]], None] | None:
        """Called once, in the heartbeat thread, with ranks that were found silent."""
        return self._on_silent

    @on_silent.setter
    def on_silent(self, report: Callable[[tuple[int, ...]], None] | None) -> None:
        with self._view:
            self._on_silent = report

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._round()
            with self._view:
                quiet = tuple(
                    r for r in self.silent() if self.beats.get(r) is None or self.beats[r].state != "closed"
                )
                report = self._on_silent if quiet else None
                if report is not None:
                    self._on_silent = None
            if report is not None:
                report(quiet)

    def _round(self) -> None:
        # A store that hangs holds the other thread here; then this one has nothing to learn either.
        if not self._turn.acquire(timeout=self.timeout_s):
            return
        try:
            begin = time.monotonic()
            self._beat()
            self._read()
            if self.on_round is not None:
                self.on_round()
            # From the beginning: a process that was stopped in between has not been heard since then.
            self._answered = begin
        except Exception:
            return
        finally:
            self._turn.release()

    def _beat(self) -> None:
        self._count += 1
        value = [self._count, self.step, self.sent, self.state, list(self.suspects), self.epoch]
        self._store.set(f"beat/{self._rank}", json.dumps(value))

    def _read(self) -> None:
        beats = self.beats
        # A beat that was never written must be asked for by itself: reading it would wait until the limit.
        known = [f"beat/{r}" for r, beat in beats.items() if beat.count or self._store.check([f"beat/{r}"])]
        if self._large and self._store.check([f"alarm/{self.epoch}"]):
            self._alarm = tuple(json.loads(self._store.get(f"alarm/{self.epoch}")))
        if not known:
            return
        raw = multi_get(self._store, known)
        for key, text in zip(known, raw, strict=True):
            rank = int(key.rpartition("/")[2])
            count, step, sent, state, suspects, epoch = json.loads(text)
            if count != beats[rank].count:
                beats[rank] = Beat(
                    count=count,
                    step=step,
                    sent=sent,
                    state=state,
                    suspects=tuple(suspects),
                    seen=time.monotonic(),
                    epoch=epoch,
                )

    @property
    def _large(self) -> bool:
        return len(self._ranks) > WATCH_ALL_UP_TO

    def follow(
        self, ranks: Sequence[int], *, watched: Sequence[int] | None = None, epoch: int | None = None
    ) -> None:
        """Watch another set of ranks from now on; what this rank said about a failure is taken back.

        Args:
            ranks: ranks of the group.
            watched: those to watch, when it is not all or the next four.
            epoch: number of the composition from now on; failures that others said before do not count.
        """
        others = self._choose(ranks) if watched is None else tuple(r for r in watched if r != self._rank)
        now = time.monotonic()
        with self._view:
            known = self.beats
            # A new mapping: a round that reads into the old one does no harm.
            self.beats = {
                r: known.get(r) or Beat(count=0, step=0, sent=0, state="run", suspects=(), seen=now)
                for r in others
            }
            self._ranks = tuple(ranks)
            self.state, self.suspects, self._alarm = "run", (), ()
            if epoch is not None:
                self.epoch = epoch

    def _choose(self, ranks: Sequence[int]) -> tuple[int, ...]:
        if len(ranks) <= WATCH_ALL_UP_TO:
            return tuple(r for r in ranks if r != self._rank)
        place = tuple(ranks).index(self._rank)
        return tuple(ranks[(place + k) % len(ranks)] for k in range(1, 5))

    def quiet(self, limit_s: float | None = None) -> tuple[int, ...]:
        """Watched ranks that have ended or sent no new beat for ``limit_s`` seconds (default: the timeout).

        None while the store itself does not answer: every beat would look old.
        """
        limit = self.timeout_s if limit_s is None else limit_s
        if self._cut_off(limit):
            return ()
        return tuple(r for r, b in list(self.beats.items()) if self._old(b, limit) or b.state == "closed")

    def silent(self, limit_s: float | None = None) -> tuple[int, ...]:
        """Ranks without a new beat for ``limit_s`` seconds (default: the timeout), or accused by one that
        failed.

        While the store itself does not answer nobody is named: every beat would look old.
        """
        limit = self.timeout_s if limit_s is None else limit_s
        if self._cut_off(limit):
            return ()
        beats = list(self.beats.items())
        quiet = {r for r, beat in beats if self._old(beat, limit) and beat.state == "run"}
        left = {r for r, beat in beats if beat.state == "closed"}
        said = {s for _, beat in beats if beat.epoch == self.epoch for s in beat.suspects}
        accused = (said | set(self._alarm)) - {self._rank}
        return tuple(sorted((quiet or accused) | left))

    def _cut_off(self, limit_s: float) -> bool:
        return bool(self.beats) and time.monotonic() - self._answered > limit_s

    def _old(self, beat: Beat, limit_s: float) -> bool:
        """Whether a beat was old when the store last answered: this process may have been stopped since."""
        return self._answered - beat.seen > limit_s

    def closed(self) -> set[int]:
        """Watched ranks that have said goodbye."""
        return {r for r, beat in list(self.beats.items()) if beat.state == "closed"}

    def seen(self, ranks: Sequence[int]) -> set[int]:
        """Those of ``ranks`` that have sent a beat, as far as they are watched, and this rank."""
        return {r for r in ranks if r == self._rank or (r in self.beats and self.beats[r].count)}

    def behind(self) -> tuple[int, ...]:
        """Ranks that are alive but have sent fewer backwards than this one: it is they who are waited for."""
        return tuple(sorted(r for r, b in self.beats.items() if b.sent < self.sent and b.state == "run"))

    @property
    def store_silent_s(self) -> float:
        """Seconds since the store last answered."""
        return time.monotonic() - self._answered

    def describe(self, rank: int) -> str:
        """One clause about a rank: how long it has been silent and where it was."""
        beat = self.beats.get(rank)
        if beat is None:
            return f"rank {rank} (reported by another rank)"
        if beat.state == "closed":
            return f"rank {rank} (closed its scheduler at step {beat.step})"
        age = time.monotonic() - beat.seen
        where = f"in step {beat.step} with {beat.sent} backwards sent"
        if beat.state == "failed" and beat.epoch == self.epoch and age <= self.timeout_s:
            return f"rank {rank} (gave up {where})"
        if age <= 3 * self.interval_s + 0.2:
            return f"rank {rank} (alive but slow: {where}, this rank {self.sent})"
        return f"rank {rank} (silent for {age:.1f} s, last seen {where})"

    def look(self) -> None:
        """Write this rank's beat and read the others' now, instead of at the next interval."""
        self._round()

    def fail(self, suspects: tuple[int, ...]) -> None:
        """Tell the others at once that this rank gave up, and because of whom.

        In a large group few watch this rank, so all are told by one key that all look at.
        """
        self.state, self.suspects = "failed", suspects
        if self._thread is None:
            return
        if self._large:
            with suppress(Exception):  # without the store there is nobody to tell
                self._store.set(f"alarm/{self.epoch}", json.dumps(suspects))
        self._round()

    def close(self) -> None:
        """Say goodbye and end the thread."""
        if self._thread is None:
            return
        if self.state == "run":
            self.state = "closed"
        self._stop.set()
        self._thread.join(timeout=self.timeout_s)
        if not self._thread.is_alive():  # else the store hangs, and so would this
            with suppress(Exception):  # the store may be gone already, and nobody is left to tell
                self._beat()
        self._thread = None
