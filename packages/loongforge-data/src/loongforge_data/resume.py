"""The saved position of a loader, and the check that it belongs to the loader it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from loongforge_data.order import OrderConfig

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """Where a loader stands and what it must be to continue there."""

    epoch: int
    """Epoch of the next batch."""
    batch: int
    """Batches of that epoch already delivered on every rank."""
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
    fingerprint: str | None
    """Fingerprint of the data set, when it has one."""
    format: int = FORMAT
    """Version of this record."""

    def to_dict(self) -> dict[str, object]:
        """Return a plain dict that survives JSON and pickle."""
        return asdict(self)


_NAMES = {
    "length": "number of samples",
    "global_batch": "global batch (batch_size x world_size)",
    "seed": "seed",
    "shuffle": "shuffle",
    "tail": "tail policy",
}


def read_state(saved: Mapping[str, object]) -> LoaderState:
    """Turn a saved dict into a `LoaderState`.

    Raises:
        ValueError: It is not such a state, or of another format version.
    """
    fields = set(LoaderState.__dataclass_fields__)
    if saved.get("format") != FORMAT:
        msg = (
            f"loader state has format {saved.get('format')!r}, allowed is {FORMAT}: it was written by "
            f"another version"
        )
        raise ValueError(msg)
    if set(saved) != fields:
        msg = f"loader state has the keys {sorted(saved)}, expected are {sorted(fields)}"
        raise ValueError(msg)
    return LoaderState(**saved)  # type: ignore[arg-type]


def check_state(state: LoaderState, order: OrderConfig, fingerprint: str | None) -> None:
    """Refuse a state that belongs to another data set or order.

    Raises:
        ValueError: Naming the first thing that differs, both values, and the way out.
    """
    here = {
        "length": order.length,
        "global_batch": order.global_batch,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "tail": order.tail,
    }
    for name, value in here.items():
        saved = getattr(state, name)
        if saved != value:
            msg = (
                f"loader state does not fit: {_NAMES[name]} is {value!r} here and {saved!r} in the state; "
                "build the loader as it was, or start without the state"
            )
            raise ValueError(msg)
    if state.fingerprint != fingerprint:
        msg = (
            f"loader state belongs to another data set: fingerprint is {fingerprint!r} here and "
            f"{state.fingerprint!r} in the state; open the same data set, or start without the state"
        )
        raise ValueError(msg)
    if state.order != order.identity():
        msg = (
            "loader state does not fit: the block structure of the order differs (group, lanes or block "
            "bounds); "
            "build the loader with the same shuffle settings, or start without the state"
        )
        raise ValueError(msg)
