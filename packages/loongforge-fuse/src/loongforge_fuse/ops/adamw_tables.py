"""What the AdamW kernels read: tables of addresses and chunks on the device, and how they get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function, copy_to_device
from loongforge_fuse.kernels.launcher import KernelUnavailableError
from loongforge_fuse.kernels.specs import KernelSpec, Option
from loongforge_fuse.ops._common import CODES, kernel

CHUNK = 16384
_WORD = 16


def norm_spec(g: str) -> KernelSpec:
    """Return the specification of the gradient norm kernel."""
    return KernelSpec(
        module="optimizer", maker="gradient_norm", options={"g": g, "chunk": CHUNK}, arguments="PPP"
    )


def prepare_spec() -> KernelSpec:
    """Return the specification of the one-block kernel between norm and update."""
    return KernelSpec(
        module="optimizer", maker="prepare_step", arguments="PqPPPPPqfff", block=1024, vector=False
    )


def update_spec(p: str, g: str, s: str, *, master: bool) -> KernelSpec:
    """Return the specification of the update kernel."""
    options: dict[str, Option] = {"p": p, "g": g, "s": s, "master": master, "chunk": CHUNK}
    return KernelSpec(module="optimizer", maker="adamw_update", options=options, arguments="PPPPPfffff")


class Slot(NamedTuple):
    """One parameter with everything its update touches; `master` is None without master weights."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    group: int


@dataclass(kw_only=True)
class Launch:
    """All parameters of one combination of types: their table, their chunks and the kernels."""

    tensors: Tensor
    chunks: Tensor
    blocks: int
    norm: Function
    update: Function
    first_partial: int


@dataclass(kw_only=True)
class Tables:
    """Device tables of a set of slots; valid while no address changes."""

    key: tuple[tuple[int, ...], ...]
    launches: list[Launch]
    partial: Tensor
    scalars: Tensor
    norm: Tensor
    keep: list[Tensor] = field(default_factory=list)


def chunk_pairs(counts: Sequence[int]) -> np.ndarray:
    """Return (tensor, chunk) int32 pairs that cover tensors of the given sizes."""
    per = np.array([-(-c // CHUNK) for c in counts], dtype=np.int64)
    tensors = np.repeat(np.arange(len(counts), dtype=np.int64), per)
    starts = np.repeat(np.cumsum(per) - per, per)
    return np.stack((tensors, np.arange(tensors.size) - starts), axis=1).astype(np.int32)


class Uploader:
    """Copies tables to the device without waiting, and keeps spare pinned memory for a graph capture.

    Inside a capture nothing may be pinned, so every eager upload leaves a spare of its size behind. The copy
    is the driver's own: torch's pinned allocator records events that a capture does not allow.
    """

    def __init__(self) -> None:
        self._spares: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def send(self, array: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the table on the device and its pinned source, which must live while a graph may replay.

        Raises:
            RuntimeError: the first step of this set of parameters is being captured.
        """
        host = torch.from_numpy(np.ascontiguousarray(array))
        key = (tuple(host.shape), host.dtype)
        spares = self._spares.setdefault(key, [])
        if not torch.cuda.is_current_stream_capturing():
            if not spares:
                spares.append(torch.empty(host.shape, dtype=host.dtype, pin_memory=True))
            source = host.pin_memory()
            return source.to(device, non_blocking=True), source
        if not spares:
            message = (
                "FusedAdamW cannot be captured in its first step; run one step eagerly before the capture"
            )
            raise RuntimeError(message)
        source = spares.pop()
        source.copy_(host)
        target = torch.empty(host.shape, dtype=host.dtype, device=device)
        copy_to_device(target.data_ptr(), source.data_ptr(), source.nbytes, device.index or 0)
        return target, source


def _row(slot: Slot) -> tuple[int, ...]:
    tensors = (slot.param, slot.grad, slot.exp_avg, slot.exp_avg_sq)
    addresses = [t.data_ptr() for t in tensors]
    addresses.append(0 if slot.master is None else slot.master.data_ptr())
    wide = not any(a % _WORD for a in addresses)
    return (*addresses, slot.param.numel(), slot.group, int(wide))


def check_layouts(slots: Sequence[Slot]) -> None:
    """Check that an update may walk through memory from each parameter's first element to its last.

    Raises:
        KernelUnavailableError: A state lies in memory in another order than its parameter, or a parameter has
            gaps, which belong to somebody else.
        ValueError: Parameters on several devices.
    """
    devices = sorted({str(slot.param.device) for slot in slots})
    if len(devices) > 1:
        message = f"FusedAdamW takes parameters on one device, got {', '.join(devices)}; make one for each"
        raise ValueError(message)
    for slot in slots:
        contiguous = slot.param.is_contiguous()
        for value in (slot.exp_avg, slot.exp_avg_sq, slot.master):
            if value is None or (contiguous and value.is_contiguous()):
                continue
            if value.stride() != slot.param.stride():
                message = "state and parameter have different strides"
                raise KernelUnavailableError(message)
        if not contiguous and _has_gaps(slot.param):
            message = "a parameter has gaps in memory"
            raise KernelUnavailableError(message)


def _has_gaps(tensor: Tensor) -> bool:
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and reach + 1 != tensor.numel()


def build_tables(
    slots: Sequence[Slot], key: tuple[tuple[int, ...], ...], device: torch.device, uploader: Uploader
) -> Tables:
    """Put the addresses of all slots on the device, one launch for each mixture of types."""
    kinds: dict[tuple[str, str, str, bool], list[Slot]] = {}
    for slot in slots:
        codes = (CODES[slot.param.dtype], CODES[slot.grad.dtype], CODES[slot.exp_avg.dtype])
        kinds.setdefault((*codes, slot.master is not None), []).append(slot)
    index = device.index if device.index is not None else torch.cuda.current_device()
    launches, keep, partials = [], [], 0
    for kind, members in kinds.items():
        p, g, s, master = kind
        norm, update = kernel(norm_spec(g), index), kernel(update_spec(p, g, s, master=master), index)
        table, source = uploader.send(np.array([_row(s) for s in members], dtype=np.int64), device)
        pairs = chunk_pairs([s.param.numel() for s in members])
        chunks, pair_source = uploader.send(pairs, device)
        keep += [source, pair_source]
        blocks = len(pairs)
        launches.append(
            Launch(
                tensors=table, chunks=chunks, blocks=blocks, norm=norm, update=update, first_partial=partials
            )
        )
        partials += blocks
    return Tables(
        key=key,
        launches=launches,
        partial=torch.empty(max(1, partials), device=device),
        scalars=torch.empty(4, device=device),
        norm=torch.empty((), device=device),
        keep=keep,
    )


def address_key(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, group: int
) -> tuple[int, int, int, int]:
    """Return what must not change while tables are in use."""
    # exp_avg stands for the state: it is made and replaced together with exp_avg_sq and master.
    return param.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), group
