"""The optimizer inside a recording: schedules, clipping, skipped steps, resuming."""

import pytest
import torch
from loongforge_fuse import GraphRunner


def ours_adam(model):
    from loongforge_fuse import FusedAdamW

    trainable = [p for p in model.parameters() if p.requires_grad]
    return FusedAdamW(trainable, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)


@pytest.mark.parametrize("gradients", ["accumulate", "overwrite"])
def test_our_adam_in_the_graph_equals_eager_with_a_schedule_fault_f04(place, gradients):
    ours, theirs = place.pair()
    optimizers = [ours_adam(m) for m in (ours, theirs)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=12) for o in optimizers]
    config = place.config(gradients=gradients, zero_in_graph=True, max_norm=0.5)
    runner = GraphRunner(ours, config, optimizer=optimizers[0])
    for step in range(12):
        batch = place.drawn(ours, step)
        if step == 5:
            batch = {**batch, "action": batch["action"] * float("nan")}
        result = runner.run(batch)
        optimizers[1].zero_grad(set_to_none=False)
        loss = place.plain(theirs, batch)
        optimizers[1].step(found_inf=torch.tensor(float(loss != loss), device=place.device))
        assert result.finite.item() == (step != 5)
        for schedule in schedules:
            schedule.step()
    assert result.graph, runner.stats().failures
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gradients", ["accumulate", "overwrite"])
def test_optimizer_in_the_graph_equals_eager_with_a_schedule_fault_f04(place, gradients):
    ours, theirs = place.pair()
    optimizers = [
        torch.optim.AdamW(
            [p for p in m.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, **place.fused()
        )
        for m in (ours, theirs)
    ]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20) for o in optimizers]
    config = place.config(gradients=gradients, zero_in_graph=True, max_norm=0.5)
    runner = GraphRunner(ours, config, optimizer=optimizers[0])
    for step in range(20):
        batch = place.drawn(ours, step)
        result = runner.run(batch)
        assert result.stepped
        theirs.zero_grad()
        place.plain(theirs, batch)
        torch.nn.utils.clip_grad_norm_([p for p in theirs.parameters() if p.requires_grad], 0.5)
        optimizers[1].step()
        for schedule in schedules:
            schedule.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
