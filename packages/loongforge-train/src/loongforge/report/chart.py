"""Charts of the HTML report: inline SVG with gridlines, made of strings; no script, no external resource."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence

from loongforge.report.summary import PHASES, Record, number

COLOURS = {
    "data_wait_ms": "#d1495b",
    "h2d_ms": "#edae49",
    "forward_ms": "#00798c",
    "backward_ms": "#3d6fa5",
    "comm_exposed_ms": "#8f2d56",
    "optimizer_ms": "#5a8f29",
    "checkpoint_ms": "#7a6c5d",
    "host_gap_ms": "#a8adb5",
}
WIDTH, HEIGHT = 900, 240
LEFT, RIGHT, TOP, BOTTOM = 78, 12, 12, 30
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MOST_COLUMNS = 300

Format = Callable[[float], str]


def stacked(records: Sequence[Record]) -> str:
    """Return an SVG of the phases of each step, stacked."""
    groups = chunks(records)
    heights = [[_mean(group, name) or 0.0 for name in PHASES] for group in groups]
    # One slow step (a checkpoint, the first) must not flatten the rest: the scale ends at about the 98th
    # percentile.
    totals = sorted(sum(column) for column in heights)
    top = ticks(0.0, max(totals[int(0.98 * (len(totals) - 1))], 1e-9))[-1]
    wide = PLOT_WIDTH / max(len(groups), 1)
    gap = 0.3 if wide > 2 else 0.0
    marks = []
    for position, column in enumerate(heights):
        below = 0.0
        for name, value in zip(PHASES, column, strict=True):
            shown = min(value, top - below)
            if shown > 0:
                y = TOP + PLOT_HEIGHT * (1 - (below + shown) / top)
                marks.append(
                    f'<rect x="{LEFT + position * wide:.1f}" y="{y:.1f}" width="{max(wide - gap, 0.3):.2f}" '
                    f'height="{PLOT_HEIGHT * shown / top:.2f}" fill="{COLOURS[name]}"/>'
                )
            below += shown
    cut = sum(1 for total in totals if total > top)
    note = f"{cut} slower column(s) cut at the top" if cut else ""
    return svg(
        "stacked step time",
        _grid(ticks(0.0, top), 0.0, top, milliseconds),
        "".join(marks),
        _steps(records, note),
    )


def lines(records: Sequence[Record], fields: Mapping[str, str], shown: Format) -> str:
    """Return an SVG with one line per field over the steps, or a sentence when nothing is known.

    Args:
        records: Of one rank, in step order.
        fields: Field -> colour.
        shown: Turns a value into its label at the axis.
    """
    groups = chunks(records)
    series = {name: [_mean(group, name) for group in groups] for name in fields}
    known = [value for values in series.values() for value in values if value is not None]
    if not known:
        return f'<p class="unknown">Not measured in this run ({", ".join(fields)}).</p>'
    marked = ticks(min(known), max(known))
    low, high = marked[0], marked[-1]
    marks = []
    for name, values in series.items():
        points = [
            f"{LEFT + PLOT_WIDTH * position / max(len(groups) - 1, 1):.1f},"
            f"{TOP + PLOT_HEIGHT * (1 - (value - low) / (high - low)):.1f}"
            for position, value in enumerate(values)
            if value is not None
        ]
        if len(points) == 1:
            x, _, y = points[0].partition(",")
            marks.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{fields[name]}"/>')
            continue
        marks.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{fields[name]}" stroke-width="1.6" '
            'stroke-linejoin="round"/>'
        )
    return svg(", ".join(fields), _grid(marked, low, high, shown), "".join(marks), _steps(records, ""))


def strip(shares: Sequence[float], label: str) -> str:
    """Return a strip of cells, each as dark as its share (0 to 1)."""
    wide = PLOT_WIDTH / max(len(shares), 1)
    gap = 0.3 if wide > 2 else 0.0
    cells = "".join(
        f'<rect x="{LEFT + position * wide:.1f}" y="4" width="{max(wide - gap, 0.3):.2f}" height="28" '
        f'fill="#5a8f29" fill-opacity="{0.12 + 0.88 * share:.2f}"/>'
        for position, share in enumerate(shares)
    )
    return f'<svg viewBox="0 0 {WIDTH} 36" role="img" aria-label="{html.escape(label)}">{cells}</svg>'


def svg(label: str, *inner: str) -> str:
    """Return an SVG of the usual size."""
    parts = "".join(inner)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{parts}</svg>'


def chunks(records: Sequence[Record]) -> list[Sequence[Record]]:
    """Split records into at most :data:`MOST_COLUMNS` runs of neighbours."""
    size = max(1, -(-len(records) // MOST_COLUMNS))
    return [records[start : start + size] for start in range(0, len(records), size)]


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return round values (1, 2 or 5 times a power of ten apart) that enclose ``low`` and ``high``."""
    if not high > low:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def milliseconds(value: float) -> str:
    """Return a time as text: milliseconds, or seconds from one second on."""
    return f"{value / 1e3:.3g} s" if abs(value) >= 1e3 else f"{value:.3g} ms"


def memory(value: float) -> str:
    """Return a size as text, in binary units."""
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def plain(value: float) -> str:
    """Return a number as text of at most six characters."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.3g}"


def share(value: float) -> str:
    """Return a share as text in percent."""
    return f"{100 * value:.0f} %"


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = [value for value in (number(record, name) for record in records) if value is not None]
    return sum(values) / len(values) if values else None


def _grid(marked: Sequence[float], low: float, high: float, shown: Format) -> str:
    parts = []
    for value in marked:
        y = TOP + PLOT_HEIGHT * (1 - (value - low) / (high - low))
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{shown(value)}</text>'
        )
    return "".join(parts)


def _steps(records: Sequence[Record], note: str) -> str:
    first, last = (int(number(record, "step") or 0) for record in (records[0], records[-1]))
    middle = (
        f'<text x="{LEFT + PLOT_WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{note}</text>'
        if note
        else ""
    )
    return (
        f'<text x="{LEFT}" y="{HEIGHT - 8}">step {first}</text>{middle}'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">step {last}</text>'
    )
