"""Turning samples into a batch: the default rule, and `DynamicPadCollator` for images of different sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array: TypeAlias = npt.NDArray[np.generic]
Collated: TypeAlias = (
    "Array | torch.Tensor | list[object] | tuple[object, ...] | dict[str, object] | str | bytes | None"
)


def torch_available() -> bool:
    """Return whether torch can be imported, without importing it."""
    if "torch" in sys.modules:
        return sys.modules["torch"] is not None
    from importlib.util import find_spec

    return find_spec("torch") is not None


def collate_arrays(samples: Sequence[object]) -> object:
    """Stack samples into numpy arrays; the structure of a sample is kept.

    * mapping: a dict of collated values per key (all samples must have the same keys);
    * tuple or list of equal length: a tuple or list of collated positions;
    * numpy array, numpy scalar, torch tensor, int, float, bool: an array with a new leading batch axis;
    * string, bytes, None and anything else: a list, one entry per sample, unchanged.

    Raises:
        ValueError: Keys or shapes differ between samples; the message names the key and both shapes.
    """
    return _collate(samples, "sample")


def _collate(values: Sequence[object], name: str) -> object:
    first = values[0]
    if isinstance(first, Mapping):
        keys = list(first)
        for position, value in enumerate(values):
            if not isinstance(value, Mapping) or set(value) != set(keys):
                other = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                msg = (
                    f"{name} {position} of the batch has {other}, the first one has "
                    f"{sorted(map(str, keys))}: "
                    "all samples need the same keys; use a collate_fn that fills in what is missing"
                )
                raise ValueError(msg)
        rows = cast("Sequence[Mapping[str, object]]", values)
        return {key: _collate([row[key] for row in rows], str(key)) for key in keys}
    if isinstance(first, bool):
        return np.asarray(values, dtype=np.bool_)
    if isinstance(first, int):
        return np.asarray(values, dtype=np.int64)
    if isinstance(first, float):
        return np.asarray(values, dtype=np.float64)
    if isinstance(first, np.ndarray | np.generic) or _is_tensor(first):
        return _stack([np.asarray(value) for value in values], name)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return rebuild(first, _positions(values, name))
    if isinstance(first, tuple):
        return tuple(_positions(values, name))
    if isinstance(first, list):
        return _positions(values, name)
    return list(values)


def rebuild(example: tuple[object, ...], values: Sequence[object]) -> object:
    """Return a named tuple of the example's type."""
    make = cast("Callable[..., object]", type(example))
    return make(*values)


def _positions(values: Sequence[object], name: str) -> list[object]:
    rows = cast("Sequence[Sequence[object]]", values)
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        msg = f"{name} has {sorted(lengths)} entries in one batch; use a collate_fn that pads"
        raise ValueError(msg)
    return [_collate(column, f"{name}[{i}]") for i, column in enumerate(zip(*rows, strict=True))]


def _stack(arrays: list[Array], name: str) -> Array | list[object]:
    first = arrays[0]
    for position, array in enumerate(arrays):
        if array.shape != first.shape or array.dtype != first.dtype:
            msg = (
                f"{name} of sample {position} has shape {array.shape} and type {array.dtype}, that of "
                f"sample 0 has "
                f"{first.shape} and {first.dtype}; use DynamicPadCollator or a collate_fn that makes them "
                f"equal"
            )
            raise ValueError(msg)
    if first.dtype.kind in "USO":
        return [array.item() for array in arrays]
    return np.stack(arrays)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_tensors(value: object) -> object:
    """Replace numpy arrays by torch tensors that share their memory; everything else stays."""
    import torch

    return _tensors(value, torch.from_numpy)


_NESTED = (np.ndarray, dict, list, tuple)


