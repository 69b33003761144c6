"""200 steps of a small GR00T, plain, fused and graphed, in float32 and bf16: the loss curves lie on each
other.

All runs start from the same weights, see the same micro-batches and the same draws of noise and time.
Dropout is off, since masks inside a fused pass agree with plain ones in distribution only. On a machine
without a GPU the graphed run uses the stand-in backend. Writes the curves, and how far each lies from the
plain run of its precision, as a picture beside the JSON file (or to ``benchmarks/results/loss_curves.svg``).

The measure for bf16 is how far each run lies from plain float32 training: the fused ones no further than the
plain one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _common
import _groot_full as groot
from loongforge_fuse import FusionConfig, GraphConfig, GraphRunner, MicroBatchFuser

MICRO, SAMPLES, BATCHES, LR = 4, 1, 16, 1e-3
WAYS = ("plain", "fused", "graphed")


def make(model: torch.nn.Module, device: str, seed: int) -> dict[str, object]:
    """Make a micro-batch with small images, so that 200 steps take seconds."""
    return groot.micro_batch(SAMPLES, model=model, device=device, seed=seed, side=84, tokens=64)


def curve(way: str, *, masters: bool, steps: int, device: str) -> list[float]:
    """Train and return the loss of each step."""
    torch.manual_seed(0)
    model = groot.build(tiny=True, device=device, masters=True, dropout=0.0)
    if masters:
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
    batches = [make(model, device, i) for i in range(BATCHES)]
    if masters:
        batches = [{k: v.float() if v.dtype == torch.bfloat16 else v for k, v in b.items()} for b in batches]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    executor = None
    if way == "graphed":
        executor = GraphRunner(model, GraphConfig(mode="auto" if device == "cuda" else "emulated"))
    factor = 1 if way == "plain" else MICRO
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor), executor=executor)
    losses = []
    for step in range(steps):
        window = [batches[(MICRO * step + i) % BATCHES] for i in range(MICRO)]
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not masters):
            outcome = fuser.run(window)
        optimizer.step()
        losses.append(float(outcome.loss))
    if executor is not None:
        executor.release()
    return losses


def apart(losses: list[float], base: list[float]) -> list[float]:
    """Return the relative difference of two curves, step by step."""
    return [abs(a - b) / abs(b) for a, b in zip(losses, base, strict=True)]


def draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the curves of each precision, and below them their distance from the plain run."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "loss_curves", "svg.fonttype": "none"})
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    FigureCanvasSVG(figure)
    grid = figure.subplots(2, len(curves), sharex=True, sharey="row", squeeze=False, height_ratios=(2, 1))
    styles = {
        "plain": ("-", 2.6, "#9aa5b1"),
        "fused": ("--", 1.4, "#d1495b"),
        "graphed": (":", 1.4, "#00798c"),
    }
    for (precision, ways), upper, lower in zip(curves.items(), grid[0], grid[1], strict=True):
        for way, losses in ways.items():
            line, width, colour = styles[way]
            upper.plot(losses, line, label=way, linewidth=width, color=colour)
            if way != "plain":
                # Equal curves have no logarithm: they are drawn at the bottom.
                distance = [max(d, 1e-9) for d in apart(losses, ways["plain"])]
                lower.plot(distance, line, linewidth=width, color=colour)
        upper.set(title=precision)
        upper.legend()
        lower.set(xlabel="step", yscale="log", ylim=(5e-10, 1e-1))
        if precision == "bf16":
            floor = [max(d, 1e-9) for d in apart(ways["plain"], curves["float32"]["plain"])]
            lower.plot(floor, "-", linewidth=0.8, color="#9aa5b1", label="plain bf16 from plain float32")
            lower.legend(loc="lower right", fontsize="small")
    grid[0][0].set(ylabel="loss")
    grid[1][0].set(ylabel="distance from plain")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def compare(curves: dict[str, dict[str, list[float]]]) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Return one row per curve and the largest distances as figures."""
    rows, figures = [], {}
    for precision, runs in curves.items():
        for way, losses in runs.items():
            distance = apart(losses, runs["plain"])
            rows.append(
                {
                    "precision": precision,
                    "way": way,
                    "first": losses[0],
                    "last": sum(losses[-16:]) / len(losses[-16:]),
                    "largest_difference": max(distance),
                    "mean_difference": sum(distance) / len(distance),
                }
            )
            if way != "plain":
                figures[f"{way}_{precision}_largest_difference"] = max(distance)
                figures[f"{way}_{precision}_mean_difference"] = sum(distance) / len(distance)
    for way, losses in curves["bf16"].items():
        distance = apart(losses, curves["float32"]["plain"])
        figures[f"{way}_bf16_from_float32_mean_difference"] = sum(distance) / len(distance)
    return rows, figures


def main() -> None:
    """Run all curves and compare them."""
    args = _common.parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = 40 if args.quick else 200
    curves = {
        precision: {
            way: curve(way, masters=precision == "float32", steps=steps, device=device) for way in WAYS
        }
        for precision in ("float32", "bf16")
    }
    rows, figures = compare(curves)
    default = Path(__file__).parent / "results" / "loss_curves.svg"
    draw(curves, args.json.with_suffix(".svg") if args.json else default)
    outcome = _common.result("loss_curves", rows=rows, figures=figures, repetitions=steps)
    _common.finish(outcome, args.json)


if __name__ == "__main__":
    main()
