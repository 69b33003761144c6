"""Where tests run: graphs on the CPU stand-in and on a GPU where there is one, kernels in the simulator."""

import copy

import pytest
import torch
from loongforge_fuse import GraphConfig, GraphRunner, ops
from loongforge_fuse.testing import TinyVLA, tiny_batch

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Place:
    """A device with the backend that belongs to it, and what tests make there."""

    def __init__(self, device):
        self.device = device
        self.mode = "emulated" if device == "cpu" else "auto"

    def to(self, batch):
        return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    def drawn(self, model, seed, samples=4, **kwargs):
        generator = torch.Generator().manual_seed(seed)
        return self.to(model.draw(tiny_batch(samples, seed=seed, **kwargs), generator=generator))

    def pair(self, kind=TinyVLA, **kwargs):
        torch.manual_seed(0)
        model = kind(**kwargs).to(self.device)
        return model, copy.deepcopy(model)

    def config(self, **config):
        return GraphConfig(**{"mode": self.mode, "warmup_steps": 1, **config})

    def runner(self, model, **config):
        return GraphRunner(model, self.config(**config))

    def fused(self):
        return {"fused": True, "capturable": True} if self.device == "cuda" else {}

    def get_rng(self):
        return torch.cuda.get_rng_state() if self.device == "cuda" else torch.get_rng_state()

    def set_rng(self, state):
        if self.device == "cuda":
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)

    @staticmethod
    def same_gradients(ours, theirs):
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7, msg=name)

    @staticmethod
    def same_weights(ours, theirs):
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=name)

    @staticmethod
    def plain(model, batch):
        """Run one batch without the package and return its loss."""
        out = model(batch)
        (out["loss_sum"].sum() / out["loss_count"].sum()).backward()
        return out["loss"].item()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def place(request):
    """Run the test on the CPU stand-in and, where there is one, on a GPU."""
    before = torch.get_float32_matmul_precision()
    if request.param == "cuda":
        torch.set_float32_matmul_precision("highest")
    yield Place(request.param)
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def poisoned():
    """Fill memory that torch.empty returns with NaN, so that what a kernel leaves unwritten shows."""
    torch.manual_seed(0)
    ops.reset_op_counters()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launched():
    """Send launches to the simulator; the list of kernels that ran."""
    # Here, because the simulator needs numba, and most tests do not.
    from loongforge_fuse.kernels.simulator.operators import simulated_gpu

    with simulated_gpu() as log:
        yield log
    assert not ops.op_counters()["fallbacks"], ops.op_counters()["fallbacks"]
