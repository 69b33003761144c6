"""The frozen part of coming batches, run ahead: same numbers, and nothing used that no longer holds."""

import pytest
import torch
from loongforge_fuse import FrozenAhead, FusedAdamW, FusionConfig, GraphRunner, MicroBatchFuser
from loongforge_fuse.graphs.frozen_graphs import describe_rows
from loongforge_fuse.graphs.multiprocessors import leaving_free
from loongforge_fuse.testing import TinyVLA


def windows(place, model, count, micro=2, samples=4):
    return [[place.drawn(model, 10 * w + m, samples=samples) for m in range(micro)] for w in range(count)]


def train(place, model, batches, *, ahead=None, graph=True):
    """Train over windows, each started before the step of the one before; return losses and the runner."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, **place.fused()
    )
    runner = GraphRunner(model, place.config()) if graph else None
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=len(batches[0])), executor=runner)
    losses = []
    under_way = None if ahead is None else ahead.start(batches[0])
    for number, window in enumerate(batches):
        if under_way is not None:
            window = under_way.take()
            under_way = ahead.start(batches[min(number + 1, len(batches) - 1)])
        optimizer.zero_grad()
        losses.append(fuser.run(window, drawn=True).loss.item())
        if under_way is not None:
            under_way.finish()
        optimizer.step()
    return losses, runner


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_training_with_the_frozen_part_ahead_gives_the_same_weights(place, graph, split):
    ours, theirs = place.pair()
    batches = windows(place, ours, 8)
    ahead = FrozenAhead(ours, split=split)
    losses, runner = train(place, ours, batches, ahead=ahead, graph=graph)
    expected, _ = train(place, theirs, batches, graph=graph)
    assert losses == pytest.approx(expected, rel=1e-5)
    place.same_weights(ours, theirs)
    stats = ahead.stats()
    assert stats.started == 9
    assert stats.discarded == 0
    assert not stats.inline
    assert not stats.failures
    if place.device == "cuda":
        assert stats.captures == 1
        assert stats.replays == 7
    if graph:
        assert runner.stats().replays > 0


def test_the_step_no_longer_gets_what_only_the_frozen_part_reads(place):
    model, _ = place.pair()
    batch = place.drawn(model, 0)
    [taken] = FrozenAhead(model).start([batch]).take()
    assert set(batch) - set(taken) == {"images", "text"}
    assert set(taken) - set(batch) == {"seen"}
    assert not taken["seen"].requires_grad
    torch.testing.assert_close(model(taken)["loss"], model(batch)["loss"])


@pytest.mark.parametrize("how", ["in place", "loaded", "moved"])
def test_weights_changed_after_the_start_are_noticed(place, how):
    ours, theirs = place.pair()
    batches = windows(place, ours, 6)
    ahead = FrozenAhead(ours)
    for window in batches[:4]:
        ahead.start(window).take()
    started = ahead.start(batches[4])
    with torch.no_grad():
        for model in (ours, theirs):
            if how == "in place":
                model.patch.weight.mul_(2)
            elif how == "loaded":
                model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
            else:
                model.patch.weight.data = model.patch.weight.data * 2
    window = started.take()
    assert "seen" not in window[0]
    for batch, plain in zip(window, batches[4], strict=True):
        torch.testing.assert_close(ours(batch)["loss"], theirs(plain)["loss"])
    assert ahead.stats().discarded == 1
    for batch, plain in zip(ahead.start(batches[5]).take(), batches[5], strict=True):
        torch.testing.assert_close(ours(batch)["loss"], theirs(plain)["loss"])


def test_a_shorter_window_fills_the_leading_rows_of_the_same_graph(place):
    model, other = place.pair()
    ahead = FrozenAhead(model)
    for window in windows(place, model, 4):
        ahead.start(window).take()
    short = [place.drawn(model, 50, samples=3)]
    [taken] = ahead.start(short).take()
    assert taken["seen"].shape[0] == 3
    torch.testing.assert_close(model(taken)["loss"], other(short[0])["loss"])
    if place.device == "cuda":
        assert ahead.stats().captures == 1
        assert ahead.stats().replays == 3


def test_unequal_shapes_run_one_by_one(place):
    model, other = place.pair()
    window = [place.drawn(model, 0, text=6), place.drawn(model, 1, text=4)]
    ahead = FrozenAhead(model)
    for taken, plain in zip(ahead.start(window).take(), window, strict=True):
        torch.testing.assert_close(model(taken)["loss"], other(plain)["loss"])
    assert ahead.stats().started == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.frozen.requires_grad_(True), "trains"),
        (lambda m: m.frozen.append(torch.nn.Dropout(0.5)), "random"),
        (lambda m: m.frozen.append(torch.nn.AlphaDropout(0.5)), "random"),
        (lambda m: m.frozen.append(torch.nn.RReLU()), "random"),
        (
            lambda m: m.frozen.append(torch.nn.MultiheadAttention(4, 1, dropout=0.1)).requires_grad_(False),
            "random",
        ),
        (lambda m: m.frozen.append(torch.nn.BatchNorm1d(4, affine=False)), "stateful"),
        (lambda m: m.frozen[0].register_forward_hook(lambda *a: None), "hooks"),
        (lambda m: setattr(m, "frozen_modules", list), "no_frozen_part"),
    ],
)
def test_a_part_that_cannot_run_ahead_is_left_to_its_step_with_the_reason(place, change, reason):
    model, _ = place.pair()
    change(model)
    window = windows(place, model, 1)[0]
    ahead = FrozenAhead(model)
    assert ahead.reason == reason
    taken = ahead.start(window).take()
    assert all(a is b for a, b in zip(taken, window, strict=True))
    assert ahead.stats().inline == {reason: 2}


@pytest.mark.parametrize(
    "harmless",
    [torch.nn.AlphaDropout(0.0), torch.nn.MultiheadAttention(4, 1), torch.nn.BatchNorm1d(4).eval()],
)
def test_modules_that_draw_nothing_and_change_nothing_do_not_keep_a_part_in_its_step(harmless):
    model = TinyVLA()
    model.frozen.append(harmless.requires_grad_(False))
    assert FrozenAhead(model).reason is None


def test_a_hook_that_comes_after_the_start_leaves_the_part_to_its_step(place):
    model, _ = place.pair()
    ahead = FrozenAhead(model)
    started = ahead.start(windows(place, model, 1)[0])
    model.frozen[0].register_forward_hook(lambda *a: a[2] * 2)
    assert "seen" not in started.take()[0]
    assert ahead.stats().discarded == 1


def test_an_empty_window_has_no_batches():
    assert FrozenAhead(TinyVLA()).start([]).take() == []


def test_a_replaced_module_is_taken_in(place):
    model, _ = place.pair()
    ahead = FrozenAhead(model)
    batches = windows(place, model, 5)
    for window in batches[:3]:
        ahead.start(window).take()
    started = ahead.start(batches[0])
    model.patch = torch.nn.Conv2d(3, 32, 4, stride=4).to(place.device).requires_grad_(False)
    assert "seen" not in started.take()[0]
    for window in batches[3:]:
        for taken, plain in zip(ahead.start(window).take(), window, strict=True):
            torch.testing.assert_close(model(taken)["loss"], model(plain)["loss"])


def test_a_model_that_says_nothing_is_left_alone():
    ahead = FrozenAhead(torch.nn.Linear(2, 2))
    assert ahead.reason == "no_frozen_part"


def test_after_release_batches_are_left_to_their_step(place):
    model, _ = place.pair()
    ahead = FrozenAhead(model)
    for window in windows(place, model, 4):
        ahead.start(window).take()
    ahead.release()
    ahead.release()
    assert ahead.stats().graph_bytes == 0
    assert "images" in ahead.start(windows(place, model, 1)[0]).take()[0]


@pytest.mark.parametrize("setting", [{"warmup_steps": 0}, {"max_graphs": 0}, {"spare_sms": -1}])
def test_settings_without_sense_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        FrozenAhead(TinyVLA(), **setting)


def test_multiprocessors_left_free_are_a_matter_of_the_frozen_part_alone():
    before = torch._C._get_sm_carveout_experimental()
    with leaving_free(24):
        assert torch._C._get_sm_carveout_experimental() == 24
    assert torch._C._get_sm_carveout_experimental() == before
    with leaving_free(0):
        assert torch._C._get_sm_carveout_experimental() == before
    assert torch._C._get_sm_carveout_experimental() == before


def test_nested_tensors_have_no_graph():
    batch = {"x": torch.zeros(2, 3), "images": [torch.zeros(3, 4, 4), torch.zeros(3, 8, 8)]}
    assert describe_rows(batch) is None


@pytest.mark.parametrize("split", [False, True])
def test_two_windows_under_way_at_once_do_not_mix(place, split):
    model, _ = place.pair()
    ahead = FrozenAhead(model, split=split)
    batches = windows(place, model, 6)
    for window in batches[:3]:
        ahead.start(window).take()
    started = [ahead.start(window) for window in batches[3:]]
    for one, window in zip(started, batches[3:], strict=True):
        for taken, plain in zip(one.take(), window, strict=True):
            torch.testing.assert_close(model(taken)["loss"], model(plain)["loss"])


def run_split(place, model, batches, *, early):
    """Train with the optimizer in the graph; return losses and how often the frozen part was finished."""
    optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = place.config(gradients="overwrite", zero_in_graph=True, max_norm=1.0)
    runner = GraphRunner(model, config, optimizer=optimizer)
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2), executor=runner)
    ahead = FrozenAhead(model, split=True)
    waiting = [ahead.start(batches[0])]
    calls, losses = [], []

    def between():
        calls.append(len(waiting))
        waiting[-1].finish()

    runner.before_optimizer = between if early else None
    for number, window in enumerate(batches):
        taken = waiting.pop().take() if early else window
        if early:
            waiting.append(ahead.start(batches[min(number + 1, len(batches) - 1)]))
        losses.append(fuser.run(taken, drawn=True).loss.item())
    return losses, calls


def test_what_was_split_off_runs_between_backward_and_optimizer(place):
    ours, theirs = place.pair()
    batches = windows(place, ours, 6)
    losses, calls = run_split(place, ours, batches, early=True)
    expected, _ = run_split(place, theirs, batches, early=False)
    assert calls
    assert losses == pytest.approx(expected, rel=1e-5)
    place.same_weights(ours, theirs)


def test_what_was_split_off_is_finished_before_its_graph_goes(place):
    model, _ = place.pair()
    ahead = FrozenAhead(model, split=True)
    batches = windows(place, model, 6)
    for window in batches[:4]:
        ahead.start(window).take()
    left = ahead.start(batches[4])
    model.patch = torch.nn.Conv2d(3, 32, 4, stride=4).to(place.device).requires_grad_(False)
    started = ahead.start(batches[5])
    left.finish()
    assert "seen" not in left.take()[0]
    for taken, plain in zip(started.take(), batches[5], strict=True):
        torch.testing.assert_close(model(taken)["loss"], model(plain)["loss"])
    ahead.release()
    started.finish()
    assert "seen" not in started.take()[0]


def test_a_model_moved_to_another_type_or_device_goes_on(place):
    model = TinyVLA()
    ahead = FrozenAhead(model)
    model.to(place.device)
    for window in windows(place, model, 5):
        for taken, plain in zip(ahead.start(window).take(), window, strict=True):
            torch.testing.assert_close(model(taken)["loss"], model(plain)["loss"])
    if place.device == "cuda":
        assert ahead.stats().replays == 3
