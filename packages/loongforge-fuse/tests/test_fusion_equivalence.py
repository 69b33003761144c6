"""Fused windows give the numbers of plain accumulation: losses, gradients, normalisation, draws."""

import pytest
import torch
from loongforge_fuse import FusionConfig, MicroBatchFuser
from loongforge_fuse.testing import TinyVLA, tiny_batch


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def reference(model, window, *, normalize):
    """Plain accumulation in float64, written without the package: the oracle."""
    total = 0.0
    counts = [model.loss_count(batch).sum() for batch in window]
    for batch, count in zip(window, counts, strict=True):
        out = model(batch)
        if normalize == "elements":
            loss = out["loss_sum"].sum() / torch.stack(counts).sum()
        else:
            loss = out["loss_sum"].sum() / count / len(window)
        loss.backward()
        total += loss.item()
    return total


def make_window(lengths=(4, 4, 4, 4), **kwargs):
    return [tiny_batch(size, seed=i, **kwargs) for i, size in enumerate(lengths)]


def drawn(model, window, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [model.draw(b, generator=generator) for b in window]


@pytest.mark.parametrize("normalize", ["elements", "mean_of_means"])
@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (4, 4, 4, 1), (4, 4, 2)])
def test_gradients_and_loss_equal_plain_accumulation(normalize, factor, sizes):
    torch.manual_seed(0)
    model = TinyVLA()
    window = drawn(model, make_window(sizes))
    expected_loss = reference(model, window, normalize=normalize)
    expected = gradients(model)
    model.zero_grad()
    fuser = MicroBatchFuser(
        model, FusionConfig(fusion_batch_size=factor, accumulation_steps=4, normalize=normalize)
    )
    outcome = fuser.run(window, drawn=True)
    assert outcome.loss.item() == pytest.approx(expected_loss, rel=1e-5)
    assert len(outcome.micro_losses) == len(sizes)
    for name, gradient in gradients(model).items():
        scale = expected[name].abs().max()
        assert (gradient - expected[name]).abs().max() <= 1e-5 * scale, name
