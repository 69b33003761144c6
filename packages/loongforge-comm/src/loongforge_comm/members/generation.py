"""One composition of a run, and how the next one follows from it: plain values, no communication."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

NO_STATE = -1
"""Finished step of a member that has no state of the run that belongs together."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The members of a run between two changes. Ranks are positions in ``members``."""

    number: int
    """Counts the changes of a run from 0."""
    members: tuple[int, ...]
    """Member numbers in rank order. A member keeps its number for life; a process that comes back gets a new
    one."""
    step: int
    """Last step that rank 0 has finished: the state of the run."""
    next_member: int
    """Number that the next process to join gets."""
    behind: tuple[int, ...] = ()
    """Members that had not finished ``step`` when they lost the others: they need rank 0's state."""
    left: tuple[int, ...] = ()
    """Members of the generation before that are not in this one."""
    joined: tuple[int, ...] = ()
    """Members that are new; they need rank 0's state too."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Members that need rank 0's state."""
        return tuple(m for m in self.members if m in self.behind or m in self.joined)

    def rank_of(self, member: int) -> int:
        """Return the rank of a member; ValueError when it is not in this generation."""
        if member not in self.members:
            msg = f"member {member} is not in generation {self.number}, whose members are {self.members}"
            raise ValueError(msg)
        return self.members.index(member)

    def to_json(self) -> str:
        """Return the record that all ranks read."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Generation:
        """Read what :meth:`to_json` wrote."""
        values: dict[str, object] = json.loads(text)
        lists = ("members", "behind", "left", "joined")
        fields = {k: tuple(v) if k in lists and isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)  # type: ignore[arg-type]


def first(world_size: int) -> Generation:
    """Return the composition that a run starts with."""
    return Generation(number=0, members=tuple(range(world_size)), step=0, next_member=world_size)


def after_loss(now: Generation, ready: Mapping[int, int]) -> Generation:
    """Return the generation of the members that are left after a failure.

    A step is finished on some ranks and not on others when its last transfer failed in between. Its average
    was complete, or nobody would have it, so those who have it are right: they come first, and the others
    take their state.

    Args:
        now: the generation that failed.
        ready: member number -> last step that it has finished, or NO_STATE.

    Raises:
        ValueError: nobody has the state of the run.
    """
    if max(ready.values(), default=NO_STATE) < 0:
        msg = f"nobody of {sorted(ready)} has the state of the run"
        raise ValueError(msg)
    step = max(ready.values())
    members = sorted(ready, key=lambda member: (ready[member] != step, now.members.index(member)))
    return Generation(
        number=now.number + 1,
        members=tuple(members),
        step=step,
        next_member=now.next_member,
        behind=tuple(member for member in members if ready[member] != step),
        left=tuple(member for member in now.members if member not in ready),
    )


def after_join(now: Generation, number: int, *, step: int) -> Generation:
    """Return the generation with ``number`` new members behind the present ones."""
    joined = tuple(range(now.next_member, now.next_member + number))
    return Generation(
        number=now.number + 1,
        members=(*now.members, *joined),
        step=step,
        next_member=now.next_member + number,
        joined=joined,
    )


def after_leave(now: Generation, leaving: Collection[int], *, step: int) -> Generation:
    """Return the generation of those who stay when some members leave behind a step.

    Raises:
        ValueError: nobody stays.
    """
    members = tuple(member for member in now.members if member not in leaving)
    if not members:
        msg = f"all members {now.members} leave: that is the end of the run, not a change"
        raise ValueError(msg)
    left = tuple(member for member in now.members if member in leaving)
    return Generation(
        number=now.number + 1, members=members, step=step, next_member=now.next_member, left=left
    )


def complete_parties(requests: Sequence[tuple[int, str, int]]) -> list[int]:
    """Return the tickets that can be let in: those whose whole party is there, in order of asking.

    Processes of one host come one by one; letting them in together makes one change of it.

    Args:
        requests: (ticket, name of the party, its size) of everybody who waits.
    """
    sizes: dict[str, list[int]] = {}
    for _, party, size in requests:
        sizes.setdefault(party, []).append(size)
    return [ticket for ticket, party, size in requests if len(sizes[party]) >= size]
