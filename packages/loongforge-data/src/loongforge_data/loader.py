"""`ADFEDataLoader`: a drop-in for `torch.utils.data.DataLoader` with exact order, exact resume and
statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

from loongforge_data.collate import default_collate
from loongforge_data.order import DEFAULT_GROUP, EpochPlan, OrderConfig, Shuffle, Tail
from loongforge_data.resume import LoaderState, check_state, read_state

Batch = TypeVar("Batch")
ShuffleArgument = bool | Literal["full", "block", "none"]


@runtime_checkable
class MapDataset(Protocol):
    """Anything with a length and samples by index."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> object:
        """Return sample ``index``."""
        ...


class ADFEDataLoader(Generic[Batch]):
    """Loads batches of a map-style data set.

    The first seven arguments mean what they mean for `torch.utils.data.DataLoader`. The order of samples
    depends on (seed, epoch, batch_size, world_size) alone, never on the number of workers or on a global
    random state.

    Each ``iter()`` walks the rest of the current epoch; when it ends, the loader stands at the start of the
    next one. ``state_dict()`` counts batches that were delivered, so nothing that was only prefetched is
    lost.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,  # noqa: FBT001 - positional in DataLoader too
        collate_fn: Callable[[list[object]], Batch] | None = None,
        prefetch_factor: int = 2,
        persistent_workers: bool = False,  # noqa: FBT001
        *,
        shuffle: ShuffleArgument = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        tail: Tail | None = None,
        group: int = DEFAULT_GROUP,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        self.collate_fn: Callable[[list[object]], Batch] = collate_fn or default_collate  # type: ignore[assignment]
        self.rank = rank
        kind: Shuffle = shuffle if isinstance(shuffle, str) else ("full" if shuffle else "none")
        self._order = OrderConfig(
            length=len(dataset),
            batch_size=batch_size,
            world_size=world_size,
            shuffle=kind,
            seed=seed,
            tail=tail or ("drop" if drop_last else "short"),
            block_starts=_block_starts(dataset) if kind == "block" else (),
            group=group,
            lanes=world_size,
        )
        self._plan: EpochPlan | None = None
        self._epoch = 0
        self._batch = 0
        self._generation = 0
        self._wait_ms = 0.0
        self._delivered = 0

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._epoch

    @property
    def batch(self) -> int:
        """Batches of the current epoch already delivered."""
        return self._batch

    def __len__(self) -> int:
        """Batches per epoch, equal on every rank."""
        return self._current_plan().num_batches

    def _current_plan(self) -> EpochPlan:
        if self._plan is None or self._plan.epoch != self._epoch:
            self._plan = EpochPlan(self._order, epoch=self._epoch, rank=self.rank)
        return self._plan

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Naming the current epoch keeps a position inside it."""
        if epoch < 0:
            msg = f"epoch is {epoch}, allowed is >= 0"
            raise ValueError(msg)
        if epoch != self._epoch:
            self._epoch, self._batch = epoch, 0
            self._generation += 1

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of the current epoch."""
        self._generation += 1
        generation = self._generation
        plan = self._current_plan()
        while self._batch < plan.num_batches:
            start = time.perf_counter()
            indices = plan.batch(self._batch)
            batch = self.collate_fn([self.dataset[int(i)] for i in indices])
            self._wait_ms += 1e3 * (time.perf_counter() - start)
            self._batch += 1
            self._delivered += 1
            yield batch
            if generation != self._generation:
                return
        self._epoch, self._batch = self._epoch + 1, 0

    def state_dict(self) -> dict[str, object]:
        """Return the position after the last delivered batch; exact on any number of workers."""
        return LoaderState(
            epoch=self._epoch,
            batch=self._batch,
            order=self._order.identity(),
            length=self._order.length,
            global_batch=self._order.global_batch,
            seed=self._order.seed,
            shuffle=self._order.shuffle,
            tail=self._order.tail,
            lanes=self._order.lanes,
            fingerprint=_fingerprint(self.dataset),
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where a state was taken, also on another number of ranks with the same global batch.

        Raises:
            ValueError: The state belongs to another data set, order, global batch or format.
        """
        saved = read_state(state)
        order = replace(self._order, lanes=saved.lanes)
        check_state(saved, order, _fingerprint(self.dataset))
        self._order = order
        self._plan = None
        self._epoch, self._batch = saved.epoch, saved.batch
        self._generation += 1

    def stats(self) -> dict[str, float | int | str | None]:
        """Return counters as a flat dict."""
        return {"batches": self._delivered, "data_wait_ms": self._wait_ms}

    def close(self) -> None:
        """Stop workers and give memory back."""


def _fingerprint(dataset: object) -> str | None:
    value = getattr(dataset, "fingerprint", None)
    return None if value is None else str(value)


def _block_starts(dataset: MapDataset) -> tuple[int, ...]:
    """Return the block bounds of a data set: its own, or runs of 32 samples."""
    own = getattr(dataset, "block_starts", None)
    if callable(own):
        starts: Sequence[int] = own()
        return tuple(int(value) for value in starts)
    return tuple(range(0, len(dataset), 32))
