"""The order of samples: pure functions of (seed, epoch, topology), the same at any worker count.

Global batch ``t`` is a fixed list of sample indices; rank ``r`` of ``W`` takes its equal slice of it. A run
that is resumed on another number of ranks therefore sees the same global batches as long as their size stays
the same. Where it changes inside an epoch, the rest of that epoch is dealt out in batches of the new size
(`BegunEpoch`), and the next epoch is a regular one again.

Two shuffles:

* ``full``: a permutation of all samples.
* ``block``: blocks of neighbouring frames (a group of pictures each) are permuted, then samples are permuted
  inside groups of ``group`` samples. Every frame of a block is wanted within one group, so a video decoder
  touches each group of pictures once. ``mixing_quality`` measures what that costs in randomness.

Both draw from the raw stream of a counter-based generator (Philox), whose output numpy keeps stable over
versions, and sort by it; neither reads a global random state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Shuffle = Literal["none", "full", "block"]
Tail = Literal["short", "pad", "drop"]

SHUFFLES: tuple[Shuffle, ...] = ("none", "full", "block")
TAILS: tuple[Tail, ...] = ("short", "pad", "drop")
DEFAULT_GROUP = 512


@dataclass(frozen=True, kw_only=True)
class OrderConfig:
    """What the order depends on. Equal configurations give equal orders."""

    length: int
    """Number of samples of the data set."""
    batch_size: int
    """Samples per batch and rank."""
    world_size: int = 1
    """Number of ranks that share an epoch."""
    shuffle: Shuffle = "none"
    """``none`` (index order), ``full`` (exact permutation) or ``block``."""
    seed: int = 0
    """Seed of the shuffle; any integer."""
    tail: Tail = "short"
    """What happens to the samples that do not fill the last global batch: ``short`` gives every rank an
    equal smaller
    batch (repeating at most world_size - 1 samples of the epoch's start), ``pad`` fills it up by repeating
    samples of the epoch's start, ``drop`` leaves them out. In an epoch that began on another global batch
    this counts for what is left of it."""
    block_starts: tuple[int, ...] = ()
    """First sample of every block, increasing from 0; needed for ``block`` only."""
    group: int = DEFAULT_GROUP
    """Samples mixed together by ``block``, rounded to whole batches."""
    lanes: int = 1
    """Independent streams of ``block``; a rank that owns whole lanes decodes each block alone. Kept when a
    run is resumed on another number of ranks, so that the order stays."""

    def __post_init__(self) -> None:
        _check(self.length >= 0, "length", self.length, ">= 0")
        _check(self.batch_size >= 1, "batch_size", self.batch_size, ">= 1")
        _check(self.world_size >= 1, "world_size", self.world_size, ">= 1")
        _check(self.group >= 1, "group", self.group, ">= 1")
        _check(self.shuffle in SHUFFLES, "shuffle", self.shuffle, f"one of {SHUFFLES}")
        _check(self.tail in TAILS, "tail", self.tail, f"one of {TAILS}")
        if self.shuffle == "block":
            _check(
                self.lanes >= 1 and self.global_batch % self.lanes == 0,
                "lanes",
                self.lanes,
                f"a divisor of the global batch of {self.global_batch} samples",
            )
            starts = np.asarray(self.block_starts, dtype=np.int64)
            ordered = bool(len(starts)) and starts[0] == 0 and bool(np.all(np.diff(starts) > 0))
            _check(
                self.length == 0 or (ordered and int(starts[-1]) < self.length),
                "block_starts",
                f"{len(starts)} values",
                "increasing from 0 and below the data set's length",
            )

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.batch_size * self.world_size

    def pooled(self) -> OrderConfig:
        """Return the configuration of the same global order with all ranks as one."""
        return replace(self, batch_size=self.global_batch, world_size=1)

    def identity(self) -> str:
        """Return a hash of everything that decides the global order (not of how ranks share it)."""
        lanes = self.lanes if self.shuffle == "block" else 0
        group = self.group if self.shuffle == "block" else 0
        blocks = hashlib.sha256(np.asarray(self.block_starts, dtype=np.int64).tobytes()).hexdigest()[:16]
        parts = (
            "order-1",
            self.length,
            self.global_batch,
            self.shuffle,
            self.seed,
            self.tail,
            blocks,
            group,
            lanes,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _check(ok: bool, name: str, actual: object, allowed: str) -> None:  # noqa: FBT001
    if not ok:
        msg = f"{name} is {actual!r}, allowed is {allowed}"
        raise ValueError(msg)


def random_keys(count: int, *parts: int | str) -> npt.NDArray[np.uint64]:
    """Return ``count`` random 64-bit keys, a pure function of ``parts``."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8")
    generator = np.random.Philox(key=key)
    return np.asarray(generator.random_raw(count), dtype=np.uint64)


