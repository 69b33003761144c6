"""Planning of a window: how many micro-batches to fuse, in which layout, what stays apart and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor, nn

from loongforge_fuse.fusion.batch import (
    JoinedBatch,
    JoinError,
    PadRule,
    join,
    join_packed,
    sequence_lengths,
)
from loongforge_fuse.fusion.config import FusionConfig, check_divides
from loongforge_fuse.fusion.cost import Layout
from loongforge_fuse.fusion.memory import activation_bytes, elements, free_bytes, largest_factor
from loongforge_fuse.fusion.packing import PackRule
from loongforge_fuse.fusion.probe import probe_fusion
from loongforge_fuse.fusion.reasons import RefusalReason
from loongforge_fuse.fusion.refusal import ModelInspection, Refusal
from loongforge_fuse.protocol import Batch, batch_size, unwrap

Agree = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Element-wise maximum over all ranks of a short tuple of integers."""

FreeBytes = Callable[[], int | None]


@dataclass(frozen=True, kw_only=True)
class Group:
    """One group of a planned window: joined, or left apart with the reason."""

    first: int
    batches: Sequence[Batch]
    joined: JoinedBatch | None
    refusal: Refusal | None


class WindowPlanner:
    """Plans windows for one model.

    Args:
        model: The model.
        config: Settings.
        agree: As in the fuser.
        available: Free bytes on the model's device, or None when memory is no limit.
    """

    def __init__(
        self, model: nn.Module, config: FusionConfig, *, agree: Agree | None, available: FreeBytes | None
    ) -> None:
        self._model = model
        self._config = config
        self._agree = agree
        self._available = available or (lambda: free_bytes(model))
        self._factor: int | None = None
        self._bytes: int | None = None
        self._measured: int | None = None
        self._probed = config.probe == "off"
        self._inspection = ModelInspection(model, hooks=config.hooks)
        self.lasting: Refusal | None = None
        self.steps = config.accumulation_steps

    def factor(self, window: Sequence[Batch]) -> int:
        """Return how many micro-batches to fuse; decided once, by all ranks together.

        Raises:
            ValueError: The window is longer than the accumulation steps, or the factor does not divide them.
        """
        if self.steps is None:
            self.steps = len(window)
        if len(window) > self.steps:
            message = (
                f"the window holds {len(window)} micro-batches, more than the {self.steps} accumulation "
                "steps; make a new fuser when the accumulation changes"
            )
            raise ValueError(message)
        if self._factor is None:
            size = self._config.fusion_batch_size
            if size == "auto":
                self._factor = self._largest(window[0])
            else:
                check_divides(size, self.steps)
                self._factor = size
        return self._factor

    def _largest(self, batch: Batch) -> int:
        """Return the largest factor that fits on every rank."""
        self._bytes = activation_bytes(self._model, batch)
        self._measured = elements(batch)
        own = largest_factor(
            accumulation_steps=self.steps or 1,
            per_micro_batch=self._bytes,
            available=self._available(),
            headroom=self._config.memory_headroom,
        )
        # The least of all ranks is the greatest of the negatives.
        return own if self._agree is None else -self._agree((-own,))[0]

    def plan(self, window: Sequence[Batch], factor: int) -> list[Group]:
        """Split the window into groups and join each one that may be fused on every rank."""
        groups: list[Group] = []
        for first in range(0, len(window), factor):
            batches = window[first : first + factor]
            joined, refusal = self._try_join(batches, factor)
            groups.append(Group(first=first, batches=batches, joined=joined, refusal=refusal))
        if self._agree is None:
            return groups
        wishes = tuple(int(group.joined is None and len(group.batches) > 1) for group in groups)
        return [
            replace(group, joined=None, refusal=_OTHER_RANK)
            if separate and group.joined is not None
            else group
            for group, separate in zip(groups, self._agree(wishes), strict=True)
        ]

    def _try_join(self, batches: Sequence[Batch], factor: int) -> tuple[JoinedBatch | None, Refusal | None]:
        """Return the joined group, or why it stays apart."""
        if factor == 1:
            return None, Refusal(reason=RefusalReason.OFF, detail="fusion_batch_size is 1")
        if len(batches) == 1:
            return None, Refusal(
                reason=RefusalReason.ONE_MICRO_BATCH, detail="the group holds one micro-batch"
            )
        refusal = self.lasting or self._inspection.refusal()
        refusal = refusal or self._memory(batches)
        if refusal is not None:
            return None, refusal
        try:
            joined = self._join(batches)
        except JoinError as error:
            return None, Refusal(reason=error.reason, detail=error.detail)
        if joined is None:
            detail = "one pass over the padded group is predicted to take longer than one per micro-batch"
            return None, Refusal(reason=RefusalReason.NOT_CHEAPER, detail=detail)
        if not self._probed:
            self._probed = True
            self.lasting = probe_fusion(
                self._model,
                batches,
                joined,
                tolerance=self._config.probe_tolerance,
                allow_reads=self._config.data_dependent == "allow",
            )
            if self.lasting is not None:
                return None, self.lasting
        return joined, None

    def _memory(self, batches: Sequence[Batch]) -> Refusal | None:
        """Predict whether the activations of the group fit."""
        if not self._config.predict_memory:
            return None
        available = self._available()
        if available is None:
            return None
        if self._bytes is None or self._measured is None:
            self._bytes = activation_bytes(self._model, batches[0])
            self._measured = elements(batches[0])
        # Every sample is padded to the largest of its group at worst.
        largest = max(elements(batch) / max(batch_size(batch), 1) for batch in batches)
        share = largest * sum(map(batch_size, batches)) / max(self._measured, 1)
        needed = share * self._bytes
        if needed <= self._config.memory_headroom * available:
            return None
        detail = (
            f"{needed / 2**20:.0f} MiB of activations ({share:.1f} times a micro-batch of "
            f"{self._bytes / 2**20:.0f} MiB) against "
            f"{available / 2**20:.0f} MiB free, of which {self._config.memory_headroom:.0%} may be filled"
        )
        return Refusal(reason=RefusalReason.MEMORY_PREDICTED, detail=detail)

    def _join(self, batches: Sequence[Batch]) -> JoinedBatch | None:
        """Join in the cheapest layout the model can run; None when leaving the group apart is cheaper."""
        config = self._config
        pads = {**_rules(self._model, "pad_rules", PadRule), **config.pad_rules}
        packs = {**_rules(self._model, "pack_rules", PackRule), **config.pack_rules}
        packs = {key: rule for key, rule in packs.items() if all(key in batch for batch in batches)}
        layout = self._layout(batches, pads, packs)
        if layout == "separate":
            return None
        if layout == "pack":
            return join_packed(batches, pack_rules=packs, pad_rules=pads, shared_keys=config.shared_keys)
        return join(batches, pad_rules=pads, shared_keys=config.shared_keys)

    def _layout(
        self, batches: Sequence[Batch], pads: Mapping[str, PadRule], packs: Mapping[str, PackRule]
    ) -> Layout:
        """Choose the layout; equal shapes are padded by nothing, that is, concatenated."""
        wanted: Literal["auto", "pad", "pack"] = self._config.layout
        if wanted != "auto":
            return wanted
        lengths = mixed_lengths(batches, pads, packs)
        if lengths is None:
            return "pad"
        allowed: list[Layout] = ["separate"]
        if packs:
            allowed.insert(0, "pack")
        if pads:
            allowed.insert(0, "pad")
        return self._config.cost.choose(lengths, allowed)[0]


