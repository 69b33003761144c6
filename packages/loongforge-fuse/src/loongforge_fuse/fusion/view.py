"""Views of the fusion trace: a table on a terminal, a timeline as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from loongforge_fuse.fusion.trace import GroupRecord

FUSED_COLOUR, SEPARATE_COLOUR = "#2a9d8f", "#e76f51"


def as_rows(records: Sequence[GroupRecord]) -> list[dict[str, object]]:
    """Return plain dictionaries, ready for JSON; reading the losses waits for the device."""
    origin = records[0].start_ns if records else 0
    return [
        {
            "window": record.window,
            "micro_batches": [record.first, record.first + len(record.sizes) - 1],
            "samples": list(record.sizes),
            "fused": record.fused,
            "layout": record.layout,
            "reason": record.reason,
            "detail": record.detail,
            "padded_share": round(record.padded_share, 4),
            "graph": record.graph,
            "graph_reason": record.graph_reason,
            "start_ms": round((record.start_ns - origin) / 1e6, 3),
            "host_ms": round((record.end_ns - record.start_ns) / 1e6, 3),
            "losses": [round(v, 6) for v in record.losses.tolist()],
        }
        for record in records
    ]


def trace_table(rows: Sequence[Mapping[str, object]], summary: Mapping[str, object]) -> str:
    """Format rows of :func:`as_rows` and the trace's summary as text."""
    lines = ["window  micro-b.  samples       layout    graph  host ms   padding  losses / reason"]
    for row in rows:
        losses, micro, samples = row["losses"], row["micro_batches"], row["samples"]
        shown = " ".join(f"{v:.4g}" for v in losses) if isinstance(losses, list) else ""
        reason = "" if row["fused"] else f"  [{row['reason']}] {row['detail'] or ''}"
        span = f"{micro[0]}-{micro[1]}" if isinstance(micro, list) else ""
        sizes = "+".join(map(str, samples)) if isinstance(samples, list) else ""
        padded = row["padded_share"]
        lines.append(
            f"{row['window']!s:>6}  {span:8}  {sizes:12}  {row['layout']!s:8}  "
            f"{'yes' if row['graph'] else 'no':5}  {row['host_ms']!s:>8}  "
            f"{padded if isinstance(padded, float) else 0.0:7.1%}  {shown}{reason}"
        )
    total, share = summary.get("micro_batches"), summary.get("fused_share")
    lines.append("")
    lines.append(
        f"{total} micro-batches in {summary.get('passes')} passes, fused: "
        + (f"{share:.1%}" if isinstance(share, float) else "none yet")
    )
    reasons = summary.get("reasons")
    if isinstance(reasons, Mapping) and reasons and isinstance(total, int):
        for reason, count in sorted(reasons.items(), key=lambda item: -int(item[1])):
            lines.append(f"  {count:6d}  {count / total:6.1%}  {reason}")
    return "\n".join(lines)


def timeline(rows: Sequence[Mapping[str, object]], path: Path) -> Path:
    """Draw when each group ran on the host, fused or apart, with refusal reasons, as a picture.

    Needs matplotlib (the ``plot`` extra).

    Args:
        rows: Rows of :func:`as_rows`.
        path: File to write; its suffix chooses the format.

    Raises:
        ValueError: No rows.
        ModuleNotFoundError: matplotlib is not installed.
    """
    if not rows:
        message = "the trace is empty: run a window first"
        raise ValueError(message)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        message = "the timeline needs matplotlib; install loongforge-fuse[plot]"
        raise ModuleNotFoundError(message) from error
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    reasons = sorted({str(row["reason"]) for row in rows if not row["fused"]})
    lanes = {"fused": 0, **{reason: i + 1 for i, reason in enumerate(reasons)}}
    for row in rows:
        lane = "fused" if row["fused"] else str(row["reason"])
        start, width = row["start_ms"], row["host_ms"]
        if isinstance(start, float | int) and isinstance(width, float | int):
            axes.broken_barh(
                [(start, max(width, 1e-3))],
                (lanes[lane] - 0.4, 0.8),
                color=FUSED_COLOUR if row["fused"] else SEPARATE_COLOUR,
                edgecolor="white",
                linewidth=0.3,
            )
    axes.set_yticks(list(lanes.values()), labels=list(lanes))
    axes.set_xlabel("host time since the first group shown, ms")
    fused = sum(1 for row in rows if row["fused"])
    axes.set_title(f"{len(rows)} groups, {fused} fused")
    axes.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
