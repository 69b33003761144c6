"""L2: batches to the device on a side stream, ahead of the step that needs them.

Images travel as uint8 (a quarter of float32) and are converted on the device by a callable that is handed
in; without one they stay uint8. A batch's host memory is kept until its copies have finished, and its
device memory is marked as used by the consumer's stream, so that neither is given away under running work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from loongforge_data.collate import rebuild
from loongforge_data.pinning import CudaEvent

if TYPE_CHECKING:
    import torch


@runtime_checkable
class ResumableLoader(Protocol):
    """What is needed of a loader to resume it."""

    def state_dict(self) -> Mapping[str, object]:
        """Return the position."""

    def load_state_dict(self, state: Mapping[str, object], /) -> None:
        """Go to a position."""


class _ReshardableLoader(Protocol):
    """A loader that can also take the position of another global batch, such as ADFEDataLoader."""

    def load_state_dict(self, state: Mapping[str, object], /, *, reshard: bool) -> None:
        """Go to a position."""


@dataclass(frozen=True, kw_only=True)
class _Staged:
    """A batch whose copies are queued."""

    value: object
    host: object
    ready: CudaEvent | None
    began: CudaEvent | None
    state: Mapping[str, object] | None
    bytes: int


def images_to_half(
    images: torch.Tensor,
    *,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Convert images with torch alone: the fallback where no fused kernel is handed in.

    Args:
        images: uint8 (..., H, W, C), any device.
        mean: Per channel, in units of the 0..1 range.
        std: Per channel, in the same units.
        dtype: Result type; None means bfloat16.

    Returns:
        (..., C, H, W), contiguous, ``(x / 255 - mean) / std``.
    """
    import torch

    if images.dtype != torch.uint8 or images.ndim < 3 or images.shape[-1] != len(mean):
        msg = (
            f"images have type {images.dtype} and shape {tuple(images.shape)}, allowed is uint8 "
            f"(..., height, width, {len(mean)})"
        )
        raise ValueError(msg)
    scale = torch.tensor([1.0 / (255.0 * s) for s in std], device=images.device)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=images.device)
    value = torch.addcmul(shift, images.float(), scale)
    return value.movedim(-1, -3).to(dtype or torch.bfloat16).contiguous()


