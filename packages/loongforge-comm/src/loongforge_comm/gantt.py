"""Draws a simulated step: backward, buckets on the link, and what is exposed."""

from __future__ import annotations

from pathlib import Path

from loongforge_comm.plan import CommPlan
from loongforge_comm.simulate import Simulation

COLOURS = ("#4878a8", "#d8853b", "#5a9e6f", "#b04a5a", "#8268a8", "#8c6d5a", "#c77ab0", "#7a7a7a")


def draw(plan: CommPlan, simulation: Simulation, path: Path) -> None:
    """Write a PNG (or what the suffix says). Needs the extra ``plot`` (matplotlib).

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        msg = "drawing needs matplotlib: pip install 'loongforge-comm[plot]'"
        raise ImportError(msg) from error
    groups = list(dict.fromkeys(bucket.group for bucket in plan.buckets))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(groups)}
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.broken_barh([(0.0, simulation.backward_ms)], (1.1, 0.8), color="#bbbbbb")
    for bucket, ready, (start, end) in zip(plan.buckets, simulation.ready, simulation.spans, strict=True):
        axes.broken_barh(
            [(start, end - start)], (0.1, 0.8), color=colour[bucket.group], edgecolor="white", linewidth=0.5
        )
        axes.plot([ready, ready], [1.1, 1.9], color=colour[bucket.group], linewidth=0.8)
    axes.axvline(simulation.backward_ms, color="black", linewidth=1, linestyle=":")
    axes.set_yticks([0.5, 1.5], ["link", "backward"])
    axes.set_ylim(0, 2)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds after the start of backward")
    axes.set_title(
        f"model: {simulation.ranks} ranks, exposed {simulation.exposed_ms:.1f} ms, "
        f"overlap {100 * simulation.overlap:.0f} %"
    )
    handles = [Patch(color=colour[name], label=name) for name in groups]
    axes.legend(handles=handles, loc="upper right", fontsize="small")
    figure.savefig(path, dpi=120)
