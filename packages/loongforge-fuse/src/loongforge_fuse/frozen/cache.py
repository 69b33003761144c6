"""Reuse of frozen features: outputs of a frozen prefix, kept per sample on GPU, host and disk.

A frozen vision tower gives the same output for the same picture in every epoch. This cache keys outputs by
sample, by a hash of the frozen weights and by the name of the input transform, and refuses where reuse
would be wrong: random augmentation, dropout that is switched on, or anything in the prefix that trains.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

FORMAT = 1


class FrozenReuseError(ValueError):
    """Reusing features would give other numbers than computing them."""


@dataclass(frozen=True, kw_only=True)
class FrozenCacheConfig:
    """Settings of :class:`FrozenFeatureCache`.

    Attributes:
        enabled: Off by default: the user decides that samples come back unchanged.
        device_bytes: Features kept on the prefix's device, bytes. Default 0, none.
        host_bytes: Features kept in host memory, bytes. Default 8 GiB.
        disk_bytes: Features kept in ``folder``, bytes. Default 0, none.
        folder: Where files go; needed for ``disk_bytes``. Default None.
        augmentation: ``"none"``: the caller asserts that a sample's input never changes. ``"keyed"``: it
            changes only with the transform key given at each call. ``"random"``: refused. Default ``"none"``.
    """

    enabled: bool = False
    device_bytes: int = 0
    host_bytes: int = 8 << 30
    disk_bytes: int = 0
    folder: Path | None = None
    augmentation: Literal["none", "keyed", "random"] = "none"

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                message = f"{name} is {getattr(self, name)}, it must be 0 or more bytes"
                raise ValueError(message)
        if self.disk_bytes and self.folder is None:
            message = "disk_bytes needs a folder; set folder= or disk_bytes=0"
            raise ValueError(message)
        if self.augmentation not in {"none", "keyed", "random"}:
            message = f"augmentation is {self.augmentation!r}, allowed: 'none', 'keyed', 'random'"
            raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class FrozenCacheStats:
    """Counters since the cache was made.

    Attributes:
        hits: Samples served, by tier.
        misses: Samples computed.
        evictions: Samples dropped from a tier for room, by tier.
        bytes: Bytes held now, by tier.
        invalidated: Times the frozen weights had changed and all was dropped.
    """

    hits: dict[str, int]
    misses: int
    evictions: dict[str, int]
    bytes: dict[str, int]
    invalidated: int


class FrozenFeatureCache:
    """Least-recently-used cache of a frozen module's per-sample outputs.

    Args:
        module: The frozen prefix; called as ``module(*inputs)`` on a batch, it returns one tensor ``(B,
            ...)``.
        config: Settings.

    Raises:
        FrozenReuseError: The prefix trains, has dropout switched on, normalises over the batch in training
            mode, or the augmentation is random.
    """

    def __init__(self, module: nn.Module, config: FrozenCacheConfig | None = None) -> None:
        self.config = config or FrozenCacheConfig()
        self.module = module
        self._lock = threading.Lock()
        self._tiers: dict[str, OrderedDict[str, Tensor | Path]] = {
            name: OrderedDict() for name in ("device", "host", "disk")
        }
        self._sizes: dict[str, dict[str, int]] = {name: {} for name in self._tiers}
        self._held = dict.fromkeys(self._tiers, 0)
        self._hits = dict.fromkeys(self._tiers, 0)
        self._evictions = dict.fromkeys(self._tiers, 0)
        self._misses = self._invalidated = 0
        self._state: tuple[object, ...] | None = None
        self._fingerprint = ""
        if self.config.enabled:
            check_reusable(module, self.config.augmentation)
            self._refresh()

    def __call__(
        self,
        samples: Sequence[Hashable],
        compute: Callable[[list[int]], Tensor],
        *,
        transform: str = "",
    ) -> Tensor:
        """Return the features of a batch, computing only those of samples that are not held.

        Args:
            samples: Identity of each sample (its index in the data set, for example), stable over epochs.
            compute: Returns the features ``(len(rows), ...)`` of the given rows of the batch; called without
                gradients, at most once, with the rows that are missing.
            transform: Key of everything that was done to the inputs. Required with ``augmentation="keyed"``.

        Returns:
            ``(B, ...)`` in the order of ``samples``, without gradient. Equal to computing all rows, up to the
            rounding of the module at another batch size.

        Raises:
            FrozenReuseError: The prefix can no longer be reused, or the transform key is missing.
        """
        rows = list(range(len(samples)))
        if not self.config.enabled:
            with torch.no_grad():
                return compute(rows)
        check_reusable(self.module, self.config.augmentation)
        if self.config.augmentation == "keyed" and not transform:
            message = "augmentation is 'keyed' but no transform key was given; pass transform= at each call"
            raise FrozenReuseError(message)
        self._refresh()
        keys = [self._key(sample, transform) for sample in samples]
        found = [self._get(key) for key in keys]
        # A sample that stands in the batch twice is computed once.
        first = {keys[i]: i for i in reversed(rows)}
        missing = [i for i in rows if found[i] is None and first[keys[i]] == i]
        if missing:
            with torch.no_grad():
                fresh = compute(missing)
            if fresh.shape[0] != len(missing):
                message = f"compute returned {fresh.shape[0]} rows for {len(missing)} samples"
                raise ValueError(message)
            self._misses += len(missing)
            for place, row in enumerate(missing):
                found[row] = fresh[place]
                self._put(keys[row], fresh[place])
            found = [found[first[keys[i]]] if f is None else f for i, f in enumerate(found)]
        device = self._device()
        return torch.stack([f.to(device, non_blocking=True) for f in found if f is not None])

    def _device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def _refresh(self) -> None:
        """Drop everything when the frozen weights changed since the last call."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        # Version counters see in-place changes without reading the values; the hash then settles it.
        state: tuple[object, ...] = tuple((t.data_ptr(), t._version, t.dtype) for t in tensors)  # noqa: SLF001
        if state == self._state:
            return
        self._state = state
        fingerprint = weights_hash(self.module)
        if self._fingerprint and fingerprint != self._fingerprint:
            self._invalidated += 1
            self.clear()
        self._fingerprint = fingerprint

    def _key(self, sample: Hashable, transform: str) -> str:
        text = f"{FORMAT}\0{self._fingerprint}\0{transform}\0{type(sample).__name__}\0{sample!r}"
        return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()

    def _get(self, key: str) -> Tensor | None:
        with self._lock:
            for name, tier in self._tiers.items():
                value = tier.get(key)
                if value is None:
                    continue
                tier.move_to_end(key)
                if isinstance(value, Path):
                    loaded = _load(value)
                    if loaded is None:
                        self._drop(name, key)
                        continue
                    value = loaded
                self._hits[name] += 1
                return value
        return self._adopt(key)

    def _adopt(self, key: str) -> Tensor | None:
        """Look for a file of an earlier run."""
        if not self.config.disk_bytes or self.config.folder is None:
            return None
        path = self.config.folder / f"{key}.pt"
        value = _load(path) if path.exists() else None
        if value is None:
            return None
        with self._lock:
            self._hits["disk"] += 1
            self._insert("disk", key, path, value.numel() * value.element_size())
        return value

    def _put(self, key: str, value: Tensor) -> None:
        size = value.numel() * value.element_size()
        with self._lock:
            if size <= self.config.device_bytes and size <= self.config.device_bytes - self._held["device"]:
                self._insert("device", key, value.detach().clone(), size)
            elif size <= self.config.host_bytes:
                self._insert("host", key, value.detach().to("cpu", copy=True), size)
            elif size <= self.config.disk_bytes and self.config.folder is not None:
                path = self.config.folder / f"{key}.pt"
                _save(value.detach().cpu(), path)
                self._insert("disk", key, path, size)

    def _insert(self, name: str, key: str, value: Tensor | Path, size: int) -> None:
        limits = {
            "device": self.config.device_bytes,
            "host": self.config.host_bytes,
            "disk": self.config.disk_bytes,
        }
        if key in self._tiers[name]:
            # Its file, if it has one, has just been written anew.
            del self._tiers[name][key]
            self._held[name] -= self._sizes[name].pop(key)
        while self._tiers[name] and self._held[name] + size > limits[name]:
            oldest = next(iter(self._tiers[name]))
            old, old_size = self._tiers[name][oldest], self._sizes[name][oldest]
            self._evictions[name] += 1
            self._drop(name, oldest)
            # What leaves the host goes to disk where there is room for it.
            if name == "host" and isinstance(old, Tensor) and old_size <= self.config.disk_bytes:
                folder = self.config.folder
                if folder is not None:
                    path = folder / f"{oldest}.pt"
                    _save(old, path)
                    self._insert("disk", oldest, path, old_size)
        self._tiers[name][key] = value
        self._sizes[name][key] = size
        self._held[name] += size

    def _drop(self, name: str, key: str) -> None:
        value = self._tiers[name].pop(key)
        self._held[name] -= self._sizes[name].pop(key)
        if isinstance(value, Path):
            value.unlink(missing_ok=True)

    def clear(self) -> None:
        """Drop all features, files included."""
        with self._lock:
            for name, tier in self._tiers.items():
                for key in list(tier):
                    self._drop(name, key)

    def stats(self) -> FrozenCacheStats:
        """Return the counters."""
        with self._lock:
            return FrozenCacheStats(
                hits=dict(self._hits),
                misses=self._misses,
                evictions=dict(self._evictions),
                bytes=dict(self._held),
                invalidated=self._invalidated,
            )


