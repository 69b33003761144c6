"""The scene of the toy data set: a disc that moves towards one of two squares, with a bar code on top."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TARGETS = ("green", "blue")
"""Colours of the two squares; the task text names one."""

_COLORS = {"red": (220, 50, 40), "green": (40, 190, 70), "blue": (50, 80, 220)}
_BITS_EPISODE = 8
_BITS_FRAME = 12
_BITS = _BITS_EPISODE + _BITS_FRAME
_SPEED = 0.045  # of the picture per frame at most


@dataclass(frozen=True, kw_only=True)
class EpisodeTrack:
    """One simulated episode.

    Attributes:
        disc: (frames, 2) float64, position of the disc (x, y) in 0..1.
        squares: (2, 2) float64, positions of the two squares.
        goal: Which square the task names, 0 or 1.
        state: (frames, 4) float32: x, y and the last displacement.
        action: (frames, 3) float32: next displacement, and 1 when the disc has arrived.
    """

    disc: NDArray[np.float64]
    squares: NDArray[np.float64]
    goal: int
    state: NDArray[np.float32]
    action: NDArray[np.float32]


def simulate(seed: int, episode: int, frames: int) -> EpisodeTrack:
    """Return the track of one episode: a pure function of its arguments."""
    rng = np.random.default_rng([seed, episode])
    squares = np.array([[0.2 + 0.15 * rng.random(), 0.35], [0.65 + 0.15 * rng.random(), 0.8]])
    squares[:, 1] += rng.uniform(-0.08, 0.08, 2)
    goal = int(rng.integers(2))
    position = rng.uniform(0.15, 0.85, 2)
    velocity = np.zeros(2)
    disc, state, action = np.zeros((frames, 2)), np.zeros((frames, 4)), np.zeros((frames, 3))
    for t in range(frames):
        gap = squares[goal] - position
        distance = float(np.hypot(*gap))
        step = 0.12 * gap
        length = float(np.hypot(*step))
        if length > _SPEED:
            step *= _SPEED / length
        disc[t] = position
        state[t] = (*position, *velocity)
        action[t] = (*step, float(distance < 0.05))
        position = position + step
        velocity = step
    return EpisodeTrack(
        disc=disc,
        squares=squares,
        goal=goal,
        state=state.astype(np.float32),
        action=action.astype(np.float32),
    )


def render(
    track: EpisodeTrack, frame: int, *, camera: int, size: tuple[int, int], episode: int
) -> NDArray[np.uint8]:
    """Draw one frame.

    Args:
        track: The simulated episode.
        frame: Frame index inside the episode.
        camera: 0 sees the whole scene, others follow the disc at a smaller field of view.
        size: (height, width) in pixels.
        episode: Episode index, for the bar code.

    Returns:
        (height, width, 3) uint8 RGB.
    """
    height, width = size
    span = 1.0 if camera == 0 else 0.6 / camera
    center = np.array([0.5, 0.5]) if camera == 0 else track.disc[frame]
    ys = (np.arange(height) + 0.5) / height
    xs = (np.arange(width) + 0.5) / width
    wx = (center[0] + (xs - 0.5) * span)[None, :]
    wy = (center[1] + (ys - 0.5) * span)[:, None]
    picture = np.empty((height, width, 3), np.uint8)
    picture[..., 0] = 60 + 40 * xs[None, :]
    picture[..., 1] = 70 + 30 * ys[:, None]
    picture[..., 2] = 90
    for square, name in zip(track.squares, TARGETS, strict=True):
        inside = (np.abs(wx - square[0]) < 0.09) & (np.abs(wy - square[1]) < 0.09)
        picture[inside] = _COLORS[name]
    disc = (wx - track.disc[frame, 0]) ** 2 + (wy - track.disc[frame, 1]) ** 2 < 0.07**2
    picture[disc] = _COLORS["red"]
    paint_code(picture, episode, frame)
    return picture


def paint_code(picture: NDArray[np.uint8], episode: int, frame: int) -> None:
    """Paint episode (8 bits) and frame number (12 bits) as black and white blocks into the top rows."""
    block, rows = _code_geometry(picture.shape[0], picture.shape[1])
    value = (episode % (1 << _BITS_EPISODE)) << _BITS_FRAME | frame % (1 << _BITS_FRAME)
    for bit in range(_BITS):
        on = value >> (_BITS - 1 - bit) & 1
        row, column = divmod(bit, _BITS // rows)
        picture[row * block : (row + 1) * block, column * block : (column + 1) * block] = 235 if on else 16


def read_code(picture: NDArray[np.uint8]) -> tuple[int, int]:
    """Return (episode, frame) from the bar code of a decoded picture; inverse of `paint_code`."""
    block, rows = _code_geometry(picture.shape[0], picture.shape[1])
    value = 0
    for bit in range(_BITS):
        row, column = divmod(bit, _BITS // rows)
        cell = picture[row * block : (row + 1) * block, column * block : (column + 1) * block]
        inner = cell[1:-1, 1:-1] if block > 3 else cell
        value = value << 1 | int(inner.mean() > 126)
    return value >> _BITS_FRAME, value & (1 << _BITS_FRAME) - 1


def _code_geometry(height: int, width: int) -> tuple[int, int]:
    """Return (block edge in pixels, rows of blocks): one row where it fits, else two."""
    rows = 1 if width >= 8 * _BITS else 2
    block = min(width // (_BITS // rows), max(height // (4 * rows), 2))
    return max(block, 2), rows
