"""One GPU: a group of one rank through NCCL exercises streams, capture and the control word."""

import pytest
import torch
from loongforge_comm import GradientScheduler, LinkModel, SchedulerConfig
from loongforge_comm.testing import run_ranks, tanh_mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def alone(rank: int, world_size: int) -> dict[str, float]:
    torch.cuda.set_device(0)
    model = tanh_mlp(width=64).cuda()
    reference = tanh_mlp(width=64).cuda()
    config = SchedulerConfig(allow_single_rank=True, heartbeat_interval_s=0.0, buffers="off", warmup_steps=2)
    link = LinkModel.from_alpha_beta(0.0, 1.0, world_size=1)
    x = torch.randn(8, 64, device="cuda")
    gaps = {}
    with GradientScheduler(model, config=config, link=link) as scheduler:
        for step in range(5):
            for m in (model, reference):
                m.zero_grad()
                m(x).square().sum().backward()
            gaps["eager"] = gap(model, reference)
            if step == 3:
                scheduler.switch_strategy("simple")
            scheduler.step_end(step)
        scheduler.attach_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for p in model.parameters():
                p.grad.zero_()
            model(x).square().sum().backward()
        graph.replay()
        torch.cuda.synchronize()
        gaps["captured"] = gap(model, reference)
        gaps["captured_backwards"] = float(scheduler.stats()["captured_backwards"])
        scheduler.reduce_now()
        gaps["reduced_again"] = gap(model, reference)
    return gaps


def gap(left: torch.nn.Module, right: torch.nn.Module) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def test_eager_and_captured_gradients_equal_plain_backward() -> None:
    (result,) = run_ranks(alone, 1, timeout_s=120.0, backend="nccl")
    assert result is not None
    assert result["eager"] == 0.0
    assert result["captured"] < 1e-5
    assert result["captured_backwards"] == 1.0
    assert result["reduced_again"] < 1e-5