def check_reusable(module: nn.Module, augmentation: str) -> None:
    """Raise FrozenReuseError when features of ``module`` may not be reused."""
    if augmentation == "random":
        message = "inputs are augmented at random: no sample comes back unchanged; switch the cache off"
        raise FrozenReuseError(message)
    for name, part in module.named_modules():
        where = f"'{name}' ({type(part).__name__})" if name else type(part).__name__
        if any(p.requires_grad for p in part.parameters(recurse=False)):
            message = f"{where} trains; freeze it or move the border of the prefix below it"
            raise FrozenReuseError(message)
        probability = getattr(part, "p", 0.0)
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and probability > 0:  # noqa: SLF001
            message = f"{where} drops {probability:.0%} at random; put the frozen prefix in eval mode"
            raise FrozenReuseError(message)
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training:  # noqa: SLF001
            message = f"{where} normalises over the batch; put the frozen prefix in eval mode"
            raise FrozenReuseError(message)


def weights_hash(module: nn.Module) -> str:
    """Return a hash of names, dtypes, shapes and values of a module's parameters and buffers.

    Values enter as sums of their bits with two position-dependent weights, computed where the tensor lies.
    """
    digest = hashlib.blake2b(digest_size=16)
    with torch.no_grad():
        for name, value in sorted(
            {**dict(module.named_parameters()), **dict(module.named_buffers())}.items()
        ):
            raw = value.detach().contiguous().flatten().view(torch.uint8)
            padded = torch.nn.functional.pad(raw, (0, -raw.numel() % 4)).view(torch.int32).long()
            places = torch.arange(1, padded.numel() + 1, device=padded.device)
            sums = torch.stack([padded.sum(), (padded * (places * 2_654_435_761 % 1_000_003)).sum()])
            digest.update(f"{name}\0{value.dtype}\0{tuple(value.shape)}\0{sums.tolist()}\0".encode())
    return digest.hexdigest()


def _save(value: Tensor, path: Path) -> None:
    """Write next to the target and rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    torch.save(value.clone(), temporary)
    temporary.replace(path)


def _load(path: Path) -> Tensor | None:
    """Return the tensor in a file, or None when it is damaged or gone: then it is computed again."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError):
        return None
    except Exception:
        return None
    return value if isinstance(value, Tensor) else None
