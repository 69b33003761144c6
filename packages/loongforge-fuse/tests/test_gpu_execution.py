"""Fused operators on a real GPU: streams, graphs, threads, compilation, tuning, more than 2^31 elements."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from loongforge_fuse import Autotuner, TuneConfig, ops
from loongforge_fuse.ops import tuning
from loongforge_fuse.ops.checking import check_no_fallback, relative_error
from loongforge_fuse.ops.elementwise import elementwise_spec
from loongforge_fuse.patching.forwards import gelu_tanh_mlp
from torch import Tensor
from torch.nn import functional as F

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


def used(name: str) -> int:
    return ops.op_counters()["launches"].get(name, 0)


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def chain(x: Tensor, r: Tensor, w: Tensor, counter: Tensor) -> Tensor:
    y, total = ops.layer_norm_modulate(x, residual=r, weight=w, bias=w)
    z = ops.gelu_tanh(y, p=0.1, key=ops.philox_next(counter))
    return ops.dropout_residual(ops.silu_mul(z, y), total, p=0.2, key=ops.philox_next(counter))


def test_operators_run_in_order_on_a_side_stream():
    x, r, w = randn(4096, 2048), randn(4096, 2048), randn(2048)
    want = chain(x, r, w, ops.philox_counter(1, "cuda"))
    side = torch.cuda.Stream()
    for _ in range(20):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            late = x.clone()
            got = chain(late, r, w, ops.philox_counter(1, "cuda"))
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(got, want)


def test_streams_and_graphs_share_statistics_that_nobody_reads():
    # Without a gradient two streams and a replay write their statistics to the same place at the same time.
    inputs = [randn(8, 512, 2048) for _ in range(3)]
    w = randn(2048)
    want = [ops.layer_norm_modulate(x, weight=w, bias=w) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = ops.layer_norm_modulate(inputs[2], weight=w, bias=w)
    sides = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for side, x in zip(sides[:2], inputs, strict=False):
            with torch.cuda.stream(side):
                found.append(ops.layer_norm_modulate(x, weight=w, bias=w))
        with torch.cuda.stream(sides[2]):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip([*found, replayed], want, strict=True))


def test_a_captured_chain_replays_with_new_masks_and_equals_eager():
    x, r = randn(512, 2048).requires_grad_(), randn(512, 2048)
    w = randn(2048).requires_grad_()
    counter = ops.philox_counter(11, "cuda")
    eager_counter = counter.clone()

    def step(c: Tensor) -> Tensor:
        x.grad = w.grad = None
        out = chain(x, r, w, c)
        out.float().sum().backward()
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(counter)
    torch.cuda.current_stream().wait_stream(side)
    counter.copy_(eager_counter)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(counter)
    grad = x.grad
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append((out.clone(), grad.clone()))
    assert not torch.equal(seen[0][0], seen[1][0])
    for got_out, got_grad in seen:
        want = step(eager_counter)
        assert torch.equal(want, got_out)
        assert torch.equal(x.grad, got_grad)
    assert counter.tolist() == eager_counter.tolist()


def test_first_use_of_a_kernel_inside_a_capture_is_legal(monkeypatch):
    from loongforge_fuse.kernels import launcher
    from loongforge_fuse.ops import elementwise

    monkeypatch.setattr(launcher, "_functions", {})
    monkeypatch.setattr(elementwise, "_gelu_calls", {})
    x = randn(4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.gelu_tanh(x)
    graph.replay()
    assert torch.equal(y, ops.gelu_tanh(x))
    check_no_fallback()


@pytest.fixture(params=["torch's launcher", "ctypes"])
def launch_way(request, monkeypatch):
    """Run a test through both ways of launching."""
    from loongforge_fuse.kernels import driver, launcher
    from loongforge_fuse.ops import elementwise

    if request.param == "ctypes":
        monkeypatch.setattr(driver, "_static_launcher", None)
    # Kernels of their own for this test: the others keep theirs, and their counts.
    monkeypatch.setattr(launcher, "_functions", {})
    monkeypatch.setattr(elementwise, "_gelu_calls", {})
    return request.param


def test_a_thread_without_a_context_can_launch(launch_way):
    x = randn(4096)
    torch.cuda.synchronize()
    results: list[object] = []

    def work() -> None:
        try:
            results.append(torch.ops.loongforge.gelu_tanh(x, 0.0, None))
        except Exception as failure:  # the assertion below shows it
            results.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert isinstance(results[0], Tensor), results
    assert torch.equal(results[0], ops.gelu_tanh(x))
    assert relative_error(results[0], F.gelu(x.double(), approximate="tanh")) < 3e-3


def test_a_refused_launch_raises_and_names_the_kernel():
    from loongforge_fuse.kernels import launcher

    # torch's own launcher skips an empty grid; the driver refuses it.
    function = launcher.function(elementwise_spec("silu_mul_forward", x="bf16", vector=True), 0)
    with pytest.raises(RuntimeError, match=r"silu_mul_forward.* with 0 x 1 blocks failed.*INVALID"):
        function.launch(0, 1, 0, 0, 0, 0, 0)
    torch.cuda.synchronize()


def test_dispatcher_and_fast_path_agree():
    x, w = randn(33, 2048), randn(2048)
    key = ops.philox_next(ops.philox_counter(1, "cuda"))
    assert torch.equal(ops.gelu_tanh(x, p=0.3, key=key), torch.ops.loongforge.gelu_tanh(x, 0.3, key))
    direct = torch.ops.loongforge.norm(x, None, w[None], None, False, False, 33, 1e-6, BF16)[0]
    assert torch.equal(ops.rms_norm(x, weight=w), direct)


def test_opcheck_passes_on_the_gpu():
    x, g = randn(6, 64).requires_grad_(), randn(6, 64).requires_grad_()
    key = ops.philox_next(ops.philox_counter(1, "cuda"))
    library = torch.ops.loongforge
    check = torch.library.opcheck
    check(library.gelu_tanh, (x, 0.2, key))
    check(library.silu_mul, (x, g))
    check(library.dropout_residual, (x, g, 0.2, key))
    check(library.norm, (x, g, randn(64)[None].requires_grad_(), None, False, False, 6, 1e-6, BF16))
    check(library.cast_scale, (x.float().detach(), BF16, 1.0, None))


def test_compiled_code_calls_the_kernels():
    x, w = randn(64, 2048).requires_grad_(), randn(2048)

    def work(a: Tensor) -> Tensor:
        return ops.gelu_tanh(ops.rms_norm(a * 2, weight=w)) + 1

    got = torch.compile(work, fullgraph=True)(x)
    got.float().sum().backward()
    assert used("norm_forward") >= 1
    assert relative_error(got.detach(), work(x.detach()).double()) < 1e-2
    check_no_fallback()


def test_more_than_two_to_the_31_elements():
    count = 2**31 + 24
    x = torch.zeros(count, dtype=BF16, device="cuda")
    x[-9:] = 1.0
    x[2**31 - 4 : 2**31 + 4] = 2.0
    y = ops.gelu_tanh(x)
    want = F.gelu(torch.tensor([1.0, 2.0], dtype=BF16, device="cuda"), approximate="tanh")
    assert torch.equal(y[-9:], want[0].expand(9))
    assert torch.equal(y[2**31 - 4 : 2**31 + 4], want[1].expand(8))
    assert float(y[: 2**31 - 4].max()) == 0.0
    del y, x
    rows = torch.full((2**20 + 3, 2048), 1.0, dtype=BF16, device="cuda")
    rows[-1, :1024] = 3.0
    y = ops.rms_norm(rows)
    assert float(y[0, 0]) == pytest.approx(1.0, abs=1e-2)
    assert float(y[-1, 0]) == pytest.approx(3.0 / 5.0**0.5, abs=1e-2)
    check_no_fallback()


def test_tuning_decides_by_device_time_and_the_decision_is_used(tmp_path):
    job = next(j for j in tuning.jobs() if j.name == "gelu_dropout")
    tuner = Autotuner(TuneConfig(path=tmp_path / "tuned.json", rounds=3))
    try:
        decision = tuning.tune(tuner, [job])[job.name]
        assert set(decision.micros) == set(job.ways)
        assert all(0 < v < float("inf") for v in decision.micros.values())
        key = ops.philox_next(ops.philox_counter(1, "cuda"))
        want = ops.reference.gelu_tanh(x := randn(4099), 0.2, key)
        assert relative_error(ops.gelu_tanh(x, p=0.2, key=key), want.double()) < 3e-3
    finally:
        tuning.variants.reload()
    check_no_fallback()


def test_a_vision_mlp_without_gradients_is_at_least_as_exact_as_the_eager_chain():
    class MLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(1152, 4304), torch.nn.Linear(4304, 1152)

        def forward(self, x):
            return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))

    torch.manual_seed(0)
    wide = MLP().cuda().double()
    mlp = copy.deepcopy(wide).to(torch.bfloat16)
    for p, q in zip(wide.parameters(), mlp.parameters(), strict=True):
        p.data = q.data.double()
    x = torch.randn(3, 324, 1152, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = wide(x.double())
        eager = (mlp(x).double() - expected).abs().mean()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as taken:
            ours = (gelu_tanh_mlp(mlp, x).double() - expected).abs().mean()
    assert ours <= eager * 1.02
    assert not any("gelu_forward" in event.name for event in taken.events())
    assert ops.op_counters()["epilogues"] == {"gelu_tanh": 1}
