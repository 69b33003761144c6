"""Replays give the numbers of eager passes: losses, gradients, dropout, scales and flags."""

import pytest
import torch
from loongforge_fuse import FusionConfig, GraphRunner, MicroBatchFuser
from loongforge_fuse.testing import TinyVLA


def test_replays_give_the_losses_and_gradients_of_eager_steps(place):
    ours, theirs = place.pair()
    runner = place.runner(ours)
    for step in range(6):
        batch = place.drawn(ours, step)
        ours.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad()
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(place.plain(theirs, batch), rel=1e-5)
        place.same_gradients(ours, theirs)
        assert result.graph == (step >= 1)
        assert result.reason == (None if step >= 1 else "warm_up")
    assert runner.stats().captures == 1
    assert runner.stats().replays == 5


def test_outputs_of_an_earlier_replay_survive_the_next(place):
    model, _ = place.pair()
    runner = place.runner(model)
    runner.run(place.drawn(model, 0))
    first = runner.run(place.drawn(model, 1))
    value = first.total.item()
    runner.run(place.drawn(model, 2))
    assert first.total.item() == value


def test_gradients_accumulate_over_replays_and_stay_the_same_tensors(place):
    ours, theirs = place.pair()
    runner = place.runner(ours)
    runner.run(place.drawn(ours, 0))
    ours.zero_grad(set_to_none=False)
    kept = [p.grad for p in ours.parameters() if p.requires_grad]
    for seed in (1, 2, 3):
        runner.run(place.drawn(ours, seed))
        place.plain(theirs, place.drawn(ours, seed))
    place.same_gradients(ours, theirs)
    assert all(
        a is p.grad for a, p in zip(kept, (p for p in ours.parameters() if p.requires_grad), strict=True)
    )


def test_dropped_gradients_are_seen_by_the_optimizer_again_fault_f08(place):
    ours, theirs = place.pair()
    runner = place.runner(ours)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (ours, theirs)
    ]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        runner.run(place.drawn(ours, step))
        place.plain(theirs, place.drawn(ours, step))
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_earlier_eager_steps_and_a_fuser_with_prediction_do_not_spoil_a_capture(place):
    ours, theirs = place.pair()
    for seed in range(2):
        place.plain(ours, place.drawn(ours, seed))
    ours.zero_grad()
    config = FusionConfig(fusion_batch_size="auto", accumulation_steps=2)
    fuser = MicroBatchFuser(ours, config, executor=place.runner(ours))
    for step in range(3):
        window = [place.drawn(ours, 10 * step + i) for i in range(2)]
        ours.zero_grad()
        outcome = fuser.run(window, drawn=True)
    assert outcome.graph, outcome.graph_reason
    MicroBatchFuser(theirs, FusionConfig(fusion_batch_size=1)).run(window, drawn=True)
    place.same_gradients(ours, theirs)


def test_dropout_masks_of_a_hundred_replays_differ_and_keep_the_rate(place):
    class Masks(TinyVLA):
        def forward(self, batch):
            kept = (
                self.dropout(torch.ones(len(batch["time"]), 1000, device=batch["time"].device)) > 0
            ).float()
            out = super().forward(batch)
            # The mask is smuggled out through the counts, which are reported per micro-batch.
            weights = torch.arange(1, 1001, device=kept.device, dtype=torch.float32)
            return {**out, "loss_count": (kept * weights).sum(dim=1) / 1000 + kept.sum(dim=1)}

    model, _ = place.pair(Masks, dropout=0.3)
    runner = place.runner(model)
    batch = place.drawn(model, 0, samples=1)
    counts = [runner.run(batch).counts.item() for _ in range(101)][1:]
    assert runner.stats().replays == 100
    assert len(set(counts)) == 100
    kept = torch.tensor(counts).mean() / (1000 + 1001 / 2)
    assert kept == pytest.approx(0.7, abs=0.01)


