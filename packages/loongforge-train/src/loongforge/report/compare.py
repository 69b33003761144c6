"""Two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from loongforge.report.summary import PHASES, Record, column, steady, summarise
from loongforge.report.text import table


def compare(first: Sequence[Record], second: Sequence[Record], *, names: tuple[str, str]) -> str:
    """Return a table of times, rates and losses of two runs, and how far their losses differ step by step.

    Raises:
        ValueError: One of the runs has no record.
    """
    one, two = summarise(steady(first) or first), summarise(steady(second) or second)
    rows = [["", *names, "second / first"]]

    def add(name: str, a: float | None, b: float | None, digits: int = 2) -> None:
        ratio = f"{b / a:.3f}" if a and b is not None else ""
        rows.append([name, *("-" if v is None else f"{v:.{digits}f}" for v in (a, b)), ratio])

    add("steps", one.steps, two.steps, 0)
    add("step ms", one.step_ms, two.step_ms)
    add("step ms, median", one.step_ms_median, two.step_ms_median)
    for name in PHASES:
        add(f"{name[:-3]} ms", one.phases.get(name), two.phases.get(name))
    add("samples/s", one.samples_per_s, two.samples_per_s, 1)
    add("tokens/s/gpu", one.tokens_per_s_gpu, two.tokens_per_s_gpu, 0)
    add("gpu util %", one.gpu_util, two.gpu_util, 1)
    peaks = [None if s.mem_peak_bytes is None else s.mem_peak_bytes / 2**30 for s in (one, two)]
    add("peak GiB", peaks[0], peaks[1])
    add("fused share", one.fused_share, two.fused_share)
    add("last loss", one.last_loss, two.last_loss, 4)
    return table(rows) + _losses(first, second)


def _losses(first: Sequence[Record], second: Sequence[Record]) -> str:
    pairs = [{int(r["step"]): r for r in run if r.get("rank") == 0} for run in (first, second)]  # type: ignore[call-overload]
    common = sorted(set(pairs[0]) & set(pairs[1]))
    differences = []
    for step in common:
        values = [column([run[step]], "loss") for run in pairs]
        if all(values):
            differences.append((abs(values[0][0] - values[1][0]), step))
    if not differences:
        return "no step has a loss in both runs\n"
    largest, step = max(differences)
    equal = sum(1 for value, _ in differences if value == 0)
    text = f"largest difference {largest:.3g} at step {step}"
    return f"losses of {len(differences)} common steps: {equal} equal, {text}\n"
