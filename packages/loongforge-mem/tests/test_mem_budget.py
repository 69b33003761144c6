"""Predicted memory of a step against the same step run for real, and the choice under a budget."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from loongforge_mem.budget import plan_memory, profile_step, resize  # noqa: E402
from loongforge_mem.recompute import apply_recompute, find_blocks  # noqa: E402
from loongforge_mem.synthetic import TransformerShape, transformer  # noqa: E402
from loongforge_mem.watch import StorageWatch  # noqa: E402

SHAPE = TransformerShape(layers=4, width=128, heads=4, mlp=512)


def _example(samples):
    return {"x": torch.zeros(samples, 64, 128, dtype=torch.bfloat16)}


def _measure(model, batch):
    """Run the step for real and count every storage it makes."""
    watch = StorageWatch()
    for tensor in (*model.parameters(), *model.buffers(), *batch.values()):
        watch.know(tensor)
    with watch:
        model(batch).backward()
    fixed = sum(
        t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers(), *batch.values())
    )
    return fixed + watch.peak_bytes


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("samples", [2, 16])
def test_the_predicted_peak_is_within_five_per_cent_of_the_measured_one(recompute, samples):
    model = transformer(SHAPE)
    profile = profile_step(model, _example(4), batch=samples, recompute=recompute)
    assert all(p.grad is None for p in model.parameters()), "the prediction ran nothing"
    apply_recompute(model, find_blocks(model), recompute)
    measured = _measure(model, _example(samples))
    assert profile.peak - profile.optimizer == pytest.approx(measured, rel=0.05)


def test_recomputation_lowers_the_peak_and_keeps_the_gradients():
    peaks = [
        profile_step(transformer(SHAPE), _example(16), recompute=m).peak
        for m in ("none", "selective", "full")
    ]
    assert peaks[0] > peaks[1] > peaks[2]
    torch.manual_seed(0)
    model = transformer(SHAPE)
    batch = {"x": torch.randn(4, 64, 128, dtype=torch.bfloat16)}
    model(batch).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    for mode in ("selective", "full"):
        model.zero_grad()
        handle = apply_recompute(model, find_blocks(model), mode)
        model(batch).backward()
        handle.remove()
        assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))


def test_a_meta_model_is_profiled_without_memory():
    with torch.device("meta"):
        model = transformer(TransformerShape(layers=12, width=2048, heads=16, mlp=8192))
        example = {"x": torch.zeros(2, 1024, 2048, dtype=torch.bfloat16)}
    profile = profile_step(model, example)
    assert profile.fixed > 1 << 30
    assert profile.peak > profile.fixed + profile.optimizer


def test_the_batch_grows_with_the_budget_and_the_cheapest_way_wins():
    model = transformer(SHAPE)
    small = plan_memory(model, _example(2), 0.03, micro_batch=2, max_batch=512)
    large = plan_memory(model, _example(2), 0.12, micro_batch=2, max_batch=512)
    assert small.predicted_peak_bytes <= small.budget_bytes
    assert large.batch > 2 * small.batch
    assert large.batch == large.micro_batch * large.fusion
    easy = plan_memory(model, _example(2), 0.12, micro_batch=2, target_batch=8)
    assert (easy.recompute, easy.offload_optimizer, easy.batch) == ("none", False, 8)
    hard = plan_memory(model, _example(2), 0.03, micro_batch=2, target_batch=24)
    assert hard.recompute != "none" or hard.offload_optimizer


def test_an_applied_plan_trains_and_is_undone():
    model = transformer(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = plan_memory(model, _example(2), 0.03, micro_batch=2, target_batch=24)
    applied = plan.apply(model, optimizer)
    model(resize(_example(2), plan.batch, like=torch.zeros)).backward()
    optimizer.step()
    applied.remove()
    assert "forward" not in model.blocks[0].__dict__


def test_a_budget_that_cannot_hold_one_micro_batch_says_what_is_missing():
    with pytest.raises(ValueError, match=r"not one micro-batch of 1 fits into 0\.001 GiB: it needs about"):
        plan_memory(transformer(SHAPE), _example(1), 0.001)
    with pytest.raises(ValueError, match="one common number"):
        profile_step(transformer(SHAPE), {"x": torch.zeros(2, 3), "y": torch.zeros(4, 3)})
