"""The graph runner, on the stand-in that re-executes with static buffers and on a GPU where there is one."""

import copy

import pytest
import torch
from loongforge_fuse import FusionConfig, GraphConfig, GraphRunner, MicroBatchFuser
from loongforge_fuse.graphs.backend import EmulatedBackend
from loongforge_fuse.graphs.buckets import BucketPlan
from loongforge_fuse.testing import TinyVLA, tiny_batch

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def device(request, monkeypatch):
    """Run every test on the CPU stand-in and, where there is one, on a GPU."""
    monkeypatch.setitem(PLACE, "device", request.param)
    monkeypatch.setitem(PLACE, "mode", "emulated" if request.param == "cpu" else "auto")
    if request.param == "cuda":
        torch.set_float32_matmul_precision("highest")
    return request.param


PLACE = {"device": "cpu", "mode": "emulated"}


def drawn(model, seed, samples=4, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    batch = model.draw(tiny_batch(samples, seed=seed, **kwargs), generator=generator)
    return {k: v.to(PLACE["device"]) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def pair(kind=TinyVLA, **kwargs):
    torch.manual_seed(0)
    model = kind(**kwargs).to(PLACE["device"])
    return model, copy.deepcopy(model)


def config_for(**config):
    return GraphConfig(**{"mode": PLACE["mode"], "warmup_steps": 1, **config})


def runner_for(model, **config):
    return GraphRunner(model, config_for(**config))


def fused():
    return {"fused": True, "capturable": True} if PLACE["device"] == "cuda" else {}


def get_rng():
    return torch.cuda.get_rng_state() if PLACE["device"] == "cuda" else torch.get_rng_state()


def set_rng(state):
    if PLACE["device"] == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def assert_same_gradients(ours, theirs):
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)


def plain(model, batch):
    out = model(batch)
    (out["loss_sum"].sum() / out["loss_count"].sum()).backward()
    return out["loss"].item()


def test_replays_give_the_losses_and_gradients_of_eager_steps():
    ours, theirs = pair()
    runner = runner_for(ours)
    for step in range(6):
        batch = drawn(ours, step)
        ours.zero_grad(set_to_none=step % 2 == 0)
        theirs.zero_grad()
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(plain(theirs, batch), rel=1e-5)
        assert_same_gradients(ours, theirs)
        assert result.graph == (step >= 1)
        assert result.reason == (None if step >= 1 else "warm_up")
    assert runner.stats().captures == 1
    assert runner.stats().replays == 5


def test_outputs_of_an_earlier_replay_survive_the_next():
    model, _ = pair()
    runner = runner_for(model)
    runner.run(drawn(model, 0))
    first = runner.run(drawn(model, 1))
    value = first.total.item()
    runner.run(drawn(model, 2))
    assert first.total.item() == value


def test_gradients_accumulate_over_replays_and_stay_the_same_tensors():
    ours, theirs = pair()
    runner = runner_for(ours)
    runner.run(drawn(ours, 0))
    ours.zero_grad(set_to_none=False)
    kept = [p.grad for p in ours.parameters() if p.requires_grad]
    for seed in (1, 2, 3):
        runner.run(drawn(ours, seed))
        plain(theirs, drawn(ours, seed))
    assert_same_gradients(ours, theirs)
    assert all(
        a is p.grad for a, p in zip(kept, (p for p in ours.parameters() if p.requires_grad), strict=True)
    )


def test_dropped_gradients_are_seen_by_the_optimizer_again_fault_f08():
    ours, theirs = pair()
    runner = runner_for(ours)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (ours, theirs)
    ]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        runner.run(drawn(ours, step))
        plain(theirs, drawn(ours, step))
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("how", ["assign", "data"])
def test_moved_weights_are_detected_and_recaptured_fault_f16(how):
    model, _ = pair()
    runner = runner_for(model)
    for seed in range(2):
        runner.run(drawn(model, seed))
    if how == "assign":
        state = {k: v.clone() * 2 for k, v in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        for parameter in [*model.patch.parameters(), *model.frozen.parameters()]:
            parameter.requires_grad_(False)
    else:
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
    other = copy.deepcopy(model)
    model.zero_grad()
    other.zero_grad()
    result = runner.run(drawn(model, 5))
    assert result.total.item() == pytest.approx(plain(other, drawn(model, 5)), rel=1e-5)
    if how == "data":
        assert_same_gradients(model, other)
    assert runner.stats().moved == {"weights": 1}


def test_another_shape_never_reuses_a_graph_and_keeps_the_first_fault_f06():
    ours, theirs = pair()
    runner = runner_for(ours)
    sizes = [8, 8, 8, 3, 8, 3, 3]
    for step, samples in enumerate(sizes):
        ours.zero_grad()
        theirs.zero_grad()
        batch = drawn(ours, step, samples=samples)
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(plain(theirs, batch), rel=1e-5)
        assert_same_gradients(ours, theirs)
    assert runner.stats().captures == 2
    assert runner.stats().recaptures == 0


def test_dtype_and_constants_are_part_of_the_key_fault_f06():
    model, _ = pair()
    runner = runner_for(model)
    batch = drawn(model, 0)
    runner.run(batch)
    assert runner.run(batch).graph
    assert runner.run({**batch, "flag": None}).reason == "warm_up"
    assert runner.run({**batch, "flag": 1}).reason == "warm_up"
    assert runner.run({**batch, "action_mask": batch["action_mask"].float()}).reason == "warm_up"


def test_forty_lengths_stay_within_eight_graphs_fault_f09():
    model, _ = pair()
    runner = runner_for(model, max_graphs=8)
    for length in range(1, 41):
        for _ in range(2):
            runner.run(drawn(model, length, text=length))
            assert runner.stats().graphs <= 8
    stats = runner.stats()
    assert stats.graphs == 8
    assert stats.evictions == 32


def test_memory_cap_evicts_the_least_recently_used():
    model, _ = pair()
    probe = runner_for(model)
    for _ in range(2):
        probe.run(drawn(model, 0))
    one = probe.stats().graph_bytes
    probe.release()
    runner = runner_for(model, memory_cap_gb=2.5 * one / 2**30)
    for length in (6, 5, 4):
        for _ in range(2):
            runner.run(drawn(model, 0, text=length))
        assert runner.stats().graph_bytes <= 2.5 * one
    tight = runner_for(model, memory_cap_gb=0.5 * one / 2**30)
    for _ in range(2):
        result = tight.run(drawn(model, 0))
    assert result.reason == "memory_cap"
    assert tight.run(drawn(model, 0)).reason == "capture_failed"


class ReadsValues(TinyVLA):
    def forward(self, batch):
        if float(batch["action"].sum()) > 1e9:
            raise RuntimeError
        return super().forward(batch)


class ReadsText(TinyVLA):
    def forward(self, batch):
        assert all(isinstance(t, str) for t in batch["task"])
        return super().forward(batch)


def test_earlier_eager_steps_and_a_fuser_with_prediction_do_not_spoil_a_capture():
    ours, theirs = pair()
    for seed in range(2):
        plain(ours, drawn(ours, seed))
    ours.zero_grad()
    config = FusionConfig(fusion_batch_size="auto", accumulation_steps=2)
    fuser = MicroBatchFuser(ours, config, executor=runner_for(ours))
    for step in range(3):
        window = [drawn(ours, 10 * step + i) for i in range(2)]
        ours.zero_grad()
        outcome = fuser.run(window, drawn=True)
    assert outcome.graph, outcome.graph_reason
    MicroBatchFuser(theirs, FusionConfig(fusion_batch_size=1)).run(window, drawn=True)
    assert_same_gradients(ours, theirs)


def test_after_failed_captures_other_shapes_are_captured():
    class Sometimes(TinyVLA):
        def forward(self, batch):
            if len(batch["time"]) < 4:
                float(batch["action"].sum())
            return super().forward(batch)

    ours, theirs = pair(Sometimes, dropout=0.0)
    runner = runner_for(ours)
    for samples in (2, 3, 2, 3, 4, 5, 4, 5, 4):
        batch = drawn(ours, samples, samples=samples)
        ours.zero_grad()
        theirs.zero_grad()
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(plain(theirs, batch), rel=1e-5)
        assert_same_gradients(ours, theirs)
    stats = runner.stats()
    assert len(stats.failures) == 2
    assert stats.captures == 2
    assert all("first=True" in shape for shape in stats.failures)


@pytest.mark.parametrize("kind", [ReadsValues, ReadsText])
def test_failed_capture_falls_back_with_reason_and_leaves_nothing_changed(kind):
    model, other = pair(kind, dropout=0.5)
    runner = runner_for(model)
    for seed in range(3):
        model.zero_grad()
        other.zero_grad()
        batch = drawn(model, seed)
        torch.manual_seed(seed)
        expected = plain(other, batch)
        torch.manual_seed(seed)
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(expected, rel=1e-6)
        assert_same_gradients(model, other)
    # A pass after the failure draws random numbers as ever: the generator left its capturing state.
    assert result.reason == "capture_failed"
    assert len(runner.stats().failures) == 1
    assert runner.stats().captures == 0


def test_dropout_masks_of_a_hundred_replays_differ_and_keep_the_rate():
    class Masks(TinyVLA):
        def forward(self, batch):
            kept = (
                self.dropout(torch.ones(len(batch["time"]), 1000, device=batch["time"].device)) > 0
            ).float()
            out = super().forward(batch)
            # The mask is smuggled out through the counts, which are reported per micro-batch.
            weights = torch.arange(1, 1001, device=kept.device, dtype=torch.float32)
            return {**out, "loss_count": (kept * weights).sum(dim=1) / 1000 + kept.sum(dim=1)}

    model, _ = pair(Masks, dropout=0.3)
    runner = runner_for(model)
    batch = drawn(model, 0, samples=1)
    counts = [runner.run(batch).counts.item() for _ in range(101)][1:]
    assert runner.stats().replays == 100
    assert len(set(counts)) == 100
    kept = torch.tensor(counts).mean() / (1000 + 1001 / 2)
    assert kept == pytest.approx(0.7, abs=0.01)


def test_dropout_differs_per_replay_and_follows_the_seed_fault_f01():
    ours, theirs = pair(dropout=0.5)
    runner = runner_for(ours)
    batch = drawn(ours, 0)
    torch.manual_seed(7)
    replayed = [runner.run(batch).total.item() for _ in range(5)]
    torch.manual_seed(7)
    expected = [plain(theirs, batch) for _ in range(5)]
    assert replayed == pytest.approx(expected, rel=1e-6)
    assert len(set(replayed)) == 5
    state = get_rng()
    following = runner.run(batch).total.item()
    set_rng(state)
    assert runner.run(batch).total.item() == following


@pytest.mark.parametrize("gradients", ["accumulate", "overwrite"])
def test_our_adam_in_the_graph_equals_eager_with_a_schedule_fault_f04(gradients):
    ours, theirs = pair()
    optimizers = [ours_adam(m) for m in (ours, theirs)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=12) for o in optimizers]
    config = config_for(gradients=gradients, zero_in_graph=True, max_norm=0.5)
    runner = GraphRunner(ours, config, optimizer=optimizers[0])
    for step in range(12):
        batch = drawn(ours, step)
        if step == 5:
            batch = {**batch, "action": batch["action"] * float("nan")}
        result = runner.run(batch)
        optimizers[1].zero_grad(set_to_none=False)
        loss = plain(theirs, batch)
        optimizers[1].step(found_inf=torch.tensor(float(loss != loss), device=PLACE["device"]))
        assert result.finite.item() == (step != 5)
        for schedule in schedules:
            schedule.step()
    assert result.graph, runner.stats().failures
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gradients", ["accumulate", "overwrite"])
def test_optimizer_in_the_graph_equals_eager_with_a_schedule_fault_f04(gradients):
    ours, theirs = pair()
    optimizers = [
        torch.optim.AdamW(
            [p for p in m.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1, **fused()
        )
        for m in (ours, theirs)
    ]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20) for o in optimizers]
    config = GraphConfig(
        mode="emulated", warmup_steps=1, gradients=gradients, zero_in_graph=True, max_norm=0.5
    )
    runner = GraphRunner(ours, config, optimizer=optimizers[0])
    for step in range(20):
        batch = drawn(ours, step)
        result = runner.run(batch)
        assert result.stepped
        theirs.zero_grad()
        plain(theirs, batch)
        torch.nn.utils.clip_grad_norm_([p for p in theirs.parameters() if p.requires_grad], 0.5)
        optimizers[1].step()
        for schedule in schedules:
            schedule.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def ours_adam(model):
    from loongforge_fuse import FusedAdamW

    trainable = [p for p in model.parameters() if p.requires_grad]
    return FusedAdamW(trainable, lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)


