"""200 steps of a small GR00T, plain, fused and graphed, in float32 and bf16: the loss curves lie on each
other.

All runs start from the same weights, see the same micro-batches and the same draws of noise and time.
Dropout is off, since masks inside a fused pass agree with plain ones in distribution only. Writes the
curves as a picture beside the JSON file (or to ``benchmarks/results/loss_curves.svg``). On a machine
without a GPU the graphed run uses the stand-in backend.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _common
import _groot_full as groot
from loongforge_fuse import FusionConfig, GraphConfig, GraphRunner, MicroBatchFuser

MICRO, SAMPLES, BATCHES, LR = 4, 1, 16, 3e-4
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


def draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw the curves of each precision beside each other."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "loss_curves"
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    for place, (precision, ways) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), place + 1)
        for (way, losses), style in zip(ways.items(), ("-", "--", ":"), strict=True):
            axes.plot(losses, style, label=way, linewidth=1.4)
        axes.set(title=precision, xlabel="step", ylabel="loss")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run all curves and compare them."""
    args = _common.parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = 40 if args.quick else 200
    curves: dict[str, dict[str, list[float]]] = {}
    rows, figures = [], {}
    for precision in ("float32", "bf16"):
        runs = {w: curve(w, masters=precision == "float32", steps=steps, device=device) for w in WAYS}
        curves[precision] = runs
        for way in WAYS:
            apart = [abs(a - b) / abs(b) for a, b in zip(runs[way], runs["plain"], strict=True)]
            rows.append(
                {
                    "precision": precision,
                    "way": way,
                    "first": runs[way][0],
                    "last": sum(runs[way][-4:]) / 4,
                    "largest_difference": max(apart),
                    "mean_difference": sum(apart) / len(apart),
                }
            )
            if way != "plain":
                figures[f"{way}_{precision}_largest_difference"] = max(apart)
    default = Path(__file__).parent / "results" / "loss_curves.svg"
    draw(curves, args.json.with_suffix(".svg") if args.json else default)
    outcome = _common.result("loss_curves", rows=rows, figures=figures, repetitions=steps)
    _common.finish(outcome, args.json)


if __name__ == "__main__":
    main()
