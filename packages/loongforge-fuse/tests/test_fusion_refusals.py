"""Fusion steps aside with a reason where it would change the numbers, which then stay as unfused."""

import copy

import pytest
import torch
from loongforge_fuse import FusionConfig, MicroBatchFuser, RefusalReason
from loongforge_fuse.fusion.memory import activation_bytes
from loongforge_fuse.fusion.refusal import ModelInspection
from loongforge_fuse.testing import TinyVLA, tiny_batch
from torch import nn


def window_for(model, sizes=(4, 4, 4, 4), **kwargs):
    generator = torch.Generator().manual_seed(5)
    return [model.draw(tiny_batch(n, seed=i, **kwargs), generator=generator) for i, n in enumerate(sizes)]


def run(model, window, **config):
    fuser = MicroBatchFuser(
        model, FusionConfig(**{"fusion_batch_size": 4, "accumulation_steps": 4, **config})
    )
    return fuser.run(window, drawn=True)


def assert_refused_with_unfused_numbers(model, reason, window=None, **config):
    window = window or window_for(model)
    other = copy.deepcopy(model)
    outcome = run(model, window, **config)
    assert outcome.reason == reason
    assert not outcome.fused
    assert outcome.detail
    expected = run(other, window, fusion_batch_size=1)
    torch.testing.assert_close(outcome.loss, expected.loss)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
    for p, q in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(p, q)
    return outcome


class WithNorm(TinyVLA):
    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(5)

    def forward(self, batch):
        batch = {**batch, "action": self.statistics(batch["action"].transpose(1, 2)).transpose(1, 2)}
        return super().forward(batch)


class Contrastive(TinyVLA):
    def forward(self, batch):
        out = super().forward(batch)
        pooled = batch["images"].flatten(1)
        logits = pooled @ pooled.t() / 1000
        return {**out, "loss_sum": out["loss_sum"] + logits.logsumexp(dim=1)}


class Routed(TinyVLA):
    def __init__(self):
        super().__init__()
        self.head[0].capacity_factor = 1.25


class ReadsHost(TinyVLA):
    def forward(self, batch):
        if bool((batch["action"] > 1e6).any()):
            raise RuntimeError
        return super().forward(batch)


class MakesShapes(TinyVLA):
    def forward(self, batch):
        batch["action_mask"].nonzero()
        return super().forward(batch)


class OnlyMean(TinyVLA):
    def forward(self, batch):
        return {"loss": super().forward(batch)["loss"]}

    loss_count = None


def test_batch_norm_in_training_mode_refuses_and_keeps_running_statistics_fault_f15():
    assert_refused_with_unfused_numbers(WithNorm(), RefusalReason.BATCH_NORM)
    model = WithNorm().eval()
    assert run(model, window_for(model)).fused


def test_batch_norm_refuses_nine_samples_as_eight_plus_one_fault_f15():
    model = WithNorm()
    window = window_for(model, sizes=(4, 4, 1))
    assert_refused_with_unfused_numbers(model, RefusalReason.BATCH_NORM, window)


def test_the_probe_finds_in_batch_interactions():
    assert_refused_with_unfused_numbers(Contrastive(), RefusalReason.SAMPLES_INTERACT)


def test_a_declared_interaction_refuses_with_its_sentence():
    model = TinyVLA()
    model.head.fusion_unsafe = "the queue of negatives is shared"
    outcome = assert_refused_with_unfused_numbers(model, RefusalReason.SAMPLES_INTERACT)
    assert "queue of negatives" in outcome.detail


def test_expert_capacity_refuses():
    assert_refused_with_unfused_numbers(Routed(), RefusalReason.MOE_CAPACITY)


@pytest.mark.parametrize("kind", [ReadsHost, MakesShapes])
def test_values_read_on_the_host_refuse_unless_allowed(kind):
    assert_refused_with_unfused_numbers(kind(), RefusalReason.DATA_DEPENDENT)
    model = kind()
    assert run(model, window_for(model), data_dependent="allow").fused


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.head[1].register_forward_hook(lambda *_: None), "hooks"),
        (lambda m: setattr(m.head, "fusion_unsafe", "samples vote"), "samples_interact"),
        (lambda m: setattr(m.head, "capacity_factor", 2), "moe_capacity"),
        (lambda m: m.head.append(torch.nn.BatchNorm1d(8)), "batch_norm"),
        (lambda m: m.eval(), None),
        (lambda m: m.head.pop(0), None),
    ],
)
def test_a_model_is_walked_again_only_when_it_changed(change, reason):
    model = TinyVLA()
    model.head.capacity_factor = 0
    inspection = ModelInspection(model)
    assert [inspection.refusal() for _ in range(3)] == [None] * 3
    assert inspection.walks == 1
    change(model)
    found = [inspection.refusal() for _ in range(3)]
    assert [None if f is None else str(f.reason) for f in found] == [reason] * 3
    assert inspection.walks == 2


