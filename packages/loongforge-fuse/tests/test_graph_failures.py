"""What cannot be recorded runs eagerly, with the reason and without a trace."""

import pytest
import torch
from loongforge_fuse import FusionConfig, GraphConfig, MicroBatchFuser, compile_regions
from loongforge_fuse.graphs.backend import EmulatedBackend
from loongforge_fuse.testing import TinyVLA


class ReadsText(TinyVLA):
    def forward(self, batch):
        assert all(isinstance(t, str) for t in batch["task"])
        return super().forward(batch)


class ReadsValues(TinyVLA):
    def forward(self, batch):
        if float(batch["action"].sum()) > 1e9:
            raise RuntimeError
        return super().forward(batch)


def test_after_failed_captures_other_shapes_are_captured(place):
    class Sometimes(TinyVLA):
        def forward(self, batch):
            if len(batch["time"]) < 4:
                float(batch["action"].sum())
            return super().forward(batch)

    ours, theirs = place.pair(Sometimes, dropout=0.0)
    runner = place.runner(ours)
    for samples in (2, 3, 2, 3, 4, 5, 4, 5, 4):
        batch = place.drawn(ours, samples, samples=samples)
        ours.zero_grad()
        theirs.zero_grad()
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(place.plain(theirs, batch), rel=1e-5)
        place.same_gradients(ours, theirs)
    stats = runner.stats()
    assert len(stats.failures) == 2
    assert stats.captures == 2
    assert all("first=True" in shape for shape in stats.failures)


@pytest.mark.parametrize("kind", [ReadsValues, ReadsText])
def test_failed_capture_falls_back_with_reason_and_leaves_nothing_changed(place, kind):
    model, other = place.pair(kind, dropout=0.5)
    runner = place.runner(model)
    for seed in range(3):
        model.zero_grad()
        other.zero_grad()
        batch = place.drawn(model, seed)
        torch.manual_seed(seed)
        expected = place.plain(other, batch)
        torch.manual_seed(seed)
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(expected, rel=1e-6)
        place.same_gradients(model, other)
    # A pass after the failure draws random numbers as ever: the generator left its capturing state.
    assert result.reason == "capture_failed"
    assert len(runner.stats().failures) == 1
    assert runner.stats().captures == 0


def test_custom_backward_and_disabled_gradients_run_eagerly(place):
    model, _ = place.pair()
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2), executor=place.runner(model))
    outcome = fuser.run(
        [place.drawn(model, 0), place.drawn(model, 1)], backward=lambda loss: loss.backward(), drawn=True
    )
    assert outcome.graph_reason == "custom_backward"


def test_emulated_capture_undoes_its_trial(place):
    if place.device != "cpu":
        pytest.skip("the stand-in works on the CPU")
    model, _ = place.pair()
    backend = EmulatedBackend(lambda: [p for p in model.parameters() if p.requires_grad])
    state = torch.get_rng_state()

    batch = place.drawn(model, 0)

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


def test_undoing_compiled_regions_puts_back_a_forward_that_was_patched_before():
    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2))

    model = Blocks()
    plain = model.blocks[0].forward
    model.blocks[0].forward = lambda x: plain(x) + 1
    patched = model.blocks[0].forward
    regions = compile_regions(model)
    assert regions.modules == ("blocks.0", "blocks.1")
    assert model.blocks[0].forward is not patched
    regions.undo()
    assert model.blocks[0].forward is patched
    assert "forward" not in model.blocks[1].__dict__


@pytest.mark.parametrize("how", ["call", "method"])
def test_a_model_compiled_as_a_whole_sees_the_same_kind_of_batch_when_it_is_recorded(place, how):
    kinds = []

    class Notes(TinyVLA):
        def forward(self, batch):
            kinds.append(type(batch))
            return super().forward(batch)

    model, _ = place.pair(Notes)
    if how == "call":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    runner = place.runner(model)
    for seed in range(3):
        runner.run(place.drawn(model, seed))
    assert set(kinds) == {dict}