def test_changed_weight_decay_is_not_frozen_fault_f04():
    model, _ = pair()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **fused())
    runner = GraphRunner(model, config_for(), optimizer=optimizer)
    for seed in range(3):
        runner.run(drawn(model, seed))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    runner.run(drawn(model, 3))
    assert runner.stats().moved == {"optimizer": 1}


def test_autocast_sees_updated_weights_fault_f03():
    ours, theirs = pair()
    runner = runner_for(ours)
    for step in range(4):
        batch = drawn(ours, step)
        ours.zero_grad()
        theirs.zero_grad()
        with torch.autocast(PLACE["device"], dtype=torch.bfloat16):
            result = runner.run(batch)
            expected = plain(theirs, batch)
        assert result.total.item() == pytest.approx(expected, rel=1e-3)
        with torch.no_grad():
            for model in (ours, theirs):
                for p in model.parameters():
                    if p.grad is not None:
                        p -= p.grad
    assert runner.stats().replays == 3


def test_models_without_trainable_parameters_or_with_integer_outputs_fault_f07():
    class Frozen(TinyVLA):
        def forward(self, batch):
            out = super().forward(batch)
            return {**out, "step": torch.zeros((), dtype=torch.int64, device=out["loss"].device)}

    model, _ = pair(Frozen)
    runner = runner_for(model)
    for seed in range(3):
        result = runner.run(drawn(model, seed))
    assert result.graph
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        runner.run(drawn(model, 0))


