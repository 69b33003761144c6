"""`loongforge-data preview`: a contact sheet of decoded frames and a plot of state and action, as PNG files.

Needs Pillow only: the plot is drawn by hand, so that a machine without a plotting library can preview too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from loongforge_data.dataset import RobotDataset, open_dataset
from loongforge_data.summary import name_of

_TILE = 160  # width of a picture on the sheet, in pixels
_LABEL = 14  # height of a caption
_PLOT = (900, 180)  # width and height of one plot
_MARGIN = 46
_COLORS = (
    (31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189),
    (140, 86, 75), (227, 119, 194), (127, 127, 127), (188, 189, 34), (23, 190, 207),
)  # fmt: skip


def write_preview(
    root: str | Path, output: str | Path, *, episode: int | None = None, columns: int = 8
) -> list[Path]:
    """Write `<name>_frames.png` and `<name>_actions.png`.

    Args:
        root: The data set.
        output: Directory for the pictures.
        episode: Episode index; None takes the first.
        columns: Frames per camera on the sheet.

    Returns:
        The files written: the sheet is left out where there are no cameras.
    """
    if columns < 1:
        msg = f"columns must be at least 1, got {columns}"
        raise ValueError(msg)
    dataset = open_dataset(root, episodes=None if episode is None else [episode])
    try:
        if not len(dataset):
            msg = "data set has no samples to preview"
            raise ValueError(msg)
        stop = int(dataset.episode_starts[1])
        rows = np.unique(np.linspace(0, stop - 1, columns).round().astype(int))
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        pictures = picture_keys(dataset)
        if pictures:
            written.append(folder / f"{name_of(root)}_frames.png")
            contact_sheet(dataset, pictures, rows.tolist()).save(written[-1])
        written.append(folder / f"{name_of(root)}_actions.png")
        action_plot(dataset, stop).save(written[-1])
        return written
    finally:
        dataset.close()


def picture_keys(dataset: RobotDataset) -> list[str]:
    """Return the keys that give pictures: cameras, depth cameras, picture columns."""
    images = [key for key, feature in dataset.features.items() if feature.kind == "image"]
    return [*dataset.cameras, *dataset.depth_cameras, *images]


def contact_sheet(dataset: RobotDataset, keys: Sequence[str], rows: Sequence[int]) -> Image.Image:
    """Return one row of pictures per key, each with its frame number."""
    tiles = [[_tile(sample[key]) for key in keys] for sample in (dataset[row] for row in rows)]
    heights = [max(column[k].height for column in tiles) for k in range(len(keys))]
    sheet = Image.new(
        "RGB", (len(rows) * (_TILE + 4) + 4, sum(heights) + len(keys) * (2 * _LABEL + 4) + 4), "white"
    )
    draw = ImageDraw.Draw(sheet)
    top = 4
    for k, key in enumerate(keys):
        draw.text((4, top), key, fill=(0, 0, 0))
        for n, row in enumerate(rows):
            left = 4 + n * (_TILE + 4)
            draw.text((left, top + _LABEL), f"frame {row}", fill=(90, 90, 90))
            sheet.paste(tiles[n][k], (left, top + 2 * _LABEL))
        top += heights[k] + 2 * _LABEL + 4
    return sheet


def _tile(value: object) -> Image.Image:
    picture = np.asarray(value)
    if picture.ndim == 4:
        picture = picture[0]
    if picture.shape[2] == 1:
        picture = _stretched(picture[..., 0])
    image = Image.fromarray(picture[..., :3].astype(np.uint8))
    return image.resize((_TILE, max(1, round(_TILE * image.height / image.width))), Image.Resampling.BILINEAR)


def _stretched(depth: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Stretch a depth map to the full grey range for the eye."""
    values = depth.astype(np.float64)
    low, high = np.percentile(values, [1, 99])
    grey = np.clip((values - low) / max(high - low, 1e-9), 0, 1) * 255
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)


def action_plot(dataset: RobotDataset, stop: int) -> Image.Image:
    """Return the curves of all numeric vector features of the first episode, one plot each."""
    rows = dataset.rows.arrays
    keys = [key for key, array in rows.items() if array.ndim == 2 and array.dtype.kind == "f"]
    width, height = _PLOT
    image = Image.new("RGB", (width, max(len(keys), 1) * (height + 24)), "white")
    draw = ImageDraw.Draw(image)
    for n, key in enumerate(keys):
        curve = rows[key][:stop].astype(np.float64)
        _draw_curves(draw, curve, key, n * (height + 24), float(dataset.info.fps))
    return image


def _draw_curves(
    draw: ImageDraw.ImageDraw, curve: NDArray[np.float64], key: str, top: int, fps: float
) -> None:
    width, height = _PLOT
    finite = curve[np.isfinite(curve)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    box = (_MARGIN, top + 18, width - 8, top + height)
    draw.rectangle(box, outline=(170, 170, 170))
    draw.text(
        (_MARGIN, top + 3), f"{key}   {curve.shape[1]} values, {len(curve) / fps:.2f} s", fill=(0, 0, 0)
    )
    draw.text((2, box[1] - 2), f"{high:.3g}", fill=(60, 60, 60))
    draw.text((2, box[3] - 10), f"{low:.3g}", fill=(60, 60, 60))
    xs = np.linspace(box[0] + 1, box[2] - 1, len(curve))
    for component, values in enumerate(curve.T):
        ys = box[3] - 1 - (np.nan_to_num(values, nan=low) - low) / (high - low) * (box[3] - box[1] - 2)
        points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
        color = _COLORS[component % len(_COLORS)]
        draw.line(points if len(points) > 1 else points * 2, fill=color, width=1)