def test_dropout_differs_per_replay_and_follows_the_seed_fault_f01(place):
    ours, theirs = place.pair(dropout=0.5)
    runner = place.runner(ours)
    batch = place.drawn(ours, 0)
    torch.manual_seed(7)
    replayed = [runner.run(batch).total.item() for _ in range(5)]
    torch.manual_seed(7)
    expected = [place.plain(theirs, batch) for _ in range(5)]
    assert replayed == pytest.approx(expected, rel=1e-6)
    assert len(set(replayed)) == 5
    state = place.get_rng()
    following = runner.run(batch).total.item()
    place.set_rng(state)
    assert runner.run(batch).total.item() == following


def test_autocast_sees_updated_weights_fault_f03(place):
    ours, theirs = place.pair()
    runner = place.runner(ours)
    for step in range(4):
        batch = place.drawn(ours, step)
        ours.zero_grad()
        theirs.zero_grad()
        with torch.autocast(place.device, dtype=torch.bfloat16):
            result = runner.run(batch)
            expected = place.plain(theirs, batch)
        assert result.total.item() == pytest.approx(expected, rel=1e-3)
        with torch.no_grad():
            for model in (ours, theirs):
                for p in model.parameters():
                    if p.grad is not None:
                        p -= p.grad
    assert runner.stats().replays == 3


def test_models_without_trainable_parameters_or_with_integer_outputs_fault_f07(place):
    class Frozen(TinyVLA):
        def forward(self, batch):
            out = super().forward(batch)
            return {**out, "step": torch.zeros((), dtype=torch.int64, device=out["loss"].device)}

    model, _ = place.pair(Frozen)
    runner = place.runner(model)
    for seed in range(3):
        result = runner.run(place.drawn(model, seed))
    assert result.graph
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        runner.run(place.drawn(model, 0))


def test_finite_flag_needs_no_host_read(place):
    model, _ = place.pair()
    runner = place.runner(model)
    good = place.drawn(model, 0)
    runner.run(good)
    assert runner.run(good).finite.item() == 1
    bad = {**good, "action": good["action"] * float("nan")}
    assert runner.run(bad).finite.item() == 0
    assert runner.stats().replays == 2


def test_fused_windows_replay_with_losses_per_micro_batch(place):
    ours, theirs = place.pair()
    fuser = MicroBatchFuser(ours, FusionConfig(fusion_batch_size=4), executor=place.runner(ours))
    for step in range(4):
        window = [place.drawn(ours, 10 * step + i) for i in range(4)]
        ours.zero_grad()
        theirs.zero_grad()
        outcome = fuser.run(window, drawn=True)
        reference = MicroBatchFuser(theirs, FusionConfig(fusion_batch_size=1)).run(window, drawn=True)
        torch.testing.assert_close(torch.stack(outcome.micro_losses), torch.stack(reference.micro_losses))
        place.same_gradients(ours, theirs)
    assert outcome.graph
    assert outcome.fused
    assert not outcome.reduced


def test_unused_parameters_keep_no_gradient(place):
    class Unused(TinyVLA):
        def __init__(self):
            super().__init__()
            self.extra = torch.nn.Linear(2, 2)

    model, _ = place.pair(Unused)
    runner = place.runner(model)
    for seed in range(3):
        runner.run(place.drawn(model, seed))
    assert model.extra.weight.grad is None


def test_grad_scaler_scale_is_read_at_each_replay(place):
    class FakeScaler(torch.amp.GradScaler):
        def __init__(self):
            super().__init__(place.device, enabled=False)
            self.value = 2.0

        def scale(self, outputs):
            return outputs * self.value

    ours, theirs = place.pair()
    scaler = FakeScaler()
    runner = GraphRunner(ours, place.config(), scaler=scaler)
    for step, value in enumerate((2.0, 4.0, 8.0)):
        scaler.value = value
        ours.zero_grad()
        theirs.zero_grad()
        batch = place.drawn(ours, step)
        runner.run(batch)
        place.plain(theirs, batch)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad * value)