def mixed_lengths(
    batches: Sequence[Batch], pads: Mapping[str, PadRule], packs: Mapping[str, PackRule]
) -> list[list[int]] | None:
    """Return each sample's tokens by micro-batch, by the largest key of mixed sizes; None without one."""
    found: list[list[int]] | None = None
    for key, rule in packs.items():
        lengths = [sequence_lengths(batch, key, rule) for batch in batches]
        if len({n for group in lengths for n in group}) > 1:
            found = _longer(found, lengths)
    if found is not None:
        return found
    for key, pad in pads.items():
        values = [v for batch in batches if isinstance(v := batch.get(key), Tensor)]
        if len(values) != len(batches) or any(v.dim() <= max(pad.dims) for v in values):
            continue
        sizes = []
        for value in values:
            elements = 1
            for dim in pad.dims:
                elements *= value.shape[dim]
            sizes.append([max(elements // pad.per_token, 1)] * value.shape[0])
        if len({group[0] for group in sizes if group}) > 1:
            found = _longer(found, sizes)
    return found


def _longer(one: list[list[int]] | None, other: list[list[int]]) -> list[list[int]]:
    return other if one is None or sum(map(sum, other)) > sum(map(sum, one)) else one


def _rules(model: nn.Module, name: str, kind: type) -> dict:
    """Return the model's own rules of one kind."""
    own = getattr(unwrap(model), name, None)
    return {k: v for k, v in own.items() if isinstance(v, kind)} if isinstance(own, dict) else {}


_OTHER_RANK = Refusal(reason=RefusalReason.OTHER_RANK, detail="another rank cannot fuse this group")
