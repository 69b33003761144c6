"""Whole-model compilation is seen at run time; compilation by block keeps the overlap."""

import pytest
import torch
from loongforge_comm import GradientScheduler, LinkModel, SchedulerConfig
from loongforge_comm.testing import run_ranks, seeded_batch, tanh_mlp


def compiled(rank: int, world_size: int) -> dict[str, object]:
    out: dict[str, object] = {}
    for kind in ("whole", "blocks"):
        torch._dynamo.reset()
        model = tanh_mlp(width=256, depth=8)
        config = SchedulerConfig(heartbeat_interval_s=0.0, warmup_steps=0)
        with GradientScheduler(model, config=config, link=LinkModel.from_alpha_beta(0.1, 1.0)) as scheduler:
            call = model
            if kind == "whole":
                call = torch.compile(model, backend="aot_eager")
            else:
                for block in model:
                    block.compile(backend="aot_eager")
            for step in range(6):
                call(seeded_batch(rank, step, 256).repeat(600, 1)).square().sum().backward()
                model.zero_grad()
                scheduler.step_end(step)
            out[kind] = scheduler.stats()["whole_model_compile_suspected"]
            out[f"{kind}_share"] = scheduler.stats()["first_gradient_share"]
    return out


@pytest.mark.slow
def test_whole_model_compilation_is_reported_and_regional_is_not() -> None:
    for result in run_ranks(compiled, 2, timeout_s=170.0):
        assert result is not None
        assert result["whole"] is True, result
        assert result["blocks"] is False, result
