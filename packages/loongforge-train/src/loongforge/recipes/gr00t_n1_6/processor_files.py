"""Processor files of a checkpoint: ``processor_config.json``, ``statistics.json``, ``embodiment_id.json``.

Their layout is that of the original inference code, so that it can run a policy that was fine-tuned here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loongforge.errors import CheckpointError, ConfigError
from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.processing.embodiment import EMBODIMENT_IDS, Embodiment, KeyConfig
from loongforge.recipes.gr00t_n1_6.processing.images import ImageOptions
from loongforge.recipes.gr00t_n1_6.processing.normalise import Statistics
from loongforge.recipes.settings import updated

log = logging.getLogger("loongforge")

PROCESSOR_FILE = "processor_config.json"
STATISTICS_FILE = "statistics.json"
SLOTS_FILE = "embodiment_id.json"
_STATISTICS = ("min", "max", "mean", "std", "q01", "q99")
_SETTINGS = {
    "shortest_image_edge": "short_edge",
    "crop_fraction": "crop_fraction",
    "use_percentiles": "use_percentiles",
    "clip_outliers": "clip",
    "formalize_language": "formalise_language",
}
# Arguments that hold for all robots of a checkpoint.
_SHARED = ("use_percentiles", "clip_outliers", "formalize_language", "shortest_image_edge", "crop_fraction")


def read_slots(folder: Path) -> dict[str, int]:
    """Return slot by tag: the published table, with what the checkpoint's own file says."""
    path = folder / SLOTS_FILE
    own = _read(path) if path.is_file() else {}
    return {**EMBODIMENT_IDS, **{str(tag): slot for tag, slot in own.items() if isinstance(slot, int)}}


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings:
    """What a checkpoint's ``processor_config.json`` says; None where it says nothing.

    Attributes:
        short_edge: Shorter side of the images, pixels.
        crop_fraction: Part of each side that is kept.
        use_percentiles: Min-max normalisation takes the 1 % and 99 % quantiles for minimum and maximum.
        clip: Normalised states are clipped to [-1, 1].
        formalise_language: Instructions are lower-cased and lose their punctuation.
    """

    short_edge: int | None = None
    crop_fraction: float | None = None
    use_percentiles: bool | None = None
    clip: bool | None = None
    formalise_language: bool | None = None


def read_settings(folder: Path) -> ProcessorSettings:
    """Return the settings of a checkpoint's processor; all None where the folder has no such file.

    Raises:
        CheckpointError: The file is damaged.
        ConfigError: A setting is of the wrong kind.
    """
    path = folder / PROCESSOR_FILE
    if not path.is_file():
        return ProcessorSettings()
    arguments = _mapping(_read(path).get("processor_kwargs"))
    known = {field: arguments[name] for name, field in _SETTINGS.items() if arguments.get(name) is not None}
    return updated(ProcessorSettings(), known, where=PROCESSOR_FILE)


def has_statistics(folder: Path, tag: str) -> bool:
    """Tell whether a checkpoint has statistics of a robot."""
    path = folder / STATISTICS_FILE
    return path.is_file() and tag in _read(path)


def read_statistics(folder: Path, robot: Embodiment) -> tuple[Statistics, Statistics]:
    """Return column statistics and relative statistics of a robot from a checkpoint's ``statistics.json``.

    Values of columns that no key of the robot covers are NaN.

    Raises:
        CheckpointError: The file lacks the robot or one of its keys, or a key has another width.
    """
    path = folder / STATISTICS_FILE
    stored = _read(path)
    if robot.tag not in stored:
        msg = (
            f"{path} has no statistics of robot '{robot.tag}'; it has {', '.join(sorted(stored)) or 'none'}. "
            "Set embodiment.tag, or leave the recipe option statistics empty"
        )
        raise CheckpointError(msg)
    own = _mapping(stored[robot.tag])
    columns: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    for part, keys in (("state", robot.state), ("action", robot.action)):
        table = _mapping(own.get(part))
        for key in keys:
            if key.name not in table:
                msg = (
                    f"{path} has no {part} key '{key.name}' of robot '{robot.tag}'; it has "
                    f"{', '.join(sorted(table)) or 'none'}. Name the keys as the policy does"
                )
                raise CheckpointError(msg)
            _place(columns.setdefault(key.column, {}), key, _mapping(table[key.name]), path)
    relative = {name: _mapping(value) for name, value in _mapping(own.get("relative_action")).items()}
    return columns, relative


def _place(
    column: dict[str, npt.NDArray[np.float64]], key: KeyConfig, values: Mapping[str, object], path: Path
) -> None:
    """Write the statistics of one key into its range of a column."""
    end = key.end or 0
    for name, value in values.items():
        array = np.asarray(value, dtype=np.float64)
        if array.shape != (end - key.start,):
            msg = (
                f"{path}: statistic '{name}' of key '{key.name}' has {array.size} values, the data set's key "
                f"has {end - key.start}; the policy was trained on another layout of '{key.column}'"
            )
            raise CheckpointError(msg)
        known = column.get(name, np.zeros(0))
        if len(known) < end:
            known = np.concatenate((known, np.full(end - len(known), np.nan)))
        known[key.start : end] = array
        column[name] = known


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

    Raises:
        ConfigError: A normalisation that the original code cannot express.
    """
    _check_expressible(robot)
    kept = {name: _read(source / name) for name in _names(source)} if source is not None else {}
    processor = kept.get(PROCESSOR_FILE, {})
    arguments = _mapping(processor.get("processor_kwargs"))
    modalities = _mapping(arguments.get("modality_configs"))
    own = _arguments(robot, config, image, formalise_language=formalise_language)
    changed = [n for n in _SHARED if n in arguments and arguments[n] != own[n]]
    others = sorted(set(modalities) - {robot.tag})
    if changed and others:
        log.warning(
            "%s holds for all robots of a checkpoint; the export changes it, so %s no longer work as before",
            ", ".join(changed),
            ", ".join(others),
        )
    arguments.update(own)
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


def _check_expressible(robot: Embodiment) -> None:
    """Refuse what ``processor_config.json`` has no word for: it would run the policy with other numbers."""
    plain = [key.name for key in (*robot.state, *robot.action) if key.normalization == "none"]
    if plain:
        msg = (
            f"keys {', '.join(plain)} have normalization 'none', which the published processor cannot "
            "express; train with min_max, q01_q99 or mean_std (state keys also sin_cos) to export"
        )
        raise ConfigError(msg)
    # Relative keys take minimum and maximum in either case.
    ranged = {
        key.normalization
        for key in (*robot.state, *robot.action)
        if key.normalization in ("min_max", "q01_q99") and not key.relative
    }
    if len(ranged) > 1:
        msg = (
            "some keys use min_max and others q01_q99; the published processor has one switch for all, so "
            "set one of them as embodiment.normalization to export"
        )
        raise ConfigError(msg)


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
        "use_percentiles": any(k.normalization == "q01_q99" and not k.relative for k in keys),
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
