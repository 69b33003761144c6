"""What a robot looks like to the model: views, state and action keys, slot; from configuration alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from loongforge.errors import ConfigError

Normalization = Literal["min_max", "q01_q99", "mean_std", "sin_cos", "none"]


class FeatureLike(Protocol):
    """A declared feature of a data set."""

    @property
    def dtype(self) -> str:
        """Declared dtype; ``video`` or ``image`` marks a camera."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the time axis; cameras are (height, width, channels)."""
        ...


class GroupLike(Protocol):
    """A named slice of a column."""

    @property
    def column(self) -> str:
        """Column that is sliced."""
        ...

    @property
    def start(self) -> int:
        """First index."""
        ...

    @property
    def stop(self) -> int:
        """One past the last index."""
        ...


class ModalityLike(Protocol):
    """Contents of ``meta/modality.json``."""

    @property
    def state(self) -> Mapping[str, GroupLike]:
        """State groups by name."""
        ...

    @property
    def action(self) -> Mapping[str, GroupLike]:
        """Action groups by name."""
        ...

    @property
    def video(self) -> Mapping[str, str]:
        """Camera feature by its new name."""
        ...

    @property
    def annotation(self) -> Mapping[str, str]:
        """Column by annotation name."""
        ...


Features = Mapping[str, FeatureLike]

EMBODIMENT_IDS: Mapping[str, int] = {
    "oxe_google": 0,
    "oxe_widowx": 1,
    "libero_panda": 2,
    "unitree_g1": 8,
    "new_embodiment": 10,
    "robocasa_panda_omron": 13,
    "oxe_droid": 16,
    "gr1": 20,
    "behavior_r1_pro": 24,
}
"""Slots of the published checkpoint; its embodiment_id.json wins where it has the tag."""


@dataclass(frozen=True, kw_only=True)
class KeyConfig:
    """One named part of the state or action vector.

    Attributes:
        name: Name of the part, as in ``modality.json``.
        column: Column of the data set; empty means ``observation.state`` or ``action``.
        start: First index inside the column.
        end: One past the last index; None means the column's end.
        normalization: How values become numbers near [-1, 1]; None takes the embodiment's setting.
        relative: Actions only: differences from the last state instead of absolute values.
        kind: Actions only: ``joint`` subtracts, ``eef`` composes poses (xyz and six rotation numbers).
        reference: Actions only: state key the difference refers to; empty means the key of the same name.
    """

    name: str
    column: str = ""
    start: int = 0
    end: int | None = None
    normalization: Normalization | None = None
    relative: bool = False
    kind: Literal["joint", "eef"] = "joint"
    reference: str = ""


@dataclass(frozen=True, kw_only=True)
class EmbodimentConfig:
    """A robot.

    Attributes:
        tag: Name of the robot; known tags have a slot in the published checkpoint.
        slot: Slot of the embodiment-specific layers; None looks the tag up.
        views: Cameras in the order the model sees them, by data set feature, by its last part or by
            ``modality.json`` name; empty means all, in the data set's order.
        state: Parts of the state; empty takes ``modality.json`` or else the whole column.
        action: Parts of the action; empty as for the state.
        action_steps: Number of predicted steps; step ``i`` is the action ``i`` frames ahead.
        normalization: Setting of keys that have none of their own.
        language: Column or annotation with the instruction; empty means the sample's task.
        clip: Clip normalised states to [-1, 1] (min-max and quantiles only).
    """

    tag: str = "new_embodiment"
    slot: int | None = None
    views: tuple[str, ...] = ()
    state: tuple[KeyConfig, ...] = ()
    action: tuple[KeyConfig, ...] = ()
    action_steps: int = 16
    normalization: Normalization = "min_max"
    language: str = ""
    clip: bool = True

    def __post_init__(self) -> None:
        if self.action_steps < 1:
            msg = f"action_steps must be at least 1, got {self.action_steps}"
            raise ValueError(msg)


@dataclass(frozen=True, kw_only=True)
class Embodiment:
    """A robot matched with a data set: every key has a column, a range and a normalisation."""

    tag: str
    slot: int
    views: tuple[str, ...]
    state: tuple[KeyConfig, ...]
    action: tuple[KeyConfig, ...]
    action_steps: int
    language: str
    clip: bool

    @property
    def state_columns(self) -> tuple[str, ...]:
        """Return the columns the state is made of."""
        return tuple(dict.fromkeys(key.column for key in self.state))

    @property
    def action_columns(self) -> tuple[str, ...]:
        """Return the columns the action is made of."""
        return tuple(dict.fromkeys(key.column for key in self.action))


