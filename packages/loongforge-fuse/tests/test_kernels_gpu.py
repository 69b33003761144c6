"""Fused operators on a real GPU: numerics against float64, streams, graphs, odd tensors, random shapes."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from loongforge_fuse import ops
from loongforge_fuse.ops import reference
from loongforge_fuse.ops.adamw import FusedAdamW
from loongforge_fuse.ops.elementwise import elementwise_spec
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


def no_fallback() -> None:
    assert not ops.op_counters()["fallbacks"], ops.op_counters()["fallbacks"]


def error(value: Tensor, truth: Tensor) -> float:
    """Root mean square error relative to the truth's root mean square."""
    d = (value.double() - truth).square().mean().sqrt()
    return float(d / truth.square().mean().sqrt().clamp_min(1e-30))


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def compare(ours, eager, inputs: list[Tensor], slack: float = 1.02) -> None:
    """Forward and gradients: error against float64 no larger than the eager chain's in the same type."""

    def run(function, arguments):
        leaves = [a.detach().clone().requires_grad_() for a in arguments]
        out = function(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        gen = torch.Generator("cuda").manual_seed(1)
        seeds = [torch.randn(o.shape, device="cuda", generator=gen) for o in outs]
        torch.autograd.backward(outs, [s.to(o.dtype) for s, o in zip(seeds, outs, strict=True)])
        return [o.detach() for o in outs] + [leaf.grad for leaf in leaves]

    truth = run(eager, [a.double() for a in inputs])
    mine, stock = run(ours, inputs), run(eager, inputs)
    for i, (m, s, t) in enumerate(zip(mine, stock, truth, strict=True)):
        a, b = error(m, t), error(s, t)
        assert a <= b * slack + 1e-7, f"result {i}: our error {a:.3e}, eager {b:.3e}"


def eager_modulate(x, r, scale, shift):
    total = x + r
    y = F.layer_norm(total, (x.shape[-1],), eps=1e-5)
    return y * (1 + scale[:, None]) + shift[:, None], total


def eager_rms(x, r, w):
    total = x + r
    wide = total if total.dtype == torch.float64 else total.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return w * y.to(x.dtype), total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_elementwise_operators_are_as_exact_as_eager(dtype):
    x, g = randn(64, 1536, dtype=dtype), randn(64, 1536, dtype=dtype)
    compare(ops.gelu_tanh, lambda a: F.gelu(a, approximate="tanh"), [x])
    compare(ops.silu_mul, lambda a, b: F.silu(a) * b, [x, g])
    no_fallback()


@pytest.mark.parametrize("width", [48, 1536, 2048])
def test_layer_norm_modulate_is_as_exact_as_eager(width):
    x, r = randn(16, 51, width), randn(16, 51, width)
    scale, shift = randn(16, width), randn(16, width)
    compare(
        lambda a, b, c, d: ops.layer_norm_modulate(a, residual=b, scale=c, shift=d),
        eager_modulate,
        [x, r, scale, shift],
    )
    no_fallback()
    assert used("norm_backward") == 1


@pytest.mark.parametrize("width", [128, 1152, 1536, 2048, 4608])
def test_layer_norm_with_weights_is_as_exact_as_eager(width):
    x, w, b = randn(700, width), randn(width), randn(width)
    compare(
        lambda a, c, d: ops.layer_norm_modulate(a, weight=c, bias=d),
        lambda a, c, d: F.layer_norm(a, (width,), c, d),
        [x, w, b],
    )
    no_fallback()


@pytest.mark.parametrize("width", [48, 128, 2048])
def test_rms_norm_is_as_exact_as_eager(width):
    compare(
        lambda a, b, c: ops.rms_norm(a, residual=b, weight=c),
        eager_rms,
        [randn(4, 220, width), randn(4, 220, width), randn(width)],
    )
    no_fallback()


def eager_head_norm_rope(x, w, cos, sin):
    wide = x if x.dtype == torch.float64 else x.float()
    y = w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    low, high = y.chunk(2, -1)
    return y * cos[:, None].to(x.dtype) + torch.cat((-high, low), -1) * sin[:, None].to(x.dtype)


@pytest.mark.parametrize("width", [16, 128])
def test_head_norm_rope_is_as_exact_as_eager(width):
    angles = torch.rand(220, width // 2, device="cuda") * 200
    angles = torch.cat((angles, angles), -1)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    compare(
        lambda a, w: ops.head_norm_rope(a, w, cos, sin),
        lambda a, w: eager_head_norm_rope(a, w, cos, sin),
        [randn(4, 220, 16, width), randn(width)],
    )
    no_fallback()


def test_autocast_mixture_takes_float32_rows_and_returns_half():
    x, r, w = randn(8, 51, 1536, dtype=torch.float32), randn(8, 51, 1536), randn(1536, dtype=torch.float32)
    b = randn(1536, dtype=torch.float32)
    y, total = ops.layer_norm_modulate(x, residual=r, weight=w, bias=b, dtype=BF16)
    truth = F.layer_norm((x + r).double(), (1536,), w.double(), b.double())
    assert y.dtype == BF16
    assert total.dtype == torch.float32
    assert error(y, truth) < 2.5e-3
    no_fallback()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 7, 8, 1000, 4096, 100003])
