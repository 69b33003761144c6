"""Left-out work: every switch gives the same loss and gradients as doing it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loongforge.errors import ConfigError
from loongforge.recipes import get_recipe
from loongforge.recipes.gr00t_n1_6.slots import DECAY_BOUND, decide_slots


def run(model, batch):
    model.zero_grad(set_to_none=True)
    out = model(batch)
    out["loss"].backward()
    return out["loss"].detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def with_switch(groot_reference, **work):
    return groot_reference.model(**work)


@pytest.mark.parametrize(
    ("off", "limit"),
    [
        ({"skip_logits": False}, 0.0),
        ({"frozen_without_autograd": False}, 0.0),
        ({"recompute": True}, 0.0),
        ({"offload": True}, 0.0),
        ({"keep_unused": False}, 0.0),
        # Another set of keys goes through another summation order.
        ({"split_cross_attention": False}, 2e-6),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
@pytest.mark.parametrize("case", ["a", "m"])
def test_a_switch_changes_neither_loss_nor_gradients(groot_reference, off, limit, case):
    batch = groot_reference.batch(case)
    loss, gradients = run(with_switch(groot_reference), batch)
    other_loss, other = run(with_switch(groot_reference, **off), batch)
    assert abs(loss - other_loss) <= limit
    assert set(gradients) == set(other)
    for name, gradient in gradients.items():
        assert (gradient - other[name]).abs().max() <= limit * gradient.abs().max() + (
            1e-7 if limit else 0
        ), name


def test_frozen_layers_build_no_graph(groot_reference):
    batch = groot_reference.batch("a")
    seen = {}
    model = with_switch(groot_reference)
    layers = model.backbone.model.language_model.model.layers
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda _m, _i, out, i=i: seen.update({i: out.requires_grad}))
    model(batch)
    first = model.config.first_trainable_layer
    assert seen == {i: i >= first for i in range(len(layers))}


def test_logits_need_the_stored_head(groot_reference):
    model = with_switch(groot_reference, skip_logits=False, keep_unused=False)
    with pytest.raises(ConfigError, match="keep_unused=True"):
        model(groot_reference.batch("a"))


def steps(model, recipe, batch, *, count=3, learning_rate=1e-4, decay=1e-5):
    optimizer = torch.optim.AdamW(
        recipe.param_groups(model, decay, learning_rate=learning_rate), lr=learning_rate
    )
    losses = []
    for _ in range(count):
        loss = model(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def test_live_slots_train_bit_equal_to_all_slots(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    results = []
    for live in ("auto", "off"):
        model = recipe.build_model(recipe.options({"live_slots": live}), 0)
        results.append((model, *steps(model, recipe, tiny_batch)))
    (live_model, losses, weights), (full_model, full_losses, full_weights) = results
    assert losses == full_losses
    assert set(weights) == set(full_weights)
    for name, value in weights.items():
        assert torch.equal(value, full_weights[name]), name
    trained = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (live_model, full_model)]
    assert trained[0] < trained[1]


def test_a_single_slot_equals_the_look_up_per_sample(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options({"live_slots": "off"}), 0)
    loss, gradients = run(model, tiny_batch)
    model.single_slot = None
    other_loss, other = run(model, tiny_batch)
    assert other_loss == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=1e-6)


def test_live_slots_follow_the_model_to_another_dtype_and_back(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options(), 0)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    model.double().float()
    layer = model.action_head.action_encoder.W1
    with torch.no_grad():
        layer.W.add_(1.0)
    after = model.state_dict()
    slot = layer.first
    name = "action_head.action_encoder.W1.W"
    assert torch.equal(after[name][slot], before[name][slot] + 1)
    assert torch.equal(after[name][slot - 1], before[name][slot - 1])
    model.load_state_dict(before)
    assert torch.equal(layer.W[0], before[name][slot])


def test_a_wrong_shape_is_named_with_live_slots():
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options(), 0)
    state = model.state_dict()
    name = "action_head.action_encoder.W1.W"
    state[name] = state[name][:3]
    with pytest.raises(RuntimeError, match=r"action_encoder\.W1\.W"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "exact"),
        ({"enabled": False}, "off"),
        ({"embodiments": 2}, "several_embodiments"),
        ({"weight_decay": 1e-2}, "decay"),
        ({"fresh_moments": False}, "moments"),
    ],
)
def test_live_slots_are_used_only_where_exact(change, reason):
    settings = {"embodiments": 1, "learning_rate": 1e-4, "weight_decay": 1e-5, **change}
    decision = decide_slots(**settings)
    assert decision.reason == reason
    assert decision.live == (reason == "exact")


def test_the_decay_bound_is_where_float32_stops_rounding_to_one():
    one = torch.tensor(1.0)
    assert one * (1 - DECAY_BOUND) == 1
    assert one * (1 - DECAY_BOUND * 1.01) < 1


def test_too_much_decay_for_live_slots_is_refused_with_the_way_out():
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options(), 0)
    with pytest.raises(ConfigError, match="live_slots"):
        recipe.param_groups(model, 1e-2, learning_rate=1e-3)
    full = recipe.build_model(recipe.options({"live_slots": "off"}), 0)
    assert recipe.param_groups(full, 1e-2, learning_rate=1e-3)


def test_draws_of_a_sample_do_not_depend_on_its_batch(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options(), 0).train()
    plain = {n: v for n, v in tiny_batch.items() if n not in ("noise", "time", "augmentation")}

    def generators(numbers):
        return [torch.Generator().manual_seed(n) for n in numbers]

    whole = model.draw(plain, generators([5, 6, 7, 8]))
    half = {n: v[2:] if isinstance(v, torch.Tensor) else v for n, v in plain.items()}
    part = model.draw(half, generators([7, 8]))
    for name in ("noise", "time", "augmentation"):
        assert torch.equal(whole[name][2:], part[name])
    with pytest.raises(ValueError, match="2 generators for a batch of 4"):
        model.draw(plain, generators([1, 2]))


def test_times_follow_the_beta_distribution(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options(), 0).train()
    from loongforge.recipes.gr00t_n1_6.draws import beta_sample

    device = torch.device("cpu")
    ours = beta_sample(200_000, 1.5, 1.0, device, torch.Generator().manual_seed(0))
    # Mean a / (a + b), variance a b / ((a + b)^2 (a + b + 1)).
    assert ours.mean().item() == pytest.approx(0.6, abs=3e-3)
    assert ours.var().item() == pytest.approx(1.5 / (6.25 * 3.5), abs=3e-3)
    drawn = model.draw({"action": torch.zeros(1000, 2, 3)}, torch.Generator().manual_seed(0))
    assert drawn["time"].min() >= 0 and drawn["time"].max() <= model.config.head.time_scale
    replaced = replace(model.config.head, beta_alpha=2.0, beta_beta=3.0)
    both = beta_sample(200_000, replaced.beta_alpha, replaced.beta_beta, device, None)
    assert both.mean().item() == pytest.approx(0.4, abs=5e-3)
    with pytest.raises(ValueError, match=r"cannot use a torch\.Generator"):
        beta_sample(4, 2.0, 3.0, device, torch.Generator())


def test_the_whole_model_is_traced_in_one_graph(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options({"frozen_dtype": "bfloat16"}), 0)
    expected = model(tiny_batch)["loss"]
    traced = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = traced(tiny_batch)["loss"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("case", ["a", "m"])
def test_the_frozen_part_ahead_of_its_step_changes_no_bit(groot_reference, case):
    batch = groot_reference.batch(case)
    model = groot_reference.model()
    loss, gradients = run(model, batch)
    canonical = model.canonical(batch)
    made = model.run_frozen(canonical)
    assert set(made) == {"frozen_rows"}
    assert not made["frozen_rows"].requires_grad
    consumed = model.frozen_inputs(canonical)
    assert "pixel_values" in consumed
    rest = {name: value for name, value in canonical.items() if name not in consumed}
    other_loss, other = run(model, {**rest, **made})
    assert torch.equal(loss, other_loss)
    assert set(gradients) == set(other)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other[name]), name


def test_the_frozen_part_reads_only_the_modules_it_names(groot_reference):
    model = groot_reference.model()
    batch = model.canonical(groot_reference.batch("a"))
    expected = model.run_frozen(batch)["frozen_rows"]
    named = {id(p) for module in model.frozen_modules() for p in module.parameters()}
    assert named
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in named:
                parameter.fill_(float("nan"))
    assert torch.equal(model.run_frozen(batch)["frozen_rows"], expected)
    assert not any(p.requires_grad for m in model.frozen_modules() for p in m.parameters())


@pytest.mark.parametrize("trained", ["visual", "language"])
def test_nothing_is_frozen_ahead_where_the_encoder_trains(groot_reference, trained):
    model = groot_reference.model()
    config = replace(model.config, tune=replace(model.config.tune, **{trained: True}))
    assert type(model)(config).frozen_modules() == []


def test_a_batch_in_another_layout_is_left_to_its_step(groot_reference):
    model = groot_reference.model()
    batch = {k: v for k, v in groot_reference.batch("a").items() if k != "text_index"}
    assert model.run_frozen(batch) == {}
