"""Float8 on a real GPU: rows against the reference bit for bit, layers against float32 products, graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from loongforge_fuse import PrecisionPolicy, apply_fused_ops, apply_precision, ops
from loongforge_fuse.ops import quantise_plan, reference, variants
from loongforge_fuse.ops.checking import check_no_fallback
from loongforge_fuse.precision.fp8 import Float8FrozenLinear
from torch import Tensor, nn
from torch.nn import functional as F

OLD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or OLD, reason="needs a GPU of capability 8.9"),
    pytest.mark.timeout(600),
]
BF16, F8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def counted():
    """Start every test with empty counters; no operator may fall back."""
    ops.reset_op_counters()
    torch.manual_seed(0)
    yield
    check_no_fallback()


def used(name: str) -> int:
    return ops.op_counters()["launches"].get(name, 0)


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def rows_of(rows: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of magnitudes from tiny to large, with peculiar ones in front."""
    x = (torch.randn(rows, width) * torch.exp2(torch.randint(-30, 14, (rows, 1)).float())).to(dtype)
    x[0] = 0.0
    x[1, 3], x[2, 1], x[3, 0] = float("nan"), float("inf"), float("-inf")
    x[4] = torch.linspace(-448, 448, width).to(dtype)
    x[5, 2:4] = torch.tensor([float("nan"), float("-inf")])
    x[6] = torch.finfo(dtype).max
    return x.cuda()


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Bit for bit, a NaN like a NaN."""
    mine, theirs = (t[0].view(torch.uint8).cpu() for t in (got, want))
    assert torch.equal(mine, theirs), f"{int((mine != theirs).sum())} of {mine.numel()} codes differ"
    mine, theirs = got[1].cpu(), want[1].cpu()
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine.nan_to_num(1.0), theirs.nan_to_num(1.0))


CASES = [
    *((w, "none", BF16, n) for w in (1152, 2048, 4304, 4608, 6144) for n in (7, 1001)),
    *((w, "none", dtype, 77) for w in (16, 48, 128, 512) for dtype in (BF16, torch.float16, torch.float32)),
]


@pytest.mark.parametrize(("width", "activation", "dtype", "rows"), CASES)
def test_rows_equal_the_reference_bit_for_bit(width, activation, dtype, rows):
    x = rows_of(rows, width, dtype)
    got = ops.quantise_rows(x, activation=activation)
    same(got, reference.quantise_rows(x.cpu(), None, activation))
    same(got, reference.quantise_rows(x, None, activation))  # torch's own conversion on this GPU
    assert used("quantise_rows") == 1


def test_every_bf16_number_is_converted_as_on_the_cpu():
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16)
    # With 448 in its row a number is multiplied by one; larger ones and NaN make rows of their own.
    x = torch.cat(
        [torch.full((65536, 1), 448.0, dtype=BF16), x[:, None], torch.zeros(65536, 14, dtype=BF16)], 1
    )
    same(ops.quantise_rows(x.cuda()), reference.quantise_rows(x, None, "none"))


def test_half_way_cases_and_their_neighbours_are_converted_as_on_the_cpu():
    codes = torch.arange(127, dtype=torch.uint8).view(F8).float()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e9))])
    x = torch.cat([x, -x, torch.full((512 - 2 * x.numel() % 512,), 448.0)])
    x = x[: x.numel() // 128 * 128].view(-1, 128)
    x[:, 0] = 448.0
    same(ops.quantise_rows(x.cuda()), reference.quantise_rows(x, None, "none"))


def test_the_division_is_rounded_for_a_million_maxima():
    x = torch.randn(2**20, 16) * torch.exp2(torch.randint(-44, 120, (2**20, 1)).float())
    same(ops.quantise_rows(x.cuda()), reference.quantise_rows(x, None, "none"))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 512])
def test_small_rows_with_activations_equal_two_kernels(width, dtype):
    x, up = rows_of(33, width, dtype), randn(33, width, dtype=dtype)
    same(ops.quantise_rows(x, activation="gelu_tanh"), ops.quantise_rows(ops.gelu_tanh(x)))
    same(ops.quantise_rows(x, up=up, activation="silu_mul"), ops.quantise_rows(ops.silu_mul(x, up)))


WAYS = [
    (width, activation, way)
    for width, activation in ((1152, "none"), (2048, "none"), (4304, "gelu_tanh"), (6144, "silu_mul"))
    for way in quantise_plan.ways_of(width, activation)
]


@pytest.mark.parametrize(("width", "activation", "way"), WAYS)
def test_every_plan_equals_two_kernels_bit_for_bit(width, activation, way):
    x = rows_of(3001, width)
    up = randn(3001, width) if activation == "silu_mul" else None
    activated = {
        "none": lambda: x,
        "gelu_tanh": lambda: ops.gelu_tanh(x),
        "silu_mul": lambda: ops.silu_mul(x, up),
    }
    with variants.forced(quantise_plan.job_of(width, activation), way):
        got = ops.quantise_rows(x, up=up, activation=activation)
    same(got, ops.quantise_rows(activated[activation]()))


def test_views_dispatch_streams_and_graphs_give_the_same_rows():
    wide = randn(300, 2, 2048)
    x = wide[:, 1]
    want = reference.quantise_rows(x.cpu(), None, "none")
    same(ops.quantise_rows(x), want)
    same(torch.ops.loongforge.quantise_rows(x, None, "none"), want)
    assert ops.quantise_rows(x[:0])[0].shape == (0, 2048)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000)
        got = ops.quantise_rows(x.clone())
    torch.cuda.current_stream().wait_stream(side)
    same(got, want)
    static = x.contiguous()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.quantise_rows(static)
    other = randn(300, 2048)
    static.copy_(other)
    graph.replay()
    same(got, reference.quantise_rows(other.cpu(), None, "none"))


class VisionMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(1152, 4304), nn.Linear(4304, 1152)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class LanguageMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(2048, 6144, bias=False), nn.Linear(2048, 6144, bias=False)
        self.down_proj = nn.Linear(6144, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class VisionAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 16
        self.k_proj, self.v_proj, self.q_proj = (nn.Linear(1152, 1152) for _ in range(3))
        self.out_proj = nn.Linear(1152, 1152)

    def forward(self, x: Tensor) -> Tensor:
        n, p, d = x.shape
        q, k, v = (f(x).view(n, p, 16, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, p, d))


# Width, launches that quantise, and roundings to float8 on the way of a number: inputs and weights of each
# layer, of both branches where two products meet.
PARTS = {VisionMLP: (1152, 2, 4), LanguageMLP: (2048, 2, 6), VisionAttention: (1152, 2, 4)}


class SameNumbers(nn.Module):
    """A float8 layer in float64: its codes and scales, exact products, results rounded to bf16."""

    def __init__(self, layer: Float8FrozenLinear) -> None:
        super().__init__()
        self.bias, self.wide = layer.bias, layer.weight_float8.double() * layer.weight_scale.double()

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = reference.quantise_rows(x.to(BF16), None, "none")
        product = (rows.double() * scale.double()) @ self.wide.t()
        product = product if self.bias is None else product + self.bias.double()
        return product.view(*x.shape[:-1], -1).to(BF16).double()


def gap(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("first", ["fused", "float8"])
@pytest.mark.parametrize("kind", PARTS)
def test_fused_blocks_in_float8_are_exact_to_its_rounding_and_launch_once_an_input(kind, first):
    width, launches, roundings = PARTS[kind]
    model = kind().to("cuda", BF16).requires_grad_(False)
    exact, same_numbers = copy.deepcopy(model).double(), copy.deepcopy(model)
    for name, linear in list(same_numbers.named_children()):
        setattr(same_numbers, name, SameNumbers(Float8FrozenLinear(linear)))
    steps = [lambda: apply_fused_ops(model), lambda: apply_precision(model, PrecisionPolicy.float8_frozen())]
    for step in steps if first == "fused" else reversed(steps):
        step()
    assert all(isinstance(child, Float8FrozenLinear) for child in model.children())
    x = randn(4, 81, width)
    ops.reset_op_counters()
    got, want, equal = model(x), exact(x.double()), same_numbers(x.double())
    assert used("quantise_rows") == launches
    assert used("gelu_forward") == used("silu_mul_forward") == 0
    assert got.dtype == BF16
    # A number with three fraction bits is off by half a step of at most 1/8 of it, evenly distributed, and
    # roundings add in squares. That error float8 has with exact products too.
    own = gap(equal, want)
    assert 0.0 < own < roundings**0.5 / 8 / 12**0.5
    # Sums in another order and roundings to bf16 move a few codes to their neighbours; in squares a third
    # of the error is a twentieth of it.
    assert gap(got, equal) < own / 3
    assert gap(got, want) < 1.06 * own
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(x)
    other = randn(4, 81, width)
    x.copy_(other)
    graph.replay()
    assert torch.equal(captured, model(other))


def test_a_layer_equals_its_reference_and_moves_between_devices():
    # Float32 rows of this width have a kernel that is built ahead of time.
    linear = nn.Linear(512, 1152).to(BF16).requires_grad_(False)
    float8 = Float8FrozenLinear(linear)
    x = torch.randn(3, 50, 512).to(BF16)
    want = float8(x)
    code = float8.weight_float8.view(torch.uint8).clone()
    float8.cuda()
    assert torch.equal(float8.weight_float8.view(torch.uint8).cpu(), code)
    got = float8(x.cuda())
    assert got.dtype == BF16
    assert float((got.cpu().float() - want.float()).norm() / want.float().norm()) < 1e-2
    assert float8(x.cuda()[:0]).shape == (0, 50, 1152)
    with torch.autocast("cuda", dtype=BF16):
        assert float8(x.cuda().float()).dtype == BF16
    assert float8(x.cuda().float()).dtype == torch.float32


def test_compiled_float8_layers_equal_eager_ones():
    model = VisionMLP().to("cuda", BF16).requires_grad_(False)
    apply_precision(model, PrecisionPolicy.float8_frozen())
    apply_fused_ops(model)
    x = randn(2, 81, 1152)
    want = model(x)
    compiled = torch.compile(model, dynamic=False)
    assert float((compiled(x).float() - want.float()).norm() / want.float().norm()) < 1e-3