def test_dropout_mask_equals_the_cpu_stream(dtype, count):
    x, r = randn(count, dtype=dtype), randn(count, dtype=dtype)
    counter = ops.philox_counter(2**40 + 5, "cuda")
    ops.philox_next(counter, steps=2**33)
    key = ops.philox_next(counter)
    y = ops.dropout_residual(x, r, p=0.2, key=key)
    truth = reference.dropout_residual(x.cpu(), r.cpu(), 0.2, key.cpu())
    assert torch.equal(y.cpu(), truth)
    assert counter.tolist() == [2**40 + 5, 2**33 + 1]
    no_fallback()


def test_dropout_gradient_uses_the_same_mask():
    x = torch.ones(10007, device="cuda", requires_grad=True)
    key = ops.philox_next(ops.philox_counter(3, "cuda"))
    y = ops.dropout_residual(x, p=0.4, key=key)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert abs(float((y == 0).float().mean()) - 0.4) < 0.02


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_cast_scale_equals_torch_bit_for_bit_and_counts_bad_values(source, target):
    x = randn(100003, dtype=source)
    x[17], x[500], x[99999] = float("inf"), float("nan"), 60000.0
    y, bad = ops.cast_scale(x, target, factor=2.0)
    truth = (x.float() * 2.0).to(target)
    assert torch.equal(y.view(torch.uint8), truth.view(torch.uint8)) or torch.equal(
        torch.nan_to_num(y.float(), 1.0), torch.nan_to_num(truth.float(), 1.0)
    )
    assert bad.item() == int((~torch.isfinite(truth)).sum())
    scale = torch.full((), 0.5, device="cuda")
    assert torch.equal(
        torch.nan_to_num(ops.cast_scale(x, target, scale=scale)[0].float()),
        torch.nan_to_num((x.float() * 0.5).to(target).float()),
    )
    no_fallback()


@pytest.mark.parametrize("size", [(252, 252), (256, 340), (4, 1), (16, 16), (480, 640)])
def test_image_to_half_matches_the_reference(size):
    image = torch.randint(0, 256, (3, *size, 3), dtype=torch.uint8, device="cuda")
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    for dtype in (BF16, torch.float16, torch.float32):
        y = ops.image_to_half(image, mean, std, dtype)
        truth = (
            (image.double() / 255 - torch.tensor(mean, device="cuda")) / torch.tensor(std, device="cuda")
        ).permute(0, 3, 1, 2)
        assert y.shape == truth.shape
        assert (
            float((y.double() - truth).abs().max())
            < {BF16: 1.1e-2, torch.float16: 1.3e-3, torch.float32: 2e-6}[dtype]
        )
    no_fallback()


