"""The self-contained HTML report: inline SVG and CSS, no script, no external resource."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from loongforge.report import chart
from loongforge.report.bottleneck import Diagnosis
from loongforge.report.summary import PHASES, Record

STYLE = """
:root{--text:#1d2126;--soft:#5d6670;--line:#e3e6ea;--card:#f6f7f9;--mark:#fff4d6;--page:#fff}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1000px;padding:0 1.2rem;color:var(--text);
background:var(--page)}
h1{font-size:1.5rem;margin:0 0 .3rem}
h2{font-size:1.05rem;margin:2.2rem 0 .5rem}
.facts{display:flex;flex-wrap:wrap;gap:.6rem;margin:1rem 0}
.facts div{background:var(--card);border-radius:8px;padding:.5rem .9rem;min-width:8.5rem}
.facts b{display:block;font-size:1.2rem;font-weight:600}
.facts span,.note,.unknown{color:var(--soft);font-size:.85rem}
.first{background:var(--mark)}
.verdict{border-left:4px solid #edae49;background:var(--mark);border-radius:0 8px 8px 0;padding:.8rem 1rem}
.verdict b{font-size:1.1rem}
.verdict dl{margin:.4rem 0 0;display:grid;grid-template-columns:max-content 1fr;gap:.1rem .9rem}
.verdict dt{color:var(--soft)}
.verdict dd{margin:0}
table{border-collapse:collapse;width:100%;font-size:.92rem}
td,th{text-align:left;padding:.4rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500}
td:nth-child(-n+2){white-space:nowrap}
code{font:inherit;white-space:nowrap}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;font-size:.9rem;margin:.3rem 0 .6rem}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
svg{width:100%;height:auto;display:block}
text{font:12px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--line)}
@media (prefers-color-scheme:dark){:root{--text:#dde1e6;--soft:#9aa4af;--line:#30353b;--card:#212529;
--mark:#3a3016;--page:#16191c}}
"""
SERIES = (
    ("Loss", {"loss": "#00798c"}, chart.plain),
    ("Throughput, samples per second of this rank", {"samples_per_s": "#5a8f29"}, chart.plain),
    (
        "Memory: peak and reserved",
        {"mem_peak_bytes": "#8f2d56", "mem_reserved_bytes": "#edae49"},
        chart.memory,
    ),
    ("Communication beside the backward", {"comm_overlap": "#3d6fa5"}, chart.share),
)


def page(diagnosis: Diagnosis, records: Sequence[Record], *, title: str) -> str:
    """Return the whole page."""
    summary = diagnosis.summary
    rank0 = [record for record in records if record.get("rank") == 0] or list(records)
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="note">Steps {summary.first_step} to {summary.last_step} on {summary.ranks} rank(s); the '
        "first steps, which warm up, and probed ones are left out of the means.</p>",
        _facts(diagnosis),
        _verdict(diagnosis),
        "<h2>Where the time of a step goes</h2>",
        _legend(summary.phases),
        chart.stacked(rank0),
        "<h2>All six causes</h2>",
        _causes(diagnosis),
    ]
    for heading, fields, shown in SERIES:
        body += [f"<h2>{heading}</h2>", chart.lines(rank0, fields, shown)]
    body += ["<h2>Fusion</h2>", fusion(rank0)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _facts(diagnosis: Diagnosis) -> str:
    """Return the numbers a reader looks for first; what was not measured is left out."""
    summary = diagnosis.summary
    facts = [
        ("mean step", chart.milliseconds(summary.step_ms)),
        ("median", chart.milliseconds(summary.step_ms_median)),
        ("95th percentile", chart.milliseconds(summary.step_ms_p95)),
    ]
    if summary.samples_per_s is not None:
        facts.append(("samples/s, all ranks", f"{summary.samples_per_s:.1f}"))
    if summary.tokens_per_s_gpu is not None:
        facts.append(("tokens/s/GPU", f"{summary.tokens_per_s_gpu:.0f}"))
    if summary.gpu_util is not None:
        facts.append(("GPU utilisation", f"{summary.gpu_util:.0f} %"))
    if summary.first_loss is not None and summary.last_loss is not None:
        facts.append(("loss, first to last ten", f"{summary.first_loss:.3g} → {summary.last_loss:.3g}"))
    if summary.skipped:
        facts.append(("steps skipped", str(summary.skipped)))
    cards = "".join(f"<div><b>{html.escape(value)}</b><span>{name}</span></div>" for name, value in facts)
    return f'<div class="facts">{cards}</div>'


def _verdict(diagnosis: Diagnosis) -> str:
    first = diagnosis.bottleneck
    rows = (("evidence", first.evidence), ("change", first.setting), ("gain", first.gain))
    entries = "".join(f"<dt>{name}</dt><dd>{_prose(text)}</dd>" for name, text in rows)
    verdict = f"<b>Bottleneck: {first.name}</b>, {first.share:.0%} of the step"
    return f'<div class="verdict">{verdict}<dl>{entries}</dl></div>'


def _legend(phases: Mapping[str, float]) -> str:
    entries = [
        f'<span><i style="background:{chart.COLOURS[name]}"></i>{name[:-3].replace("_", " ")} '
        f"{chart.milliseconds(phases[name]) if name in phases else 'not measured'}</span>"
        for name in PHASES
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def _prose(text: str) -> str:
    """Return text as HTML in which no option is broken over two lines."""
    return re.sub(r"(--[a-z][a-z-]*)", r"<code>\1</code>", html.escape(text))


def _causes(diagnosis: Diagnosis) -> str:
    rows = [
        f"<tr{' class=first' if position == 0 else ''}><td>{f.name}</td><td>{f.share:.0%}</td>"
        f"<td>{_prose(f.evidence)}</td><td>{_prose(f.setting)}</td><td>{_prose(f.gain)}</td></tr>"
        for position, f in enumerate(diagnosis.findings)
    ]
    head = "<tr><th>cause</th><th>share</th><th>evidence</th><th>change</th><th>gain</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def fusion(records: Sequence[Record]) -> str:
    """Return a strip that shows for each step whether it was fused, and the reasons why not."""
    known = [record for record in records if isinstance(record.get("fused"), bool)]
    if not known:
        return '<p class="unknown">Not measured in this run.</p>'
    shares = [sum(1 for record in group if record["fused"]) / len(group) for group in chart.chunks(known)]
    reasons = Counter(str(r["fusion_reason"]) for r in known if r.get("fusion_reason") is not None)
    rows = "".join(
        f"<tr><td>{html.escape(reason)}</td><td>{count} steps</td></tr>"
        for reason, count in reasons.most_common()
    )
    total = sum(1 for record in known if record["fused"]) / len(known)
    table = f"<table><tr><th>why not fused</th><th></th></tr>{rows}</table>" if rows else ""
    return f"<p>{total:.1%} of windows were fused.</p>{chart.strip(shares, 'fusion trace')}{table}"
