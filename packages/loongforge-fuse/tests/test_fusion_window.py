"""Windows: normalisation, draws, trace, debug gradients, synchronisation, bf16 distance to an oracle."""

import contextlib
import copy

import pytest
import torch
from loongforge_fuse import FusionConfig, MicroBatchFuser
from loongforge_fuse.testing import TinyVLA, tiny_batch
from torch.nn import functional


class Scalar(torch.nn.Module):
    """loss = masked mean of w * x; the valid elements are those of x that are not NaN."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(()))

    def loss_count(self, batch):
        return (~batch["x"].isnan()).sum(dim=1).float()

    def forward(self, batch):
        sums = self.w * batch["x"].nan_to_num().sum(dim=1)
        counts = self.loss_count(batch)
        return {"loss": sums.sum() / counts.sum().clamp(min=1), "loss_sum": sums, "loss_count": counts}


NAN = float("nan")


@pytest.mark.parametrize("factor", [1, 2])
def test_unequal_valid_elements_weigh_as_in_one_big_batch_fault_f13(factor):
    window = [{"x": torch.tensor([[1.0, 1, 1]])}, {"x": torch.tensor([[9.0, NAN, NAN]])}]
    model = Scalar()
    outcome = MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor)).run(window)
    assert outcome.loss.item() == 3.0
    assert model.w.grad.item() == 3.0
    assert [m.item() for m in outcome.micro_losses] == [1.0, 9.0]
    assert [m.item() for m in outcome.micro_counts] == [3.0, 1.0]
    means = MicroBatchFuser(Scalar(), FusionConfig(fusion_batch_size=factor, normalize="mean_of_means")).run(
        window
    )
    assert means.loss.item() == 5.0


@pytest.mark.parametrize("factor", [1, 2])
def test_two_ranks_with_different_counts_average_to_the_big_batch_fault_f13(factor):
    windows = [
        [{"x": torch.tensor([[1.0, 1, 1]])}, {"x": torch.tensor([[9.0, NAN, NAN]])}],
        [{"x": torch.tensor([[2.0, NAN, NAN]])}, {"x": torch.tensor([[4.0, 6.0, NAN]])}],
    ]
    everything = torch.cat([b["x"] for w in windows for b in w])
    gradients = []
    for window in windows:
        model = Scalar()
        total = float((~everything.isnan()).sum())
        MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor)).run(window, divisor=total / 2)
        gradients.append(model.w.grad)
    averaged = torch.stack(gradients).mean()
    torch.testing.assert_close(averaged, everything.nanmean())


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_padded_action_steps_are_not_counted_and_all_padding_is_harmless_fault_f14(factor):
    torch.manual_seed(0)
    model = TinyVLA()
    valid = [(2, 8), (8, 8), (0, 0), (1, 5)]
    window = [model.draw(tiny_batch(2, seed=i, valid=v)) for i, v in enumerate(valid)]
    outcome = MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor)).run(window, drawn=True)
    assert outcome.micro_losses[2] == 0
    big = {k: torch.cat([b[k] for b in window]) for k in window[0] if k != "task"}
    expected = model(big)
    torch.testing.assert_close(outcome.loss, (expected["loss_sum"].sum() / (5 * 40 - 5 * 8)).detach())
    nothing = [model.draw(tiny_batch(2, seed=0, valid=(0, 0)))] * factor
    model.zero_grad()
    empty = MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor, probe="off")).run(
        nothing, drawn=True
    )
    assert empty.loss == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_a_short_last_window_is_normalised_by_its_own_size():
    model = Scalar()
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2, accumulation_steps=4))
    full = [{"x": torch.tensor([[float(i)]])} for i in range(4)]
    fuser.run(full)
    model.zero_grad()
    outcome = fuser.run(full[1:4])
    assert model.w.grad.item() == 2.0
    assert outcome.groups == 2
    assert outcome.reason == "one_micro_batch"


def test_draws_happen_per_micro_batch_in_window_order_fused_or_not():
    model = TinyVLA()
    window = [tiny_batch(n, seed=n) for n in (3, 4, 2, 4)]
    losses = []
    for factor in (1, 2, 4):
        generator = torch.Generator().manual_seed(11)
        fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor), generator=generator)
        losses.append(torch.stack(fuser.run(window).micro_losses))
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2])
    generator = torch.Generator().manual_seed(11)
    by_hand = torch.stack([model(model.draw(b, generator=generator))["loss"] for b in window])
    torch.testing.assert_close(losses[0], by_hand.detach())


def test_the_probe_and_the_memory_prediction_leave_random_state_modes_and_gradients_alone():
    model = TinyVLA(dropout=0.5)
    model.head[0].eval()
    window = [model.draw(tiny_batch(2, seed=i)) for i in range(2)]
    config = FusionConfig(fusion_batch_size="auto")
    fuser = MicroBatchFuser(model, config, free_bytes=lambda: 10**9)
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    groups = fuser._planner.plan(window, fuser._planner.factor(window))
    assert groups[0].joined is not None
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())


def test_debug_mode_gives_the_gradients_of_every_micro_batch():
    torch.manual_seed(0)
    model = TinyVLA()
    window = [model.draw(tiny_batch(3, seed=i)) for i in range(4)]
    plain = copy.deepcopy(model)
    MicroBatchFuser(plain, FusionConfig(fusion_batch_size=4)).run(window, drawn=True)
    outcome = MicroBatchFuser(model, FusionConfig(fusion_batch_size=4, debug_gradients=True)).run(
        window, drawn=True
    )
    assert len(outcome.micro_gradients) == 4
    counts = torch.stack(outcome.micro_counts)
    for name, p in plain.named_parameters():
        if p.grad is None:
            continue
        parts = torch.stack([g[name] for g in outcome.micro_gradients])
        torch.testing.assert_close(parts.sum(dim=0), p.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad)
    alone = copy.deepcopy(model)
    alone.zero_grad()
    (alone(window[2])["loss_sum"].sum() / counts.sum()).backward()
    name = "head.0.weight"
    torch.testing.assert_close(outcome.micro_gradients[2][name], alone.get_parameter(name).grad)


@pytest.mark.parametrize(("factor", "backwards"), [(1, 4), (2, 2), (4, 1)])
def test_only_the_last_backward_synchronises_and_each_goes_through_the_given_function(factor, backwards):
    model = TinyVLA()
    calls, flags = [], []

    @contextlib.contextmanager
    def sync(last):
        flags.append(last)
        yield

    def backward(loss):
        calls.append(loss.item())
        (loss * 8).backward()

    window = [model.draw(tiny_batch(2, seed=i)) for i in range(4)]
    outcome = MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor)).run(
        window, backward=backward, sync=sync, drawn=True
    )
    assert len(calls) == backwards
    assert flags == [False] * (backwards - 1) + [True]
    assert outcome.groups == backwards
    assert sum(calls) == pytest.approx(outcome.loss.item(), rel=1e-5)


def test_launches_per_window_fall_by_three_quarters():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    counts = {}
    for factor in (1, 4):
        model = TinyVLA()
        window = [model.draw(tiny_batch(2, seed=i)) for i in range(4)]
        fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor, probe="off"))
        fuser.run(window, drawn=True)
        with Count() as counter:
            fuser.run(window, drawn=True)
        counts[factor] = counter.calls
    # Joining and splitting cost a few operators of their own; on a real model they vanish among thousands.
    assert counts[4] < 0.5 * counts[1]


def test_bf16_is_no_further_from_a_float32_oracle_than_plain_accumulation():
    torch.manual_seed(0)
    oracle = TinyVLA(width=64)
    window = [oracle.draw(tiny_batch(8, seed=i, width=64)) for i in range(4)]
    MicroBatchFuser(oracle, FusionConfig(fusion_batch_size=1)).run(window, drawn=True)
    distance = {}
    for factor in (1, 4):
        model = copy.deepcopy(oracle).to(torch.bfloat16)
        model.zero_grad()
        half = [
            {
                k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                for k, v in b.items()
            }
            for b in window
        ]
        MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor, probe_tolerance=0.1)).run(
            half, drawn=True
        )
        error = [
            (p.grad.float() - q.grad).square().sum()
            for p, q in zip(model.parameters(), oracle.parameters(), strict=True)
            if q.grad is not None
        ]
        distance[factor] = torch.stack(error).sum().sqrt().item()
    assert distance[4] <= 1.05 * distance[1]


def test_the_trace_tells_what_happened_and_is_bounded():
    model = Scalar()
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2, accumulation_steps=2, trace_length=3))
    for step in range(5):
        window = [{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 2 + (step == 4))}]
        fuser.run(window)
    records = fuser.trace.records()
    assert [r.window for r in records] == [2, 3, 4]
    assert [r.fused for r in records] == [True, True, False]
    assert records[-1].reason == "shapes_differ"
    assert "[(2,), (3,)]" in records[-1].detail
    summary = fuser.trace.summary()
    assert summary["micro_batches"] == 10
    assert summary["fused_share"] == 0.8
    assert summary["reasons"] == {"shapes_differ": 2}
    assert summary["passes"] == 6


def test_models_without_sample_losses_average_over_samples():
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(()))

        def forward(self, batch):
            return {"loss": functional.mse_loss(self.w.expand(len(batch["x"])), batch["x"])}

    model = Mean()
    window = [{"x": torch.tensor([1.0, 1.0, 1.0])}, {"x": torch.tensor([5.0])}]
    outcome = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2)).run(window)
    assert outcome.reason == "no_sample_losses"
    assert model.w.grad.item() == pytest.approx(-2 * (3 + 5) / 4)
