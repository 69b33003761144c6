"""What members write for each other in the store: records, arrivals, requests. No waiting happens here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from loongforge_comm.internals import multi_get
from loongforge_comm.members.generation import Generation

ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """A process that asks to be let in."""

    party: str
    """Name that the processes share which are to be let in together."""
    size: int
    """How many processes the party has."""
    host: str
    """Where it runs, for logs."""
    pid: int
    """Its process id there, for logs."""


class Board:
    """Typed access to the store under a run's own prefix. Every call is one or two round trips."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    # -- generations -------------------------------------------------------------------------------

    def publish(self, generation: Generation) -> Generation:
        """Make this the record of its number, unless there is one: return the one that stands.

        The store decides between two proposals, so there is never a second opinion about who is in.
        """
        key, text = f"generation/{generation.number}", generation.to_json()
        return Generation.from_json(self._store.compare_set(key, "", text).decode())

    def generation(self, number: int) -> Generation | None:
        """Return a record, or None when there is none yet."""
        text = self._get(f"generation/{number}")
        return Generation.from_json(text) if text is not None else None

    def say_ready(self, number: int, member: int, step: int) -> None:
        """Say that a member has given generation ``number`` up after finishing ``step``."""
        self._store.set(f"ready/{number}/{member}", str(step))

    def ready(self, number: int, members: Iterable[int]) -> dict[int, int]:
        """Return the last finished steps of those who gave a generation up."""
        return {m: int(text) for m, text in self._many(f"ready/{number}", members).items()}

    def arrive(self, number: int, member: int) -> None:
        """Say that a member has come to the start of a generation."""
        self._store.set(f"here/{number}/{member}", "1")

    def arrived(self, number: int, members: Iterable[int]) -> set[int]:
        """Return who has come to the start of a generation."""
        return set(self._many(f"here/{number}", members))

    # -- borders -----------------------------------------------------------------------------------

    def decide(self, number: int, step: int, *, change: bool) -> None:
        """Say, as rank 0, whether a new generation begins behind a step."""
        self._store.set(f"border/{number}/{step}", "1" if change else "0")

    def decision(self, number: int, step: int) -> bool | None:
        """Return what rank 0 has said about a border, None when nothing yet."""
        text = self._get(f"border/{number}/{step}")
        return None if text is None else text == "1"

    def forget(self, number: int, step: int) -> None:
        """Remove a decision that everybody has read."""
        self._store.delete_key(f"border/{number}/{step}")

    # -- joining -----------------------------------------------------------------------------------

    def claim(self, what: str) -> bool:
        """Return True for the first who asks, False for everybody after."""
        return self._store.add(f"claim/{what}", 1) == 1

    def ask(self, request: JoinRequest) -> int:
        """Put up a request and return its ticket."""
        ticket = self._store.add("join/count", 1) - 1
        self._store.set(f"join/{ticket}", json.dumps(asdict(request)))
        return ticket

    def show_life(self, ticket: int, count: int) -> None:
        """Say that whoever holds a ticket still waits."""
        self._store.set(f"life/{ticket}", str(count))

    def waiting(self, *, first: int = 0) -> dict[int, tuple[JoinRequest, str]]:
        """Return requests without an answer, with their last sign of life, by ticket."""
        found = {}
        for ticket in range(first, self._store.add("join/count", 0)):
            text = self._get(f"join/{ticket}")
            if text is not None and not self._store.check([f"answer/{ticket}"]):
                found[ticket] = (JoinRequest(**json.loads(text)), self._get(f"life/{ticket}") or "")
        return found

    def answer(self, ticket: int, generation: int, member: int) -> None:
        """Let a ticket in."""
        self._store.set(f"answer/{ticket}", json.dumps([generation, member]))

    def answered(self, ticket: int) -> tuple[int, int] | None:
        """Return (generation, member number) of a ticket that was let in."""
        text = self._get(f"answer/{ticket}")
        if text is None:
            return None
        generation, member = json.loads(text)
        return generation, member

    def end(self) -> None:
        """Say that the run is over."""
        self._store.set(ENDED, "1")

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._store.check([ENDED])

    # -- store -------------------------------------------------------------------------------------

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _many(self, prefix: str, members: Iterable[int]) -> dict[int, str]:
        there = {m: f"{prefix}/{m}" for m in members if self._store.check([f"{prefix}/{m}"])}
        if not there:
            return {}
        values = multi_get(self._store, list(there.values()))
        return {m: raw.decode() for m, raw in zip(there, values, strict=True)}
