"""Where memory goes in a recorded step: peak, holders, fragmentation under every policy, advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loongforge_mem.planning import plan_trace
from loongforge_mem.trace import Trace, simulate

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings about one trace. Sizes in bytes.

    Attributes:
        peak_bytes: largest sum of live blocks, blocks that stay included.
        peak_event: index of the event that reached it.
        staying_bytes: blocks never freed in the trace.
        timeline: live bytes after every event.
        holders: (owner or label, bytes) at the peak, largest first.
        overheads: reserve overhead by policy.
        plan_bytes: bytes an offline plan of the step needs.
        advice: sentences, most valuable first.
    """

    peak_bytes: int
    peak_event: int
    staying_bytes: int
    timeline: Sequence[int]
    holders: Sequence[tuple[str, int]]
    overheads: dict[str, float]
    plan_bytes: int
    advice: Sequence[str]

    def text(self) -> str:
        """Return the report as lines of text."""
        lines = [
            f"peak {self.peak_bytes / MIB:.1f} MiB at event {self.peak_event} of {len(self.timeline)}; "
            f"{self.staying_bytes / MIB:.1f} MiB stay after the step",
            f"an offline plan holds the step in {self.plan_bytes / MIB:.1f} MiB",
            "reserve overhead: " + ", ".join(f"{name} {share:.2%}" for name, share in self.overheads.items()),
            "largest holders at the peak:",
        ]
        lines += [f"  {size / MIB:10.1f} MiB  {name}" for name, size in self.holders]
        lines += [f"- {sentence}" for sentence in self.advice]
        return "\n".join(lines)


def analyse(trace: Trace, *, top: int = 10) -> Report:
    """Analyse ``trace``; ``top`` holders are kept.

    Raises:
        ValueError: the trace contradicts itself or is empty.
    """
    if not trace.events:
        msg = "the trace has no events; record at least one step"
        raise ValueError(msg)
    timeline, peak, peak_event, at_peak, staying = _walk(trace)
    overheads = {
        name: float(simulate(trace, name)["reserve_overhead"])
        for name in ("best_fit", "expandable", "run_fit", "plan")
    }
    sizes: Counter[str] = Counter()
    for block, size in at_peak.items():
        sizes[trace.owners.get(block) or trace.labels.get(block) or "unnamed"] += size
    return Report(
        peak_bytes=peak,
        peak_event=peak_event,
        staying_bytes=staying,
        timeline=timeline,
        holders=sizes.most_common(top),
        overheads=overheads,
        plan_bytes=plan_trace(trace).high_water,
        advice=_advice(peak, at_peak, overheads, sizes),
    )


def _walk(trace: Trace) -> tuple[list[int], int, int, dict[int, int], int]:
    live: dict[int, int] = {}
    timeline, now, peak, peak_event = [], 0, 0, 0
    at_peak: dict[int, int] = {}
    for index, (is_alloc, block, size) in enumerate(trace.events):
        if is_alloc:
            live[block] = size
            now += size
        else:
            now -= live.pop(block, 0)
        if now > peak:
            peak, peak_event = now, index
        timeline.append(now)
    live.clear()
    for is_alloc, block, size in trace.events[: peak_event + 1]:
        if is_alloc:
            live[block] = size
        else:
            live.pop(block, None)
    at_peak = live
    return timeline, peak, peak_event, at_peak, timeline[-1]


def _advice(
    peak: int, at_peak: dict[int, int], overheads: dict[str, float], sizes: Counter[str]
) -> list[str]:
    out = []
    gain = overheads["best_fit"] - overheads["plan"]
    if gain > 0.01:
        out.append(
            f"a planned layout needs {gain:.1%} less memory than segment caching on this step: mode 'global'"
        )
    small_gain = overheads["best_fit"] - overheads["expandable"]
    if small_gain > 0.03:
        out.append(f"expandable segments alone would save {small_gain:.1%}")
    biggest = max(at_peak.values(), default=0)
    if biggest > peak // 5:
        out.append(
            f"one block of {biggest / MIB:.0f} MiB is {biggest / peak:.0%} of the peak (often logits): "
            "compute the loss in chunks"
        )
    if sizes:
        name, size = sizes.most_common(1)[0]
        if name != "unnamed" and size > peak // 4:
            out.append(f"{name} holds {size / peak:.0%} of the peak: recompute it in backward or offload it")
    return out or ["nothing to gain here: the step packs well under every policy"]


def draw_timeline(report: Report, path: str | Path) -> None:
    """Write the timeline of live bytes as a PNG.

    Raises:
        ImportError: matplotlib is not installed; install loongforge-mem[plot].
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        msg = "drawing needs matplotlib; install loongforge-mem[plot], or leave out --png"
        raise ImportError(msg) from error
    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.fill_between(
        range(len(report.timeline)), [n / MIB for n in report.timeline], step="post", alpha=0.35
    )
    axes.axhline(report.peak_bytes / MIB, linewidth=0.8, color="black")
    axes.axhline(report.plan_bytes / MIB, linewidth=0.8, linestyle="--", color="tab:red")
    axes.annotate(f"peak {report.peak_bytes / MIB:.0f} MiB", (report.peak_event, report.peak_bytes / MIB))
    axes.set_xlabel("event (allocation or free)")
    axes.set_ylabel("live MiB")
    axes.set_title("dashed: an offline plan of the step (blocks that stay are not in it)")
    figure.savefig(str(path))
