"""The multimodal family of recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np
import torch
from torch import nn

from loongforge.errors import ConfigError
from loongforge.recipes.base import Collate, FileRecipe, SampleSource, decay_groups
from loongforge.recipes.gr00t_n1_6.initialise import materialise, named_fill
from loongforge.recipes.multimodal.collate import Array, MultimodalCollate
from loongforge.recipes.multimodal.config import MultimodalConfig
from loongforge.recipes.multimodal.model import MultimodalModel


@dataclass(frozen=True, kw_only=True)
class MultimodalOptions:
    """Options of a multimodal recipe.

    Attributes:
        config: Sizes of the model.
        views: Cameras by feature name; empty means all of the data set's.
        image_size: (height, width) of every image, pixels, multiples of 28.
        audio_file: Sound file per episode, e.g. ``audio/episode_{episode_index:06d}.wav``, or empty.
        audio_camera: Camera feature whose video file carries the sound, or empty.
        series: Column that is read as inertial series (a window of past rows), or empty.
        text_tokens: Text tokens of a row.
    """

    config: MultimodalConfig = field(default_factory=MultimodalConfig)
    views: tuple[str, ...] = ()
    image_size: tuple[int, int] = (224, 224)
    audio_file: str = ""
    audio_camera: str = ""
    series: str = "observation.state"
    text_tokens: int = 64


class _Feature(Protocol):
    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class MultimodalRecipe(FileRecipe[MultimodalOptions]):
    """Builds model, data set and collate function from :class:`MultimodalOptions`."""

    def build_model(self, options: MultimodalOptions, seed: int, *, device: str = "cpu") -> MultimodalModel:
        """Build the model; ``device`` meta gives shapes without memory."""
        with torch.device("meta"):
            model = MultimodalModel(options.config)
        if device != "meta":
            depth = {
                "vision.": options.config.vision.layers,
                "audio.": options.config.audio.layers,
                "series.": options.config.series.layers,
                "decoder.": options.config.language.layers,
            }
            materialise(model, device, frozen_dtype=torch.float32, fill=named_fill(seed, depth))
        return model.train()

    def build_dataset(
        self, root: str, options: MultimodalOptions, *, episodes: Sequence[int] | None = None
    ) -> SampleSource:
        """Open a LeRobot data set with action windows, past rows of the series, and sound if configured."""
        import loongforge_data
        from loongforge_data.sources import AudioSource

        audio = options.config.audio
        sound = None
        if options.audio_file or options.audio_camera:
            source = AudioSource(
                rate=audio.rate,
                before=audio.seconds,
                camera=options.audio_camera or None,
                path=options.audio_file or None,
            )
            sound = {"audio": source}
        window: dict[str, Sequence[int]] = {"action": range(options.config.action_steps)}
        if options.series:
            window[options.series] = range(1 - options.config.series.rows, 1)
        return cast(
            SampleSource,
            loongforge_data.open_dataset(
                root,
                window=window,
                episodes=episodes,
                cameras=list(options.views) or None,
                image_size=options.image_size,
                audio=sound,
            ),
        )

    def build_collate(self, dataset: SampleSource, model: nn.Module, options: MultimodalOptions) -> Collate:
        """Return the function from samples to a model batch on the host."""
        features = cast(Mapping[str, _Feature], getattr(dataset, "features", {}))
        stats = cast(Mapping[str, Mapping[str, object]], getattr(dataset, "stats", {}))
        cameras = [name for name, feature in features.items() if feature.dtype in ("video", "image")]
        for view in options.views:
            if view not in cameras:
                msg = f"the data set has no view '{view}'; it has {', '.join(cameras) or 'no camera'}"
                raise ConfigError(msg)
        for side in options.image_size:
            if side % 28 or side <= 0:
                msg = f"image_size must be positive multiples of 28, got {options.image_size}"
                raise ConfigError(msg)
        if options.series and options.series not in features:
            msg = f"the data set has no column '{options.series}'; set series to one it has, or to ''"
            raise ConfigError(msg)
        return MultimodalCollate(
            options.config,
            views=options.views or cameras,
            image_size=options.image_size,
            audio_key="audio" if options.audio_file or options.audio_camera else "",
            series_key=options.series,
            series_range=_limits(stats, options.series) if options.series else None,
            action_range=_limits(stats, "action"),
            text_tokens=options.text_tokens,
        )

    def param_groups(
        self, model: nn.Module, weight_decay: float, *, learning_rate: float | None = None
    ) -> list[dict[str, object]]:
        """Return a decayed group of matrices and an undecayed one of biases and norms."""
        return decay_groups(
            model.named_parameters(),
            weight_decay,
            lambda name: not name.endswith("bias") and "norm" not in name,
        )


def _limits(stats: Mapping[str, Mapping[str, object]], column: str) -> tuple[Array, Array]:
    known = stats.get(column, {})
    if "min" not in known or "max" not in known:
        msg = (
            f"the data set has no minimum and maximum of '{column}'; compute them with "
            "`loongforge-data stats`"
        )
        raise ConfigError(msg)
    return np.asarray(known["min"], dtype=np.float32), np.asarray(known["max"], dtype=np.float32)
