"""Whether the fastest way computes what plain PyTorch computes: loss and gradients of the full model."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import _groot_full as groot
import torch
from _step_columns import MICRO, Bench
from loongforge_fuse import (
    FrozenAhead,
    FusionConfig,
    GraphConfig,
    GraphRunner,
    MicroBatchFuser,
    apply_fused_ops,
)
from torch import Tensor, nn


def check_equality(bench: Bench) -> dict[str, object]:
    """Compare loss and gradients of the graphed, fused pass with our operators with plain eager, dropout off;
    and those with the frozen part ahead with those without.
    """
    model = bench.shell()
    model.eval()
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    window = [bench.model.draw(b) for b in bench.window]
    with bench.precision():
        out = model(groot.joined(window))
        loss = out["loss_sum"].sum() / out["loss_count"].sum()
    loss.backward()
    # A graph that stays alive keeps its accumulation nodes on this stream, which would break a capture.
    plain = float(loss.detach())
    del out, loss
    expected = {n: p.grad for n, p in trainable if p.grad is not None}
    model.zero_grad(set_to_none=True)
    cuda = bench.device == "cuda"
    apply_fused_ops(model)
    config = GraphConfig(mode="auto" if cuda else "emulated")
    with GraphRunner(model, config) as runner:
        fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=MICRO), executor=runner)
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            with bench.precision():
                outcome = fuser.run(window, drawn=True)
        row: dict[str, object] = {
            "graph": outcome.graph,
            "graph_reason": outcome.graph_reason,
            "failures": dict(runner.stats().failures),
            "fusion_reason": outcome.reason,
            "loss": float(outcome.loss),
            "loss_eager": plain,
            "gradient_difference": difference(trainable, expected),
            "missing": [n for n, p in trainable if n in expected and p.grad is None][:5],
        }
        in_its_step = {n: p.grad.clone() for n, p in trainable if p.grad is not None}
        ahead = FrozenAhead(model, autocast=torch.bfloat16 if bench.autocast else None)
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            with bench.precision():
                outcome = fuser.run(ahead.start(window).take(), drawn=True)
        row["ahead_graph"] = bool(outcome.graph and (ahead.stats().replays or not cuda))
        row["ahead_loss"] = float(outcome.loss)
        row["ahead_gradient_difference"] = difference(trainable, in_its_step)
        row["ahead_failures"] = list(ahead.stats().failures)
        ahead.release()
    model.zero_grad(set_to_none=True)
    gc.collect()
    return row


def difference(trainable: Sequence[tuple[str, nn.Parameter]], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the gradients' difference relative to that of the expected ones."""
    gap = sum(
        ((p.grad.float() - expected[n].float()) ** 2).sum()
        for n, p in trainable
        if n in expected and p.grad is not None
    )
    return float((gap / sum((g.float() ** 2).sum() for g in expected.values())).sqrt())
