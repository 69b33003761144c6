"""FusedAdamW on a real GPU: against torch.optim.AdamW in float64, alone and inside CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from loongforge_fuse import ops
from loongforge_fuse.ops.adamw import FusedAdamW
from loongforge_fuse.ops.checking import check_no_fallback, relative_error
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def counted():
    """Start every test with empty counters."""
    ops.reset_op_counters()
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_follows_torch_over_twenty_steps(dtype, state):
    if dtype == torch.float32 and state == torch.bfloat16:
        pytest.skip("not built ahead of time")
    sizes = [(1000, 37), (16384,), (3,), (40000, 2), (1,)]
    ours = [torch.nn.Parameter(randn(*s, dtype=dtype)) for s in sizes]
    wide = [torch.nn.Parameter(p.detach().double()) for p in ours]
    a = FusedAdamW(ours, lr=1e-3, max_grad_norm=1.0, state_dtype=state)
    b = torch.optim.AdamW(wide, lr=1e-3)
    for _ in range(20):
        for p, q in zip(ours, wide, strict=True):
            p.grad = randn(*p.shape, dtype=dtype)
            q.grad = p.grad.double()
        norm = torch.nn.utils.clip_grad_norm_(wide, 1.0)
        a.step()
        b.step()
        assert abs(float(a.grad_norm) / float(norm) - 1) < 1e-4
    for p, q in zip(ours, wide, strict=True):
        # bf16 weights round each of 20 steps by up to half a unit in the last place.
        allowed = 1e-5 if dtype == torch.float32 else 20 * 2**-9
        assert relative_error(p.detach(), q.detach()) < allowed
    check_no_fallback()


def test_adamw_with_masters_writes_the_rounded_master():
    p = torch.nn.Parameter(randn(1000, 77))
    optimizer = FusedAdamW([p], lr=1e-2, master_weights=True, state_dtype=torch.float32)
    for _ in range(5):
        p.grad = randn(1000, 77)
        optimizer.step()
    master = optimizer.state[p]["master"]
    assert torch.equal(p.detach(), master.to(BF16))
    check_no_fallback()


def test_adamw_skips_a_step_with_an_infinity_and_honours_the_scale():
    p = torch.nn.Parameter(torch.ones(5000, device="cuda"))
    optimizer = FusedAdamW([p], lr=1e-2)
    p.grad = torch.full_like(p, float("inf"))
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones_like(p))
    assert float(optimizer.state[p]["step"]) == 0
    p.grad = torch.full_like(p, 8.0)
    optimizer.step(grad_scale=torch.full((), 4.0, device="cuda"), found_inf=torch.zeros((), device="cuda"))
    assert float(optimizer.grad_norm) == pytest.approx(2.0 * 5000**0.5, rel=1e-5)
    assert float(optimizer.state[p]["step"]) == 1


def test_adamw_in_a_graph_reads_the_new_learning_rate():
    p = torch.nn.Parameter(torch.ones(5000, device="cuda"))
    q = torch.nn.Parameter(torch.ones(5000, device="cuda", dtype=torch.float64))
    a, b = FusedAdamW([p], lr=1e-2), torch.optim.AdamW([q], lr=1e-2)
    p.grad = torch.ones_like(p)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    q.grad = torch.ones_like(q)
    b.step()
    for i in range(10):
        lr = 1e-2 / (i + 1)
        a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = lr
        g = torch.randn(5000, device="cuda")
        p.grad.copy_(g)
        q.grad.copy_(g)
        a.refresh()
        graph.replay()
        b.step()
    assert relative_error(p.detach(), q.detach()) < 1e-6
    assert float(a.state[p]["step"]) == 11


def test_adamw_is_captured_with_gradients_made_inside_the_graph():
    p = torch.nn.Parameter(torch.ones(5000, 3, device="cuda"))
    q = torch.nn.Parameter(torch.ones(5000, 3, device="cuda", dtype=torch.float64))
    a, b = FusedAdamW([p], lr=torch.tensor(1e-2, device="cuda")), torch.optim.AdamW([q], lr=1e-2)
    x = torch.randn(5000, 3, device="cuda")

    def step() -> None:
        p.grad = None
        (p * x).square().sum().backward()
        a.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
    for _ in range(6):
        q.grad = None
        (q * x).square().sum().backward()
        b.step()
    assert relative_error(p.detach(), q.detach()) < 1e-6
