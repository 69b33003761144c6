"""The tiny recipe learns from a real recording on a CPU."""

from __future__ import annotations

import pytest
import torch
from loongforge.evaluation import Validation
from loongforge.recipes import get_recipe

pytest.importorskip("loongforge_data")


class Every:
    """Every n-th sample of a data set, decoded once."""

    def __init__(self, dataset, stride):
        self._samples = [dataset[i] for i in range(0, len(dataset), stride)]

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, i):
        return self._samples[i]


def train(g1_pick, *, steps, seed=0, validate=False):
    """Return losses, and the validation loss before and after."""
    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options({"held_out": [6, 7]})
    model = recipe.build_model(options, seed)
    dataset = recipe.build_dataset(str(g1_pick), options)
    collate = recipe.build_collate(dataset, model, options)
    samples = Every(dataset, 4)
    training = recipe.training
    rate, batch_size = training["learning_rate"], training["batch_size"]
    groups = recipe.param_groups(model, training["weight_decay"], learning_rate=rate)
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(training["beta1"], training["beta2"]))
    warm = max(1, round(training["warmup_ratio"] * steps))
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, total_iters=warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warm),
        ],
        [warm],
    )
    validation = None
    if validate:
        held_out = recipe.build_dataset(str(g1_pick), options, episodes=[6, 7])
        validation = Validation(held_out, collate, samples=128, batch_size=32)
    before = validation.loss(model) if validation else None
    order = torch.Generator().manual_seed(seed)
    draws = torch.Generator().manual_seed(seed + 1)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(samples), (batch_size,), generator=order).tolist()
        loss = model(model.draw(collate([samples[i] for i in chosen]), draws))["loss"]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_norm"])
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, before, validation.loss(model) if validation else None


def test_the_loss_falls_within_sixty_steps(g1_pick):
    losses, _, _ = train(g1_pick, steps=60)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_both_layouts_of_a_recording_give_equal_batches(g1_pick):
    other = g1_pick.parent / "g1_pick_v30"
    if not other.exists():
        pytest.skip("the recording g1_pick_v30 is not here")
    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options()
    batches = []
    for root in (g1_pick, other):
        dataset = recipe.build_dataset(str(root), options)
        collate = recipe.build_collate(dataset, None, options)
        batches.append(collate([dataset[i] for i in (0, 289, 290, 1000, len(dataset) - 1)]))
    first, second = batches
    assert set(first) == set(second)
    for name, value in first.items():
        if value.is_floating_point():
            # Statistics are merged from the episodes in one layout and stored once in the other.
            torch.testing.assert_close(value, second[name], rtol=1e-5, atol=1e-5, msg=name)
        else:
            assert torch.equal(value, second[name]), name


@pytest.mark.slow
def test_validation_loss_falls_within_three_hundred_steps(g1_pick):
    losses, before, after = train(g1_pick, steps=300, validate=True)
    print(f"training {losses[0]:.3f} -> {sum(losses[-10:]) / 10:.3f}, validation {before:.3f} -> {after:.3f}")
    assert after < 0.7 * before
