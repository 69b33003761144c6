"""Whether the fastest way computes what plain PyTorch computes: loss and gradients of the full model."""

from __future__ import annotations

import gc

import _groot_full as groot
from _step_columns import MICRO, Bench
from loongforge_fuse import FusionConfig, GraphConfig, GraphRunner, MicroBatchFuser


def check_equality(bench: Bench) -> dict[str, object]:
    """Compare loss and gradients of the graphed, fused, compiled pass with plain eager, dropout off."""
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
    config = GraphConfig(mode="auto" if cuda else "emulated", compile=cuda)
    with GraphRunner(model, config) as runner:
        fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=MICRO), executor=runner)
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            with bench.precision():
                outcome = fuser.run(window, drawn=True)
        difference = sum(
            ((p.grad.float() - expected[n].float()) ** 2).sum()
            for n, p in trainable
            if n in expected and p.grad is not None
        )
        size = sum((g.float() ** 2).sum() for g in expected.values())
        row: dict[str, object] = {
            "graph": outcome.graph,
            "graph_reason": outcome.graph_reason,
            "failures": dict(runner.stats().failures),
            "fusion_reason": outcome.reason,
            "loss": float(outcome.loss),
            "loss_eager": plain,
            "gradient_difference": float((difference / size).sqrt()),
            "missing": [n for n, p in trainable if n in expected and p.grad is None][:5],
        }
    model.zero_grad(set_to_none=True)
    gc.collect()
    return row
