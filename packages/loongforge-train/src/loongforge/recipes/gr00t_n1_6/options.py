"""Options of a GR00T N1.6 recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.lora import LoraConfig
from loongforge.recipes.gr00t_n1_6.processing.embodiment import EmbodimentConfig
from loongforge.recipes.gr00t_n1_6.processing.images import ImageOptions
from loongforge.recipes.gr00t_n1_6.processor_files import ProcessorSettings
from loongforge.recipes.settings import updated


@dataclass(frozen=True, kw_only=True)
class GrootOptions:
    """Options of a GR00T N1.6 recipe.

    Attributes:
        config: Sizes, trainable parts and work switches of the model.
        image: Image pipeline.
        embodiment: The robot.
        tokenizer: ``bytes`` for the stand-in of the tiny recipe, else a folder with tokenizer files.
        checkpoint: Folder in the published layout to start from; None draws random weights.
        processor: With a checkpoint that has ``processor_config.json``: ``checkpoint`` takes image sizes,
            clipping, percentiles and the treatment of instructions from it, as the public recipe does;
            ``recipe`` keeps those of this file.
        statistics: Folder with the ``statistics.json`` of a trained policy: values are normalised as it was
            trained. None uses the statistics of the data set.
        pad_to: Fixed number of tokens a row; None rounds the longest row of a batch up to ``pad_multiple``.
        pad_multiple: Rounding of the row length, tokens.
        frozen_dtype: Storage of parameters that do not train; trainable ones are float32.
        formalise_language: Lower-case the instruction and drop punctuation.
        live_slots: ``auto`` leaves unused embodiment slots out of communication and optimizer where that
            changes nothing; ``off`` keeps all of them.
        lora: Low-rank adapters; off by default.
        held_out: Episodes (by index) that training leaves out; ``loongforge eval`` looks at these.
        memory_budget_gb: GPU memory the run must fit, GB; chooses adapters, recomputation and dropped unused
            tensors. None changes nothing.
    """

    config: GrootConfig = field(default_factory=GrootConfig)
    image: ImageOptions = field(default_factory=ImageOptions)
    embodiment: EmbodimentConfig = field(default_factory=EmbodimentConfig)
    tokenizer: str = "bytes"
    checkpoint: str | None = None
    processor: Literal["checkpoint", "recipe"] = "checkpoint"
    statistics: str | None = None
    pad_to: int | None = None
    pad_multiple: int = 8
    frozen_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    formalise_language: bool = True
    live_slots: Literal["auto", "off"] = "auto"
    lora: LoraConfig = field(default_factory=LoraConfig)
    held_out: tuple[int, ...] = ()
    memory_budget_gb: float | None = None


def with_processor(options: GrootOptions, settings: ProcessorSettings) -> GrootOptions:
    """Return the options with what the checkpoint's processor decides.

    Percentiles replace the robot's general min-max normalisation and the reverse; a normalisation that a key
    names itself stays.
    """
    robot, image = options.embodiment, options.image
    kind = robot.normalization
    if settings.use_percentiles is not None and kind in ("min_max", "q01_q99"):
        kind = "q01_q99" if settings.use_percentiles else "min_max"
    found = (
        ("image.short_edge", image.short_edge, settings.short_edge),
        ("image.crop_fraction", image.crop_fraction, settings.crop_fraction),
        ("embodiment.clip", robot.clip, settings.clip),
        ("embodiment.normalization", robot.normalization, kind),
        ("formalise_language", options.formalise_language, settings.formalise_language),
    )
    changes = {name: value for name, before, value in found if value is not None and value != before}
    return updated(options, changes) if changes else options


def processor_changes(asked: GrootOptions, resolved: GrootOptions) -> str:
    """Return in words what :func:`with_processor` changed, or ""."""
    pairs = (
        ("image.short_edge", asked.image.short_edge, resolved.image.short_edge),
        ("image.crop_fraction", asked.image.crop_fraction, resolved.image.crop_fraction),
        ("embodiment.clip", asked.embodiment.clip, resolved.embodiment.clip),
        ("embodiment.normalization", asked.embodiment.normalization, resolved.embodiment.normalization),
        ("formalise_language", asked.formalise_language, resolved.formalise_language),
    )
    return ", ".join(f"{name} = {now} (recipe: {was})" for name, was, now in pairs if was != now)
