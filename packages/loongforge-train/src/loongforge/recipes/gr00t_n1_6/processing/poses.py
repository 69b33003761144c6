"""End-effector poses as nine numbers: position and the first two columns of the rotation matrix."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Rotation = npt.NDArray[np.float64]


def rotation_from_six(six: Array) -> Rotation:
    """Return rotation matrices (..., 3, 3) from two column vectors (..., 6), made orthonormal.

    In float64: with nearly parallel columns the difference below cancels most of float32's digits.
    """
    a, b = six[..., :3].astype(np.float64), six[..., 3:].astype(np.float64)
    x = a / np.linalg.norm(a, axis=-1, keepdims=True)
    b = b - (x * b).sum(-1, keepdims=True) * x
    y = b / np.linalg.norm(b, axis=-1, keepdims=True)
    return np.stack((x, y, np.cross(x, y)), axis=-1)


def six_from_rotation(rotation: Rotation) -> Rotation:
    """Return the first two columns (..., 6) of rotation matrices (..., 3, 3)."""
    return np.concatenate((rotation[..., 0], rotation[..., 1]), axis=-1)


def _check(pose: Array) -> None:
    if pose.shape[-1] != 9:
        msg = (
            f"an end-effector pose has 9 values (xyz and six rotation numbers), got {pose.shape[-1]}; "
            "use kind 'joint' for other representations"
        )
        raise ValueError(msg)


def relative_pose(pose: Array, reference: Array) -> Array:
    """Return ``reference^-1 * pose`` (..., 9)."""
    _check(pose)
    inverse = np.swapaxes(rotation_from_six(reference[..., 3:]), -1, -2)
    moved = (inverse @ (pose[..., :3] - reference[..., :3])[..., None])[..., 0]
    turned = inverse @ rotation_from_six(pose[..., 3:])
    return np.concatenate((moved, six_from_rotation(turned)), axis=-1).astype(np.float32)


def absolute_pose(pose: Array, reference: Array) -> Array:
    """Return ``reference * pose`` (..., 9)."""
    _check(pose)
    rotation = rotation_from_six(reference[..., 3:])
    moved = (rotation @ pose[..., :3, None])[..., 0] + reference[..., :3]
    turned = rotation @ rotation_from_six(pose[..., 3:])
    return np.concatenate((moved, six_from_rotation(turned)), axis=-1).astype(np.float32)