def test_finite_flag_needs_no_host_read():
    model, _ = pair()
    runner = runner_for(model)
    good = drawn(model, 0)
    runner.run(good)
    assert runner.run(good).finite.item() == 1
    bad = {**good, "action": good["action"] * float("nan")}
    assert runner.run(bad).finite.item() == 0
    assert runner.stats().replays == 2


def test_fused_windows_replay_with_losses_per_micro_batch():
    ours, theirs = pair()
    fuser = MicroBatchFuser(ours, FusionConfig(fusion_batch_size=4), executor=runner_for(ours))
    for step in range(4):
        window = [drawn(ours, 10 * step + i) for i in range(4)]
        ours.zero_grad()
        theirs.zero_grad()
        outcome = fuser.run(window, drawn=True)
        reference = MicroBatchFuser(theirs, FusionConfig(fusion_batch_size=1)).run(window, drawn=True)
        torch.testing.assert_close(torch.stack(outcome.micro_losses), torch.stack(reference.micro_losses))
        assert_same_gradients(ours, theirs)
    assert outcome.graph
    assert outcome.fused
    assert not outcome.reduced


def test_buckets_bound_the_number_of_graphs():
    ours, theirs = pair()
    plan = BucketPlan(
        dims={("text", 1): "text", ("text_mask", 1): "text"}, sizes={"text": (4, 8, 16)}, rules=ours.pad_rules
    )
    runner = runner_for(ours, buckets=plan)
    for step in range(40):
        batch = drawn(ours, step, text=1 + step % 16)
        ours.zero_grad()
        theirs.zero_grad()
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(plain(theirs, batch), rel=1e-5)
        assert_same_gradients(ours, theirs)
    assert runner.stats().captures == 3


