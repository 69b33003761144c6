"""A recording never outlives the model it was made with."""

import copy

import pytest
import torch
from loongforge_fuse import FusionConfig, GraphConfig, GraphRunner, MicroBatchFuser
from loongforge_fuse.graphs.backend import EmulatedBackend
from loongforge_fuse.testing import TinyVLA, tiny_batch


@pytest.mark.parametrize("how", ["assign", "data"])
def test_moved_weights_are_detected_and_recaptured_fault_f16(place, how):
    model, _ = place.pair()
    runner = place.runner(model)
    for seed in range(2):
        runner.run(place.drawn(model, seed))
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
    result = runner.run(place.drawn(model, 5))
    assert result.total.item() == pytest.approx(place.plain(other, place.drawn(model, 5)), rel=1e-5)
    if how == "data":
        place.same_gradients(model, other)
    assert runner.stats().moved == {"weights": 1}


def test_changed_weight_decay_is_not_frozen_fault_f04(place):
    model, _ = place.pair()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, **place.fused()
    )
    runner = GraphRunner(model, place.config(), optimizer=optimizer)
    for seed in range(3):
        runner.run(place.drawn(model, seed))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    runner.run(place.drawn(model, 3))
    assert runner.stats().moved == {"optimizer": 1}


def test_release_goes_back_to_eager_and_may_be_repeated(place):
    model, _ = place.pair()
    runner = place.runner(model)
    for seed in range(2):
        runner.run(place.drawn(model, seed))
    runner.release()
    runner.release()
    assert runner.run(place.drawn(model, 2)).reason == "released"
    assert runner.stats().graphs == 0


def test_a_replaced_submodule_is_noticed(place):
    ours, theirs = place.pair()
    runner = place.runner(ours)
    for seed in range(2):
        runner.run(place.drawn(ours, seed))
    torch.manual_seed(5)
    head = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
    ours.head = head.to(place.device)
    theirs.head = copy.deepcopy(ours.head)
    for seed in range(2, 5):
        ours.zero_grad()
        theirs.zero_grad()
        batch = place.drawn(ours, seed)
        assert runner.run(batch).total.item() == pytest.approx(place.plain(theirs, batch), rel=1e-5)
        place.same_gradients(ours, theirs)
    assert runner.stats().moved == {"modules": 1}
    assert runner.run(batch).graph


def test_a_layer_that_starts_to_train_gets_its_gradient(place):
    ours, theirs = place.pair()
    runner = place.runner(ours)
    for seed in range(2):
        runner.run(place.drawn(ours, seed))
    for model in (ours, theirs):
        model.frozen.requires_grad_(True)
    for seed in range(2, 5):
        ours.zero_grad()
        theirs.zero_grad()
        batch = place.drawn(ours, seed)
        result = runner.run(batch)
        place.plain(theirs, batch)
        place.same_gradients(ours, theirs)
    assert result.graph
    assert runner.stats().moved == {"requires_grad": 1}


def test_weights_that_move_after_each_capture_leave_the_shape_eager(place):
    model, _ = place.pair()
    runner = place.runner(model)
    for seed in range(12):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        result = runner.run(place.drawn(model, seed))
    assert result.reason == "moving"
    assert runner.stats().captures == 4
    assert "weights moved" in next(iter(runner.stats().failures.values()))


def test_module_hooks_run_or_are_the_reason_for_no_graph(place):
    model, _ = place.pair()
    called = []
    model.head.register_forward_hook(lambda *_: called.append(1))
    runner = place.runner(model)
    for seed in range(3):
        result = runner.run(place.drawn(model, seed))
    assert result.reason == "hooks"
    assert len(called) == 3
    assert place.runner(model, hooks="allow").run(place.drawn(model, 0)).reason == "warm_up"


def test_windows_of_eager_and_replayed_passes_add_up_without_a_new_capture(place):
    ours, theirs = place.pair()
    runner = place.runner(ours)
    for seed in range(2):
        runner.run(place.drawn(ours, seed))
    for step in range(4):
        ours.zero_grad(set_to_none=True)
        theirs.zero_grad(set_to_none=True)
        # Another number of samples each time: never captured, so its gradients are new tensors.
        for batch in (place.drawn(ours, step, samples=5 + step), place.drawn(ours, step)):
            result = runner.run(batch)
            place.plain(theirs, batch)
        place.same_gradients(ours, theirs)
        assert result.graph
    stats = runner.stats()
    assert stats.captures == 1
    assert stats.adopted > 0
    assert stats.moved == {}


