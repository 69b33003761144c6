"""Rate conversion of sound, exact to the sample and independent of how the signal is cut.

Output sample k lies at time k / new rate and is a weighted sum of the input around that time (a sinc windowed
by a Kaiser window, one set of weights per phase). It depends on the input and on k alone, so a window of the
output equals the same stretch of the whole, bit for bit.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_CROSSINGS = 24  # zero crossings of the sinc on each side, in periods of the lower rate
_BETA = 9.0  # Kaiser parameter: about 90 dB of stop-band attenuation
_ROLL_OFF = 0.94  # pass band as a share of the lower Nyquist frequency
_BLOCK = 1 << 15  # output samples per step, which bounds the working memory


def resampled_length(count: int, rate: int, new_rate: int) -> int:
    """Return how many output samples `count` input samples make: count * new_rate / rate, half rounded up."""
    return (2 * count * new_rate + rate) // (2 * rate)


@lru_cache(maxsize=16)
def _weights(up: int, down: int) -> tuple[NDArray[np.float64], int]:
    """Return weights (phases, taps) and the number of taps before the centre."""
    scale = min(1.0, up / down) * _ROLL_OFF
    half = math.ceil(_CROSSINGS / min(1.0, up / down))
    offsets = np.arange(-half + 1, half + 1)
    distance = np.arange(up)[:, None] / up - offsets[None, :]
    window = np.i0(_BETA * np.sqrt(np.maximum(1 - (distance / half) ** 2, 0))) / np.i0(_BETA)
    weights = scale * np.sinc(scale * distance) * window
    return weights / weights.sum(axis=1, keepdims=True), half


def resample(
    samples: NDArray[np.floating],
    rate: int,
    new_rate: int,
    *,
    start: int = 0,
    stop: int | None = None,
) -> NDArray[np.float32]:
    """Convert (channels, samples) to another rate.

    Args:
        samples: The whole signal; beyond both ends it is silence.
        rate: Its samples per second.
        new_rate: Wanted samples per second.
        start: First output sample wanted.
        stop: End of the wanted output, exclusive; None means the end, see `resampled_length`.

    Returns:
        (channels, stop - start) float32.

    Raises:
        ValueError: A rate is not positive, or the range lies outside the output.

    Complexity: O(output samples x taps), taps = 48 x max(1, rate / new_rate).
    """
    if rate < 1 or new_rate < 1:
        msg = f"rates must be positive, got {rate} and {new_rate}"
        raise ValueError(msg)
    total = resampled_length(samples.shape[1], rate, new_rate)
    stop = total if stop is None else stop
    if not 0 <= start <= stop <= total:
        msg = f"range [{start}, {stop}) lies outside the {total} output samples"
        raise ValueError(msg)
    if rate == new_rate:
        return samples[:, start:stop].astype(np.float32)
    divisor = math.gcd(rate, new_rate)
    up, down = new_rate // divisor, rate // divisor
    weights, half = _weights(up, down)
    result = np.empty((samples.shape[0], stop - start), np.float32)
    for first in range(start, stop, _BLOCK):
        last = min(first + _BLOCK, stop)
        result[:, first - start : last - start] = _block(samples, weights, half, up, down, first, last)
    return result


def _block(
    samples: NDArray[np.floating],
    weights: NDArray[np.float64],
    half: int,
    up: int,
    down: int,
    first: int,
    last: int,
) -> NDArray[np.float64]:
    outputs = np.arange(first, last, dtype=np.int64)
    base, phase = np.divmod(outputs * down, up)
    low, high = int(base[0]) - half + 1, int(base[-1]) + half + 1
    piece = np.zeros((samples.shape[0], high - low), np.float64)
    inside = slice(max(low, 0), min(high, samples.shape[1]))
    if inside.start < inside.stop:
        piece[:, inside.start - low : inside.stop - low] = samples[:, inside]
    windows = np.lib.stride_tricks.sliding_window_view(piece, 2 * half, axis=1)
    chosen = windows[:, base - base[0]]
    return np.einsum("cot,ot->co", chosen, weights[phase])
