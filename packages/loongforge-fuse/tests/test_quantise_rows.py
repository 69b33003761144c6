"""Rows in e4m3: the reference, the operator, and the kernel's own source in the simulator."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_fuse import ops
from loongforge_fuse.kernels.simulator import intrinsics
from loongforge_fuse.kernels.simulator.operators import simulated_gpu
from loongforge_fuse.ops import quantise_plan, reference, variants
from torch import Tensor
from torch.library import opcheck

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


pytestmark = pytest.mark.usefixtures("poisoned")


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """Bit for bit, a NaN like a NaN."""
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1].isnan(), want[1].isnan())
    assert torch.equal(got[1].nan_to_num(1.0), want[1].nan_to_num(1.0))


def rows_of(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of magnitudes from tiny to large, with peculiar ones in front."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 14, (*shape[:-1], 1)).float())
    x = x.to(dtype)
    rows = x.view(-1, shape[-1])
    rows[0] = 0.0
    rows[1, 3], rows[2, 1], rows[3, 0] = float("nan"), float("inf"), float("-inf")
    rows[4] = torch.linspace(-448, 448, shape[-1]).to(dtype)
    rows[5, 2:4] = torch.tensor([float("nan"), float("-inf")])
    rows[6] = torch.finfo(dtype).max
    return x


def old_formula(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x.float() / scale).clamp(-448, 448).to(F8), scale


@pytest.mark.parametrize("part", ["every bf16", "random", "around codes"])
def test_the_simulated_conversion_equals_torch(part):
    if part == "every bf16":
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16).float()
    elif part == "random":
        x = torch.randn(2**18) * torch.exp2(torch.randint(-14, 12, (2**18,)).float())
    else:
        codes = torch.arange(127, dtype=torch.uint8).view(F8).float()
        middles = (codes[1:] + codes[:-1]) / 2
        near = torch.stack([codes[1:], middles])
        x = torch.cat([near, near.nextafter(torch.tensor(0.0)), near.nextafter(torch.tensor(1e9))]).flatten()
        x = torch.cat([x, -x, torch.tensor([0.0, -0.0, 449.0, 464.0, 465.0, 1e30, float("inf"), 1e-45])])
    want = x.masked_fill(x.isnan(), float("nan")).clamp(-448, 448).to(F8).view(torch.uint8)
    words = intrinsics.narrowed(x.tolist(), "e4m3")
    assert np.array_equal(np.array(words, dtype=np.uint32).view(np.uint8), want.numpy())


def test_the_steps_of_the_division_round_as_a_division_does():
    # What the intrinsic `quotient` does with a / b, for a fifth of all significands of b and every guess of
    # 1 / b that is right to one unit. All numbers are float32; the longer type holds products exactly.
    long = np.longdouble
    if np.finfo(long).nmant < 63:
        pytest.skip("needs a floating-point type of 64 significant bits")
    a = long(448.0 * 2.0**20)
    for start in range(2**23, 2**24, 2**21):
        divisors = np.arange(start, start + 2**21, 5).astype(np.float32)
        b = divisors.astype(long)

        def single(value: np.ndarray) -> np.ndarray:
            return value.astype(np.float32).astype(long)

        for off in (-1, 0, 1):
            guess = ((long(1) / b).astype(np.float32).view(np.int32) + off).view(np.float32).astype(long)
            inverse = single(guess + guess * single(long(1) - b * guess))
            first = single(a * inverse)
            second = single(first + single(a - b * first) * inverse)
            last = (second + single(a - b * second) * inverse).astype(np.float32)
            assert np.array_equal(last, (a / b).astype(np.float32))


def test_most_codes_are_those_of_a_division_by_the_scale():
    x = torch.randn(64, 4304).to(BF16)
    (values, scale), (divided, before) = reference.quantise_rows(x, None, "none"), old_formula(x)
    gap = (values.view(torch.uint8).int() - divided.view(torch.uint8).int()).abs()
    assert int(gap.max()) <= 1
    assert float((gap > 0).float().mean()) < 1e-3
    assert torch.allclose(scale, before, rtol=2e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_multiply_back_to_what_they_were(dtype):
    x = torch.randn(9, 64).to(dtype)
    values, scale = ops.quantise_rows(x)
    gap = (values.float() * scale - x.float()).abs()
    assert bool((gap <= x.float().abs() / 16 + scale * 2**-10 * 1.001).all())
    for row in rows_of(9, 64, dtype=dtype)[[1, 2, 3, 5]]:
        values, scale = ops.quantise_rows(row)
        assert (values.float() * scale).isnan().all()
    values, scale = ops.quantise_rows(torch.zeros(2, 16, dtype=dtype))
    assert not values.float().any()
    assert torch.equal(scale, torch.full((2, 1), 1e-12) * (1 / 448))


@given(st.integers(0, 2**31), st.integers(-24, 24), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_powers_of_two_move_the_scale_and_signs_the_sign_alone(seed, power, width):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
    values, scale = ops.quantise_rows(x)
    same(ops.quantise_rows(x * 2.0**power), (values, scale * 2.0**power))
    flipped, again = ops.quantise_rows(-x)
    assert torch.equal(flipped.float(), -values.float())
    assert torch.equal(again, scale)
    assert bool((values.float().abs().amax(-1) == 448.0).all())


def test_opcheck_and_leading_shapes():
    x, up = torch.randn(2, 3, 32).to(BF16), torch.randn(2, 3, 32).to(BF16)
    for arguments in ((x, None, "none"), (x, None, "gelu_tanh"), (x, up, "silu_mul")):
        opcheck(torch.ops.loongforge.quantise_rows, arguments)
    values, scale = ops.quantise_rows(x.transpose(0, 1))
    assert values.shape == (6, 32)
    same((values, scale), ops.quantise_rows(x.transpose(0, 1).reshape(6, 32)))
    assert [t.shape for t in ops.quantise_rows(x[0, 0])] == [(1, 32), (1, 1)]
    assert [t.shape for t in ops.quantise_rows(x[:0])] == [(0, 32), (0, 1)]
    needs = x.float().requires_grad_()
    assert not any(t.requires_grad for t in ops.quantise_rows(needs))


def test_compiled_code_gives_the_same_rows():
    x = torch.randn(5, 48).to(BF16)

    def twice(a: Tensor) -> tuple[Tensor, Tensor]:
        return ops.quantise_rows(a * 2, activation="gelu_tanh")

    same(torch.compile(twice, backend="aot_eager", fullgraph=True)(x), twice(x))


@pytest.mark.parametrize(
    ("shape", "named", "words"),
    [
        ((2, 16), {"activation": "relu"}, "activation must be one of none, gelu_tanh, silu_mul, got 'relu'"),
        ((2, 0), {}, "rows of at least one element"),
        ((), {}, "rows of at least one element"),
        ((2, 16), {"activation": "silu_mul"}, "takes a second tensor"),
        ((2, 16), {"up": (2, 16)}, "takes a second tensor"),
        ((2, 16), {"up": (2, 8), "activation": "silu_mul"}, "takes a second tensor"),
    ],
)
def test_wrong_arguments_are_named(shape, named, words):
    with pytest.raises(ValueError, match=words):
        ops.quantise_rows(
            torch.zeros(shape), **{k: torch.zeros(v) if k == "up" else v for k, v in named.items()}
        )


def test_activations_are_those_of_the_operators():
    x, up = rows_of(12, 64), torch.randn(12, 64).to(BF16)
    same(ops.quantise_rows(x, activation="gelu_tanh"), ops.quantise_rows(ops.gelu_tanh(x)))
    same(ops.quantise_rows(x, up=up, activation="silu_mul"), ops.quantise_rows(ops.silu_mul(x, up)))


@pytest.mark.parametrize("width", [8, 16, 40, 64, 136, 264, 1152])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_equals_the_reference_bit_for_bit(launched, dtype, width):
    x = rows_of(9, width, dtype=dtype)
    same(ops.quantise_rows(x), reference.quantise_rows(x, None, "none"))
    assert [spec.maker for spec in launched] == ["quantise_rows"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 144])
def test_an_activation_in_the_kernel_equals_one_of_its_own_bit_for_bit(launched, dtype, width):
    x, up = rows_of(9, width, dtype=dtype), torch.randn(9, width).to(dtype)
    got = ops.quantise_rows(x, activation="gelu_tanh"), ops.quantise_rows(x, up=up, activation="silu_mul")
    assert len(launched) == 2
    same(got[0], ops.quantise_rows(ops.gelu_tanh(x)))
    same(got[1], ops.quantise_rows(ops.silu_mul(x, up)))


@pytest.mark.parametrize("case", [(1152, "none"), (2048, "none"), (4304, "gelu_tanh"), (6144, "silu_mul")])
def test_every_plan_equals_the_default(launched, case):
    width, activation = case
    x = rows_of(7, width)
    up = torch.randn(7, width).to(BF16) if activation == "silu_mul" else None
    ways = quantise_plan.ways_of(width, activation)
    found = []
    for way in ways:
        with variants.forced(quantise_plan.job_of(width, activation), way):
            found.append(ops.quantise_rows(x[-2:], up=None if up is None else up[-2:], activation=activation))
    for other in found[1:]:
        same(other, found[0])
    plans = [(plan.threads, plan.vectors) for plan in ways.values()]
    assert [(s.options["threads"], s.options["vectors"]) for s in launched] == plans
    if activation == "none":
        same(found[0], reference.quantise_rows(x[-2:], None, "none"))


@pytest.mark.parametrize(("threads", "rows"), list(itertools.product((4, 32, 64), (1, 5))))
def test_rows_that_do_not_fill_a_block_leave_the_rest_alone(launched, threads, rows):
    width = {4: 24, 32: 200, 64: 1000}[threads]
    ways = quantise_plan.ways_of(width, "none")
    way = next(name for name, plan in ways.items() if plan.threads == threads)
    x = torch.randn(rows, width).to(BF16)
    with variants.forced(quantise_plan.job_of(width, "none"), way):
        same(ops.quantise_rows(x), reference.quantise_rows(x, None, "none"))


def test_what_no_kernel_takes_falls_back_with_the_reason():
    flat = torch.randn(4 * 64 + 1)
    with simulated_gpu() as launched:
        for x in (torch.randn(2, 20), torch.randn(2, 64).double(), flat[1:].view(4, 64)):
            same(ops.quantise_rows(x), reference.quantise_rows(x, None, "none"))
        same(
            ops.quantise_rows(torch.ones(2, 16), up=torch.ones(2, 16).to(BF16), activation="silu_mul"),
            reference.quantise_rows(torch.ones(2, 16), torch.ones(2, 16).to(BF16), "silu_mul"),
        )
        assert launched == []
        assert ops.quantise_rows(torch.randn(0, 64))[0].shape == (0, 64)
        assert launched == []
        same(
            ops.quantise_rows(flat[1:65].view(8, 8).t()),
            ops.quantise_rows(flat[1:65].view(8, 8).t().contiguous()),
        )
        assert len(launched) == 2
    assert ops.op_counters()["fallbacks"] == {
        "quantise_rows: width 20 is not a multiple of 8 in range": 1,
        "quantise_rows: dtype torch.float64": 1,
        "quantise_rows: a tensor cannot be read in 16-byte vectors": 1,
        "quantise_rows: dtypes torch.float32, torch.bfloat16": 1,
    }


def test_plans_hold_every_row_and_stay_within_a_block():
    for width, activation in itertools.product(range(8, 16400, 8), quantise_plan.ACTIVATIONS):
        for plan in quantise_plan.ways_of(width, activation).values():
            assert plan.threads * plan.vectors * 8 >= width
            assert plan.block % plan.threads == 0
            assert plan.block % 32 == 0
            assert plan.block <= 1024
            assert plan.min_blocks * plan.block <= 2048
            spec = quantise_plan.quantise_spec(plan, width, "bf16", activation)
            assert int(spec.options["sure"]) * plan.threads * 8 <= width
    assert quantise_plan.plan_of(16400, "none") is None
    assert quantise_plan.plan_of(12, "none") is None