def test_gradients_in_a_communication_buffer_stay_there(place):
    ours, theirs = place.pair()
    runner = place.runner(ours)
    for seed in range(2):
        runner.run(place.drawn(ours, seed))
    trainable = [p for p in ours.parameters() if p.requires_grad]
    buffer = torch.zeros(sum(p.numel() for p in trainable), device=place.device)
    at = 0
    for p in trainable:
        p.grad = buffer[at : at + p.numel()].view_as(p)
        at += p.numel()
    for seed in range(2, 5):
        buffer.zero_()
        theirs.zero_grad()
        batch = place.drawn(ours, seed)
        result = runner.run(batch)
        place.plain(theirs, batch)
        place.same_gradients(ours, theirs)
        assert trainable[0].grad.data_ptr() == buffer.data_ptr()
    assert result.graph
    assert runner.stats().moved == {"gradients": 1}


class ViewGradients(torch.autograd.Function):
    """The sum of two weights, whose gradients are views of one tensor."""

    @staticmethod
    def forward(ctx, one, other):
        return one + other

    @staticmethod
    def backward(ctx, grad):
        both = torch.stack([grad, grad])
        return both[0], both[1]


def test_gradients_that_are_views_of_a_fresh_buffer_are_copied_in_the_end(place):
    class Views(TinyVLA):
        def __init__(self):
            super().__init__()
            self.one, self.other = (torch.nn.Parameter(torch.zeros(5)) for _ in range(2))

        def forward(self, batch):
            noise = batch["noise"] + ViewGradients.apply(self.one, self.other)
            return super().forward({**batch, "noise": noise})

    ours, theirs = place.pair(Views)
    runner = place.runner(ours)
    for seed in range(2):
        runner.run(place.drawn(ours, seed))
    for step in range(8):
        ours.zero_grad(set_to_none=True)
        theirs.zero_grad(set_to_none=True)
        for batch in (place.drawn(ours, step, samples=5 + step), place.drawn(ours, step)):
            result = runner.run(batch)
            place.plain(theirs, batch)
        place.same_gradients(ours, theirs)
        assert result.graph
    assert runner.stats().moved == {"gradients": 2}


def test_short_windows_between_whole_ones_need_no_new_capture(place):
    ours, theirs = place.pair()
    runner = place.runner(ours, gradients="overwrite")
    fuser = MicroBatchFuser(ours, FusionConfig(fusion_batch_size=1, accumulation_steps=2), executor=runner)
    plain = MicroBatchFuser(theirs, FusionConfig(fusion_batch_size=1, accumulation_steps=2))
    for step in range(10):
        # One pass overwrites its gradients, two add to theirs.
        window = [place.drawn(ours, 10 * step + i) for i in range(1 + step % 2)]
        theirs.zero_grad()
        outcome = fuser.run(window, drawn=True)
        plain.run(window, drawn=True)
        place.same_gradients(ours, theirs)
    assert outcome.graph
    assert runner.stats().captures == 3
    assert runner.stats().moved == {}


class CountsRenewals(EmulatedBackend):
    """A stand-in that counts how often the shared pool was given up."""

    def __init__(self, model):
        super().__init__(lambda: [p for p in model.parameters() if p.requires_grad])
        self.renewals = 0

    def renew(self):
        self.renewals += 1


def test_a_pool_whose_last_recording_is_gone_is_not_used_again():
    model = TinyVLA()
    backend = CountsRenewals(model)
    runner = GraphRunner(model, GraphConfig(mode="emulated", warmup_steps=1), backend=backend)
    batches = [model.draw(tiny_batch(4, seed=s, text=6 + s % 2)) for s in range(6)]
    for batch in batches:
        runner.run(batch)
    assert runner.stats().graphs == 2
    model.patch.weight.data = model.patch.weight.data * 2
    runner.run(batches[0])
    assert backend.renewals == 0
    runner.invalidate()
    assert backend.renewals == 1


def test_on_a_gpu_a_recording_made_anew_beside_living_gradients_is_captured(place):
    model, _ = place.pair()
    runner = place.runner(model, gradients="overwrite")
    for seed in range(3):
        runner.run(place.drawn(model, seed))
    kept = [p.grad for p in model.parameters() if p.grad is not None]
    model.patch.weight.data = model.patch.weight.data * 2
    result = runner.run(place.drawn(model, 3))
    assert result.graph, runner.stats().failures
    assert kept