@pytest.mark.parametrize("out", [(24, 32), (24, 33)])
def test_mixed_images_crop_mirror_and_pad_like_the_reference(out):
    sizes = [(28, 42), (14, 28), (31, 17)]
    data = torch.randint(0, 256, (sum(h * w * 3 for h, w in sizes),), dtype=torch.uint8)
    table = ops.image_table(
        sizes, crops=[(1, 2, 20, 30), (0, 0, 14, 28), (5, 3, 22, 9)], flips=[True, False, True]
    )
    y = ops.image_table_to_half(data.cuda(), table.cuda(), out, pad=7.0)
    truth = ops.image_table_to_half(data, table, out, pad=7.0)
    assert float((y.cpu().float() - truth.float()).abs().max()) <= 2**-8
    no_fallback()


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("last", [True, False])
def test_unfold_of_mixed_sizes_matches_the_reference_and_its_backward(patch, last):
    sizes = [(2 * patch, 5 * patch), (patch, 3 * patch), (4 * patch, 4 * patch)]
    count = sum(h * w * 3 for h, w in sizes)
    mask = torch.rand(10 + 3 + 16) > 0.3
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8)
    table = ops.patch_table(sizes, patch, planar=False)
    other = ops.patch_table(sizes, patch, planar=True)
    rows = ops.masked_unfold(raw.cuda(), other.cuda(), patch=patch, last=last, planar=True)
    truth = ops.masked_unfold(raw, other, patch=patch, last=last, planar=True)
    assert float((rows.cpu().float() - truth.float()).abs().max()) <= 2**-8
    rows = ops.masked_unfold(raw.cuda(), table.cuda(), patch=patch, mask=mask.cuda(), last=last)
    truth = ops.masked_unfold(raw, table, patch=patch, mask=mask, last=last)
    assert float((rows.cpu().float() - truth.float()).abs().max()) <= 2**-8
    planar = ops.patch_table(sizes, patch, planar=True)
    x = torch.randn(count).to(BF16)
    a, b = x.cuda().requires_grad_(), x.clone().requires_grad_()
    got = ops.masked_unfold(a, planar.cuda(), patch=patch, mask=mask.cuda(), last=last)
    want = ops.masked_unfold(b, planar, patch=patch, mask=mask, last=last)
    assert torch.equal(got.cpu(), want)
    seed = torch.randn(want.shape).to(BF16)
    got.backward(seed.cuda())
    want.backward(seed)
    assert torch.equal(a.grad.cpu(), b.grad)
    no_fallback()


def test_patch_embedding_equals_the_convolution():
    images = torch.randn(2, 3, 28, 42, device="cuda")
    w, b = torch.randn(64, 3, 14, 14, device="cuda"), torch.randn(64, device="cuda")
    table = ops.patch_table([(28, 42)] * 2, 14, planar=True).cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    got = ops.masked_patch_embed(images.reshape(-1), table, w, b, patch=14)
    want = (
        F.conv2d(images.double(), w.double(), b.double(), stride=14)
        .flatten(2)
        .transpose(1, 2)
        .reshape(-1, 64)
    )
    assert error(got, want) < 1e-5


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
        assert error(p.detach(), q.detach()) < allowed
    no_fallback()


def test_adamw_with_masters_writes_the_rounded_master():
    p = torch.nn.Parameter(randn(1000, 77))
    optimizer = FusedAdamW([p], lr=1e-2, master_weights=True, state_dtype=torch.float32)
    for _ in range(5):
        p.grad = randn(1000, 77)
        optimizer.step()
    master = optimizer.state[p]["master"]
    assert torch.equal(p.detach(), master.to(BF16))
    no_fallback()


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
    assert error(p.detach(), q.detach()) < 1e-6
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
    assert error(p.detach(), q.detach()) < 1e-6


