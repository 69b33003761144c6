"""Micro-batches for the step engine: any loader, with a position that survives a stop at any step.

``ADFEDataLoader`` brings its own exact state. For any other loader the position is (epoch, micro-batches
taken, random state at the start of the epoch); a resume replays the epoch's order from that state and passes
the batches over.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Protocol, runtime_checkable

from torch import Tensor

from loongforge.errors import CheckpointError
from loongforge.rng import capture_rng, restore_rng

Batch = Mapping[str, object]


@runtime_checkable
class Resumable(Protocol):
    """A loader with an exact position of its own (``state_dict`` counts delivered batches)."""

    def state_dict(self) -> dict[str, object]:
        """Return the position."""
        ...

    def load_state_dict(self, state: Mapping[str, object], /) -> None:
        """Go to a position."""
        ...


class BatchSource:
    """Delivers micro-batches epoch by epoch.

    Args:
        loader: Anything that yields micro-batches when iterated, once per epoch.
        fingerprint: Identity of the data set; a resume against another one is refused (fault T20).
    """

    def __init__(self, loader: Iterable[object], *, fingerprint: str | None = None) -> None:
        self.loader = loader
        self.fingerprint = fingerprint
        self.epoch = 0
        self.taken = 0
        self._iterator: Iterator[object] | None = None
        self._ended = False
        self._epoch_rng: dict[str, Tensor] | None = None
        self._pending_skip = 0
        self._own_position = False

    def next_micro_batch(self) -> object | None:
        """Return the next micro-batch of the current epoch, or None at its end."""
        if self._iterator is None:
            self._iterator = self._start()
        batch = next(self._iterator, None)
        if batch is not None:
            self.taken += 1
        self._ended = batch is None
        return batch

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.taken = 0
        self._iterator, self._ended = None, False
        self._epoch_rng = None

    def _start(self) -> Iterator[object]:
        for part in (
            self.loader,
            getattr(self.loader, "sampler", None),
            getattr(self.loader, "batch_sampler", None),
        ):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)
        if self._own_position:
            self._own_position = False
            return iter(self.loader)
        if self._epoch_rng is not None and self._pending_skip:
            return self._replay()
        self._epoch_rng = capture_rng()
        return iter(self.loader)

    def _replay(self) -> Iterator[object]:
        """Start the epoch again from its random state and pass over what was already taken."""
        now = capture_rng()
        if self._epoch_rng is not None:
            restore_rng(self._epoch_rng)
        iterator = iter(self.loader)
        for number in range(self._pending_skip):
            if next(iterator, None) is None:
                message = (
                    f"the loader ended after {number} batches but the checkpoint stopped after "
                    f"{self._pending_skip}: "
                    "the data or the batch size changed; start a new run or allow the mismatch"
                )
                raise CheckpointError(message)
        self._pending_skip = 0
        restore_rng(now)
        return iterator

    @property
    def ended(self) -> bool:
        """Whether the current epoch has no micro-batch left, as far as was seen."""
        return self._ended

    def batches_per_epoch(self) -> int | None:
        """Number of micro-batches of the current epoch, where the loader knows it."""
        if isinstance(self.loader, Sized):
            try:
                return len(self.loader)
            except TypeError:
                return None
        return None

    def state_dict(self) -> dict[str, object]:
        """Return the position: plain numbers, tensors, and the loader's own state where it has one."""
        state: dict[str, object] = {
            "format": 1,
            "epoch": self.epoch,
            "taken": self.taken,
            "batches_per_epoch": self.batches_per_epoch(),
            "fingerprint": self.fingerprint,
            "ended": self._ended,
            "epoch_rng": dict(self._epoch_rng or {}),
        }
        if self._ended:
            # A loader that has seen its end may already stand at the next epoch; this source does not.
            return state
        if (self._iterator is not None or self._own_position) and isinstance(self.loader, Resumable):
            state["loader"] = dict(self.loader.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, object], *, allow_mismatch: bool = False) -> None:
        """Go to a stored position.

        Args:
            state: What :meth:`state_dict` returned.
            allow_mismatch: Start the stored epoch anew when the data set is another one, instead of refusing.

        Raises:
            CheckpointError: The data set or its length differs and ``allow_mismatch`` is false.
        """
        stored, now = state.get("fingerprint"), self.fingerprint
        lengths = state.get("batches_per_epoch"), self.batches_per_epoch()
        problem = None
        if stored is not None and now is not None and stored != now:
            problem = f"the checkpoint belongs to data set {stored}, this run reads {now}"
        elif not self._restores(state) and None not in lengths and lengths[0] != lengths[1]:
            problem = (
                f"the checkpoint has {lengths[0]} micro-batches per epoch and rank, this run {lengths[1]}"
            )
        self.epoch, self.taken = _integer(state, "epoch"), _integer(state, "taken")
        self._iterator, self._ended = None, False
        if problem is not None:
            if not allow_mismatch:
                msg = f"{problem}: use the same data and batch size, or --allow-mismatch to start afresh"
                raise CheckpointError(msg)
            self.taken = 0
            self._epoch_rng, self._pending_skip, self._own_position = None, 0, False
            return
        if state.get("ended"):
            self._iterator, self._ended = iter(()), True
            return
        loader = state.get("loader")
        self._pending_skip = self.taken
        if isinstance(loader, Mapping) and isinstance(self.loader, Resumable):
            try:
                self.loader.load_state_dict(loader)
            except ValueError as error:
                if not allow_mismatch:
                    msg = f"the data position cannot be restored: {error}"
                    raise CheckpointError(msg) from error
                self.taken, self._pending_skip = 0, 0
                return
            self._own_position = True
        rng = state.get("epoch_rng")
        self._epoch_rng = (
            {str(key): value for key, value in rng.items() if isinstance(value, Tensor)}
            if isinstance(rng, Mapping) and rng
            else None
        )

    def _restores(self, state: Mapping[str, object]) -> bool:
        """Whether the loader restores its position itself, and so checks what it must fit."""
        return isinstance(state.get("loader"), Mapping) and isinstance(self.loader, Resumable)

    def load_resharded(
        self, state: Mapping[str, object], *, stored_ranks: int, ranks: int, allow_mismatch: bool = False
    ) -> None:
        """Go to the position of a run with another number of ranks.

        A loader with state of its own converts it exactly or refuses; any other loader cannot know which
        samples the other ranks have used, so the rest of the epoch would repeat or lose samples (fault T21).

        Raises:
            CheckpointError: No exact conversion exists and ``allow_mismatch`` is false.
        """
        reshard = {"reshard": True} if takes_other_ranks(self.loader) else {}
        at_border = state.get("taken") == 0 or bool(state.get("ended"))
        own = state.get("loader")
        self.epoch, self.taken = _integer(state, "epoch"), 0
        self._iterator, self._ended, self._epoch_rng = None, False, None
        if state.get("ended"):
            self._iterator, self._ended = iter(()), True
            return
        if isinstance(self.loader, Resumable) and isinstance(own, Mapping):
            try:
                self.loader.load_state_dict(own, **reshard)
            except ValueError as error:
                if not allow_mismatch:
                    message = (
                        f"{stored_ranks} rank(s) wrote the checkpoint, {ranks} resume: {error}. Use the same "
                        "number of ranks, or --allow-mismatch to start the epoch afresh"
                    )
                    raise CheckpointError(message) from error
                return
            self.taken = int(getattr(self.loader, "batch", 0))
            self._own_position = True
            return
        if not at_border and not allow_mismatch:
            message = (
                f"{stored_ranks} rank(s) wrote the checkpoint in mid-epoch, {ranks} resume: with this loader "
                "samples would repeat or be lost. Use the same number of ranks, or --allow-mismatch to start "
                "the epoch afresh"
            )
            raise CheckpointError(message)

    def stats(self) -> dict[str, float]:
        """Return the numeric counters of the loader, where it keeps any."""
        stats = getattr(self.loader, "stats", None)
        if not callable(stats):
            return {}
        values = stats()
        return {
            str(key): float(value)
            for key, value in dict(values).items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def close(self) -> None:
        """Close the loader where it can be closed."""
        self._iterator = None
        close = getattr(self.loader, "close", None)
        if callable(close):
            close()


def takes_other_ranks(loader: object) -> bool:
    """Whether the loader can go on inside an epoch that another number of ranks began."""
    load = getattr(loader, "load_state_dict", None)
    return callable(load) and "reshard" in inspect.signature(load).parameters


def _integer(state: Mapping[str, object], key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int):
        msg = f"the data position lacks {key!r}: the checkpoint is damaged or of another program"
        raise CheckpointError(msg)
    return value