def test_module_hooks_refuse_unless_allowed():
    model = TinyVLA()
    calls = []
    model.head.register_forward_hook(lambda *args: calls.append(1))
    outcome = run(model, window_for(model))
    assert outcome.reason == RefusalReason.HOOKS
    assert len(calls) == 4
    assert run(model, window_for(model), hooks="allow", probe="off").fused
    assert len(calls) == 5


@pytest.mark.parametrize("probe", ["first", "off"])
def test_a_model_with_only_a_mean_loss_is_left_unfused(probe):
    outcome = assert_refused_with_unfused_numbers(OnlyMean(), RefusalReason.NO_SAMPLE_LOSSES, probe=probe)
    assert outcome.groups == 4


def test_keys_dtypes_shapes_and_shared_values_are_checked():
    model = TinyVLA()
    window = window_for(model)
    for change, reason in (
        ({"extra": torch.ones(4)}, RefusalReason.KEYS_DIFFER),
        ({"action": window[0]["action"].double()}, RefusalReason.DTYPES_DIFFER),
        ({"images": torch.zeros(4, 3, 8, 16)}, RefusalReason.SHAPES_DIFFER),
    ):
        mixed = [{**window[0], **change}, *window[1:]]
        fuser = MicroBatchFuser(model, FusionConfig(probe="off"))
        groups = fuser._planner.plan(mixed, 4)
        assert groups[0].refusal.reason == reason
        assert groups[0].refusal.detail
    scaled = [{**b, "gain": float(i)} for i, b in enumerate(window)]
    assert run(model, scaled).reason == RefusalReason.SHARED_VALUES_DIFFER
    assert run(model, [{**b, "gain": 1.0} for b in window]).fused


@pytest.mark.parametrize("seed", [0, 21, 23, 30, 39])
def test_padding_that_no_mask_covers_is_found_by_the_probe(seed):
    """With seeds 21 to 39 the samples' differences cancel in the sum of a micro-batch."""

    class Unmasked(TinyVLA):
        def forward(self, batch):
            return super().forward({**batch, "text_mask": torch.ones_like(batch["text_mask"])})

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Unmasked()
        window = [model.draw(tiny_batch(4, seed=i, text=3 + i)) for i in range(4)]
    assert run(model, window).reason == RefusalReason.SAMPLES_INTERACT


def test_out_of_memory_in_the_fused_forward_runs_unfused_and_accumulates_once():
    class Hungry(TinyVLA):
        def forward(self, batch):
            if len(batch["time"]) > 4 and self.training:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            return super().forward(batch)

    assert_refused_with_unfused_numbers(Hungry(), RefusalReason.MEMORY_CAUGHT)


def test_memory_is_predicted_before_any_backward():
    model = TinyVLA()
    fuser = MicroBatchFuser(model, FusionConfig(), free_bytes=lambda: 50_000)
    outcome = fuser.run(window_for(model), drawn=True)
    assert outcome.reason == RefusalReason.MEMORY_PREDICTED
    assert "MiB" in outcome.detail


def test_the_prediction_grows_with_the_shapes_of_the_group():
    model = TinyVLA()
    small = [model.draw(tiny_batch(2, seed=i, text=2, valid=(8, 8))) for i in range(2)]
    large = [model.draw(tiny_batch(2, seed=i, text=200, valid=(8, 8))) for i in range(2)]
    needed = 2 * activation_bytes(model, small[0])
    config = FusionConfig(fusion_batch_size=2, layout="pad", memory_headroom=1.0)
    fuser = MicroBatchFuser(model, config, free_bytes=lambda: 2 * needed)
    assert fuser.run(small, drawn=True).fused
    # Measured on the first window's small shapes; the second needs many times as much.
    assert fuser.run(large, drawn=True).reason == RefusalReason.MEMORY_PREDICTED
    # A single large micro-batch in a group counts for all, since the others are padded to it.
    assert fuser.run([small[0], large[0]], drawn=True).reason == RefusalReason.MEMORY_PREDICTED
    assert fuser.run(small, drawn=True).fused


