"""What members write for each other in the store: records, arrivals, requests. No waiting happens here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch.distributed as dist

from loongforge_comm.members.generation import Generation
from loongforge_comm.members.store import BoundedStore

ENDED = "ended"
WITHDRAWN = "withdrawn"
GO, VOID, CANCELLED = "go", "void", "cancelled"


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
    """Typed access to the store under a run's own prefix. Calls cost a few round trips whatever the number of
    members; each raises RankFailureError when the store is gone or does not answer.
    """

    def __init__(self, store: dist.Store, *, limit_s: float = 30.0) -> None:
        """Set up without communication.

        Args:
            store: connection under the run's prefix.
            limit_s: longest wait for an answer of the store.
        """
        self._bounded = BoundedStore(store, limit_s)

    def close(self) -> None:
        """End the thread that asks the store."""
        self._bounded.close()

    # -- generations -------------------------------------------------------------------------------

    def publish(self, generation: Generation) -> Generation:
        """Make this the record of its number, unless there is one: return the one that stands.

        The store decides between two proposals, so there is never a second opinion about who is in.
        """
        return Generation.from_json(self._first(f"generation/{generation.number}", generation.to_json()))

    def generation(self, number: int) -> Generation | None:
        """Return a record, or None when there is none yet."""
        text = self._get(f"generation/{number}")
        return Generation.from_json(text) if text is not None else None

    def say_ready(self, number: int, member: int, step: int) -> None:
        """Say that a member has given generation ``number`` up after finishing ``step``."""
        self._append(f"ready/{number}", member, step)

    def ready(self, number: int) -> dict[int, int]:
        """Return the last finished steps of those who gave a generation up."""
        return self._list(f"ready/{number}")

    def arrive(self, number: int, member: int) -> None:
        """Say that a member has come to the start of a generation."""
        self._append(f"here/{number}", member, 1)

    def arrived(self, number: int) -> set[int]:
        """Return who has come to the start of a generation."""
        return set(self._list(f"here/{number}"))

    def settle(self, number: int, verdict: str) -> str:
        """Say whether a generation begins, unless somebody has: return the verdict that stands.

        ``go``: all are there. ``void``: one was given up, or has given up. ``cancelled``: the run cannot
        begin.
        """
        return self._first(f"start/{number}", verdict)

    def verdict(self, number: int) -> str | None:
        """Return whether a generation begins, None when that is open."""
        return self._get(f"start/{number}")

    # -- borders -----------------------------------------------------------------------------------

    def decide(self, number: int, step: int, *, change: bool) -> None:
        """Say, as rank 0, whether a new generation begins behind a step."""
        self._bounded.call(lambda store: store.set(f"border/{number}/{step}", "1" if change else "0"))

    def decision(self, number: int, step: int) -> bool | None:
        """Return what rank 0 has said about a border, None when nothing yet."""
        text = self._get(f"border/{number}/{step}")
        return None if text is None else text == "1"

    def forget(self, number: int, step: int) -> None:
        """Remove a decision that everybody has read."""
        self._bounded.call(lambda store: store.delete_key(f"border/{number}/{step}"))

    # -- joining -----------------------------------------------------------------------------------

    def claim(self, what: str) -> bool:
        """Return True for the first who asks, False for everybody after."""
        return self._bounded.call(lambda store: store.add(f"claim/{what}", 1)) == 1

    def ask(self, request: JoinRequest) -> int:
        """Put up a request and return its ticket."""

        def put(store: dist.Store) -> int:
            ticket = store.add("join/count", 1) - 1
            store.set(f"join/{ticket}", json.dumps(asdict(request)))
            return ticket

        return self._bounded.call(put)

    def show_life(self, ticket: int, count: int) -> None:
        """Say that whoever holds a ticket still waits."""
        self._bounded.call(lambda store: store.set(f"life/{ticket}", str(count)))

    def waiting(self, *, first: int = 0) -> tuple[int, dict[int, tuple[JoinRequest, str]]]:
        """Return requests without an answer, with their last sign of life.

        Args:
            first: ticket to begin with.

        Returns:
            (oldest ticket without an answer, ticket -> (request, sign of life)).
        """

        def look(store: dist.Store) -> tuple[int, dict[int, tuple[JoinRequest, str]]]:
            count = store.add("join/count", 0)
            open_tickets = [t for t in range(first, count) if not store.check([f"answer/{t}"])]
            found = {}
            for ticket in open_tickets:
                text = _read(store, f"join/{ticket}")
                if text is not None:  # else it is just being written
                    life = _read(store, f"life/{ticket}") or ""
                    found[ticket] = (JoinRequest(**json.loads(text)), life)
            return min(open_tickets, default=count), found

        return self._bounded.call(look)

    def answer(self, ticket: int, generation: int, member: int) -> bool:
        """Let a ticket in; False when it was withdrawn before."""
        text = json.dumps([generation, member])
        return self._first(f"answer/{ticket}", text) == text

    def answered(self, ticket: int) -> tuple[int, int] | None:
        """Return (generation, member number) of a ticket that was let in."""
        return _parse_answer(self._get(f"answer/{ticket}"))

    def withdraw(self, ticket: int) -> tuple[int, int] | None:
        """Take a request back; returns the answer when there is one already."""
        return _parse_answer(self._first(f"answer/{ticket}", WITHDRAWN))

    def end(self) -> None:
        """Say that the run is over."""
        self._bounded.call(lambda store: store.set(ENDED, "1"))

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._bounded.call(lambda store: store.check([ENDED]))

    # -- store -------------------------------------------------------------------------------------

    def _get(self, key: str) -> str | None:
        return self._bounded.call(lambda store: _read(store, key))

    def _first(self, key: str, text: str) -> str:
        return self._bounded.call(lambda store: store.compare_set(key, "", text)).decode()

    def _append(self, key: str, member: int, value: int) -> None:
        self._bounded.call(lambda store: store.append(key, f"{member}:{value};"))  # type: ignore[attr-defined]

    def _list(self, key: str) -> dict[int, int]:
        entries = (self._get(key) or "").split(";")
        pairs = (entry.split(":") for entry in entries if entry)
        return {int(member): int(value) for member, value in pairs}


def _read(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _parse_answer(text: str | None) -> tuple[int, int] | None:
    if text is None or text == WITHDRAWN:
        return None
    generation, member = json.loads(text)
    return generation, member
