"""Processor files of a checkpoint: ``processor_config.json``, ``statistics.json``, ``embodiment_id.json``.

Their layout is that of the original inference code, so that it can run a policy that was fine-tuned here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from loongforge.errors import CheckpointError
from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.processing.embodiment import EMBODIMENT_IDS, Embodiment, KeyConfig
from loongforge.recipes.gr00t_n1_6.processing.images import ImageOptions
from loongforge.recipes.gr00t_n1_6.processing.normalise import Statistics

PROCESSOR_FILE = "processor_config.json"
STATISTICS_FILE = "statistics.json"
SLOTS_FILE = "embodiment_id.json"
_STATISTICS = ("min", "max", "mean", "std", "q01", "q99")


def read_slots(folder: Path) -> dict[str, int]:
    """Return slot by tag: the published table, with what the checkpoint's own file says."""
    path = folder / SLOTS_FILE
    own = _read(path) if path.is_file() else {}
    return {**EMBODIMENT_IDS, **{str(tag): slot for tag, slot in own.items() if isinstance(slot, int)}}


def write_processor(
    folder: Path,
    *,
    robot: Embodiment,
    statistics: Statistics,
    relative: Statistics,
    config: GrootConfig,
    image: ImageOptions,
    formalise_language: bool,
    source: Path | None = None,
) -> list[Path]:
    """Write the three processor files.

    Args:
        folder: The checkpoint folder.
        robot: The robot, matched with its data set.
        statistics: Column statistics of the data set.
        relative: Per-step statistics of relative action keys.
        config: Model configuration.
        image: Image pipeline.
        formalise_language: Whether instructions are lower-cased and stripped of punctuation.
        source: Folder whose processor files are extended (other robots stay in them).
    """
    kept = {name: _read(source / name) for name in _names(source)} if source is not None else {}
    processor = kept.get(PROCESSOR_FILE, {})
    arguments = _mapping(processor.get("processor_kwargs"))
    modalities = _mapping(arguments.get("modality_configs"))
    arguments.update(_arguments(robot, config, image, formalise_language=formalise_language))
    arguments["modality_configs"] = {**modalities, robot.tag: modality_config(robot)}
    arguments.setdefault("use_albumentations", True)
    for unset in ("random_rotation_angle", "image_crop_size", "image_target_size"):
        arguments.setdefault(unset, None)
    arguments.setdefault("model_name", "nvidia/Eagle-Block2A-2B-v2")
    arguments.setdefault("model_type", "eagle")
    files = {
        PROCESSOR_FILE: {"processor_class": "Gr00tN1d6Processor", **processor, "processor_kwargs": arguments},
        STATISTICS_FILE: {
            **kept.get(STATISTICS_FILE, {}),
            robot.tag: robot_statistics(robot, statistics, relative),
        },
        SLOTS_FILE: {**EMBODIMENT_IDS, **kept.get(SLOTS_FILE, {}), robot.tag: robot.slot},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    return [folder / name for name in files]


def _names(source: Path) -> list[str]:
    return [name for name in (PROCESSOR_FILE, STATISTICS_FILE, SLOTS_FILE) if (source / name).is_file()]


def _arguments(
    robot: Embodiment, config: GrootConfig, image: ImageOptions, *, formalise_language: bool
) -> dict[str, object]:
    jitter = {
        "brightness": image.brightness,
        "contrast": image.contrast,
        "saturation": image.saturation,
        "hue": image.hue,
    }
    keys = (*robot.state, *robot.action)
    return {
        "shortest_image_edge": image.short_edge,
        "crop_fraction": image.crop_fraction,
        "color_jitter_params": jitter if image.has_jitter else None,
        "formalize_language": formalise_language,
        "max_state_dim": config.head.max_state_dim,
        "max_action_dim": config.head.max_action_dim,
        "max_action_horizon": config.head.action_horizon,
        "use_percentiles": any(key.normalization == "q01_q99" for key in keys),
        "clip_outliers": robot.clip,
        "apply_sincos_state_encoding": any(key.normalization == "sin_cos" for key in robot.state),
        "use_relative_action": any(key.relative for key in robot.action),
    }


def modality_config(robot: Embodiment) -> dict[str, object]:
    """Return the robot's entry of ``modality_configs``."""

    def part(keys: tuple[KeyConfig, ...], steps: list[int]) -> dict[str, object]:
        return {
            "delta_indices": steps,
            "modality_keys": [key.name for key in keys],
            "sin_cos_embedding_keys": [k.name for k in keys if k.normalization == "sin_cos"] or None,
            "mean_std_embedding_keys": [k.name for k in keys if k.normalization == "mean_std"] or None,
            "action_configs": None,
        }

    action = part(robot.action, list(range(robot.action_steps)))
    action["action_configs"] = [
        {
            "rep": "RELATIVE" if key.relative else "ABSOLUTE",
            "type": "EEF" if key.kind == "eef" else "NON_EEF",
            "format": "XYZ_ROT6D" if key.kind == "eef" else "DEFAULT",
            "state_key": key.reference or None,
        }
        for key in robot.action
    ]
    views = [view.rsplit(".", 1)[-1] for view in robot.views]
    return {
        "video": {**part((), [0]), "modality_keys": views},
        "state": part(robot.state, [0]),
        "action": action,
        "language": {**part((), [0]), "modality_keys": [robot.language or "task"]},
    }


def robot_statistics(robot: Embodiment, statistics: Statistics, relative: Statistics) -> dict[str, object]:
    """Return the robot's entry of ``statistics.json``: values per key, cut from the columns."""

    def cut(key: KeyConfig) -> dict[str, object]:
        column = statistics.get(key.column, {})
        values = {
            name: np.asarray(column[name])[..., key.start : key.end] for name in _STATISTICS if name in column
        }
        # The original asks for quantiles even where it does not use them; without them the range stands in.
        values.setdefault("q01", values.get("min", np.zeros(0)))
        values.setdefault("q99", values.get("max", np.zeros(0)))
        return {name: value.tolist() for name, value in values.items()}

    return {
        "state": {key.name: cut(key) for key in robot.state},
        "action": {key.name: cut(key) for key in robot.action},
        "relative_action": {
            key.name: {name: np.asarray(value).tolist() for name, value in relative[key.name].items()}
            for key in robot.action
            if key.relative and key.name in relative
        },
    }


def _read(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read as JSON: {error}"
        raise CheckpointError(msg) from error
    if not isinstance(value, dict):
        msg = f"{path} must hold a JSON object"
        raise CheckpointError(msg)
    return value


def _mapping(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}
