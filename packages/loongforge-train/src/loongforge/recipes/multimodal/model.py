"""The model: encoders of each modality, one decoder, action tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge.errors import ConfigError
from loongforge.filling import blank_rows
from loongforge.recipes.gr00t_n1_6.connector import connector_mlp, pixel_unshuffle
from loongforge.recipes.gr00t_n1_6.language import Decoder
from loongforge.recipes.gr00t_n1_6.layers import at_dtype_of
from loongforge.recipes.gr00t_n1_6.vision import VisionTransformer
from loongforge.recipes.multimodal.audio import AudioEncoder
from loongforge.recipes.multimodal.config import MultimodalConfig
from loongforge.recipes.multimodal.series import SeriesEncoder

Batch = Mapping[str, object]


class MultimodalModel(nn.Module):
    """Next-token prediction of action tokens from cameras, sound, inertial series and language.

    A batch holds ``input_ids`` (B, N) (text, then action tokens), ``order`` (B, L): for each position of the
    decoder's row its place among all tokens (images, sound, series, text and actions; valid ones first),
    ``target`` (B, A) action bins, ``target_place`` (B, A) rows that predict them, ``target_valid`` (B, A);
    and, of each modality that is present, ``images`` (B, V, H, W, 3) uint8, ``audio`` (B, S) with
    ``audio_valid`` (B, tokens), ``series`` (B, rows, channels) with ``series_valid`` (B, tokens).
    """

    def __init__(self, config: MultimodalConfig) -> None:
        super().__init__()
        self.config = config
        width = config.language.hidden_size
        self.vision = VisionTransformer(config.vision, pooling_head=False)
        self.vision_connector = connector_mlp(config.vision.hidden_size, width)
        self.audio = AudioEncoder(config.audio)
        self.audio_connector = nn.Linear(config.audio.hidden_size, width)
        self.series = SeriesEncoder(config.series)
        self.series_connector = nn.Linear(config.series.hidden_size, width)
        self.decoder = Decoder(config.language)

    def loss_count(self, batch: Batch) -> Tensor:
        """Return the number of predicted action tokens of each sample (B,)."""
        return _tensor(batch, "target_valid").float().sum(1)

    def blank(self, batch: Batch, rows: int) -> dict[str, object]:
        """Return ``rows`` copies of the batch's first sample without any valid action token."""
        return blank_rows(batch, rows, weights=("target_valid",))

    def tokens(self, batch: Batch) -> Tensor:
        """Return all tokens (B, M, D) in fixed order: images, sound, series, text and actions."""
        parts: list[Tensor] = []
        images, audio, series = batch.get("images"), batch.get("audio"), batch.get("series")
        if isinstance(images, Tensor):
            parts.append(self.encode_images(images))
        if isinstance(audio, Tensor):
            sound = self.audio(audio, _tensor(batch, "audio_valid"))
            parts.append(self.audio_connector(sound))
        if isinstance(series, Tensor):
            rows = self.series(series, _tensor(batch, "series_valid"))
            parts.append(self.series_connector(rows))
        text = self.decoder.embed_tokens(_tensor(batch, "input_ids"))
        return torch.cat([part.to(text.dtype) for part in (*parts, text)], dim=1)

    def encode_images(self, images: Tensor) -> Tensor:
        """Encode (B, V, H, W, 3) uint8 as (B, tokens, D)."""
        b, v, h, w, _ = images.shape
        patch = self.config.vision.patch_size
        pixels = images.flatten(0, 1).permute(0, 3, 1, 2).float() / 127.5 - 1
        pixels = at_dtype_of(pixels, self.vision.embeddings.patch_embedding.weight)
        rows = self.vision_connector(pixel_unshuffle(self.vision(pixels), h // patch, w // patch))
        return rows.reshape(b, v * rows.shape[1], -1)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``loss`` (mean over action tokens), ``loss_sum`` (B,) and ``loss_count`` (B,)."""
        tokens = self.tokens(batch)
        order = _tensor(batch, "order")
        x = tokens.gather(1, order[..., None].expand(-1, -1, tokens.shape[-1]))
        x = self.decoder.run(x, list(self.decoder.layers), recompute=self.config.recompute)
        x = self.decoder.norm(x)
        places = _tensor(batch, "target_place")
        chosen = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        # Only action bins can follow, and only at action places: the rest of the vocabulary is left out.
        table = self.decoder.embed_tokens.weight[self.config.first_action_id :]
        logits = functional.linear(chosen, table)
        target, valid = _tensor(batch, "target"), _tensor(batch, "target_valid")
        losses = functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
        sums = (losses.view_as(target) * valid).sum(1)
        counts = valid.float().sum(1)
        return {"loss": sums.sum() / counts.sum().clamp(min=1), "loss_sum": sums, "loss_count": counts}


def _tensor(batch: Batch, name: str) -> Tensor:
    value = batch.get(name)
    if not isinstance(value, Tensor):
        msg = (
            f"the batch has no tensor '{name}' (it has {sorted(batch)}); build batches with the "
            "recipe's collate"
        )
        raise ConfigError(msg)
    return value