class DevicePrefetcher:
    """Iterates a loader and hands out its batches on a device.

    ``state_dict()`` counts batches that were handed out, not those pulled ahead. Attributes it does not
    have are looked up in the loader (``epoch``, ``stats`` of the loader are ``prefetcher.loader.stats()``).

    Args:
        loader: Any iterable of batches; resumable when it has ``state_dict`` and ``load_state_dict``.
        device: Where batches go, e.g. "cuda:0" or "cpu".
        convert: uint8 (..., H, W, C) tensor on the device to what the model wants; None leaves it.
        depth: Batches on their way at once, at least 1; 2 overlaps copies with the step.
        keys: Names of the entries that are images; None takes uint8 tensors of 3 or more axes and 1, 3 or
            4 channels.
    """

    def __init__(
        self,
        loader: object,
        device: str | torch.device,
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
        depth: int = 2,
        *,
        keys: Sequence[str] | None = None,
    ) -> None:
        import torch

        if depth < 1:
            msg = f"depth is {depth}, allowed is >= 1"
            raise ValueError(msg)
        self.loader = loader
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            msg = f"device is {device}, but torch sees no CUDA device; use device='cpu'"
            raise ValueError(msg)
        self._torch = torch
        self._convert = convert
        self._depth = depth
        self._keys = None if keys is None else frozenset(keys)
        self._stream: torch.cuda.Stream | None = None
        self._state: Mapping[str, object] | None = None
        self._counts = {"batches": 0, "h2d_bytes": 0, "wait_ms": 0.0, "h2d_ms": 0.0, "pageable_bytes": 0}
        self._last_wait_ms = 0.0
        self._generation = 0

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    # -- iteration ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[object]:
        """Iterate over what the loader gives; its error is raised after the batches that came before it."""
        finished: deque[_Staged] = deque()
        try:
            yield from self._batches(finished)
        finally:
            # The loader writes its memory again as soon as nobody holds the batch.
            for entry in finished:
                if entry.ready is not None:
                    entry.ready.synchronize()

    def _batches(self, finished: deque[_Staged]) -> Iterator[object]:
        """Yield the batches; ``finished`` holds those that were handed out and may still be on their way."""
        self._generation += 1
        generation = self._generation
        source = iter(self.loader)  # type: ignore[call-overload]
        staged: deque[_Staged] = deque()
        self._state = None
        more, failure = True, None
        while True:
            start = time.perf_counter()
            while more and len(staged) < (self._depth if self.device.type == "cuda" else 1):
                try:
                    entry = self._pull(source)
                except Exception as error:
                    # The position counts what was handed out: what is on its way is not lost for the error.
                    entry, failure = None, error
                if entry is None:
                    more = False
                else:
                    staged.append(entry)
            if not staged:
                break
            entry = staged.popleft()
            value = self._hand_out(entry)
            self._settle(finished, entry)
            self._last_wait_ms = 1e3 * (time.perf_counter() - start)
            self._counts["wait_ms"] += self._last_wait_ms
            self._counts["batches"] += 1
            self._state = entry.state
            del entry
            yield value
            if generation != self._generation:
                return
        if failure is not None:
            raise failure
        self._state = None

    def _pull(self, source: Iterator[object]) -> _Staged | None:
        try:
            batch = next(source)
        except StopIteration:
            return None
        state = self.loader.state_dict() if isinstance(self.loader, ResumableLoader) else None
        if self.device.type != "cuda":
            value = self._map(batch, self._to_device)
            return _Staged(value=value, host=None, ready=None, began=None, state=state, bytes=0)
        cuda = self._torch.cuda
        if self._stream is None:
            self._stream = cuda.Stream(self.device)
        began = cast("CudaEvent", cuda.Event(enable_timing=True))
        ready = cast("CudaEvent", cuda.Event(enable_timing=True))
        before = self._counts["h2d_bytes"]
        host: list[torch.Tensor] = []
        with cuda.stream(self._stream):
            began.record(self._stream)
            value = self._map(batch, lambda name, tensor: self._copy(name, tensor, host))
            ready.record(self._stream)
        size = int(self._counts["h2d_bytes"] - before)
        return _Staged(value=value, host=(batch, host), ready=ready, began=began, state=state, bytes=size)

    def _copy(self, name: str, tensor: torch.Tensor, host: list[torch.Tensor]) -> torch.Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            self._counts["pageable_bytes"] += tensor.numel() * tensor.element_size()
            tensor = tensor.pin_memory()
            host.append(tensor)
        self._counts["h2d_bytes"] += tensor.numel() * tensor.element_size()
        return self._converted(name, tensor.to(self.device, non_blocking=True))

    def _to_device(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._converted(name, tensor.to(self.device))

    def _converted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._convert is None or not self._is_image(name, tensor):
            return tensor
        return self._convert(tensor)

    def _is_image(self, name: str, tensor: torch.Tensor) -> bool:
        if self._keys is not None:
            return name in self._keys
        return tensor.dtype == self._torch.uint8 and tensor.ndim >= 3 and tensor.shape[-1] in (1, 3, 4)

    def _map(
        self, value: object, change: Callable[[str, torch.Tensor], torch.Tensor], name: str = ""
    ) -> object:
        if isinstance(value, self._torch.Tensor):
            return change(name, value)
        if isinstance(value, dict):
            return {key: self._map(item, change, str(key)) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return rebuild(value, [self._map(item, change, name) for item in value])
        if isinstance(value, list | tuple):
            return type(value)(self._map(item, change, name) for item in value)
        return value

    def _hand_out(self, entry: _Staged) -> object:
        """Let the consumer's stream wait for the copies, and mark the memory as used there."""
        if entry.ready is None:
            return entry.value
        current = self._torch.cuda.current_stream(self.device)
        current.wait_event(cast("torch.cuda.Event", entry.ready))

        def mark(_: str, tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)
            return tensor

        return self._map(entry.value, mark)

    def _settle(self, finished: deque[_Staged], entry: _Staged) -> None:
        """Keep host memory until its copies are done; then it may be given back."""
        if entry.ready is None or entry.began is None:
            return
        finished.append(entry)
        while finished and (ready := finished[0].ready) is not None and ready.query():
            done = finished.popleft()
            if done.began is not None:
                self._counts["h2d_ms"] += done.began.elapsed_time(ready)

    # -- position and statistics -------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the position after the last batch that was handed out."""
        if not isinstance(self.loader, ResumableLoader):
            msg = (
                f"{type(self.loader).__name__} has no state_dict: use a resumable loader such as "
                f"ADFEDataLoader"
            )
            raise TypeError(msg)
        return dict(self._state if self._state is not None else self.loader.state_dict())

    def load_state_dict(self, state: Mapping[str, object], *, reshard: bool = False) -> None:
        """Go to a position; batches pulled ahead are dropped.

        Args:
            state: What `state_dict` returned.
            reshard: Also take the state of another global batch; the loader must know this argument, see
                `ADFEDataLoader.load_state_dict`.
        """
        if not isinstance(self.loader, ResumableLoader):
            msg = f"{type(self.loader).__name__} has no load_state_dict"
            raise TypeError(msg)
        self._generation += 1
        self._state = None
        if reshard:
            cast("_ReshardableLoader", self.loader).load_state_dict(state, reshard=True)
        else:
            self.loader.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; naming the epoch of the position keeps the position."""
        self._generation += 1
        if self._state is not None and isinstance(self.loader, ResumableLoader):
            # The loader may be ahead of what was handed out.
            self.loader.load_state_dict(self._state)
            self._state = None
        set_epoch = getattr(self.loader, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def stats(self) -> dict[str, float | int | str | None]:
        """Return the loader's statistics and those of the copies."""
        inner = getattr(self.loader, "stats", None)
        base: dict[str, float | int | str | None] = dict(inner()) if callable(inner) else {}
        seconds = self._counts["h2d_ms"] / 1e3
        base.update(
            {
                "h2d_bytes": self._counts["h2d_bytes"],
                "h2d_ms": self._counts["h2d_ms"],
                "h2d_gb_per_s": self._counts["h2d_bytes"] / 1e9 / seconds if seconds else None,
                "h2d_pageable_bytes": self._counts["pageable_bytes"],
                "device_batches": self._counts["batches"],
                "data_wait_ms": self._counts["wait_ms"],
                "last_data_wait_ms": self._last_wait_ms,
            }
        )
        return base

    def close(self) -> None:
        """Close the loader."""
        self._generation += 1
        close = getattr(self.loader, "close", None)
        if callable(close):
            close()
