"""Joining micro-batches along the sample dimension: equal shapes concatenate, others pad by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from loongforge_fuse.fusion.packing import PackedLayout, PackRule, pack_rows
from loongforge_fuse.fusion.reasons import RefusalReason
from loongforge_fuse.protocol import Batch, batch_size


@dataclass(frozen=True, kw_only=True)
class PadRule:
    """How one batch key is padded when its shapes differ between micro-batches.

    Attributes:
        value: Fill value. Default 0, which is also False for masks.
        side: Side of each padded dimension that receives the fill. Default ``"right"``; decoder text is often
            padded on the left.
        dims: Dimensions (of the batched tensor, 0 is the samples) that may differ. Default ``(1,)``.
        per_token: Elements of those dimensions that make one token, for the cost model: 784 for images whose
            14x14 patches are joined two by two. Default 1.
    """

    value: float = 0.0
    side: Literal["left", "right"] = "right"
    dims: tuple[int, ...] = (1,)
    per_token: int = 1

    def __post_init__(self) -> None:
        if self.side not in {"left", "right"}:
            message = f"side is {self.side!r}, allowed: 'left', 'right'"
            raise ValueError(message)
        if not self.dims or any(d < 1 for d in self.dims):
            message = f"dims is {self.dims}, it must name dimensions from 1 on; 0 holds the samples"
            raise ValueError(message)


class JoinError(Exception):
    """Micro-batches that cannot be joined; ``reason`` says why."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class JoinedBatch:
    """Several micro-batches in one.

    Attributes:
        batch: The joined batch.
        sizes: Samples of each micro-batch, in order.
        padded_share: Share of the elements of padded keys that are fill, 0 when nothing was padded.
        layout: ``concat``, ``pad`` or ``pack``.
    """

    batch: Batch
    sizes: tuple[int, ...]
    padded_share: float
    layout: str = "concat"


def join(
    batches: Sequence[Batch],
    *,
    pad_rules: Mapping[str, PadRule] | None = None,
    shared_keys: frozenset[str] = frozenset(),
) -> JoinedBatch:
    """Join micro-batches along dim 0.

    Tensors with dimensions are concatenated, after padding where a rule allows it; lists are appended;
    scalars and other values must be the same object or compare equal. The samples keep their order.

    Raises:
        JoinError: With the refusal reason, when keys, dtypes, shapes or shared values do not fit.
    """
    sizes = tuple(batch_size(b) for b in batches)
    names = list(batches[0])
    for batch in batches[1:]:
        if set(batch) != set(names):
            odd = sorted(set(batch) ^ set(names))
            raise JoinError(RefusalReason.KEYS_DIFFER, f"keys {odd} are not in every micro-batch")
    rules = pad_rules or {}
    joined: dict[str, object] = {}
    real = filled = 0
    for name in names:
        values = [b[name] for b in batches]
        if name not in shared_keys and all(isinstance(v, Tensor) and v.dim() > 0 for v in values):
            tensors = [v for v in values if isinstance(v, Tensor)]
            result, before = _join_tensors(name, tensors, sizes, rules.get(name))
            joined[name] = result
            if before != result.numel():
                real, filled = real + before, filled + result.numel() - before
        elif all(isinstance(v, list | tuple) for v in values):
            joined[name] = [item for v in values for item in v]  # type: ignore[attr-defined]
        else:
            joined[name] = _shared(name, values)
    share = filled / (real + filled) if filled else 0.0
    return JoinedBatch(batch=joined, sizes=sizes, padded_share=share, layout="pad" if filled else "concat")


def join_packed(
    batches: Sequence[Batch],
    *,
    pack_rules: Mapping[str, PackRule],
    pad_rules: Mapping[str, PadRule] | None = None,
    shared_keys: frozenset[str] = frozenset(),
) -> JoinedBatch:
    """Join micro-batches with the keys of ``pack_rules`` packed end to end and all others as in :func:`join`.

    The joined batch carries each rule's :class:`~loongforge_fuse.fusion.packing.PackedLayout` under its
    layout key, with one sequence per row of dim 0, in order.

    Raises:
        JoinError: As :func:`join`, or a packed key is no tensor, or two keys of one layout differ in length.
    """
    rest = [{k: v for k, v in b.items() if k not in pack_rules} for b in batches]
    joined = join(rest, pad_rules=pad_rules, shared_keys=shared_keys)
    result: dict[str, object] = dict(joined.batch)
    layouts: dict[str, tuple[int, ...]] = {}
    packed: dict[str, list[str]] = {}
    for key, rule in pack_rules.items():
        rows: list[Tensor] = []
        lengths: list[int] = []
        for batch in batches:
            value = batch.get(key)
            if not isinstance(value, Tensor) or value.dim() < 2:
                raise JoinError(
                    RefusalReason.KEYS_DIFFER, f"'{key}' is to be packed but is no (B, T, ...) tensor"
                )
            valid = sequence_lengths(batch, key, rule)
            rows.append(pack_rows(value, valid))
            lengths.extend(valid)
        if layouts.setdefault(rule.layout, tuple(lengths)) != tuple(lengths):
            detail = f"'{key}' has other lengths than the keys it shares the layout '{rule.layout}' with"
            raise JoinError(RefusalReason.SHAPES_DIFFER, detail)
        if len({(r.dtype, r.device, r.shape[1:]) for r in rows}) != 1:
            raise JoinError(RefusalReason.SHAPES_DIFFER, f"'{key}' comes in different row shapes or dtypes")
        result[key] = torch.cat(rows)
        packed.setdefault(rule.layout, []).append(key)
        result[rule.layout] = PackedLayout.of(
            lengths, rows[0].device, keys=packed[rule.layout], source=rule.lengths
        )
    return JoinedBatch(batch=result, sizes=joined.sizes, padded_share=joined.padded_share, layout="pack")


