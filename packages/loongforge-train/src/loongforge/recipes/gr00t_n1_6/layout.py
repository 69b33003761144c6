"""Layout of a model batch: right-padded rows, and index tensors that say where text and images stand.

Everything that depends on token ids is worked out here, before the step, so that the forward pass has static
shapes and never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from loongforge.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Rows of tokens in the layout the model reads.

    Attributes:
        input_ids: (B, L) int64, valid tokens first, padding at the end.
        attention_mask: (B, L) bool, true on valid tokens.
        image_index: (B, I) int64 positions of the image tokens, in order.
        image_valid: (B, I) bool, or None when every sample has exactly I image tokens.
        text_index: (B, T) int64 positions of all other valid tokens.
        text_valid: (B, T) bool.
    """

    input_ids: Tensor
    attention_mask: Tensor
    image_index: Tensor
    image_valid: Tensor | None
    text_index: Tensor
    text_valid: Tensor

    def items(self) -> dict[str, Tensor]:
        """Return the tensors as batch entries; ``image_valid`` only where it says something."""
        result = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "image_index": self.image_index,
            "text_index": self.text_index,
            "text_valid": self.text_valid,
        }
        if self.image_valid is not None:
            result["image_valid"] = self.image_valid
        return result


def layout_tokens(
    rows: Sequence[Sequence[int]],
    *,
    image_token_id: int,
    pad_token_id: int,
    pad_to: int | None = None,
    multiple: int = 8,
) -> TokenLayout:
    """Pad rows of token ids on the right and index their image and text positions.

    Args:
        rows: Token ids of each sample, without padding.
        image_token_id: Id that marks an image token.
        pad_token_id: Id written at padded positions.
        pad_to: Fixed length L; None takes the longest row, rounded up to ``multiple``.
        multiple: Rounding of L when ``pad_to`` is None, tokens.

    Raises:
        ValueError: No rows, a row without an image token, or a row longer than ``pad_to``.
    """
    if not rows:
        msg = "layout_tokens needs at least one row of tokens, got none"
        raise ValueError(msg)
    longest = max(len(row) for row in rows)
    if pad_to is not None and longest > pad_to:
        msg = (
            f"a sample has {longest} tokens but pad_to is {pad_to}; raise pad_to to at least {longest} "
            "or use smaller images"
        )
        raise ValueError(msg)
    length = pad_to if pad_to is not None else -(-longest // multiple) * multiple
    images = [[i for i, token in enumerate(row) if token == image_token_id] for row in rows]
    texts = [[i for i, token in enumerate(row) if token != image_token_id] for row in rows]
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        if not image or not text:
            missing = "image" if not image else "text"
            msg = (
                f"sample {number} has no {missing} token; the action head attends to text and images in "
                "turn, so each sample needs at least one of both"
            )
            raise ValueError(msg)
    widest_image = max(map(len, images))
    # The text side takes what a full row leaves beside the images, so its width is fixed when L is.
    # Whole groups of eight keep the attention bias aligned for the fast kernels.
    widest_text = -(-max(max(map(len, texts)), length - widest_image) // 8) * 8
    same = all(len(image) == widest_image for image in images)
    image_index, image_valid = _pad_index(images, widest_image)
    text_index, text_valid = _pad_index(texts, widest_text)
    ids = torch.full((len(rows), length), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), length), dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
        mask[number, : len(row)] = True
    return TokenLayout(
        input_ids=ids,
        attention_mask=mask,
        image_index=image_index,
        image_valid=None if same else image_valid,
        text_index=text_index,
        text_valid=text_valid,
    )


def _pad_index(positions: Sequence[Sequence[int]], width: int) -> tuple[Tensor, Tensor]:
    index = torch.zeros((len(positions), width), dtype=torch.int64)
    valid = torch.zeros((len(positions), width), dtype=torch.bool)
    for number, row in enumerate(positions):
        index[number, : len(row)] = torch.as_tensor(row, dtype=torch.int64)
        valid[number, : len(row)] = True
    return index, valid


def canonical_batch(
    batch: Mapping[str, object], *, image_token_id: int, pad_token_id: int
) -> dict[str, object]:
    """Bring a batch padded on any side into the model's layout.

    Reads token values on the host: for batches of other origin (evaluation, tests), not for the hot path.
    """
    if "text_index" in batch:
        return dict(batch)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    if not isinstance(ids, Tensor) or not isinstance(mask, Tensor):
        msg = "a batch needs tensors 'input_ids' and 'attention_mask' (B, L)"
        raise ConfigError(msg)
    rows = [row[keep.bool()].tolist() for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]
    layout = layout_tokens(rows, image_token_id=image_token_id, pad_token_id=pad_token_id)
    return {**batch, **{name: value.to(ids.device) for name, value in layout.items().items()}}


def join_layouts(parts: Sequence[Mapping[str, Tensor]], pad_token_id: int) -> dict[str, Tensor]:
    """Join token entries of several batches, padding their lengths to the longest on the right."""
    result: dict[str, Tensor] = {}
    masked = (
        any("image_valid" in part for part in parts) or len({p["image_index"].shape[1] for p in parts}) > 1
    )
    names = ["input_ids", "attention_mask", "image_index", "text_index", "text_valid"]
    for name in [*names, "image_valid"] if masked else names:
        rows = [part[name] if name in part else torch.ones_like(part["image_index"]).bool() for part in parts]
        width = max(row.shape[1] for row in rows)
        fill = pad_token_id if name == "input_ids" else 0
        result[name] = torch.cat([functional.pad(r, (0, width - r.shape[1]), value=fill) for r in rows])
    return result
