"""Colour conversion and resize: speed against FFmpeg's scaler on one core, error against float64.

Speed: a decoded 640x480 yuv420p picture to 224x224 RGB (and at full size), into memory that is there
already; the scaler is asked for the same size through PyAV with one thread, once with its default filter
(bilinear, as here) and once with its area filter. Error: every format, range and matrix, random planes and
random crops, against the definition evaluated in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import av
import numpy as np
import numpy.typing as npt
from _common import finish, parser, result, spread
from loongforge_data._core import FrameConverter, vector_kernels
from loongforge_data.convert import FORMATS, frame_to_rgb

MATRICES = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722), "bt2020": (0.2627, 0.0593)}
Floats = npt.NDArray[np.float64]
Planes = list[npt.NDArray[np.generic]]


def weights(offset: float, length: float, limit: int, outputs: int) -> Floats:
    """Return (outputs, limit) weights of the filter: a triangle as wide as the scale, at least one sample."""
    scale = length / outputs
    support = max(1.0, scale)
    centres = offset + (np.arange(outputs) + 0.5) * scale
    w = np.clip(1.0 - np.abs(np.arange(limit)[None] + 0.5 - centres[:, None]) / support, 0.0, None)
    w[:, : int(np.floor(offset))] = 0.0
    w[:, int(np.ceil(offset + length)) :] = 0.0
    return np.asarray(w / w.sum(1, keepdims=True))


def reference(
    planes: Planes,
    depth: int,
    chroma: tuple[int, int] | None,
    matrix: str,
    full: bool,
    crop: tuple[int, int, int, int],
    size: tuple[int, int],
) -> Floats:
    """Return RGB in float64 by the definition."""
    top, left, rows, columns = crop
    lines = []
    for number, plane in enumerate(planes):
        sx, sy = (chroma or (0, 0)) if number else (0, 0)
        if size == (rows, columns):
            y, x = np.arange(top, top + rows) >> sy, np.arange(left, left + columns) >> sx
            lines.append(plane[np.ix_(y, x)].astype(np.float64))
        else:
            v = weights(top / 2**sy, rows / 2**sy, plane.shape[0], size[0])
            h = weights(left / 2**sx, columns / 2**sx, plane.shape[1], size[1])
            lines.append(v @ plane.astype(np.float64) @ h.T)
    unit, highest = float(1 << (depth - 8)), float((1 << depth) - 1)
    wide = full or chroma is None
    y_ = lines[0] / highest * 255 if wide else (lines[0] / unit - 16) / 219 * 255
    if chroma is None:
        return np.asarray(np.clip(np.repeat(y_[..., None], 3, -1), 0, 255))
    u, v_ = ((line - (1 << (depth - 1))) / (highest if wide else 224 * unit) * 255 for line in lines[1:])
    kr, kb = MATRICES[matrix]
    kg = 1 - kr - kb
    green = y_ - 2 * (1 - kb) * kb / kg * u - 2 * (1 - kr) * kr / kg * v_
    return np.asarray(np.clip(np.stack([y_ + 2 * (1 - kr) * v_, green, y_ + 2 * (1 - kb) * u], -1), 0, 255))


def worst_error(cases: int, *, vector: bool) -> float:
    """Return the largest difference to float64 over random cases, in levels of 255."""
    rng = np.random.default_rng(0)
    worst = 0.0
    names = sorted(FORMATS)
    for case in range(cases):
        form = FORMATS[names[case % len(names)]]
        height, width = (int(n) for n in rng.integers(1, 200, 2))
        rows, columns = int(rng.integers(1, height + 1)), int(rng.integers(1, width + 1))
        crop = (
            int(rng.integers(0, height - rows + 1)),
            int(rng.integers(0, width - columns + 1)),
            rows,
            columns,
        )
        size = (rows, columns) if case % 3 == 0 else (int(rng.integers(1, 120)), int(rng.integers(1, 120)))
        matrix, full = sorted(MATRICES)[case % 3], form.full or bool(case % 2)
        kind = np.uint8 if form.depth == 8 else np.uint16
        shapes = [(height, width)]
        if form.chroma is not None:
            shapes += [(-(-height // 2 ** form.chroma[1]), -(-width // 2 ** form.chroma[0]))] * 2
        planes: Planes = [rng.integers(0, 1 << form.depth, shape).astype(kind) for shape in shapes]
        converter = FrameConverter(
            width=width,
            height=height,
            depth=form.depth,
            chroma_shift=form.chroma,
            matrix=matrix,
            full_range=full,
            crop=crop,
            size=size,
            vector=vector,
        )
        out = np.empty((*size, 3), np.uint8)
        converter.run([p.view(np.uint8) for p in planes], [p.strides[0] for p in planes], out)
        want = reference(planes, form.depth, form.chroma, matrix, full, crop, size)
        worst = max(worst, float(np.abs(out - want).max()))
    return worst


def timed(call: Callable[[], object], *, repetitions: int, calls: int) -> list[float]:
    """Return milliseconds per call of each repetition."""
    call()
    values = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        values.append(1e3 * (time.perf_counter() - start) / calls)
    return values


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__).parse_args()
    repetitions, calls = (3, 30) if arguments.quick else (9, 200)
    y, x = np.mgrid[0:480, 0:640]
    noise = np.random.default_rng(0).integers(0, 60, (480, 640))
    picture = np.stack([x * 195 // 640 + noise, y * 195 // 480 + noise, (x + y) % 196 + noise], -1).astype(
        np.uint8
    )
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuv420p")
    rows, medians = [], {}
    for name, size in (("224x224", (224, 224)), ("full size", (480, 640))):
        out = np.empty((*size, 3), np.uint8)
        choices: dict[str, Callable[[], object]] = {
            "here": lambda size=size, out=out: frame_to_rgb(frame, size=size, out=out),
            **{
                f"swscale {kind.lower()}": lambda size=size, kind=kind: frame.reformat(
                    width=size[1], height=size[0], format="rgb24", interpolation=kind, threads=1
                )
                for kind in ("BILINEAR", "AREA")
            },
        }
        for label, call in choices.items():
            values = timed(call, repetitions=repetitions, calls=calls)
            row = {
                "what": label,
                "to": name,
                "ms": spread(values),
                "kernels": vector_kernels() if label == "here" else "",
            }
            rows.append(row)
            medians[label, name] = spread(values)["median"]
    cases = 300 if arguments.quick else 3000
    errors = {kind: worst_error(cases, vector=kind == "vector") for kind in ("vector", "scalar")}
    rows += [
        {"what": f"error, {kind} kernels, {cases} cases", "levels": value} for kind, value in errors.items()
    ]
    numbers = {
        "vs_swscale": medians["swscale bilinear", "224x224"] / medians["here", "224x224"],
        "vs_swscale_area": medians["swscale area", "224x224"] / medians["here", "224x224"],
        "vs_swscale_full_size": medians["swscale bilinear", "full size"] / medians["here", "full size"],
        "max_abs_error": max(errors.values()) / 255,
        "max_abs_error_levels": max(errors.values()),
    }
    finish(result("data_convert", rows=rows, figures=numbers, repetitions=repetitions), arguments.json)


if __name__ == "__main__":
    main()
