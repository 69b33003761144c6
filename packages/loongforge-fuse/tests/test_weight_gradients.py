"""Weight gradients beside the backward pass: the same values, at the end of the pass, where that is safe."""

from contextlib import nullcontext

import pytest
import torch
from loongforge_fuse import GraphConfig, GraphRunner, ops
from loongforge_fuse.graphs import passes
from loongforge_fuse.ops.beside import WeightGradients, collector
from torch import nn
from torch.utils import checkpoint as checkpointing


class Tower(nn.Module):
    """Residual layers of the operator; the last weight is used twice."""

    def __init__(self, width=32, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, batch):
        return self.run(batch, ops.linear)

    def reference(self, batch):
        return self.run(batch, torch.nn.functional.linear)

    def run(self, batch, linear):
        x = batch["x"]
        for layer in [*self.layers, self.layers[-1]]:
            x = x + torch.tanh(linear(x, layer.weight, layer.bias))
        sums = (x - batch["y"]).square().flatten(1).sum(1)
        counts = torch.full_like(sums, x[0].numel())
        return {"loss": sums.sum() / counts.sum(), "loss_sum": sums, "loss_count": counts}


def towers(place, *, width=32, depth=4, dtype=torch.float32):
    torch.manual_seed(0)
    models = [Tower(width, depth).to(place.device, dtype) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return models


def batch_of(place, step, *, rows=5, width=32, dtype=torch.float32):
    g = torch.Generator().manual_seed(step)
    x, y = (torch.randn(2, rows, width, generator=g).to(place.device, dtype) for _ in range(2))
    return {"x": x, "y": y}


def equal_gradients(ours, theirs):
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("gradients", ["accumulate", "overwrite"])
def test_replays_with_late_weight_gradients_equal_those_without(place, gradients):
    models = towers(place)
    runners = [
        place.runner(model, gradients=gradients, zero_in_graph=True, weight_gradients=how)
        for model, how in zip(models, ("beside", "in_line"), strict=True)
    ]
    for step in range(6):
        results = [runner.run(batch_of(place, step)) for runner in runners]
        assert [r.graph for r in results] == [step > 0] * 2
        assert torch.equal(results[0].total, results[1].total)
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            if p.requires_grad:
                # A weight used twice is added up in another order than autograd's.
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=name)
            else:
                assert p.grad is None
    stats = [runner.stats() for runner in runners]
    # The first pass is watched by hooks, the second one recorded; replays do not count again.
    assert stats[0].late_gradients > 0
    assert stats[0].in_line_gradients["hooks"] > 0
    assert (stats[1].late_gradients, stats[1].in_line_gradients) == (0, {})


@pytest.mark.parametrize("late", [False, True])
def test_under_autocast_gradients_of_float32_weights_are_at_least_as_exact_as_torchs(place, late):
    ours, theirs = towers(place, width=64)
    exact = towers(place, width=64)[1].double()
    batch = batch_of(place, 0, rows=40, width=64)
    with torch.autocast(place.device, dtype=torch.bfloat16):
        out = ours(batch)
        plain = theirs.reference(batch)
        assert torch.equal(out["loss"], plain["loss"])
    collecting = WeightGradients(torch.device(place.device)).collecting(ours) if late else nullcontext()
    with collecting:
        out["loss"].backward()
    plain["loss"].backward()
    exact.reference({name: value.double() for name, value in batch.items()})["loss"].backward()
    for (name, p), q, e in zip(ours.named_parameters(), theirs.parameters(), exact.parameters(), strict=True):
        if p.requires_grad:
            assert p.grad.dtype == torch.float32
            gap, allowed = ((g.grad.double() - e.grad).norm() / e.grad.norm() for g in (p, q))
            assert gap <= 1.1 * allowed + 1e-6, name


def test_passes_of_a_window_add_up(place):
    models = towers(place)
    runner = place.runner(models[0], weight_gradients="beside")
    for step in range(4):
        for model in models:
            model.zero_grad()
        for part in range(3):
            batch = batch_of(place, 10 * step + part)
            runner.run(batch)
            place.plain(models[1], batch)
        place.same_gradients(*models)
    assert runner.stats().replays > 0


def test_an_optimizer_in_the_recording_sees_the_late_gradients(place):
    models = towers(place)
    optimizers = [
        torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=1e-2, **place.fused())
        for m in models
    ]
    config = place.config(gradients="overwrite", zero_in_graph=True, weight_gradients="beside")
    runner = GraphRunner(models[0], config, optimizer=optimizers[0])
    for step in range(8):
        batch = batch_of(place, step)
        assert runner.run(batch).stepped
        optimizers[1].zero_grad()
        place.plain(models[1], batch)
        optimizers[1].step()
    place.same_weights(*models)


def test_a_parameter_with_a_gradient_hook_is_not_late(place):
    model = towers(place)[0]
    seen, late = [], WeightGradients(torch.device(place.device))
    first = model.layers[1].weight
    first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model.layers[2].weight.register_hook(lambda g: seen.append(g.clone()))
    with late.collecting(model):
        model(batch_of(place, 0))["loss"].backward()
        assert len(seen) == 2
        # Their biases belong to the same product and stay with it.
        assert model.layers[1].bias.grad is not None
        assert model.layers[3].weight.grad is None
    assert model.layers[3].weight.grad is not None
    assert late.taken == 1 + 2 * 2
    assert late.in_line == {"hooks": 2 + 2}


