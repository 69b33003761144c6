"""The self-contained HTML report: inline SVG and CSS, no script, no external resource."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from loongforge.report.bottleneck import Diagnosis
from loongforge.report.summary import PHASES, Record, number

COLOURS = {
    "data_wait_ms": "#d1495b",
    "h2d_ms": "#edae49",
    "forward_ms": "#00798c",
    "backward_ms": "#30638e",
    "comm_exposed_ms": "#8f2d56",
    "optimizer_ms": "#5a8f29",
    "checkpoint_ms": "#7a6c5d",
    "host_gap_ms": "#b8b8b8",
}
WIDTH, HEIGHT, LEFT, BOTTOM = 900, 240, 60, 24
MOST_COLUMNS = 300

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:980px;padding:0
1rem;color:#1c1c1c;background:#fff} h1{font-size:1.4rem}h2{font-size:1.1rem;margin:2rem 0
.5rem}table{border-collapse:collapse;width:100%} td,th{text-align:left;padding:.25rem .6rem;border-bottom:1px
solid #ddd;vertical-align:top} .first{background:#fff4d6}.legend span{display:inline-block;margin-right:1rem}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}svg{width:100%;height:auto}
text{font:11px system-ui,sans-serif;fill:#555}
@media (prefers-color-scheme:dark){body{background:#161616;color:#ddd}td,th{border-color:#333}
.first{background:#3a2f10}text{fill:#aaa}}
"""


def page(diagnosis: Diagnosis, records: Sequence[Record], *, title: str) -> str:
    """Return the whole page."""
    summary, first = diagnosis.summary, diagnosis.bottleneck
    rank0 = [record for record in records if record.get("rank") == 0] or list(records)
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>Steps {summary.first_step} to {summary.last_step}, {summary.ranks} rank(s). "
        f"One step takes <b>{summary.step_ms:.1f} ms</b> (median {summary.step_ms_median:.1f}, "
        f"95th percentile {summary.step_ms_p95:.1f}){_rates(diagnosis)}.</p>",
        f"<p><b>Bottleneck: {first.name}</b>, {first.share:.0%} of the step. "
        f"{html.escape(first.evidence)}.<br>"
        f"Change: {html.escape(first.setting)}.<br>Gain: {html.escape(first.gain)}.</p>",
        "<h2>Where the time goes</h2>",
        _legend(summary.phases),
        stacked(rank0),
        "<h2>All six causes</h2>",
        _causes(diagnosis),
        "<h2>Loss</h2>",
        lines(rank0, {"loss": "#00798c"}),
        "<h2>Throughput (samples per second of this rank)</h2>",
        lines(rank0, {"samples_per_s": "#5a8f29"}),
        "<h2>Memory (peak bytes)</h2>",
        lines(rank0, {"mem_peak_bytes": "#8f2d56", "mem_reserved_bytes": "#edae49"}),
        "<h2>Communication: overlap with the backward (0 to 1)</h2>",
        lines(rank0, {"comm_overlap": "#30638e"}),
        "<h2>Fusion</h2>",
        fusion(rank0),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _rates(diagnosis: Diagnosis) -> str:
    summary, parts = diagnosis.summary, []
    if summary.samples_per_s is not None:
        parts.append(f"{summary.samples_per_s:.1f} samples/s")
    if summary.tokens_per_s_gpu is not None:
        parts.append(f"{summary.tokens_per_s_gpu:.0f} tokens/s/GPU")
    if summary.gpu_util is not None:
        parts.append(f"GPU utilisation {summary.gpu_util:.0f} %")
    return "".join(f", {part}" for part in parts)