def slot_of(config: EmbodimentConfig, slots: int, known_slots: Mapping[str, int] = EMBODIMENT_IDS) -> int:
    """Return the slot of a robot among ``slots``; ConfigError where it has none."""
    slot = config.slot if config.slot is not None else known_slots.get(config.tag)
    if slot is None:
        msg = (
            f"embodiment tag '{config.tag}' has no known slot; known are {', '.join(sorted(known_slots))}. "
            "Use tag 'new_embodiment' or give embodiment.slot"
        )
        raise ConfigError(msg)
    if not 0 <= slot < slots:
        msg = f"embodiment.slot {slot} is outside the model's slots 0..{slots - 1}; choose embodiment.slot"
        raise ConfigError(msg)
    return slot


def resolve_embodiment(
    config: EmbodimentConfig,
    features: Features,
    modality: ModalityLike | None,
    *,
    slots: int,
    known_slots: Mapping[str, int] = EMBODIMENT_IDS,
) -> Embodiment:
    """Match a robot with a data set.

    Args:
        config: The robot.
        features: The data set's features by name.
        modality: Contents of ``meta/modality.json``, or None.
        slots: Number of slots the model has.
        known_slots: Slot by tag.

    Raises:
        ConfigError: A view, key or tag that the data set or the model does not have.
    """
    return Embodiment(
        tag=config.tag,
        slot=slot_of(config, slots, known_slots),
        views=_views(config.views, features, {} if modality is None else modality.video),
        state=_keys(config, "state", features, {} if modality is None else modality.state),
        action=_keys(config, "action", features, {} if modality is None else modality.action),
        action_steps=config.action_steps,
        language=_language(config.language, features, {} if modality is None else modality.annotation),
        clip=config.clip,
    )


def _views(wanted: Sequence[str], features: Features, renamed: Mapping[str, str]) -> tuple[str, ...]:
    cameras = [name for name, feature in features.items() if feature.dtype in ("video", "image")]
    if not cameras:
        msg = f"the data set has no camera; its features are {', '.join(sorted(features))}"
        raise ConfigError(msg)
    aliases = {camera: camera for camera in cameras}
    for camera in cameras:
        aliases.setdefault(camera.rsplit(".", 1)[-1], camera)
    aliases.update({name: camera for name, camera in renamed.items() if camera in cameras})
    for name in wanted:
        if name not in aliases:
            msg = (
                f"the data set has no view '{name}'; it has {', '.join(sorted(aliases))}. Set "
                "embodiment.views to cameras it has"
            )
            raise ConfigError(msg)
        alike = [camera for camera in cameras if camera.rsplit(".", 1)[-1] == name]
        if len(alike) > 1 and name not in cameras and name not in renamed:
            msg = f"view '{name}' may be {' or '.join(alike)}; give the whole name in embodiment.views"
            raise ConfigError(msg)
    return tuple(aliases[name] for name in wanted) or tuple(cameras)


def _language(wanted: str, features: Features, renamed: Mapping[str, str]) -> str:
    column = renamed.get(wanted, wanted)
    if column and column != "task" and column not in features:
        msg = (
            f"the data set has no text '{wanted}'; it has {', '.join(sorted({*features, *renamed}))}, or "
            "leave embodiment.language empty for the task"
        )
        raise ConfigError(msg)
    return column


def _keys(
    config: EmbodimentConfig,
    part: Literal["state", "action"],
    features: Features,
    groups: Mapping[str, GroupLike],
) -> tuple[KeyConfig, ...]:
    default = "observation.state" if part == "state" else "action"
    keys = config.state if part == "state" else config.action
    if not keys:
        keys = tuple(KeyConfig(name=name) for name in groups) or (KeyConfig(name=part),)
    return tuple(_key(key, default, groups.get(key.name), features, config) for key in keys)


def _key(
    key: KeyConfig, default: str, group: GroupLike | None, features: Features, config: EmbodimentConfig
) -> KeyConfig:
    column = key.column or (default if group is None else group.column)
    if column not in features:
        msg = (
            f"key '{key.name}' reads column '{column}', which the data set lacks; it has "
            f"{', '.join(sorted(features))}. Set the key's column in a copy of the recipe"
        )
        raise ConfigError(msg)
    shape = features[column].shape
    width = shape[0] if shape else 1
    start, end = key.start, key.end
    if group is not None and start == 0 and end is None:
        start, end = group.start, group.stop
    end = width if end is None else end
    if not 0 <= start < end <= width:
        msg = (
            f"key '{key.name}' takes {start}:{end} of column '{column}', which has {width} values; give "
            "ranges inside it in a copy of the recipe, or no keys at all to take the whole column"
        )
        raise ConfigError(msg)
    normalization = key.normalization or config.normalization
    return replace(key, column=column, start=start, end=end, normalization=normalization)
