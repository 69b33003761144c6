"""Curves over steps as a self-contained HTML page: inline SVG with axes, and the numbers as a table."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from loongforge.evaluation.plots import STYLE

CURVE_WIDTH, CURVE_HEIGHT, LEFT, BOTTOM = 760, 340, 52, 40
_COLOURS = ("#1f6f43", "#c2410c", "#1d4ed8", "#7c3aed", "#a16207", "#0f766e")


def write_curve(
    path: Path,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    *,
    title: str,
    label: str = "validation loss",
    goal: float | None = None,
) -> Path:
    """Write curves over steps as a self-contained HTML page: a drawing with axes, and the numbers.

    Args:
        path: File to write.
        curves: (step, value) points by the curve's name, steps ascending.
        title: Heading.
        label: What the values are.
        goal: Value drawn as a dashed line.

    Raises:
        ValueError: No curve, or one without points.
    """
    if not curves or not all(curves.values()):
        msg = f"write_curve needs at least one curve with points, got {sorted(curves)}; measure first"
        raise ValueError(msg)
    steps = sorted({step for points in curves.values() for step, _ in points})
    tables = {name: dict(points) for name, points in curves.items()}
    rows = "".join(
        f"<tr><td>{step}</td>"
        + "".join(f"<td>{t[step]:.4f}</td>" if step in t else "<td></td>" for t in tables.values())
        + "</tr>"
        for step in steps
    )
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in curves)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        f"<figure style='max-width:760px'>{_curves(curves, label, goal)}</figure>"
        f"<table><tr><th>step</th>{heads}</tr>{rows}</table>"
    )
    return path


def _curves(curves: Mapping[str, Sequence[tuple[int, float]]], label: str, goal: float | None) -> str:
    """Draw curves from zero upwards, with ticks on both axes and a legend."""
    last = max(step for points in curves.values() for step, _ in points) or 1
    top = 1.05 * max(*(v for points in curves.values() for _, v in points), goal or 0.0, 1e-9)

    def x(step: float) -> float:
        return LEFT + step / last * (CURVE_WIDTH - LEFT - 12)

    def y(value: float) -> float:
        return CURVE_HEIGHT - BOTTOM - value / top * (CURVE_HEIGHT - BOTTOM - 12)

    right = CURVE_WIDTH - 12
    parts = [
        f'<line x1="{LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e5e5e5"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in _ticks(top)
    ]
    parts += [
        f'<text x="{x(tick):.1f}" y="{CURVE_HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>'
        for tick in _ticks(last)
    ]
    if goal is not None:
        parts.append(
            f'<line x1="{LEFT}" x2="{right}" y1="{y(goal):.1f}" y2="{y(goal):.1f}" stroke="#666" '
            f'stroke-dasharray="5 4"/><text x="{CURVE_WIDTH - 14}" y="{y(goal) - 5:.1f}" '
            f'text-anchor="end">goal {goal:.3g}</text>'
        )
    for number, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{line}"/>')
        parts += [
            f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.6" fill="{colour}"/>'
            for step, value in points
        ]
        parts.append(
            f'<text x="{CURVE_WIDTH - 14}" y="{24 + 16 * number}" text-anchor="end" fill="{colour}">'
            f"{html.escape(name)}</text>"
        )
    middle = (CURVE_HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + CURVE_WIDTH) / 2}" y="{CURVE_HEIGHT - 6}" text-anchor="middle">step</text>'
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(label)}</text>"
    )
    return (
        f'<svg viewBox="0 0 {CURVE_WIDTH} {CURVE_HEIGHT}" role="img" font-size="11" fill="#333">'
        f"{''.join(parts)}</svg>"
    )


def _ticks(top: float) -> list[float]:
    """Return four to nine round numbers from 0 to at most ``top``."""
    step = 10.0 ** np.floor(np.log10(top))
    for factor in (1.0, 0.5, 0.2):
        if top / (step * factor) >= 4:
            step *= factor
            break
    return [float(tick) for tick in np.arange(0, top + 1e-12, step)]
