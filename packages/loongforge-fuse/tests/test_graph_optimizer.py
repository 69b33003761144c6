"""The optimizer inside a recording: schedules, clipping, skipped steps, resuming."""

import io

import pytest
import torch
from loongforge_fuse import GraphRunner
from loongforge_fuse.graphs.optimizer import make_capturable
from loongforge_fuse.testing import TinyVLA


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


def test_a_loaded_state_brings_no_uncapturable_settings_back():
    model = TinyVLA()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.param_groups[0]["capturable"]
    make_capturable(optimizer, torch.device("meta"))
    assert optimizer.param_groups[0]["capturable"]
    assert {state["step"].device.type for state in optimizer.state.values()} == {"meta"}


class Run:
    """A training run with everything a checkpoint holds."""

    def __init__(self, place, kind, gradients):
        self.place = place
        self.model, _ = place.pair(dropout=0.2)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        if kind == "ours":
            self.optimizer = ours_adam(self.model)
        else:
            self.optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.1, **place.fused())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        config = place.config(gradients=gradients, zero_in_graph=True, max_norm=0.5)
        self.runner = GraphRunner(self.model, config, optimizer=self.optimizer)
        self.step = 0

    def train(self, steps):
        losses = []
        for _ in range(steps):
            result = self.runner.run(self.place.drawn(self.model, self.step))
            self.schedule.step()
            self.step += 1
            losses.append(result.total.item())
        self.graph = result.graph
        return losses

    def save(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        file = io.BytesIO()
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "rng": self.place.get_rng(), "step": self.step}, file)
        return file.getvalue()

    def load(self, data):
        state = torch.load(io.BytesIO(data), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.place.set_rng(state["rng"].cpu())
        self.step = state["step"]


@pytest.mark.parametrize("gradients", ["accumulate", "overwrite"])
@pytest.mark.parametrize("kind", ["stock", "ours"])
@pytest.mark.parametrize("fresh", [True, False])
def test_resuming_reproduces_the_next_steps_dropout_included(place, kind, gradients, fresh):
    torch.manual_seed(3)
    run = Run(place, kind, gradients)
    run.train(5)
    saved = run.save()
    expected = run.train(4)
    assert run.graph
    # In a new process, or by going back in the same one, whose recordings then belong to an old state.
    again = Run(place, kind, gradients) if fresh else run
    again.load(saved)
    assert again.train(4) == pytest.approx(expected, rel=1e-5)
    assert again.graph
    other = Run(place, kind, gradients)
    other.load(saved)
    other.train(4)
    place.same_weights(again.model, other.model)


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_after_a_load_the_next_step_is_eager_since_it_may_make_state(place, kind):
    torch.manual_seed(3)
    run = Run(place, kind, "accumulate")
    fresh = run.save()
    run.train(5)
    run.load(fresh)
    again = run.train(4)
    assert run.runner.stats().moved == {"optimizer_state": 1}
    assert run.runner.stats().eager == {"warm_up": 2}
    assert run.graph
    other = Run(place, kind, "accumulate")
    other.load(fresh)
    assert again == pytest.approx(other.train(4), rel=1e-5)
    place.same_weights(run.model, other.model)


def test_a_changed_clip_of_our_adam_makes_a_recording_stale(place):
    model, _ = place.pair()
    optimizer = ours_adam(model)
    runner = GraphRunner(model, place.config(zero_in_graph=True), optimizer=optimizer)
    for step in range(3):
        runner.run(place.drawn(model, step))
    optimizer.max_grad_norm = 0.1
    runner.run(place.drawn(model, 3))
    assert runner.stats().moved == {"optimizer": 1}


def test_an_optimizer_with_step_hooks_is_not_recorded_unless_allowed(place):
    for hooks, ran in (("refuse", 4), ("allow", None)):
        model, _ = place.pair()
        optimizer = ours_adam(model)
        seen = []
        optimizer.register_step_post_hook(lambda *a, seen=seen: seen.append(a))
        runner = GraphRunner(model, place.config(zero_in_graph=True, hooks=hooks), optimizer=optimizer)
        graphs = [runner.run(place.drawn(model, step)).graph for step in range(4)]
        assert any(graphs) == (hooks == "allow")
        assert ran is None or len(seen) == ran


def test_a_loaded_step_count_is_made_outside_of_captures():
    model = TinyVLA()
    optimizer = ours_adam(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    counters = {id(state["step"]) for state in optimizer.state.values()}
    assert counters == {id(optimizer._step)}
    assert optimizer._step.item() == 1