def sequence_lengths(batch: Batch, key: str, rule: PackRule) -> list[int]:
    """Return the valid length of each row of ``batch[key]``.

    Raises:
        JoinError: The rule names lengths that are missing or lie on a device, where reading them would wait.
    """
    value = batch[key]
    rows, longest = (value.shape[0], value.shape[1]) if isinstance(value, Tensor) else (0, 0)
    if rule.lengths is None:
        return [longest] * rows
    lengths = batch.get(rule.lengths)
    if isinstance(lengths, Tensor) and lengths.is_cuda:
        detail = f"'{rule.lengths}' lies on {lengths.device}; keep lengths on the host"
        raise JoinError(RefusalReason.DATA_DEPENDENT, detail)
    if isinstance(lengths, Tensor | list | tuple):
        return [int(n) for n in lengths]
    raise JoinError(RefusalReason.KEYS_DIFFER, f"'{rule.lengths}' with the lengths of '{key}' is missing")


def _join_tensors(
    name: str, tensors: list[Tensor], sizes: tuple[int, ...], rule: PadRule | None
) -> tuple[Tensor, int]:
    """Return the joined tensor and the number of elements that were there before padding."""
    first = tensors[0]
    if any(t.dtype != first.dtype or t.device != first.device for t in tensors):
        kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
        raise JoinError(RefusalReason.DTYPES_DIFFER, f"'{name}' comes as {kinds}")
    for tensor, size in zip(tensors, sizes, strict=True):
        if size and tensor.shape[0] % size:
            detail = (
                f"'{name}' has {tensor.shape[0]} rows for {size} samples; list it in shared_keys if it has "
                "no sample dimension"
            )
            raise JoinError(RefusalReason.SHAPES_DIFFER, detail)
    before = sum(t.numel() for t in tensors)
    if all(t.shape[1:] == first.shape[1:] for t in tensors):
        return torch.cat(tensors), before
    if rule is None:
        shapes = sorted({tuple(t.shape[1:]) for t in tensors})
        raise JoinError(RefusalReason.SHAPES_DIFFER, f"'{name}' comes in shapes {shapes} and has no pad rule")
    if len({t.dim() for t in tensors}) != 1:
        raise JoinError(RefusalReason.SHAPES_DIFFER, f"'{name}' comes with different numbers of dimensions")
    target = tuple(max(t.shape[d] for t in tensors) for d in range(1, first.dim()))
    for d in range(1, first.dim()):
        if d not in rule.dims and any(t.shape[d] != target[d - 1] for t in tensors):
            lengths = sorted({t.shape[d] for t in tensors})
            raise JoinError(
                RefusalReason.SHAPES_DIFFER,
                f"dim {d} of '{name}' is {lengths}; its pad rule covers {rule.dims}",
            )
    return torch.cat([pad_to(t, target, rule) for t in tensors]), before


def pad_to(tensor: Tensor, target: tuple[int, ...], rule: PadRule) -> Tensor:
    """Return ``tensor`` with its dims 1.. enlarged to ``target`` by the rule's value and side."""
    if tuple(tensor.shape[1:]) == target:
        return tensor
    result = tensor.new_full((tensor.shape[0], *target), rule.value)
    place = [slice(None)]
    for have, want in zip(tensor.shape[1:], target, strict=True):
        place.append(slice(want - have, want) if rule.side == "left" else slice(0, have))
    result[tuple(place)] = tensor
    return result


def _shared(name: str, values: list[object]) -> object:
    """Return the one value all micro-batches share."""
    first = values[0]
    for value in values[1:]:
        if value is first:
            continue
        if isinstance(value, Tensor) and isinstance(first, Tensor):
            # Comparing device values would make the host wait, so only host tensors are compared.
            if (
                value.shape == first.shape
                and not value.is_cuda
                and not first.is_cuda
                and torch.equal(value, first)
            ):
                continue
        elif type(value) is type(first) and not isinstance(value, Tensor) and bool(value == first):
            continue
        raise JoinError(
            RefusalReason.SHARED_VALUES_DIFFER, f"'{name}' has no sample dimension and is not the same object"
        )
    return first
