"""The saved position of a loader, and the check that it belongs to the loader it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from loongforge_data.order import BegunEpoch, OrderConfig

FORMAT = 2
_OLD_FORMAT = 1  # without `group` and `begun`


@dataclass(frozen=True, kw_only=True)
class SavedBeginning:
    """Where the current epoch began, when that was on another global batch."""

    global_batch: int
    """Samples per step over all ranks at the epoch's start."""
    lanes: int
    """Lanes of the block shuffle at the epoch's start."""
    group: int
    """Samples mixed together by the block shuffle at the epoch's start."""
    taken: int
    """Samples of the epoch delivered before ``batch`` began to count."""


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """Where a loader stands and what it must be to continue there."""

    epoch: int
    """Epoch of the next batch."""
    batch: int
    """Batches already delivered on every rank: of that epoch, or of its rest after ``begun``."""
    order: str
    """Identity of the order, see `OrderConfig.identity`."""
    length: int
    """Samples of the data set."""
    global_batch: int
    """Samples per step over all ranks."""
    seed: int
    """Seed of the shuffle."""
    shuffle: str
    """Kind of shuffle."""
    tail: str
    """Tail policy."""
    lanes: int
    """Lanes of the block shuffle."""
    group: int | None
    """Samples mixed together by the block shuffle; None where the state was written by format 1."""
    begun: SavedBeginning | None
    """The epoch's beginning on another global batch, or None for an epoch that began on this one."""
    fingerprint: str | None
    """Fingerprint of the data set, when it has one."""
    format: int = FORMAT
    """Version of this record."""

    def to_dict(self) -> dict[str, object]:
        """Return a plain dict that survives JSON and pickle."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a loader goes on."""

    order: OrderConfig
    """Order of the epochs."""
    epoch: int
    """Epoch of the next batch."""
    batch: int
    """Batches of the epoch, or of its rest, already delivered."""
    begun: BegunEpoch | None
    """What was delivered of the epoch on another global batch, or None."""


_NAMES = {
    "length": "number of samples",
    "global_batch": "global batch (batch_size x world_size)",
    "seed": "seed",
    "shuffle": "shuffle",
    "tail": "tail policy",
}


def state_of(
    order: OrderConfig, *, epoch: int, batch: int, begun: BegunEpoch | None, fingerprint: str | None
) -> LoaderState:
    """Return the record of a position."""
    beginning = None
    if begun is not None:
        origin = begun.origin
        beginning = SavedBeginning(
            global_batch=origin.global_batch, lanes=origin.lanes, group=origin.group, taken=begun.taken
        )
    return LoaderState(
        epoch=epoch,
        batch=batch,
        order=order.identity(),
        length=order.length,
        global_batch=order.global_batch,
        seed=order.seed,
        shuffle=order.shuffle,
        tail=order.tail,
        lanes=order.lanes,
        group=order.group,
        begun=beginning,
        fingerprint=fingerprint,
    )


def read_state(saved: Mapping[str, object]) -> LoaderState:
    """Turn a saved dict into a `LoaderState`; one of format 1 is taken as an epoch that began nowhere else.

    Raises:
        ValueError: It is not such a state, or of another format version.
    """
    found = saved.get("format")
    if found not in (_OLD_FORMAT, FORMAT):
        msg = (
            f"loader state has format {found!r}, allowed are {_OLD_FORMAT} and {FORMAT}: it was written by "
            f"another version"
        )
        raise ValueError(msg)
    added: dict[str, object] = {"group": None, "begun": None} if found == _OLD_FORMAT else {}
    fields = set(LoaderState.__dataclass_fields__)
    _check_keys("loader state", saved, fields - set(added))
    begun = saved.get("begun")
    if begun is not None:
        if not isinstance(begun, Mapping):
            msg = f"begun of the loader state is {begun!r}, allowed is a mapping or None"
            raise ValueError(msg)
        _check_keys("begun of the loader state", begun, set(SavedBeginning.__dataclass_fields__))
        added["begun"] = SavedBeginning(**begun)
    return LoaderState(**{**saved, **added, "format": FORMAT})  # type: ignore[arg-type]


def _check_keys(name: str, found: Mapping[str, object], expected: set[str]) -> None:
    if set(found) != expected:
        msg = f"{name} has the keys {sorted(found)}, expected are {sorted(expected)}"
        raise ValueError(msg)


def find_position(
    state: LoaderState, built: OrderConfig, fingerprint: str | None, *, reshard: bool = False
) -> Position:
    """Return where a loader goes on from a state; a function of its arguments alone, equal on every rank.

    Args:
        state: The saved state.
        built: The loader's order as it was built.
        fingerprint: Fingerprint of the loader's data set, when it has one.
        reshard: Deal out the rest of the epoch anew where the global batch differs.

    Raises:
        ValueError: The state belongs to another data set or order, or to another global batch and
            ``reshard`` is False. It names the first thing that differs, both values, and the way out.
    """
    _check_facts(state, built, fingerprint, reshard=reshard)
    if state.global_batch == built.global_batch:
        order = replace(built, lanes=state.lanes)
        _check_identity(state, order)
        return Position(order=order, epoch=state.epoch, batch=state.batch, begun=_begun(state, order))
    old = _with_ranks_of(state, built, group=state.group or built.group)
    _check_identity(state, old)
    begun = _begun(state, old) or BegunEpoch(origin=old, taken=0)
    taken = min(begun.taken + state.batch * state.global_batch, built.length)
    # Of an epoch of which nothing was delivered there is nothing to keep: it is a regular one here.
    rest = replace(begun, taken=taken) if taken else None
    return Position(order=built, epoch=state.epoch, batch=0, begun=rest)


def _with_ranks_of(place: LoaderState | SavedBeginning, order: OrderConfig, *, group: int) -> OrderConfig:
    """Return the order of the same data set on the ranks of ``place``, as one rank."""
    return replace(order, batch_size=place.global_batch, world_size=1, lanes=place.lanes, group=group)


def _begun(state: LoaderState, order: OrderConfig) -> BegunEpoch | None:
    if state.begun is None:
        return None
    origin = _with_ranks_of(state.begun, order, group=state.begun.group)
    return BegunEpoch(origin=origin, taken=state.begun.taken)


def _check_facts(state: LoaderState, order: OrderConfig, fingerprint: str | None, *, reshard: bool) -> None:
    """Refuse a state of another data set, shuffle or, unless ``reshard``, global batch."""
    way_out = "build the loader as it was, or start without the state"
    for name, words in _NAMES.items():
        here, saved = getattr(order, name), getattr(state, name)
        if saved == here or (reshard and name == "global_batch"):
            continue
        way = f"load it with reshard=True, {way_out}" if name == "global_batch" else way_out
        msg = f"loader state does not fit: {words} is {here!r} here and {saved!r} in the state; {way}"
        raise ValueError(msg)
    if state.fingerprint != fingerprint:
        msg = (
            f"loader state belongs to another data set: fingerprint is {fingerprint!r} here and "
            f"{state.fingerprint!r} in the state; open the same data set, or start without the state"
        )
        raise ValueError(msg)


def _check_identity(state: LoaderState, order: OrderConfig) -> None:
    if state.order != order.identity():
        msg = (
            "loader state does not fit: the block structure of the order differs (group, lanes or block "
            f"bounds; group is {order.group} here and {state.group or 'not known'} in the state); "
            "build the loader with the same shuffle settings, or start without the state"
        )
        raise ValueError(msg)