def test_release_goes_back_to_eager_and_may_be_repeated():
    model, _ = pair()
    runner = runner_for(model)
    for seed in range(2):
        runner.run(drawn(model, seed))
    runner.release()
    runner.release()
    assert runner.run(drawn(model, 2)).reason == "released"
    assert runner.stats().graphs == 0


def test_unused_parameters_keep_no_gradient():
    class Unused(TinyVLA):
        def __init__(self):
            super().__init__()
            self.extra = torch.nn.Linear(2, 2)

    model, _ = pair(Unused)
    runner = runner_for(model)
    for seed in range(3):
        runner.run(drawn(model, seed))
    assert model.extra.weight.grad is None


def test_custom_backward_and_disabled_gradients_run_eagerly():
    model, _ = pair()
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2), executor=runner_for(model))
    outcome = fuser.run([drawn(model, 0), drawn(model, 1)], backward=lambda loss: loss.backward(), drawn=True)
    assert outcome.graph_reason == "custom_backward"


def test_grad_scaler_scale_is_read_at_each_replay():
    class FakeScaler(torch.amp.GradScaler):
        def __init__(self):
            super().__init__(PLACE["device"], enabled=False)
            self.value = 2.0

        def scale(self, outputs):
            return outputs * self.value

    ours, theirs = pair()
    scaler = FakeScaler()
    runner = GraphRunner(ours, config_for(), scaler=scaler)
    for step, value in enumerate((2.0, 4.0, 8.0)):
        scaler.value = value
        ours.zero_grad()
        theirs.zero_grad()
        batch = drawn(ours, step)
        runner.run(batch)
        plain(theirs, batch)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad * value)


def test_emulated_capture_undoes_its_trial(device):
    if device != "cpu":
        pytest.skip("the stand-in works on the CPU")
    model, _ = pair()
    backend = EmulatedBackend(lambda: [p for p in model.parameters() if p.requires_grad])
    state = torch.get_rng_state()

    batch = drawn(model, 0)

    def work():
        out = model(batch)
        out["loss"].backward()
        return (out["loss"] + torch.rand(()),)

    backend.capture(work, work)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "bad",
    [{"mode": "fast"}, {"warmup_steps": 0}, {"max_graphs": 0}, {"memory_cap_gb": 0}, {"max_norm": -1.0}],
)
def test_bad_settings_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        GraphConfig(**bad)
