"""Shapes that reach different parameters, replayed as a GPU does it: operators run again, Python does not."""

import copy

import pytest
import torch
from loongforge_fuse import GraphConfig, GraphRunner
from loongforge_fuse.fusion.execute import Weighting
from loongforge_fuse.graphs import entry
from loongforge_fuse.graphs.entry import LiveParameters
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class Tape(TorchDispatchMode):
    """Notes every operator with its arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class TapeRecording:
    bytes = 1

    def __init__(self, calls, outputs):
        self.calls, self.outputs = calls, outputs

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, out in self.calls:
                args = tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, args)
                pairs = zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True)
                for old, new in pairs:
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.detach().copy_(new)

    def release(self):
        self.calls, self.outputs = [], ()


class TapeBackend:
    """Records operators on the memory that they used, and puts back what the recording changed."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def eager(self, work):
        return work()

    def capture(self, work, rehearsal):
        tensors = [t for p in self.model.parameters() for t in (p, p.grad) if t is not None]
        tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        kept = [(t.detach(), t.detach().clone()) for t in tensors]
        with Tape() as tape:
            outputs = work()
        for tensor, value in kept:
            tensor.copy_(value)
        return TapeRecording(tape.calls, outputs)

    def held(self):
        return None

    def renew(self):
        pass

    def release(self):
        pass


class Cameras(nn.Module):
    """A trunk and a layer for batches of one camera, another for those of two."""

    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, batch):
        x = torch.tanh(self.trunk(batch["x"]))
        x = self.one(x) if x.shape[1] == 1 else self.two(x)
        sums = x.square().flatten(1).sum(1)
        return {"loss": sums.mean(), "loss_sum": sums, "loss_count": torch.ones_like(sums)}


def agree(ours, theirs):
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)


BLOCKS = (1, 1, 1, 1, 2, 2, 2, 1, 2, 1, 1, 2)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    "how", [{"gradients": "overwrite"}, {"zero_in_graph": True}, {}, {"check_finite": "gradients"}]
)
def test_gradients_that_a_shape_does_not_reach_are_those_of_eager_passes(how, passes, inside):
    torch.manual_seed(0)
    ours = Cameras()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (ours, theirs)]
    config = GraphConfig(warmup_steps=1, **how)
    backend = TapeBackend(ours, optimizers[0])
    runner = GraphRunner(ours, config, optimizer=optimizers[0] if inside else None, backend=backend)
    keeps = how == {"zero_in_graph": True} or ("gradients" in how and passes > 1)
    generator = torch.Generator().manual_seed(1)
    weights = torch.full((2,), 0.1)
    weighting = Weighting(kind="given", sizes=(2,), weights=weights)
    cameras = iter(BLOCKS * passes)
    for _ in BLOCKS:
        if not how or "check_finite" in how:
            optimizers[0].zero_grad()
        optimizers[1].zero_grad(set_to_none=not keeps)
        for number in range(passes):
            batch = {"x": torch.randn(2, next(cameras), 6, generator=generator)}
            first, last = number == 0, number == passes - 1
            runner.execute(batch, weighting, backward=None, first=first, last=last)
            (theirs(batch)["loss_sum"] * weights).sum().backward()
        if not inside:
            optimizers[0].step()
        optimizers[1].step()
        agree(ours, theirs)
    assert runner.stats().replays > 4, runner.stats()


def test_a_shape_is_watched_again_after_another_shapes_recording_met_new_state():
    torch.manual_seed(0)
    ours = Cameras()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (ours, theirs)]
    backend = TapeBackend(ours, optimizers[0])
    runner = GraphRunner(ours, GraphConfig(warmup_steps=1), optimizer=optimizers[0], backend=backend)
    generator = torch.Generator().manual_seed(1)
    # The first pass of two cameras makes state; the recording of one camera is given up at its next pass, and
    # that of two cameras is due right after.
    for cameras in (1, 1, 1, 2, 1, 2, 2, 1, 1):
        batch = {"x": torch.randn(2, cameras, 6, generator=generator)}
        for optimizer in optimizers:
            optimizer.zero_grad()
        runner.run(batch)
        theirs(batch)["loss"].backward()
        optimizers[1].step()
        agree(ours, theirs)
    assert runner.stats().moved == {"optimizer_state": 1}


@pytest.mark.parametrize("how", [{}, {"zero_in_graph": True}, {"gradients": "overwrite"}])
@pytest.mark.parametrize("beside", ["in_line", "beside"])
def test_a_layer_unfrozen_between_warm_up_and_capture_gets_its_gradients(how, beside):
    torch.manual_seed(0)
    ours = Cameras()
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (ours, theirs)]
    config = GraphConfig(warmup_steps=1, weight_gradients=beside, **how)
    runner = GraphRunner(ours, config, backend=TapeBackend(ours, optimizers[0]))
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        for model in (ours, theirs):
            # Frozen in the first, watched pass, and later on with gradients of before.
            model.one.requires_grad_(step not in {0, 4, 5})
        batch = {"x": torch.randn(2, 1, 6, generator=generator)}
        if not how:
            optimizers[0].zero_grad()
        optimizers[1].zero_grad()
        runner.run(batch)
        theirs(batch)["loss_sum"].sum().div(2).backward()
        for optimizer in optimizers:
            optimizer.step()
        agree(ours, theirs)
    assert runner.stats().replays > 2, runner.stats()


def test_what_shapes_reach_is_remembered_for_a_bounded_number_of_them(monkeypatch):
    monkeypatch.setattr(entry, "SHAPES_REMEMBERED", 3)
    live = LiveParameters(Cameras())
    for key in (0, 1, 2, 0, 3):
        with live.watched(key):
            pass
    assert [key for key in range(5) if live.knows(key)] == [0, 2, 3]
