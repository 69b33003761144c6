"""Normalisation of states and actions: forward for training, backward for evaluation and deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.processing.embodiment import Embodiment, KeyConfig
from loongforge.recipes.gr00t_n1_6.processing.poses import absolute_pose, relative_pose

Array = npt.NDArray[np.float32]
Statistics = Mapping[str, Mapping[str, object]]

_LOW_HIGH = {"min_max": ("min", "max"), "q01_q99": ("q01", "q99")}


@dataclass(frozen=True, kw_only=True)
class Affine:
    """``y = (x - offset) * factor + shift``; elements of factor 0 map to zero and back to ``offset``.

    Attributes:
        offset: Subtracted first.
        factor: Multiplied by; 0 where a channel has no spread.
        shift: Added last.
        clip: Clip normalised values to [-1, 1].
        clip_back: Clip values to [-1, 1] before :meth:`backward`; mean and deviation are not clipped there.
    """

    offset: Array
    factor: Array
    shift: float
    clip: bool
    clip_back: bool = False

    def forward(self, x: Array) -> Array:
        """Normalise."""
        y = (x - self.offset) * self.factor + np.float32(self.shift)
        y = np.where(self.factor == 0, np.float32(0), y)
        return np.clip(y, -1, 1) if self.clip else y

    def backward(self, y: Array) -> Array:
        """Undo :meth:`forward`."""
        y = np.clip(y, -1, 1) if self.clip_back else y
        safe = np.where(self.factor == 0, np.float32(1), self.factor)
        return np.where(
            self.factor == 0, self.offset, (y - np.float32(self.shift)) / safe + self.offset
        ).astype(np.float32)


def affine_of(kind: str, statistics: Mapping[str, object], part: slice, *, clip: bool, what: str) -> Affine:
    """Build the normalisation of one key.

    Args:
        kind: ``min_max``, ``q01_q99``, ``mean_std`` or ``none``.
        statistics: Statistic name to values of the whole column (D,) or (T, D).
        part: Range inside the column.
        clip: Clip the result to [-1, 1].
        what: Name for errors.
    """

    def values(name: str) -> Array:
        if name not in statistics:
            msg = (
                f"normalisation {kind} of {what} needs the statistic '{name}', the data set has "
                f"{', '.join(sorted(statistics)) or 'none'}; recompute statistics or choose "
                "another normalisation"
            )
            raise ConfigError(msg)
        return np.asarray(statistics[name], dtype=np.float32)[..., part]

    if kind == "none":
        one = np.ones(part.stop - part.start, dtype=np.float32)
        return Affine(offset=one * 0, factor=one, shift=0.0, clip=False)
    if kind == "mean_std":
        mean, std = values("mean"), values("std")
        # A channel that never changes stays as it is.
        offset = np.where(std == 0, np.float32(0), mean)
        return Affine(
            offset=offset, factor=(1 / np.where(std == 0, 1, std)).astype(np.float32), shift=0.0, clip=clip
        )
    low, high = (values(name) for name in _LOW_HIGH[kind])
    flat = np.isclose(low, high)
    factor = np.where(flat, np.float32(0), 2 / np.where(flat, np.float32(1), high - low))
    return Affine(offset=low, factor=factor.astype(np.float32), shift=-1.0, clip=clip, clip_back=clip)


@dataclass(frozen=True, kw_only=True)
class PaddedActions:
    """Normalised actions: ``values`` and ``mask`` (B, horizon, max_action_dim), float32, mask 0 or 1."""

    values: Array
    mask: Array


class StateActionProcessor:
    """Normalises raw vectors into padded model input and back.

    Args:
        embodiment: The robot, matched with the data set.
        statistics: Column name to statistics of the data set.
        relative: Action key name to per-step statistics (T, D) of its relative form.
        max_state_dim: Width of the padded state.
        max_action_dim: Width of a padded action.
        action_horizon: Number of padded steps.
    """

    def __init__(
        self,
        embodiment: Embodiment,
        statistics: Statistics,
        *,
        relative: Statistics | None = None,
        max_state_dim: int,
        max_action_dim: int,
        action_horizon: int,
    ) -> None:
        self.embodiment = embodiment
        self.sizes = (max_state_dim, max_action_dim, action_horizon)
        self._state = [self._state_key(key, statistics) for key in embodiment.state]
        self._action = [self._action_key(key, statistics, relative or {}) for key in embodiment.action]
        self.state_dim = sum(2 * w if a is None else w for w, a in self._state)
        self.action_dim = sum(_width(key) for key in embodiment.action)
        for what, dim, limit in (
            ("state", self.state_dim, max_state_dim),
            ("action", self.action_dim, max_action_dim),
        ):
            if dim > limit:
                msg = (
                    f"the {what} has {dim} values but the model takes at most {limit}; leave keys out of "
                    f"embodiment.{what} or use a model with a larger head.max_{what}_dim"
                )
                raise ConfigError(msg)
        if embodiment.action_steps > action_horizon:
            msg = (
                f"action_steps {embodiment.action_steps} exceeds the model's action_horizon "
                f"{action_horizon}; set embodiment.action_steps to at most {action_horizon}"
            )
            raise ConfigError(msg)

    def _state_key(self, key: KeyConfig, statistics: Statistics) -> tuple[int, Affine | None]:
        if key.normalization == "sin_cos":
            return _width(key), None
        kind = str(key.normalization)
        clip = self.embodiment.clip and kind != "mean_std"
        return _width(key), affine_of(
            kind, statistics.get(key.column, {}), _range(key), clip=clip, what=key.name
        )

    def _action_key(self, key: KeyConfig, statistics: Statistics, relative: Statistics) -> Affine:
        kind = str(key.normalization)
        if kind == "sin_cos":
            msg = f"action key '{key.name}' cannot use sin_cos, which has no inverse; use min_max"
            raise ConfigError(msg)
        clip = kind != "none"
        if not key.relative:
            return affine_of(kind, statistics.get(key.column, {}), _range(key), clip=clip, what=key.name)
        if key.name not in relative:
            msg = f"action key '{key.name}' is relative but has no relative statistics"
            raise ConfigError(msg)
        # Quantiles are not kept per step: the original takes minimum and maximum there as well.
        kind = "min_max" if kind == "q01_q99" else kind
        return affine_of(
            kind, relative[key.name], slice(0, _width(key)), clip=clip, what=f"relative {key.name}"
        )

    def states(self, raw: Mapping[str, Array]) -> Array:
        """Normalise raw state columns (B, D) into (B, 1, max_state_dim)."""
        parts: list[Array] = []
        for key, (_, affine) in zip(self.embodiment.state, self._state, strict=True):
            x = raw[key.column][:, _range(key)]
            parts.append(
                np.concatenate((np.sin(x), np.cos(x)), axis=-1) if affine is None else affine.forward(x)
            )
        joined = np.concatenate(parts, axis=-1)
        padded = np.zeros((joined.shape[0], 1, self.sizes[0]), dtype=np.float32)
        padded[:, 0, : joined.shape[-1]] = joined
        return padded

    def actions(
        self, raw: Mapping[str, Array], states: Mapping[str, Array], is_pad: npt.NDArray[np.bool_]
    ) -> PaddedActions:
        """Normalise raw action columns (B, T, D).

        Args:
            raw: Action columns (B, T, D).
            states: Raw state columns (B, D), which relative keys refer to.
            is_pad: (B, T) true where the episode had ended; such steps are masked out.
        """
        parts = []
        for key, affine in zip(self.embodiment.action, self._action, strict=True):
            x = raw[key.column][..., _range(key)]
            if key.relative:
                x = to_relative(x, self._reference(key, states), key.kind)
            parts.append(affine.forward(x))
        joined = np.concatenate(parts, axis=-1)
        b, t, d = joined.shape
        values = np.zeros((b, self.sizes[2], self.sizes[1]), dtype=np.float32)
        mask = np.zeros_like(values)
        values[:, :t, :d] = joined
        mask[:, :t, :d] = ~is_pad[..., None]
        return PaddedActions(values=values, mask=mask)

    def decode(self, actions: Array, states: Mapping[str, Array]) -> dict[str, Array]:
        """Turn model output (B, horizon, max_action_dim) into raw values (B, T, width) by action key."""
        result: dict[str, Array] = {}
        at, steps = 0, self.embodiment.action_steps
        for key, affine in zip(self.embodiment.action, self._action, strict=True):
            x = affine.backward(actions[:, :steps, at : at + _width(key)].astype(np.float32))
            if key.relative:
                x = to_absolute(x, self._reference(key, states), key.kind)
            result[key.name] = x
            at += _width(key)
        return result

    def _reference(self, key: KeyConfig, states: Mapping[str, Array]) -> Array:
        return reference_state(key, self.embodiment.state, states)


def reference_state(key: KeyConfig, state_keys: Sequence[KeyConfig], states: Mapping[str, Array]) -> Array:
    """Return the raw state (B, width) that a relative action key refers to."""
    name = key.reference or key.name
    for candidate in state_keys:
        if candidate.name == name:
            if _width(candidate) != _width(key):
                msg = (
                    f"relative action key '{key.name}' has {_width(key)} values, its state key '{name}' has "
                    f"{_width(candidate)}"
                )
                raise ConfigError(msg)
            return states[candidate.column][:, _range(candidate)]
    msg = (
        f"relative action key '{key.name}' refers to state key '{name}', which is not among "
        f"{', '.join(k.name for k in state_keys)}; set reference"
    )
    raise ConfigError(msg)


def to_relative(action: Array, state: Array, kind: str) -> Array:
    """Express actions (B, T, D) relative to the state (B, D)."""
    return action - state[:, None] if kind == "joint" else relative_pose(action, state[:, None])


def to_absolute(action: Array, state: Array, kind: str) -> Array:
    """Undo :func:`to_relative`."""
    return action + state[:, None] if kind == "joint" else absolute_pose(action, state[:, None])


def _range(key: KeyConfig) -> slice:
    return slice(key.start, key.end)


def _width(key: KeyConfig) -> int:
    return (key.end or 0) - key.start