def _legend(phases: Mapping[str, float]) -> str:
    entries = [
        f'<span><i style="background:{COLOURS[name]}"></i>{name[:-3].replace("_", " ")} '
        f"{f'{phases[name]:.1f} ms' if name in phases else 'not measured'}</span>"
        for name in PHASES
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def _causes(diagnosis: Diagnosis) -> str:
    rows = [
        f"<tr{' class=first' if position == 0 else ''}><td>{f.name}</td><td>{f.share:.0%}</td>"
        f"<td>{html.escape(f.evidence)}</td><td>{html.escape(f.setting)}</td><td>{html.escape(f.gain)}</td></tr>"
        for position, f in enumerate(diagnosis.findings)
    ]
    head = "<tr><th>cause</th><th>share</th><th>evidence</th><th>change</th><th>gain</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def chunks(records: Sequence[Record]) -> list[Sequence[Record]]:
    """Split records into at most :data:`MOST_COLUMNS` runs of neighbours."""
    size = max(1, -(-len(records) // MOST_COLUMNS))
    return [records[start : start + size] for start in range(0, len(records), size)]


def stacked(records: Sequence[Record]) -> str:
    """Return an SVG of the phases of each step, stacked."""
    groups = chunks(records)
    heights = [[_mean(group, name) or 0.0 for name in PHASES] for group in groups]
    # One slow step (a checkpoint, the first) must not flatten the rest: the scale ends at the 98th
    # percentile.
    totals = sorted(sum(column) for column in heights)
    top = max(totals[int(0.98 * (len(totals) - 1))], 1e-9)
    wide = (WIDTH - LEFT) / max(len(groups), 1)
    marks = []
    for position, column in enumerate(heights):
        below = 0.0
        for name, value in zip(PHASES, column, strict=True):
            shown = min(value, top - below)
            if shown > 0:
                y = (HEIGHT - BOTTOM) * (1 - (below + shown) / top)
                tall = (HEIGHT - BOTTOM) * shown / top
                marks.append(
                    f'<rect x="{LEFT + position * wide:.1f}" y="{y:.1f}" width="{max(wide - 0.3, 0.3):.2f}" '
                    f'height="{tall:.2f}" fill="{COLOURS[name]}"/>'
                )
            below += shown
    return _svg("stacked step time", "".join(marks) + _axes(records, 0.0, top, " ms"))


def lines(records: Sequence[Record], fields: Mapping[str, str]) -> str:
    """Return an SVG with one line per field over the steps, or a sentence when nothing is known."""
    groups = chunks(records)
    series = {name: [_mean(group, name) for group in groups] for name in fields}
    known = [value for values in series.values() for value in values if value is not None]
    if not known:
        return f"<p>Not measured in this run ({', '.join(fields)}).</p>"
    low, high = min(known), max(known)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    marks = []
    for name, values in series.items():
        points = [
            f"{LEFT + (WIDTH - LEFT) * position / max(len(groups) - 1, 1):.1f},"
            f"{(HEIGHT - BOTTOM) * (1 - (value - low) / (high - low)):.1f}"
            for position, value in enumerate(values)
            if value is not None
        ]
        marks.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{fields[name]}" stroke-width="1.5"/>'
        )
    return _svg(", ".join(fields), "".join(marks) + _axes(records, low, high, ""))


def fusion(records: Sequence[Record]) -> str:
    """Return a strip that shows for each step whether it was fused, and the reasons why not."""
    known = [record for record in records if isinstance(record.get("fused"), bool)]
    if not known:
        return "<p>Not measured in this run.</p>"
    groups = chunks(known)
    wide = (WIDTH - LEFT) / len(groups)
    marks = []
    for position, group in enumerate(groups):
        share = sum(1 for record in group if record["fused"]) / len(group)
        marks.append(
            f'<rect x="{LEFT + position * wide:.1f}" y="4" width="{max(wide - 0.3, 0.3):.2f}" height="28" '
            f'fill="#5a8f29" fill-opacity="{0.12 + 0.88 * share:.2f}"/>'
        )
    reasons: dict[str, int] = {}
    for record in known:
        if record.get("fusion_reason") is not None:
            reasons[str(record["fusion_reason"])] = reasons.get(str(record["fusion_reason"]), 0) + 1
    rows = "".join(
        f"<tr><td>{html.escape(reason)}</td><td>{count} steps</td></tr>" for reason, count in reasons.items()
    )
    total = sum(1 for record in known if record["fused"]) / len(known)
    strip = f'<svg viewBox="0 0 {WIDTH} 36" role="img" aria-label="fusion trace">{"".join(marks)}</svg>'
    table = f"<table><tr><th>why not fused</th><th></th></tr>{rows}</table>" if rows else ""
    return f"<p>{total:.1%} of windows were fused.</p>{strip}{table}"


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = [value for value in (number(record, name) for record in records) if value is not None]
    return sum(values) / len(values) if values else None


def _svg(label: str, inner: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">{inner}</svg>'


def _axes(records: Sequence[Record], low: float, high: float, unit: str) -> str:
    base = HEIGHT - BOTTOM
    first, last = (int(number(record, "step") or 0) for record in (records[0], records[-1]))
    return (
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}" stroke="#999"/>'
        f'<text x="{LEFT - 6}" y="12" text-anchor="end">{_short(high)}{unit}</text>'
        f'<text x="{LEFT - 6}" y="{base}" text-anchor="end">{_short(low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">step {first}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">step {last}</text>'
    )


def _short(value: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            divisor = {"G": 1e9, "M": 1e6, "k": 1e3}[letter]
            return f"{value / divisor:.1f}{letter}"
    return f"{value:.3g}"
