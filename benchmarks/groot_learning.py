"""The tiny GR00T recipe learns on a CPU: training loss over 60 steps, validation loss over 300.

Six episodes of a robot recording train, two are held out; the validation loss always uses the same samples
and the same noise. Written beside the JSON: the validation curve and open-loop trajectories as HTML pages.

    uv run benchmarks/groot_learning.py --dataset ../shared/data/g1_pick --json OUT
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _common
from loongforge.evaluation import Validation, evaluate_open_loop
from loongforge.evaluation.curves import write_curve
from loongforge.evaluation.plots import write_html
from loongforge.recipes import get_recipe


def main() -> None:
    parser = _common.parser(__doc__)
    parser.add_argument("--dataset", type=Path, default=Path("../shared/data/g1_pick"))
    parser.add_argument("--held-out", default="6,7", help="episodes that do not train")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = (0,) if options.quick else (0, 1, 2)
    long = 60 if options.quick else 300
    setup = Setup(options)
    rows: list[dict[str, object]] = []
    ratios = []
    for seed in seeds:
        losses, _ = setup.train(60, seed)
        ratios.append(sum(losses[-10:]) / sum(losses[:10]))
        rows.append(
            {
                "case": "60 steps",
                "seed": seed,
                "first_10": sum(losses[:10]) / 10,
                "last_10": sum(losses[-10:]) / 10,
                "ratio": ratios[-1],
            }
        )
        print(rows[-1], flush=True)
    finals = []
    curves: dict[str, list[tuple[int, float]]] = {}
    for seed in seeds:
        losses, points = setup.train(long, seed, every=30)
        finals.append(points[-1][1] / points[0][1])
        curves[f"seed {seed}"] = points
        rows.append(
            {
                "case": f"{long} steps",
                "seed": seed,
                "validation_first": points[0][1],
                "validation_last": points[-1][1],
                "ratio": finals[-1],
                "training_last_10": sum(losses[-10:]) / 10,
            }
        )
        print(rows[-1], flush=True)
        if seed == 0 and options.json:
            report = setup.open_loop()
            summary = report.to_json()
            rows.append(
                {
                    "case": "open loop after training",
                    "seed": seed,
                    "mse": summary["mse"],
                    "l1": summary["l1"],
                    "mse_of_untrained": setup.untrained_mse,
                }
            )
            write_html(
                report, options.json.with_name("groot_open_loop.html"), title="gr00t_n1_6_tiny", episodes=1
            )
    if options.json:
        write_curve(
            options.json.with_suffix(".html"),
            curves,
            title="Validation loss of gr00t_n1_6_tiny on two held-out episodes",
            goal=0.7 * min(points[0][1] for points in curves.values()),
        )
    figures = {
        "loss_ratio_60": max(ratios),
        "validation_ratio": max(finals),
        "validation_steps": long,
        "seeds": len(seeds),
    }
    outcome = _common.result(
        "groot_learning",
        rows=rows,
        figures=figures,
        repetitions=len(seeds),
        notes=[
            "Both figures are the worst of the seeds: the mean of the last 10 losses over that of the first "
            "10, and the last validation loss over the first. Validation draws the same noise every time."
        ],
    )
    _common.finish(outcome, options.json)


class Setup:
    """Recipe, decoded samples and collate function, shared by all runs."""

    def __init__(self, options) -> None:
        self.recipe = get_recipe("gr00t_n1_6_tiny")
        held_out = [int(number) for number in options.held_out.split(",")]
        self.options = self.recipe.options({"held_out": held_out})
        self.model = self.recipe.build_model(self.options, 0)
        dataset = self.recipe.build_dataset(str(options.dataset), self.options)
        self.collate = self.recipe.build_collate(dataset, self.model, self.options)
        began = time.perf_counter()
        self.samples = [dataset[i] for i in range(0, len(dataset), 4)]
        print(f"decoded {len(self.samples)} samples in {time.perf_counter() - began:.1f} s", flush=True)
        self.held_out = self.recipe.build_dataset(str(options.dataset), self.options, episodes=held_out)
        self.validation = Validation(self.held_out, self.collate, samples=128, batch_size=32)
        self.untrained_mse: object = None

    def open_loop(self):
        """Compare predicted with recorded actions of the first held-out episode."""
        return evaluate_open_loop(self.recipe.predictor(self.model, self.collate), self.held_out, episodes=1)

    def train(self, steps: int, seed: int, every: int = 0) -> tuple[list[float], list[tuple[int, float]]]:
        """Train anew; return losses and (step, validation loss) every ``every`` steps."""
        training = self.recipe.training
        self.model = model = self.recipe.build_model(self.options, seed)
        if every and seed == 0:
            self.untrained_mse = self.open_loop().to_json()["mse"]
        rate, batch = training["learning_rate"], training["batch_size"]
        groups = self.recipe.param_groups(model, training["weight_decay"], learning_rate=rate)
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(training["beta1"], training["beta2"]))
        warm = max(1, round(training["warmup_ratio"] * steps))
        rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, total_iters=warm)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warm)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [warm])
        order, draws = (torch.Generator().manual_seed(seed + i) for i in (0, 1))
        losses: list[float] = []
        points = [(0, self.validation.loss(model))] if every else []
        for step in range(1, steps + 1):
            chosen = torch.randint(len(self.samples), (batch,), generator=order).tolist()
            loss = model(model.draw(self.collate([self.samples[i] for i in chosen]), draws))["loss"]
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_norm"])
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if every and step % every == 0:
                points.append((step, self.validation.loss(model)))
        return losses, points


if __name__ == "__main__":
    main()