def test_predicting_memory_keeps_nothing_alive():
    import weakref

    class Watched(TinyVLA):
        def forward(self, batch):
            out = super().forward(batch)
            sums = out["loss_sum"].exp()  # saves its own result for the backward pass
            self.seen = weakref.ref(sums)
            return {**out, "loss_sum": sums}

    model = Watched()
    assert activation_bytes(model, window_for(model)[0]) > 0
    assert model.seen() is None


def test_auto_takes_the_largest_divisor_that_fits_on_every_rank():
    model = TinyVLA()
    window = window_for(model, sizes=(4,) * 6)

    def factor(free, agree=None):
        config = FusionConfig(fusion_batch_size="auto", accumulation_steps=6, probe="off")
        fuser = MicroBatchFuser(model, config, free_bytes=lambda: free, agree=agree)
        return fuser.run(window, drawn=True).factor

    one = activation_bytes(model, window[0])
    assert one > 10_000
    assert factor(None) == 6
    assert factor(int(4.5 * one / 0.9)) == 3
    assert factor(int(2.5 * one / 0.9)) == 2
    assert factor(10) == 1
    assert factor(None, agree=lambda wishes: tuple(max(w, -2) for w in wishes)) == 2


def test_ranks_never_disagree():
    fine, broken = TinyVLA(), TinyVLA()
    windows = [window_for(fine), window_for(fine)]
    windows[1][2] = {**windows[1][2], "extra": torch.ones(4)}
    wishes = []
    for model, window in zip((fine, broken), windows, strict=True):
        MicroBatchFuser(model, FusionConfig(), agree=lambda w: wishes.append(w) or w).run(window, drawn=True)
    agreed = tuple(map(max, *wishes))
    reasons = []
    for model, window in zip((fine, broken), windows, strict=True):
        outcome = MicroBatchFuser(model, FusionConfig(), agree=lambda w: agreed).run(window, drawn=True)
        assert outcome.groups == 4
        reasons.append(outcome.reason)
    assert reasons == [RefusalReason.OTHER_RANK, RefusalReason.KEYS_DIFFER]


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"fusion_batch_size": 3, "accumulation_steps": 4}, r"3 does not divide the 4 .*\[1, 2, 4\]"),
        ({"fusion_batch_size": 0}, "fusion_batch_size is 0"),
        ({"fusion_batch_size": True, "accumulation_steps": 0}, "accumulation_steps is 0"),
        ({"normalize": "sum"}, "normalize"),
        ({"hooks": "maybe"}, "hooks"),
        ({"layout": "best"}, "layout"),
        ({"memory_headroom": 0.0}, "memory_headroom"),
        ({"trace_length": 0}, "trace_length"),
    ],
)
def test_bad_settings_say_what_is_allowed(config, match):
    with pytest.raises(ValueError, match=match):
        FusionConfig(**config)


def test_bad_windows_are_refused_before_anything_runs():
    model = TinyVLA()
    window = window_for(model)
    with pytest.raises(ValueError, match="no micro-batch"):
        run(model, [])
    with pytest.raises(ValueError, match="more than the 4"):
        run(model, window + window)
    with pytest.raises(ValueError, match="does not divide the 3"):
        MicroBatchFuser(model, FusionConfig(fusion_batch_size=2)).run(window[:3], drawn=True)
    with pytest.raises(ValueError, match="divisor"):
        MicroBatchFuser(model, FusionConfig()).run(window, divisor=0.0, drawn=True)
    assert all(p.grad is None for p in model.parameters())


def test_unknown_counts_before_the_first_backward_are_an_error_with_ways_out():
    class NoCount(TinyVLA):
        loss_count = None

    model = NoCount()
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2))
    with pytest.raises(ValueError, match=r"loss_count\(batch\)"):
        fuser.run(window_for(model), drawn=True)
    assert all(p.grad is None for p in model.parameters())
    assert fuser.run(window_for(model), drawn=True, divisor=100.0).fused


@pytest.mark.parametrize(
    ("output", "error", "match"),
    [
        (torch.ones(()), TypeError, "mapping"),
        ({"value": 1}, TypeError, "'loss'"),
        ({"loss": 1.0}, TypeError, "tensor"),
        ({"loss": torch.ones(3)}, ValueError, "scalar"),
        (
            {"loss": torch.ones(()), "loss_sum": torch.ones(2), "loss_count": torch.ones(4)},
            ValueError,
            "loss_sum",
        ),
    ],
)
def test_wrong_model_outputs_are_named(output, error, match):
    class Wrong(TinyVLA):
        def forward(self, batch):
            return output

    model = Wrong()
    with pytest.raises(error, match=match):
        MicroBatchFuser(model, FusionConfig(fusion_batch_size=1)).run(window_for(model), drawn=True)
