"""The one-screen report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loongforge.report.bottleneck import Diagnosis
from loongforge.report.summary import PHASES

BAR = 40


def screen(diagnosis: Diagnosis, *, title: str) -> str:
    """Return a report of about 40 lines."""
    summary, first = diagnosis.summary, diagnosis.bottleneck
    lines = [
        f"{title}: steps {summary.first_step} to {summary.last_step}, {summary.ranks} rank(s)",
        f"step {summary.step_ms:.1f} ms (median {summary.step_ms_median:.1f}, p95 {summary.step_ms_p95:.1f})"
        + _unit("samples/s", summary.samples_per_s, 1)
        + _unit("tokens/s/gpu", summary.tokens_per_s_gpu, 0)
        + _unit("gpu %", summary.gpu_util, 0),
        f"loss {_number(summary.first_loss)} -> {_number(summary.last_loss)}, {summary.skipped} step(s) "
        f"skipped",
        "",
        "where a step goes",
    ]
    for name in PHASES:
        ms = summary.phases.get(name)
        if ms is None:
            lines.append(f"  {name[:-3]:<14} not measured")
            continue
        share = ms / summary.step_ms if summary.step_ms else 0.0
        lines.append(f"  {name[:-3]:<14} {ms:9.2f} ms {share:5.0%} {'#' * round(share * BAR)}")
    lines += [
        "",
        f"bottleneck: {first.name} ({first.share:.0%} of the step)",
        f"  evidence: {first.evidence}",
    ]
    lines += [f"  change:   {first.setting}", f"  gain:     {first.gain}", "", "all six causes"]
    lines += [f"  {f.name:<19} {f.share:5.0%}  {f.evidence}" for f in diagnosis.findings]
    if summary.fused_share is not None:
        lines += ["", f"fused {summary.fused_share:.1%} of windows{_reasons(summary.fusion_reasons)}"]
    if summary.graph_share is not None:
        lines.append(f"replayed {summary.graph_share:.1%} of windows{_reasons(summary.graph_reasons)}")
    return "\n".join(lines) + "\n"


def _unit(name: str, value: float | None, digits: int) -> str:
    return "" if value is None else f"  {name} {value:.{digits}f}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4f}"


def _reasons(reasons: Mapping[str, int]) -> str:
    return "".join(f"; {count} x {reason}" for reason, count in list(reasons.items())[:4])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as aligned columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(lines) + "\n"