@pytest.mark.parametrize("rows", [1, 7, 816, 5000])
@pytest.mark.parametrize("width", [8, 64, 1536, 6144, 4304])
def test_linear_gives_the_bias_its_gradient(rows, width):
    x, w, b = randn(rows, 64), randn(width, 64), randn(width)
    compare(ops.linear, F.linear, [x, w, b])
    assert used("bias_sums") == 1
    no_fallback()


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
    no_fallback()


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
    assert error(results[0], F.gelu(x.double(), approximate="tanh")) < 3e-3


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
    assert error(got.detach(), work(x.detach()).double()) < 1e-2
    no_fallback()


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
    no_fallback()


def odd(shape: tuple[int, ...], dtype: torch.dtype, kind: int) -> Tensor:
    """A tensor of this shape that is contiguous, misaligned, transposed, strided or expanded."""
    if kind == 1:
        flat = torch.randn(int(torch.tensor(shape).prod()) + 3, device="cuda").to(dtype)
        return flat[3:].view(shape)
    if kind == 2:
        return torch.randn(*shape[::-1], device="cuda").to(dtype).permute(*range(len(shape) - 1, -1, -1))
    if kind == 3:
        return torch.randn(*shape[:-1], 2 * shape[-1], device="cuda").to(dtype)[..., ::2]
    if kind == 4 and len(shape) > 1:
        return torch.randn(1, *shape[1:], device="cuda").to(dtype).expand(shape)
    return torch.randn(*shape, device="cuda").to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, label: str) -> None:
    tolerance = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}[dtype]
    assert got.shape == want.shape, label
    if got.numel():
        gap = (got.float() - want.float()).abs()
        assert bool((gap <= tolerance * (want.float().abs() + 1.0)).all()), f"{label}: {float(gap.max())}"


def test_ten_thousand_random_shapes_strides_and_alignments():
    rng = random.Random(7)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    key = ops.philox_next(ops.philox_counter(9, "cuda"))
    for case in range(10_000):
        dtype = rng.choice(dtypes)
        dims = rng.randint(1, 3)
        shape = tuple(
            rng.choice((0, 1, 2, 3, 5, 8, 17, 33)) if rng.random() < 0.03 else rng.randint(1, 24)
            for _ in range(dims)
        )
        kind = rng.randint(0, 4)
        which = rng.randint(0, 5)
        label = f"case {case}: {which} {shape} {dtype} kind {kind}"
        x = odd(shape, dtype, kind)
        if which == 0:
            close(ops.gelu_tanh(x), reference.gelu_tanh(x, 0.0, None), dtype, label)
        elif which == 1:
            g = odd(shape, dtype, rng.randint(0, 4))
            close(ops.silu_mul(x, g), reference.silu_mul(x, g), dtype, label)
        elif which == 2:
            r = odd(shape, dtype, rng.randint(0, 4))
            close(
                ops.dropout_residual(x, r, p=0.3, key=key),
                reference.dropout_residual(x, r, 0.3, key),
                dtype,
                label,
            )
        elif which == 3:
            target = rng.choice(dtypes)
            close(
                ops.cast_scale(x, target, factor=0.5)[0],
                reference.cast_scale(x, target, 0.5, None)[0],
                target,
                label,
            )
        else:
            width = (
                rng.choice((48, 96, 2048, 20, 7))
                if dtype == torch.float16
                else rng.choice((48, 96, 128, 2048, 20, 7))
            )
            shape = (rng.randint(1, 5), rng.randint(1, 9), width)
            x = odd(shape, dtype, kind)
            r = odd(shape, dtype, rng.randint(0, 4))
            w = odd((width,), dtype, rng.choice((0, 1, 3)))
            total = (x.float() + r.float()).to(dtype).float()
            if which == 4:
                y, _ = ops.rms_norm(x, residual=r, weight=w)
                want = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * w.float()
            else:
                y, _ = ops.layer_norm_modulate(x, residual=r, weight=w, bias=w)
                want = F.layer_norm(total, (width,), w.float(), w.float())
            close(y, want.to(dtype), dtype, label)
    counters = ops.op_counters()
    assert sum(counters["launches"].values()) > 6_000, counters
    allowed = ("multiple of 8", "16-byte")
    assert all(any(a in reason for a in allowed) for reason in counters["fallbacks"]), counters["fallbacks"]