def permutation(count: int, *parts: int | str) -> Indices:
    """Return a permutation of ``range(count)``, a pure function of ``parts``; O(n log n)."""
    return np.argsort(random_keys(count, *parts), kind="stable").astype(np.int64)


def epoch_order(config: OrderConfig, epoch: int) -> Indices:
    """Return the global order of one epoch before padding: every sample once (``drop`` is applied by the
    plan).
    """
    if config.shuffle == "full":
        return permutation(config.length, "full", config.seed, epoch)
    if config.shuffle == "block":
        return _block_order(config, epoch)
    return np.arange(config.length, dtype=np.int64)


def _block_order(config: OrderConfig, epoch: int) -> Indices:
    """Permute blocks, deal them to lanes, permute within groups, and interleave the lanes batch by batch."""
    if config.length == 0:
        return np.empty(0, dtype=np.int64)
    starts = np.asarray(config.block_starts, dtype=np.int64)
    ends = np.append(starts[1:], config.length)
    chosen = permutation(len(starts), "blocks", config.seed, epoch)
    lengths = (ends - starts)[chosen]
    offsets = np.repeat(starts[chosen] - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    flat = np.arange(config.length, dtype=np.int64) + offsets
    steps = config.length // config.global_batch
    share = config.global_batch // config.lanes
    lane_length = steps * share
    group = group_batches(config) * share
    lanes = np.empty((config.lanes, lane_length), dtype=np.int64)
    for lane in range(config.lanes):
        part = flat[lane * lane_length : (lane + 1) * lane_length]
        for first in range(0, lane_length, group):
            piece = part[first : first + group]
            lanes[lane, first : first + group] = piece[
                permutation(len(piece), "group", config.seed, epoch, lane, first)
            ]
    head = lanes.reshape(config.lanes, steps, share).transpose(1, 0, 2).reshape(-1)
    rest = flat[config.lanes * lane_length :]
    return np.concatenate((head, rest[permutation(len(rest), "rest", config.seed, epoch)]))


def group_batches(config: OrderConfig) -> int:
    """Return how many consecutive batches of a rank draw from the same blocks (1 unless ``block``)."""
    if config.shuffle != "block":
        return 1
    share = config.global_batch // config.lanes
    return max(1, round(config.group / share))


@dataclass(frozen=True, kw_only=True)
class BegunEpoch:
    """An epoch that began on another global batch and of which a part was delivered.

    What is left is ``epoch_order(origin, epoch)[taken:]``, in that order. It stays so over several changes
    within the epoch: ``origin`` is that of the epoch's start, ``taken`` grows.

    Raises:
        ValueError: ``taken`` is outside of the data set.
    """

    origin: OrderConfig
    """What the epoch's order depends on; only its global batch counts, see `OrderConfig.pooled`."""
    taken: int
    """Samples of that order already delivered, over all ranks and without repeats."""

    def __post_init__(self) -> None:
        _check(
            0 <= self.taken <= self.origin.length,
            "taken",
            self.taken,
            f"0 to the number of samples, {self.origin.length}",
        )


class EpochPlan:
    """The batches of one rank in one epoch, or in the rest of an epoch that began elsewhere.

    The rest of a begun epoch is dealt out in its order, in global batches of ``config``; steps count from 0
    there, and the tail policy counts for the rest. The block shuffle's lanes are those of the epoch's
    beginning and not dealt anew: until the epoch's end a block may be decoded by several ranks.

    Memory: 8 bytes per sample of the data set. ``batch(t)`` is O(batch).

    Args:
        config: Order of the ranks that share the plan.
        epoch: Number of the epoch.
        rank: This rank, 0 to world_size - 1.
        begun: What was delivered of the epoch on another global batch; None for a whole epoch.

    Raises:
        ValueError: The rank is not one of ``config``, or ``begun`` belongs to another data set or shuffle.
    """

    def __init__(
        self, config: OrderConfig, *, epoch: int, rank: int, begun: BegunEpoch | None = None
    ) -> None:
        if not 0 <= rank < config.world_size:
            msg = f"rank is {rank}, allowed is 0 <= rank < world_size = {config.world_size}"
            raise ValueError(msg)
        self.config = config
        self.epoch = epoch
        self.rank = rank
        self.begun = begun
        if begun is not None:
            for name in ("length", "shuffle", "seed", "tail", "block_starts"):
                here, there = getattr(config, name), getattr(begun.origin, name)
                _check(here == there, f"{name} of a begun epoch", there, f"that of the plan, {here!r}")
        self._origin = config if begun is None else begun.origin
        self._taken = 0 if begun is None else begun.taken
        self._order = epoch_order(self._origin, epoch)
        full, rest = divmod(config.length - self._taken, config.global_batch)
        self._full = full
        self._rest = 0 if config.tail == "drop" else rest
        self.num_batches = full + (1 if self._rest else 0)

    def __len__(self) -> int:
        return self.num_batches

    def same_batches(self, other: EpochPlan) -> bool:
        """Return whether another plan gives the same indices at every step."""
        mine, theirs = ((plan.epoch, plan.rank, plan.begun, plan.config) for plan in (self, other))
        return mine == theirs

    def left_in_group(self, step: int) -> int:
        """Return how many batches from ``step`` on draw from the same blocks: those up to the end of the
        block shuffle's group, or all that are left where there is none.
        """
        left = self.num_batches - step
        batches = group_batches(self._origin)
        if batches == 1:
            return left
        group, size = batches * self._origin.global_batch, self.config.global_batch
        ahead = group - (self._taken + step * size) % group
        return min(left, -(-ahead // size))

    @property
    def padded(self) -> int:
        """Number of repeated samples in the plan, over all ranks."""
        return self._tail_share() * self.config.world_size - self._rest if self._rest else 0

    def _tail_share(self) -> int:
        if self.config.tail == "pad":
            return self.config.batch_size
        return -(-self._rest // self.config.world_size)

    def batch(self, step: int) -> Indices:
        """Return this rank's sample indices of batch ``step``."""
        if not 0 <= step < self.num_batches:
            msg = f"step is {step}, allowed is 0 <= step < {self.num_batches}"
            raise ValueError(msg)
        size, first = self.config.batch_size, self._taken + step * self.config.global_batch
        if step >= self._full:
            size = self._tail_share()
        start = first + self.rank * size
        wanted = np.arange(start, start + size) % self.config.length  # repeats the epoch's first samples
        return self._order[wanted]


def mixing_quality(order: Sequence[int] | Indices, batch_size: int, block_starts: Sequence[int]) -> float:
    """Return how close batches are to independent draws: distinct blocks per batch over the expectation.

    1.0 means that a batch touches as many different blocks as a uniform draw without order would; index
    order gives about ``1 / batch_size``. Only whole batches count.
    """
    indices = np.asarray(order, dtype=np.int64)
    steps = len(indices) // batch_size
    if steps == 0:
        msg = f"{len(indices)} samples do not fill one batch of {batch_size}"
        raise ValueError(msg)
    starts = np.asarray(block_starts, dtype=np.int64)
    block_of = np.searchsorted(starts, indices[: steps * batch_size], side="right").reshape(steps, batch_size)
    distinct = np.mean([len(np.unique(row)) for row in block_of])
    shares = np.diff(np.append(starts, len(indices))) / len(indices)
    expected = float(np.sum(1.0 - (1.0 - shares) ** batch_size))
    return float(distinct / expected)
