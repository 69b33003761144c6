"""When a matrix product may write the activation of an MLP itself: on a stand-in for tensors of a GPU."""

import pytest
import torch
from loongforge_fuse import ops
from loongforge_fuse.patching.forwards import gelu_tanh_mlp
from torch import nn
from torch.nn import functional as F


class OnGpu(torch.Tensor):
    """A CPU tensor that says that it lies on a GPU."""

    is_cuda = True


def mlp(dtype=torch.bfloat16):
    torch.manual_seed(0)
    module = nn.Module()
    module.fc1, module.fc2 = nn.Linear(8, 16, dtype=dtype), nn.Linear(16, 8, dtype=dtype)
    return module


@pytest.mark.parametrize(
    ("change", "used"),
    [
        (lambda m: m, True),
        (lambda m: m.fc1.register_forward_hook(lambda *a: None), False),
        (lambda m: setattr(m.fc1, "bias", None), False),
        (lambda m: m.fc1.register_full_backward_hook(lambda *a: None), False),
    ],
)
def test_only_a_plain_layer_writes_its_activation(monkeypatch, change, used):
    module = mlp()
    change(module)
    monkeypatch.setattr(ops, "gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))
    ops.reset_op_counters()
    x = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        found = gelu_tanh_mlp(module, x.as_subclass(OnGpu)).as_subclass(torch.Tensor)
        expected = module.fc2(F.gelu(module.fc1(x), approximate="tanh"))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert ops.op_counters()["epilogues"] == ({"gelu_tanh": 1} if used else {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_gradients_or_in_full_precision_the_kernel_does_it(monkeypatch, dtype):
    monkeypatch.setattr(ops, "gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))
    ops.reset_op_counters()
    x = torch.randn(2, 3, 8, dtype=dtype)
    with torch.set_grad_enabled(dtype == torch.bfloat16):
        gelu_tanh_mlp(mlp(dtype), x.as_subclass(OnGpu))
    assert ops.op_counters()["epilogues"] == {}
