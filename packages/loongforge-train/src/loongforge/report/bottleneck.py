"""Which of six things holds a run back, with the evidence, the setting to change, and what that would gain.

The shares come from the step record alone. What no phase names is found by probes: a probed step counts
operators and host syncs, and the measured cost of dispatching one tiny operator tells how much of forward,
backward and optimizer is launching. The predicted gain is Amdahl's: the share of the step that would vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loongforge.report.summary import Record, Summary, column, mean, steady, summarise

COST_MARGIN = 5.0
"""Ratio of time to the bare dispatch cost up to which a step counts as made of launches: Python around each
operator and its autograd node cost a few times the dispatch; real work is tens to thousands of times that."""
HOST_BOUND = 0.9
"""On a GPU the host must also have been busy enqueuing for this share of the device's time."""
NAMES = {
    "serial dependency": "the work itself: forward, backward and optimizer, one after the other",
    "communication wait": "waiting for gradients of other ranks",
    "kernel launch": "many tiny operators: the host launches slower than the device computes",
    "data stall": "waiting for the next micro-batch",
    "host sync": "the host waits for the device or blocks between phases",
    "memory": "allocation, retries and cache flushes",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One candidate bottleneck."""

    name: str
    ms: float
    """Milliseconds per step it is charged with."""
    share: float
    """Share of the step, 0 to 1."""
    evidence: str
    setting: str
    """What to change."""
    gain: str
    """What that would gain, and under which assumption."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A run's summary with its bottlenecks, largest first."""

    summary: Summary
    findings: tuple[Finding, ...]

    @property
    def bottleneck(self) -> Finding:
        """The finding that costs most."""
        return self.findings[0]


def diagnose(records: Sequence[Record]) -> Diagnosis:
    """Charge every part of the step to one of six causes and rank them.

    Raises:
        ValueError: There is no record.
    """
    kept = steady(records)
    summary = summarise(kept or records)
    charges = _charges(records, summary)
    findings = [
        Finding(
            name=name,
            ms=ms,
            share=ms / summary.step_ms if summary.step_ms else 0.0,
            evidence=evidence,
            setting=SETTINGS[name],
            gain=_gain(name, ms, summary),
        )
        for name, (ms, evidence) in charges.items()
    ]
    findings.sort(key=lambda finding: finding.ms, reverse=True)
    return Diagnosis(summary=summary, findings=tuple(findings))


SETTINGS = {
    "serial dependency": "larger batch_size (with --mem pool), --precision bf16, --fused-ops, --compile",
    "communication wait": "--comm hybrid, larger accumulation, a faster link; see loongforge monitor-comm",
    "kernel launch": "--fuse auto (needs accumulation > 1), --graph, --compile",
    "data stall": "more --workers, pillars.prefetch_factor, --data on, a faster disk or smaller images",
    "host sync": "remove .item(), print and blocking callbacks from the step; guards.nonfinite needs a "
    "fused optimizer",
    "memory": "--mem pool or --mem global, smaller batch_size",
}


def _charges(records: Sequence[Record], summary: Summary) -> dict[str, tuple[float, str]]:
    """Split the mean step among the six causes; the parts add up to at most the step."""
    phases = summary.phases
    compute = sum(phases.get(name, 0.0) for name in ("forward_ms", "backward_ms", "optimizer_ms"))
    data = phases.get("data_wait_ms", 0.0) + phases.get("h2d_ms", 0.0)
    comm = phases.get("comm_exposed_ms", 0.0)
    sync, sync_text = _sync(records, phases.get("host_gap_ms", 0.0), compute)
    launch, launch_text = _launch(records, summary, compute - sync[1])
    memory, memory_text = _memory(records, summary)
    memory = min(memory, compute)
    work = max(0.0, compute - launch - sync[1] - memory)
    overlap = "" if summary.comm_overlap is None else f", overlap {summary.comm_overlap:.0%}"
    util = "" if summary.gpu_util is None else f", GPU utilisation {summary.gpu_util:.0f} %"
    return {
        "serial dependency": (work, f"{work:.1f} ms of computing that nothing else explains{util}"),
        "communication wait": (comm, _comm_text(comm, summary) + overlap),
        "kernel launch": (launch, launch_text),
        "data stall": (data, f"{data:.1f} ms from the end of a step to its first micro-batch on the device"),
        "host sync": (sum(sync), sync_text),
        "memory": (memory, memory_text),
    }


def _comm_text(comm: float, summary: Summary) -> str:
    if "comm_exposed_ms" not in summary.phases:
        return "not measured (one rank, or stock DDP)"
    return f"{comm:.1f} ms of collectives beyond the end of the backward"


def _sync(records: Sequence[Record], gap: float, compute: float) -> tuple[tuple[float, float], str]:
    """Return (gap, syncs inside compute) and the evidence."""
    counts, times = column(records, "sync_count"), column(records, "sync_ms")
    inside = min(mean(times) or 0.0, compute)
    text = f"{gap:.1f} ms a step outside every phase"
    if counts:
        text += f"; {mean(counts) or 0:.0f} host syncs in a probed step, {inside:.1f} ms"
    return (gap, inside), text


def _launch(records: Sequence[Record], summary: Summary, compute: float) -> tuple[float, str]:
    """Charge compute to launching when it is not much longer than dispatching its operators takes."""
    operators, costs = mean(column(records, "ops")), mean(column(records, "op_cost_us"))
    if operators is None or costs is None:
        return 0.0, "not probed (probe_interval is 0, or too few steps)"
    dispatch = operators * costs / 1e3
    text = f"{operators:.0f} operators a step at {costs:.1f} us to dispatch = {dispatch:.1f} ms"
    text += f" of {compute:.1f} ms"
    if summary.graph_share:
        text += f"; {summary.graph_share:.0%} of steps replayed a graph"
    if compute <= 0:
        return 0.0, text
    enqueuing = mean(column(records, "launch_ms"))
    on_gpu = summary.mem_peak_bytes is not None
    host_bound = not on_gpu or enqueuing is None or enqueuing >= HOST_BOUND * compute
    if on_gpu and enqueuing is not None:
        text += f"; the host enqueued for {enqueuing:.1f} ms"
    if dispatch * COST_MARGIN >= compute and host_bound:
        return compute, text
    return min(dispatch, compute), text


def _memory(records: Sequence[Record], summary: Summary) -> tuple[float, str]:
    retries = column(records, "alloc_retries")
    grown = retries[-1] - retries[0] if len(retries) > 1 else 0.0
    alloc = summary.alloc_ms or 0.0
    # A retry flushes torch's cache and waits for the device: charge the steps it lengthened.
    excess = max(0.0, summary.step_ms - summary.step_ms_median) if grown else 0.0
    peak = "" if summary.mem_peak_bytes is None else f", peak {summary.mem_peak_bytes / 2**30:.1f} GiB"
    return alloc + excess, f"{alloc:.2f} ms in the allocator, {grown:.0f} allocation retries{peak}"


def _gain(name: str, ms: float, summary: Summary) -> str:
    if summary.step_ms <= 0 or ms <= 0:
        return "nothing"
    if name == "serial dependency":
        return "depends on the device: fewer, larger operators; not predicted from records"
    after = max(summary.step_ms - ms, 1e-9)
    if name == "kernel launch":
        kept = ms / 4
        after = summary.step_ms - ms + kept
        return f"up to {summary.step_ms / after:.2f}x when four micro-batches share each launch"
    return f"up to {summary.step_ms / after:.2f}x when it vanishes ({summary.step_ms:.0f} -> {after:.0f} ms)"