def _tensors(value: object, convert: Callable[[Array], torch.Tensor]) -> object:
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            return convert(value if value.flags.writeable else value.copy())
        return value
    if isinstance(value, dict):
        return {key: _tensors(item, convert) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return rebuild(value, [_tensors(item, convert) for item in value])
    if isinstance(value, tuple):
        return tuple(_tensors(item, convert) for item in value)
    if isinstance(value, list) and any(isinstance(item, _NESTED) for item in value):
        return [_tensors(item, convert) for item in value]
    return value


def default_collate(samples: Sequence[object]) -> object:
    """Collate samples: torch tensors where torch is installed, else numpy arrays; strings become a list."""
    batch = collate_arrays(samples)
    return to_tensors(batch) if torch_available() else batch


class DynamicPadCollator:
    """Pads the images of a batch to the largest height and width in it and says which pixels are real.

    Every array that is an image (``keys``, or by default: three or more axes, uint8 or float, last axis 1, 3
    or 4 channels) is padded at the bottom and right with ``fill``. ``<key>_mask`` is a bool array (B, H, W),
    true where a pixel comes from the sample. Other values go through `default_collate`.

    An image whose long side exceeds ``max_ratio`` times its short side is cut to that ratio around its
    centre, so that one panorama cannot blow up the whole batch; ``counters["cropped"]`` counts them.

    Args:
        max_ratio: Largest allowed long side / short side, >= 1.
        keys: Names of the image arrays; None finds them by shape.
        multiple: The padded height and width are rounded up to a multiple of this many pixels.
        fill: Value of padded pixels.
    """

    def __init__(
        self,
        max_ratio: float = 2.0,
        *,
        keys: Sequence[str] | None = None,
        multiple: int = 1,
        fill: int = 0,
    ) -> None:
        if not max_ratio >= 1.0:
            msg = f"max_ratio is {max_ratio}, allowed is >= 1 (long side over short side)"
            raise ValueError(msg)
        if multiple < 1:
            msg = f"multiple is {multiple}, allowed is >= 1 pixel"
            raise ValueError(msg)
        self.max_ratio = float(max_ratio)
        self.keys = None if keys is None else tuple(keys)
        self.multiple = multiple
        self.fill = fill
        self.counters = {"batches": 0, "images": 0, "cropped": 0, "padded_pixels": 0, "pixels": 0}

    def __call__(self, samples: Sequence[Mapping[str, object]]) -> dict[str, object]:
        """Return the batch; O(bytes of the batch)."""
        if not samples:
            msg = "an empty batch cannot be padded: give at least one sample"
            raise ValueError(msg)
        names = (
            self.keys if self.keys is not None else tuple(k for k in samples[0] if _is_image(samples[0][k]))
        )
        images = {name: self._pad(name, [np.asarray(sample[name]) for sample in samples]) for name in names}
        rest = collate_arrays([{k: v for k, v in s.items() if k not in images} for s in samples])
        batch: dict[str, object] = dict(rest) if isinstance(rest, dict) else {}
        for name, (padded, mask) in images.items():
            batch[name] = padded
            batch[f"{name}_mask"] = mask
        self.counters["batches"] += 1
        return cast("dict[str, object]", to_tensors(batch)) if torch_available() else batch

    def _pad(self, name: str, images: list[Array]) -> tuple[Array, npt.NDArray[np.bool_]]:
        kept = [self._limit(image) for image in images]
        shapes = {(*image.shape[:-3], image.shape[-1]) for image in kept}
        if len(shapes) != 1 or len({image.dtype for image in kept}) != 1:
            msg = (
                f"{name} differs in more than height and width: shapes {sorted({i.shape for i in kept})}, "
                f"types "
                f"{sorted({str(i.dtype) for i in kept})}; only height and width are padded"
            )
            raise ValueError(msg)
        height = _round_up(max(image.shape[-3] for image in kept), self.multiple)
        width = _round_up(max(image.shape[-2] for image in kept), self.multiple)
        first = kept[0]
        shape = (len(kept), *first.shape[:-3], height, width, first.shape[-1])
        padded = np.full(shape, self.fill, dtype=first.dtype)
        mask = np.zeros((len(kept), height, width), dtype=np.bool_)
        for row, image in enumerate(kept):
            h, w = image.shape[-3:-1]
            padded[row, ..., :h, :w, :] = image
            mask[row, :h, :w] = True
            self.counters["pixels"] += height * width
            self.counters["padded_pixels"] += height * width - h * w
        self.counters["images"] += len(kept)
        return padded, mask

    def _limit(self, image: Array) -> Array:
        height, width = image.shape[-3:-1]
        if height == 0 or width == 0:
            msg = f"an image has shape {image.shape}, allowed are at least 1 x 1 pixels"
            raise ValueError(msg)
        longest = max(1, int(min(height, width) * self.max_ratio))
        if max(height, width) <= longest:
            return image
        self.counters["cropped"] += 1
        if height > width:
            top = (height - longest) // 2
            return image[..., top : top + longest, :, :]
        left = (width - longest) // 2
        return image[..., left : left + longest, :]


def _is_image(value: object) -> bool:
    if not isinstance(value, np.ndarray) and not _is_tensor(value):
        return False
    array = np.asarray(value)
    return array.ndim >= 3 and array.shape[-1] in (1, 3, 4) and array.dtype.kind in "uf"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
