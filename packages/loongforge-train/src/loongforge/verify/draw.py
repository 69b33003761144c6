"""The plot of ``loongforge verify``: loss curves, and their differences from the reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loongforge.verify.curves import Curve
from loongforge.verify.judge import Verdict


def plot(reference: Curve, results: Sequence[tuple[Verdict, Curve]], path: Path) -> None:
    """Draw loss curves and their differences from the reference as SVG or PNG (extra ``plot``)."""
    from loongforge.errors import require

    require("matplotlib", "loongforge-train[plot]", "leave --plot away")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    steps = range(1, len(reference.losses) + 1)
    upper.plot(steps, reference.losses, "k", linewidth=2, label="reference (all off)")
    for verdict, curve in results:
        (line,) = upper.plot(range(1, len(curve.losses) + 1), curve.losses, linewidth=1, label=verdict.name)
        apart = [abs(a - b) + 1e-12 for a, b in zip(reference.losses, curve.losses, strict=False)]
        lower.plot(range(1, len(apart) + 1), apart, linewidth=1, color=line.get_color())
    upper.set_ylabel("loss")
    lower.set_ylabel("|difference|")
    lower.set_yscale("log")
    lower.set_xlabel("step")
    upper.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
