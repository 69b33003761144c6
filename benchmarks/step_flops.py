"""Which products one optimizer step of GR00T N1.6 over 16 samples needs, and which are run.

The full-size model on the meta device: shapes are real, nothing is computed, so a laptop can tell. ``needed``
follows from the calls of the forward pass: a product itself, one more where its weight trains, one more where
something below it trains. ``run`` is what forward and backward dispatch. ``waste`` is the difference, from
recomputation, from gradients nobody uses, or from layers whose result is dropped; ``unswitched`` runs the
same step with the recipe's switches for such work off. Attention counts as if every key were visible.

The rows list the shapes of matrix products with the share of the GPU's processors that their last wave of
output tiles fills: where the small products are, and what joining products of one input would fill.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent))
import _common
import _groot_full as groot
from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta
from loongforge.recipes.gr00t_n1_6.slots import use_single_slot

MICRO, SAMPLES = 4, 4
PROCESSORS, TILE = 132, (128, 256)
"""Streaming multiprocessors of an H200, and rows and columns of a common output tile."""


class Needed(TorchFunctionMode):
    """Adds up what the calls of a forward pass need, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is functional.linear:
            self._product(args[0], args[1])
        elif func in {torch.bmm, torch.matmul, torch.Tensor.matmul}:
            self._product(args[0], args[1].transpose(-1, -2))
        elif func is torch.baddbmm:
            self._product(args[1], args[2].transpose(-1, -2))
        elif func is functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            pairs = 2 * query.numel() * key.shape[-2]
            self.forward += 2 * pairs
            if torch.is_grad_enabled():
                # Scores and mixture each have a gradient on either side.
                self.backward += pairs * (2 * value.requires_grad or 0)
                self.backward += pairs * (query.requires_grad + key.requires_grad)
        return result

    def _product(self, x: Tensor, weight: Tensor) -> None:
        flops = 2 * x.numel() * weight.shape[-2]
        self.forward += flops
        if torch.is_grad_enabled():
            self.backward += flops * (x.requires_grad + weight.requires_grad)


class Shapes(TorchDispatchMode):
    """Counts matrix products by shape (M, N, K)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = func._schema.name.removeprefix("aten::")
        if name in {"mm", "addmm"}:
            a, b = args[-2:] if name == "mm" else args[1:3]
            self.seen[(a.shape[0], b.shape[1], a.shape[1])] += 1
        return func(*args, **(kwargs or {}))


def build(config: GrootConfig) -> nn.Module:
    """Build the full model without memory."""
    model = build_on_meta(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    use_single_slot(model, 0, live_only=True)
    return model.train()


def batch_for(model: nn.Module) -> dict[str, object]:
    """Return 16 samples with their draws, without memory."""
    parts = [groot.micro_batch(SAMPLES, model=model, device="cpu", seed=i) for i in range(MICRO)]
    drawn = model.draw(groot.joined(parts))
    return {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in drawn.items()}


def run(config: GrootConfig) -> tuple[int, int, int, Counter[tuple[int, int, int]]]:
    """Return the operations of a whole step, those its forward calls need either way, and the shapes."""
    model = build(config)
    batch = batch_for(model)
    with Needed() as needed:
        model(batch)["loss"]
    with FlopCounterMode(display=False) as counter, Shapes() as shapes:
        model(batch)["loss"].backward()
    return counter.get_total_flops(), needed.forward, needed.backward, shapes.seen


def fill(m: int, n: int) -> float:
    """Return the share of processors busy over all waves of output tiles of an (m, n) product."""
    tiles = -(-m // TILE[0]) * -(-n // TILE[1])
    return tiles / (-(-tiles // PROCESSORS) * PROCESSORS)


def main() -> None:
    """Count and compare."""
    args = _common.parser(__doc__).parse_args()
    config = groot.config()
    total, forward, backward, shapes = run(config)
    work = dataclasses.replace(
        config.work,
        keep_unused=True,
        skip_logits=False,
        frozen_without_autograd=False,
        split_cross_attention=False,
    )
    unswitched, *_ = run(dataclasses.replace(config, work=work))
    needed = forward + backward
    largest = sorted(shapes.items(), key=lambda item: -2 * item[1] * item[0][0] * item[0][1] * item[0][2])
    rows: list[dict[str, object]] = [
        {
            "shape_mnk": "x".join(map(str, (m, n, k))),
            "count": count,
            "tflop": round(2 * count * m * n * k / 1e12, 3),
            "fill": round(fill(m, n), 2),
        }
        for (m, n, k), count in largest[:24]
    ]
    products = sum(2 * count * m * n * k for (m, n, k), count in shapes.items())
    weighted = sum(2 * count * m * n * k * fill(m, n) for (m, n, k), count in shapes.items())
    figures = {
        "run_tflop": total / 1e12,
        "needed_tflop": needed / 1e12,
        "waste_share": total / needed - 1,
        "unswitched_tflop": unswitched / 1e12,
        "products": sum(shapes.values()),
        "products_tflop": products / 1e12,
        "mean_fill": weighted / products,
    }
    notes = [
        f"needed: {forward / 1e12:.2f} TFLOP forward, {backward / 1e12:.2f} backward",
        f"fill: output tiles of {TILE[0]}x{TILE[1]} over {PROCESSORS} processors, weighted by operations",
    ]
    outcome = _common.result("step_flops", rows=rows, figures=figures, repetitions=1, notes=notes)
    _common.finish(outcome, args.json)


if __name__ == "__main__":
    main()
