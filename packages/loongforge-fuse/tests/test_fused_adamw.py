"""FusedAdamW on the CPU, where it runs its plain torch form, against torch.optim.AdamW."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loongforge_fuse import FusedAdamW
from loongforge_fuse.ops.adamw_tables import CHUNK, chunk_pairs
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
    ],
)
def test_bad_hyperparameters_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        FusedAdamW([torch.nn.Parameter(torch.ones(2))], **options)