def test_gradients_that_ddp_would_wait_for_are_not_made_late(monkeypatch):
    monkeypatch.setattr(passes, "DistributedDataParallel", Tower)
    model = nn.Sequential(Tower())
    GraphRunner(model, GraphConfig(mode="emulated"))
    with pytest.raises(ValueError, match="in_line"):
        GraphRunner(model, GraphConfig(mode="emulated", weight_gradients="beside"))


def test_parameters_of_another_model_are_not_taken(place):
    ours, theirs = towers(place)
    late = WeightGradients(torch.device(place.device))
    with late.collecting(ours):
        theirs(batch_of(place, 0))["loss"].backward()
        assert theirs.layers[1].weight.grad is not None
    assert ours.layers[1].weight.grad is None
    assert late.taken == 0
    assert late.in_line["other_model"] > 0


def test_after_an_error_nothing_is_added_and_the_next_pass_is_whole(place):
    ours, theirs = towers(place)
    late = WeightGradients(torch.device(place.device))

    def failing():
        with late.collecting(ours):
            ours(batch_of(place, 0))["loss"].backward()
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        failing()
    assert all(p.grad is None for p in ours.parameters())
    assert collector(torch.device(place.device), [ours.layers[1].weight]) is None
    with late.collecting(ours):
        ours(batch_of(place, 1))["loss"].backward()
    place.plain(theirs, batch_of(place, 1))
    place.same_gradients(ours, theirs)


def test_passes_of_two_models_may_end_in_any_order_and_leave_nothing_behind(place):
    models = towers(place)
    device = torch.device(place.device)
    lates = [WeightGradients(device) for _ in models]
    first, second = (late.collecting(model) for late, model in zip(lates, models, strict=True))
    first.__enter__()
    second.__enter__()
    models[0](batch_of(place, 0))["loss"].backward()
    models[1](batch_of(place, 0))["loss"].backward()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert lates[0].taken == lates[1].taken > 0
    assert not lates[0].in_line
    assert not lates[1].in_line
    equal_gradients(*models)
    # A plain pass afterwards hands its gradients over as it always did.
    models[0].zero_grad()
    models[0](batch_of(place, 0))["loss"].backward()
    place.same_gradients(*models)
    with (
        lates[0].collecting(models[0]),
        pytest.raises(RuntimeError, match="already collecting"),
        lates[0].collecting(models[0]),
    ):
        pass


def test_under_checkpointing_gradients_are_made_in_their_place(place):
    ours, theirs = towers(place)
    x = batch_of(place, 0)["x"]
    late = WeightGradients(torch.device(place.device))
    layer = ours.layers[1]
    y = checkpointing.checkpoint(
        lambda x: ops.linear(x, layer.weight, layer.bias).tanh(), x, use_reentrant=False
    )
    with late.collecting(ours):
        y.square().sum().backward()
    assert late.taken == 0
    other = theirs.layers[1]
    other(x).tanh().square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, other.weight.grad)
    torch.testing.assert_close(layer.bias.grad, other.bias.grad)


def test_a_bias_may_change_in_place_before_the_backward_pass_as_with_torchs_layer():
    layer = nn.Linear(4, 4)
    loss = ops.linear(torch.ones(2, 4), layer.weight, layer.bias).sum()
    with torch.no_grad():
        layer.bias.add_(1)
    loss.backward()
    assert torch.equal(layer.bias.grad, torch.full((4,), 2.0))


def test_the_operator_works_under_transforms_and_on_nested_tensors():
    layer = nn.Linear(4, 3)
    x, w, b = torch.randn(5, 4), layer.weight.detach(), layer.bias.detach()
    ours = torch.func.grad(lambda w, b: ops.linear(x, w, b).square().sum(), argnums=(0, 1))(w, b)
    plain = nn.functional.linear
    theirs = torch.func.grad(lambda w, b: plain(x, w, b).square().sum(), argnums=(0, 1))(w, b)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert torch.equal(torch.vmap(lambda x: ops.linear(x, w, b))(x), torch.vmap(lambda x: plain(x, w, b))(x))
    nested = torch.nested.nested_tensor([x[:2], x[2:]])
    ops.linear(nested, layer.weight, layer.bias).to_padded_tensor(0.0).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((3,), 5.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_late_weight_gradients_are_bit_equal_while_the_memory_they_read_is_reused():
    class Gpu:
        device = "cuda"

    torch.manual_seed(0)
    width, rows = 1024, 400
    models = [
        nn.ModuleList(nn.Linear(width, width) for _ in range(24)).to("cuda", torch.bfloat16) for _ in "ab"
    ]
    models[1].load_state_dict(models[0].state_dict())

    class Chain(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, batch):
            x = batch["x"]
            for layer in self.layers:
                x = x + ops.linear(x, layer.weight, layer.bias)
            sums = (x - batch["y"]).float().square().flatten(1).mean(1)
            return {"loss": sums.mean(), "loss_sum": sums, "loss_count": torch.ones_like(sums)}

    chains = [Chain(m) for m in models]
    for gradients in ("overwrite", "accumulate"):
        runners = [
            GraphRunner(chain, GraphConfig(gradients=gradients, zero_in_graph=True, weight_gradients=how))
            for chain, how in zip(chains, ("beside", "in_line"), strict=True)
        ]
        for step in range(30):
            batch = batch_of(Gpu, step, rows=rows, width=width, dtype=torch.bfloat16)
            results = [runner.run(batch) for runner in runners]
            assert torch.equal(results[0].total, results[1].total)
            equal_gradients(*chains)
        assert all(runner.stats().replays > 20 for runner in runners), runners[0].stats()
        for runner in runners:
            runner.release()
