"""Shape buckets: few sizes for a varying dimension, chosen from what was seen to bound the padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from loongforge_fuse.fusion.batch import PadRule, pad_to
from loongforge_fuse.protocol import Batch


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Which dimensions vary together, and the sizes they are padded to.

    Attributes:
        dims: ``(batch key, dimension)`` -> group name; dimensions of one group have the same length.
        sizes: Group name -> allowed sizes in ascending order. A longer one is left as it is.
        rules: Batch key -> how it is padded. Default zeros on the right.
    """

    dims: Mapping[tuple[str, int], str]
    sizes: Mapping[str, tuple[int, ...]]
    rules: Mapping[str, PadRule]

    def __post_init__(self) -> None:
        for group, sizes in self.sizes.items():
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                message = (
                    f"sizes of bucket group '{group}' are {sizes}; give positive sizes in ascending order"
                )
                raise ValueError(message)
        unknown = sorted(set(self.dims.values()) - set(self.sizes))
        if unknown:
            message = f"bucket groups {unknown} have no sizes; known: {sorted(self.sizes)}"
            raise ValueError(message)

    def apply(self, batch: Batch) -> Batch:
        """Return the batch with every varying dimension padded to the smallest size that holds it."""
        wanted: dict[str, dict[int, int]] = {}
        for (key, dim), group in self.dims.items():
            value = batch.get(key)
            if isinstance(value, Tensor):
                wanted.setdefault(key, {})[dim] = round_up(value.shape[dim], self.sizes[group])
        result = dict(batch)
        for key, dims in wanted.items():
            value = batch[key]
            if isinstance(value, Tensor):
                target = tuple(dims.get(d, value.shape[d]) for d in range(1, value.dim()))
                result[key] = pad_to(value, target, self.rules.get(key, PadRule(dims=tuple(dims))))
        return result


def round_up(length: int, sizes: tuple[int, ...]) -> int:
    """Return the smallest size that holds ``length``, or ``length`` when none does."""
    return next((size for size in sizes if size >= length), length)


def choose_sizes(histogram: Mapping[int, int], *, buckets: int, power: float = 1.0) -> tuple[int, ...]:
    """Choose bucket sizes that minimise the expected padded cost.

    Exact dynamic programme over the lengths seen: ``O(n^2 * buckets)`` for ``n`` distinct lengths.

    Args:
        histogram: Length -> how often it was seen.
        buckets: Largest number of sizes.
        power: Cost of a sequence of length ``l`` is ``l ** power``; 1 counts tokens, 2 counts attention
            scores.

    Returns:
        Sizes in ascending order; the largest is the longest length seen.
    """
    lengths = sorted(length for length, count in histogram.items() if count > 0)
    if not lengths or buckets < 1:
        message = f"choose_sizes needs at least one length and one bucket, got {len(lengths)} and {buckets}"
        raise ValueError(message)
    prefix = [0]
    for length in lengths:
        prefix.append(prefix[-1] + histogram[length])
    n, limit = len(lengths), min(buckets, len(lengths))
    # best[k][j]: least cost of the first j lengths in k buckets; cut[k][j]: where the last bucket starts.
    infinite = float("inf")
    best = [[infinite] * (n + 1) for _ in range(limit + 1)]
    cut = [[0] * (n + 1) for _ in range(limit + 1)]
    best[0][0] = 0.0
    for k in range(1, limit + 1):
        for j in range(1, n + 1):
            cost = lengths[j - 1] ** power
            for i in range(j):
                candidate = best[k - 1][i] + (prefix[j] - prefix[i]) * cost
                if candidate < best[k][j]:
                    best[k][j], cut[k][j] = candidate, i
    sizes: list[int] = []
    j = n
    for k in range(limit, 0, -1):
        sizes.append(lengths[j - 1])
        j = cut[k][j]
        if j == 0:
            break
    return tuple(sorted(sizes))


class ShapeHistogram:
    """Counts the lengths of the dimensions of a plan's groups, to choose sizes from.

    Args:
        dims: As in :class:`BucketPlan`.
    """

    def __init__(self, dims: Mapping[tuple[str, int], str]) -> None:
        self._dims = dict(dims)
        self._seen: dict[str, Counter[int]] = {group: Counter() for group in dims.values()}

    def observe(self, batch: Batch) -> None:
        """Count one batch."""
        lengths = {
            group: value.shape[dim]
            for (key, dim), group in self._dims.items()
            if isinstance(value := batch.get(key), Tensor)
        }
        for group, length in lengths.items():
            self._seen[group][int(length)] += 1

    def plan(self, *, buckets: int, rules: Mapping[str, PadRule], power: float = 1.0) -> BucketPlan:
        """Return the plan whose sizes fit what was seen best.

        Raises:
            ValueError: Nothing was observed for a group.
        """
        sizes = {g: choose_sizes(seen, buckets=buckets, power=power) for g, seen in self._seen.items()}
        return BucketPlan(dims=self._dims, sizes=sizes, rules=rules)
