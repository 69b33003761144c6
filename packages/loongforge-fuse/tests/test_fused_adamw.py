"""FusedAdamW on the CPU, where it runs its plain torch form, against torch.optim.AdamW."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loongforge_fuse import FusedAdamW
from loongforge_fuse.kernels.launcher import KernelUnavailableError
from loongforge_fuse.ops.adamw_tables import CHUNK, Slot, check_layouts, chunk_pairs
from torch.utils._python_dispatch import TorchDispatchMode


def twin(seed: int = 0):
    torch.manual_seed(seed)
    ours = [torch.nn.Parameter(torch.randn(7, 5)) for _ in range(4)]
    return ours, [torch.nn.Parameter(p.detach().clone()) for p in ours]


def give(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()


def groups(params):
    return [{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.0}]


def test_steps_equal_torch_adamw_with_groups_and_clipping():
    ours, theirs = twin()
    a, b = FusedAdamW(groups(ours), lr=3e-3, max_grad_norm=1.0), torch.optim.AdamW(groups(theirs), lr=3e-3)
    for i in range(10):
        give(ours, theirs)
        for optimizer in (a, b):
            optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        b.step()
        a.step()
        assert float(a.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_a_state_of_torch_adamw_is_continued():
    ours, theirs = twin()
    b = torch.optim.AdamW(theirs, lr=1e-2)
    for _ in range(3):
        give(ours, theirs)
        b.step()
    a = FusedAdamW(ours, lr=1e-2)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    for p, q in zip(ours, theirs, strict=True):
        p.data.copy_(q)
    give(ours, theirs)
    a.step()
    b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_a_rate_that_changes_every_step_is_sent_without_waiting():
    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                waits.append(not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)))
            return func(*args, **(kwargs or {}))

    ours, theirs = twin()
    optimizer = FusedAdamW(groups(ours), lr=3e-3)
    give(ours, theirs)
    optimizer.step()
    waits: list[bool] = []
    optimizer.param_groups[0]["lr"] = 1e-4
    with Copies():
        optimizer.refresh()
    assert waits == [False, False], "the rates and the decays"


def test_torch_adamw_continues_a_state_of_ours():
    ours, theirs = twin()
    a, b = FusedAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for _ in range(3):
        give(ours, theirs)
        a.step()
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p)
    # A copy keeps which tensors are one: a shared step count would be advanced once for every parameter.
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for _ in range(2):
        give(ours, theirs)
        a.step()
        b.step()
    assert [float(state["step"]) for state in b.state.values()] == [5.0] * 4
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_saved_state_continues_bit_for_bit():
    ours, theirs = twin()
    a, b = FusedAdamW(ours, lr=1e-2), FusedAdamW(theirs, lr=1e-2)
    give(ours, theirs)
    a.step()
    b.step()
    fresh = FusedAdamW(theirs, lr=1e-2)
    fresh.load_state_dict(b.state_dict())
    give(ours, theirs)
    a.step()
    fresh.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_an_infinite_gradient_or_the_flag_skips_the_step():
    ours, _ = twin()
    optimizer = FusedAdamW(ours, lr=1e-2)
    before = [p.detach().clone() for p in ours]
    for p in ours:
        p.grad = torch.ones_like(p)
    ours[1].grad[0, 0] = float("inf")
    optimizer.step()
    ours[1].grad.fill_(1.0)
    optimizer.step(found_inf=torch.ones(()))
    assert all(torch.equal(p, q) for p, q in zip(ours, before, strict=True))
    optimizer.step(found_inf=torch.zeros(()))
    assert not torch.equal(ours[0], before[0])
    assert float(optimizer.state[ours[0]]["step"]) == 1


def test_grad_scale_divides_the_gradient():
    ours, theirs = twin()
    a, b = FusedAdamW(ours, lr=1e-2, eps=1e-3), FusedAdamW(theirs, lr=1e-2, eps=1e-3)
    give(ours, theirs)
    for p in ours:
        p.grad.mul_(64.0)
    a.step(grad_scale=torch.tensor(64.0))
    b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, atol=1e-7)


def test_masters_collect_updates_that_bfloat16_would_lose():
    p = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = FusedAdamW([p], lr=1e-4, weight_decay=0.0, master_weights=True, state_dtype=torch.float32)
    for _ in range(60):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert float(optimizer.state[p]["master"][0]) == pytest.approx(1 - 60e-4, rel=1e-4)
    assert float(p.detach()[0]) < 1.0


def halves(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(7, 5).to(dtype)) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masters", [False, True])
def test_masters_and_wide_moments_of_half_parameters_survive_a_load_bit_for_bit(dtype, masters):
    ours = halves(dtype)
    a = FusedAdamW(ours, lr=1e-3, master_weights=masters, state_dtype=torch.float32)
    for _ in range(5):
        give(ours, ours)
        a.step()
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    b = FusedAdamW(theirs, lr=1e-3, master_weights=masters, state_dtype=torch.float32)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for _ in range(2):
        for p, q in zip(ours, theirs, strict=True):
            assert a.state[p].keys() == b.state[q].keys()
            for name, value in a.state[p].items():
                assert value.dtype == b.state[q][name].dtype, name
                assert torch.equal(value, b.state[q][name]), name
        give(ours, theirs)
        a.step()
        b.step()


def test_a_loaded_master_gives_way_to_a_parameter_that_was_trained_on_without_it():
    ours = halves()
    first = FusedAdamW(ours, lr=1e-2, master_weights=True)
    give(ours, ours)
    first.step()
    other = torch.optim.AdamW(ours, lr=1e-2)
    other.load_state_dict(first.state_dict())
    for _ in range(20):
        give(ours, ours)
        other.step()
    before = [p.detach().clone() for p in ours]
    last = FusedAdamW(ours, lr=1e-2, master_weights=True)
    last.load_state_dict(other.state_dict())
    # One of them gets its gradient a step later: its master is compared then.
    for missing in (2, None):
        give(ours, ours)
        if missing is not None:
            ours[missing].grad = None
        last.step()
    for p, q in zip(ours, before, strict=True):
        assert (p - q).abs().max() < 0.05


def test_masters_are_made_for_a_state_that_was_saved_without_and_dropped_where_not_asked_for():
    ours = halves()
    other = torch.optim.AdamW(ours)
    give(ours, ours)
    other.step()
    with_masters = FusedAdamW(ours, master_weights=True)
    with_masters.load_state_dict(other.state_dict())
    assert all(with_masters.state[p]["master"].dtype == torch.float32 for p in ours)
    without = FusedAdamW(ours)
    without.load_state_dict(with_masters.state_dict())
    assert all("master" not in without.state[p] for p in ours)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_goes_on_like_its_original(how):
    ours, _ = twin()
    a = FusedAdamW(ours, lr=1e-2, max_grad_norm=0.5)
    give(ours, ours)
    a.step()
    b = how(a)
    theirs = b.param_groups[0]["params"]
    give(ours, theirs)
    a.step()
    b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert [float(state["step"]) for state in b.state.values()] == [2.0] * 4


def test_a_group_added_later_is_trained_with_its_own_rate():
    ours, theirs = twin()
    a, b = FusedAdamW(ours[:2], lr=1e-2), torch.optim.AdamW(theirs[:2], lr=1e-2)
    a.refresh()
    for optimizer, params in ((a, ours), (b, theirs)):
        optimizer.add_param_group({"params": params[2:], "lr": 1e-3})
    for _ in range(3):
        give(ours, theirs)
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    with pytest.raises(ValueError, match="the same in all groups"):
        a.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "eps": 1e-3})
    assert len(a.param_groups) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [({"amsgrad": True}, "no amsgrad"), ({"maximize": True}, "no maximize")],
)
def test_a_state_of_torch_adamw_that_asks_for_more_is_refused_and_nothing_is_loaded(options, words):
    ours, _ = twin()
    other = torch.optim.AdamW(ours, **options)
    give(ours, ours)
    other.step()
    optimizer = FusedAdamW(ours, lr=0.5)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_the_largest_step_count_of_a_loaded_state_is_taken_wherever_it_stands():
    ours, _ = twin()
    other = torch.optim.AdamW(ours)
    for step in range(5):
        give(ours, ours)
        if step > 1:
            # The first parameter is not trained on.
            ours[0].grad = None
        other.step()
    optimizer = FusedAdamW(ours)
    optimizer.load_state_dict(other.state_dict())
    assert float(optimizer.state_dict()["state"][0]["step"]) == 5


def test_complex_parameters_are_refused():
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="real parameters only"):
        FusedAdamW([p]).step()


def test_kernels_are_refused_memory_that_they_would_walk_through_in_another_order():
    p = torch.nn.Parameter(torch.randn(4, 6))
    slot = Slot(p, p, torch.zeros_like(p), torch.zeros_like(p), None, 0)
    check_layouts([slot])
    turned = torch.zeros(6, 4).t()
    with pytest.raises(KernelUnavailableError, match="strides"):
        check_layouts([slot._replace(exp_avg=turned)])
    check_layouts([slot._replace(param=turned, exp_avg=turned, exp_avg_sq=turned)])
    part = torch.zeros(4, 8)[:, :6]
    with pytest.raises(KernelUnavailableError, match="gaps"):
        check_layouts([slot._replace(param=part, exp_avg=part, exp_avg_sq=part)])
    # A loaded state takes the order of its parameter.
    optimizer = FusedAdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    state = optimizer.state_dict()
    values = state["state"][0]["exp_avg"]
    state["state"][0]["exp_avg"] = torch.empty_like(turned).copy_(values)
    assert not state["state"][0]["exp_avg"].is_contiguous()
    optimizer.load_state_dict(state)
    assert optimizer.state[p]["exp_avg"].is_contiguous()
    assert torch.equal(optimizer.state[p]["exp_avg"], values)


@given(st.lists(st.integers(0, 5 * CHUNK), max_size=12))
def test_chunks_cover_every_element_once(counts):
    pairs = chunk_pairs(counts)
    seen = [np.zeros(c, dtype=np.int8) for c in counts]
    for tensor, chunk in pairs:
        seen[tensor][chunk * CHUNK : (chunk + 1) * CHUNK] += 1
    assert all((s == 1).all() for s in seen)
    assert len(pairs) == sum(-(-c // CHUNK) for c in counts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"betas": (0.9, 1.0)}, "betas must be in"),
        ({"lr": -1.0}, "must not be negative"),
        ({"max_grad_norm": 0.0}, "must be positive or None"),
        ({"state_dtype": torch.int8}, "state_dtype must be"),
        ({"eps": -1.0}, "must not be negative"),
    ],
)
def test_bad_hyperparameters_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        FusedAdamW([torch.nn.Parameter(torch.ones(2))], **options)
