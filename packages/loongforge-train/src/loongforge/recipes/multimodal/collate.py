"""From samples to batches of the multimodal model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.processing.images import resize_uint8
from loongforge.recipes.gr00t_n1_6.processing.text import ByteTokenizer
from loongforge.recipes.multimodal.config import MultimodalConfig

Sample = Mapping[str, object]
Array = npt.NDArray[np.float32]


class MultimodalCollate:
    """Collate function: pads what is missing, orders what is valid, turns actions into tokens.

    Args:
        config: Model configuration.
        views: Camera features in order; empty means no images.
        image_size: (height, width) of every image, multiples of 28.
        audio_key: Sample key of the sound (channels, samples), or empty.
        series_key: Sample key of the series (rows, channels), or empty.
        series_range: Lowest and highest value (channels,) of the series, for scaling to [-1, 1].
        action_range: Lowest and highest value (D,) of each action dimension.
        text_tokens: Fixed number of text tokens; longer instructions are cut.
    """

    def __init__(
        self,
        config: MultimodalConfig,
        *,
        views: Sequence[str],
        image_size: tuple[int, int],
        audio_key: str,
        series_key: str,
        series_range: tuple[Array, Array] | None,
        action_range: tuple[Array, Array],
        text_tokens: int = 64,
    ) -> None:
        self.config, self.views, self.image_size = config, tuple(views), image_size
        self.audio_key, self.series_key = audio_key, series_key
        self.series_range, self.action_range = series_range, action_range
        self.text_tokens = text_tokens
        self.tokenizer = ByteTokenizer()

    def __call__(self, samples: Sequence[Sample]) -> dict[str, object]:
        """Join samples into one batch of tensors on the host."""
        batch: dict[str, object] = {}
        valid: list[Tensor] = []
        count = len(samples)
        if self.views:
            images = torch.stack(
                [torch.stack([self._image(s, view) for view in self.views]) for s in samples]
            )
            batch["images"] = images
            per_image = images.shape[2] * images.shape[3] // 784
            valid.append(torch.ones(count, len(self.views) * per_image, dtype=torch.bool))
        if self.audio_key:
            batch["audio"], batch["audio_valid"] = self._sound(samples)
            valid.append(batch["audio_valid"])  # type: ignore[arg-type]
        if self.series_key:
            batch["series"], batch["series_valid"] = self._series(samples)
            valid.append(batch["series_valid"])  # type: ignore[arg-type]
        before = sum(part.shape[1] for part in valid)
        text, text_valid = self._text(samples)
        bins, bins_valid = self._actions(samples)
        batch["input_ids"] = torch.cat((text, bins + self.config.first_action_id), dim=1)
        everything = torch.cat((*valid, text_valid, bins_valid), dim=1)
        # A stable sort on "is padding" keeps the order of valid tokens and moves the others to the end.
        order = torch.argsort((~everything).to(torch.uint8), dim=1, stable=True)
        batch["order"] = order
        rank = torch.argsort(order, dim=1)
        first = before + text.shape[1]
        # The row before an action token predicts it.
        batch["target_place"] = (rank[:, first:] - 1).clamp(min=0)
        batch["target"], batch["target_valid"] = bins, bins_valid
        numbers = [int(np.asarray(s.get("index", i)).reshape(-1)[0]) for i, s in enumerate(samples)]
        batch["index"] = torch.tensor(numbers)
        return batch

    def _image(self, sample: Sample, view: str) -> Tensor:
        value = sample.get(view)
        if value is None:
            msg = f"the sample has no view '{view}'; it has {', '.join(sorted(sample))}"
            raise ConfigError(msg)
        image = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        image = image[-1] if image.ndim == 4 else image
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            msg = (
                f"view '{view}' must be uint8 (H, W, 3), got {image.dtype} {tuple(image.shape)}; give "
                "pictures as the data set's decoder does"
            )
            raise ConfigError(msg)
        if tuple(image.shape[:2]) != self.image_size:
            wide = resize_uint8(image.permute(2, 0, 1)[None].float(), self.image_size, mode="area")
            image = wide[0].permute(1, 2, 0).to(torch.uint8)
        return image

    def _sound(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        audio = self.config.audio
        waves = torch.zeros(len(samples), audio.samples)
        valid = torch.zeros(len(samples), audio.tokens, dtype=torch.bool)
        for i, sample in enumerate(samples):
            value = sample.get(self.audio_key)
            if value is None:
                continue
            wave = np.asarray(value, dtype=np.float32).reshape(-1, np.asarray(value).shape[-1]).mean(0)
            wave = wave[-audio.samples :]
            waves[i, -len(wave) :] = torch.from_numpy(wave.copy())
            pad = np.ones(audio.samples, dtype=bool)
            given = sample.get(f"{self.audio_key}_is_pad")
            pad[-len(wave) :] = False if given is None else np.asarray(given, dtype=bool)[-len(wave) :]
            span = 4 * audio.hop
            tokens = [not pad[t * span : (t + 1) * span].all() for t in range(audio.tokens)]
            valid[i] = torch.tensor(tokens)
        return waves, valid

    def _series(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        series = self.config.series
        rows = torch.zeros(len(samples), series.rows, series.channels)
        valid = torch.zeros(len(samples), series.tokens, dtype=torch.bool)
        for i, sample in enumerate(samples):
            value = sample.get(self.series_key)
            if value is None:
                continue
            raw = np.asarray(value, dtype=np.float32)
            if raw.ndim != 2 or raw.shape[1] > series.channels:
                msg = (
                    f"series '{self.series_key}' must be (rows, at most {series.channels}), got {raw.shape}; "
                    "set config.series.channels"
                )
                raise ConfigError(msg)
            raw = scale(raw, self.series_range)[-series.rows :]
            rows[i, -len(raw) :, : raw.shape[1]] = torch.from_numpy(raw)
            pad = np.ones(series.rows, dtype=bool)
            given = sample.get(f"{self.series_key}_is_pad")
            pad[-len(raw) :] = False if given is None else np.asarray(given, dtype=bool)[-len(raw) :]
            valid[i] = torch.from_numpy(~pad.reshape(series.tokens, -1).all(1))
        return rows, valid

    def _text(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        ids = torch.zeros(len(samples), self.text_tokens, dtype=torch.int64)
        valid = torch.zeros(len(samples), self.text_tokens, dtype=torch.bool)
        for i, sample in enumerate(samples):
            text = f"<|im_start|>{sample.get('task', '')}<|im_end|>"
            row = self.tokenizer.encode(text)[: self.text_tokens]
            ids[i, : len(row)] = torch.tensor(row)
            valid[i, : len(row)] = True
        return ids, valid

    def _actions(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        steps, bins = self.config.action_steps, self.config.action_bins
        rows = [np.asarray(s["action"], dtype=np.float32)[:steps] for s in samples]
        wanted = (steps, len(self.action_range[0]))
        for row in rows:
            if row.shape != wanted:
                msg = (
                    f"the sample's action has shape {row.shape}, needed are {wanted} (steps, dimensions of "
                    "the statistics); open the data set through the recipe, which sets the window"
                )
                raise ConfigError(msg)
        raw = np.stack(rows)
        pads = [
            np.asarray(s.get("action_is_pad", np.zeros(raw.shape[1])), dtype=bool)[:steps] for s in samples
        ]
        scaled = scale(raw, self.action_range)
        tokens = np.clip(((scaled + 1) / 2 * bins).astype(np.int64), 0, bins - 1)
        valid = np.broadcast_to(~np.stack(pads)[..., None], tokens.shape)
        flat = (len(samples), -1)
        return torch.from_numpy(tokens.reshape(flat)), torch.from_numpy(valid.reshape(flat).copy())


def scale(values: Array, limits: tuple[Array, Array] | None) -> Array:
    """Map [low, high] to [-1, 1], clipped; a channel that never changes becomes 0."""
    if limits is None:
        return values
    low, high = limits
    span = high - low
    safe = np.where(span == 0, np.float32(1), span)
    return np.where(span == 0, 0, np.clip((values - low) / safe * 2 - 1, -1, 1)).astype(np.float32)
