"""Pictures of predicted against recorded actions: a self-contained HTML page, or a PNG by matplotlib."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from loongforge.errors import MissingPillarError
from loongforge.evaluation.openloop import Array, EpisodeTrace, OpenLoopReport

WIDTH, HEIGHT, PAD = 560, 120, 6
RECORDED, PREDICTED = "#1f6f43", "#c2410c"
STYLE = """
body{font:14px system-ui,sans-serif;margin:2rem;max-width:1200px;color:#222}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(560px,1fr));gap:1rem}
figure{margin:0}figcaption{font-size:12px;color:#555}svg{background:#fafafa;width:100%}
"""


def write_html(report: OpenLoopReport, path: Path, *, title: str, episodes: int = 4) -> Path:
    """Write errors as a table and the trajectories of the first ``episodes`` as inline drawings."""
    summary = report.to_json()
    rows = "".join(
        f"<tr><td>{html.escape(str(row['name']))}</td>"
        + "".join(f"<td>{row[key]:.4g}</td>" for key in ("mse", "l1", "recorded_std"))
        + "</tr>"
        for row in report.per_dimension()
    )
    figures = "".join(_episode(report.names, trace) for trace in report.traces[:episodes])
    page = (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        f"<p>{summary['episodes']} episodes, {summary['frames']} frames. Mean squared error "
        f"{summary['mse']:.4g}, mean absolute error {summary['l1']:.4g} (in the units of the recording). "
        f'<span style="color:{RECORDED}">recorded</span>, <span style="color:{PREDICTED}">predicted</span>; '
        "thin vertical lines: where a chunk was predicted.</p>"
        "<table><tr><th>dimension</th><th>MSE</th><th>L1</th><th>std of recording</th></tr>"
        f"{rows}</table>{figures}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    return path


def _episode(names: Sequence[str], trace: EpisodeTrace) -> str:
    figures = "".join(
        f"<figure>{_drawing(trace.recorded[:, i], trace.predicted[:, i], trace.chunk)}"
        f"<figcaption>{html.escape(name)}</figcaption></figure>"
        for i, name in enumerate(names)
    )
    return f"<h2>Episode {trace.episode}</h2><div class=grid>{figures}</div>"


def _drawing(recorded: Array, predicted: Array, chunk: int) -> str:
    low = float(min(recorded.min(), predicted.min()))
    high = float(max(recorded.max(), predicted.max()))
    span = high - low or 1.0

    def line(values: Array, colour: str) -> str:
        x = PAD + np.arange(len(values)) * (WIDTH - 2 * PAD) / max(1, len(values) - 1)
        y = HEIGHT - PAD - (values - low) / span * (HEIGHT - 2 * PAD)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        return f'<polyline fill="none" stroke="{colour}" stroke-width="1.4" points="{points}"/>'

    marks = "".join(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}" stroke="#ddd"/>'
        for x in PAD + np.arange(0, len(recorded), chunk) * (WIDTH - 2 * PAD) / max(1, len(recorded) - 1)
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{marks}{line(recorded, RECORDED)}'
        f"{line(predicted, PREDICTED)}</svg>"
    )


def write_png(report: OpenLoopReport, path: Path, *, title: str, episode: int = 0) -> Path:
    """Draw one episode, one panel a dimension.

    Raises:
        MissingPillarError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        msg = "matplotlib is not installed: run `pip install loongforge-train[plot]`, or use the HTML page"
        raise MissingPillarError(msg) from error
    trace = report.traces[episode]
    columns = min(4, len(report.names))
    lines = -(-len(report.names) // columns)
    figure = Figure(figsize=(4 * columns, 1.9 * lines + 0.6), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for i, (panel, name) in enumerate(zip(panels, report.names, strict=False)):
        panel.plot(trace.recorded[:, i], color=RECORDED, linewidth=1, label="recorded")
        panel.plot(trace.predicted[:, i], color=PREDICTED, linewidth=1, label="predicted")
        panel.set_title(name, fontsize=8)
        panel.tick_params(labelsize=6)
    for panel in list(figure.axes)[len(report.names) :]:
        panel.set_visible(False)
    figure.axes[0].legend(fontsize=7)
    figure.suptitle(f"{title}, episode {trace.episode}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    return path
