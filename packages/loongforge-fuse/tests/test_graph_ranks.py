"""Graphs beside collectives: gradients reduced after the replay, and an exit that never hangs."""

import os
import subprocess
import sys
import time

import pytest
import torch

WORKER = """
import os, sys, datetime, torch, torch.distributed as dist
from loongforge_fuse import FusionConfig, GraphConfig, GraphRunner, MicroBatchFuser
from loongforge_fuse.testing import TinyVLA, tiny_batch
rank, mode, cuda = int(os.environ["RANK"]), sys.argv[1], torch.cuda.device_count() >= 2
device = f"cuda:{rank}" if cuda else "cpu"
if cuda:
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=60))
torch.manual_seed(0)
model, whole = TinyVLA().to(device), TinyVLA().to(device)
whole.load_state_dict(model.state_dict())
def batch(step, r):
    generator = torch.Generator().manual_seed(step)
    made = model.draw(tiny_batch(2, seed=10 * step + r, valid=(4, 4)), generator=generator)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}
runner = GraphRunner(model, GraphConfig(mode="auto" if cuda else "emulated", warmup_steps=1))
fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=1), executor=runner)
pending = None
try:
    for step in range(6):
        model.zero_grad(set_to_none=False)
        # Work in flight when a pass is captured must not disturb it.
        noise = torch.ones(1000, device=device)
        pending = dist.all_reduce(noise, async_op=True)
        outcome = fuser.run([batch(step, rank)], drawn=True)
        pending.wait()
        assert not outcome.reduced
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= 2
        if mode == "raise" and step == 4:
            raise KeyboardInterrupt
    whole.zero_grad()
    MicroBatchFuser(whole, FusionConfig(fusion_batch_size=2)).run([batch(5, 0), batch(5, 1)], drawn=True)
    for (n, p), q in zip(model.named_parameters(), whole.parameters()):
        if p.grad is not None:
            assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max(), n
    assert outcome.graph
finally:
    runner.release()
    dist.destroy_process_group()
print("done", rank, flush=True)
"""


@pytest.mark.parametrize("mode", ["finish", "raise"])
def test_two_ranks_reduce_after_replays_and_exit_in_time_faults_f10_f11(mode, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    port = str(29500 + os.getpid() % 400 + (mode == "raise"))
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    environment |= {"OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), mode],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=150) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert time.monotonic() - started < 150
    for process, (out, err) in zip(ranks, outputs, strict=True):
        if mode == "finish":
            assert process.returncode == 0, err
            assert "done" in out
        else:
            assert process.returncode != 0
            assert "KeyboardInterrupt" in err
    assert torch.distributed.is_available()
