"""The CUDA paths of the operators on the CPU: launches run the kernels' own source in the simulator."""

from __future__ import annotations

import itertools

import pytest
import torch
from loongforge_fuse import FusedAdamW, ops
from loongforge_fuse.kernels.simulator.operators import simulated_gpu
from loongforge_fuse.ops import adamw_tables, norm_launch, norm_plan, products, reference, variants
from loongforge_fuse.ops.columns import add_partials
from loongforge_fuse.ops.elementwise import GELU_DROPOUT_WAYS
from torch import Tensor

BF16 = torch.bfloat16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOLERANCES = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3, torch.float32: 3e-5}


pytestmark = pytest.mark.usefixtures("poisoned")


def makers(log) -> set[str]:
    return {spec.maker for spec in log}


def close(got: Tensor, want: Tensor, dtype: torch.dtype | None = None, scale: float = 1.0) -> None:
    limit = scale * TOLERANCES[dtype or want.dtype]
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    gap = (got.double() - want.double()).abs()
    assert bool((gap <= limit * (want.double().abs() + 1.0)).all()), float(gap.max())


def misaligned(x: Tensor, by: int) -> Tensor:
    """A copy of x that lies `by` elements above a 16-byte border."""
    flat = torch.empty(x.numel() + 16, dtype=x.dtype)
    return flat[by : by + x.numel()].view(x.shape).copy_(x)


def key_of(seed: int = 3) -> Tensor:
    return torch.tensor([seed + (seed << 40), 5 + (9 << 33)])


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_kernels_equal_the_reference_forward_and_backward(launched, dtype, shift):
    x, g = (misaligned(torch.randn(3, 5, 23).to(dtype), shift).requires_grad_() for _ in "xg")
    key = key_of()
    seed = torch.randn(3, 5, 23).to(dtype)
    cases = (
        (lambda a, _: ops.gelu_tanh(a), lambda a, _: reference.gelu_tanh(a, 0.0, None)),
        (lambda a, _: ops.gelu_tanh(a, p=0.3, key=key), lambda a, _: reference.gelu_tanh(a, 0.3, key)),
        (ops.silu_mul, reference.silu_mul),
        (
            lambda a, b: ops.dropout_residual(a, b, p=0.4, key=key),
            lambda a, b: reference.dropout_residual(a, b, 0.4, key),
        ),
        (
            lambda a, _: ops.dropout_residual(a, p=0.4, key=key),
            lambda a, _: reference.dropped(a, 0.4, key).to(dtype),
        ),
    )
    for ours, theirs in cases:
        results = []
        for function, inputs in ((ours, (x, g)), (theirs, (x.detach().clone(), g.detach().clone()))):
            leaves = [t.requires_grad_() for t in inputs]
            for leaf in leaves:
                leaf.grad = None
            out = function(*leaves)
            out.backward(seed)
            results.append([out.detach(), *(t.grad for t in leaves if t.grad is not None)])
        for got, want in zip(*results, strict=True):
            close(got, want)
    assert shift == 0 or False in {spec.options["vector"] for spec in launched}


@pytest.mark.parametrize("way", ["1", "2", "4 min 4"])
@pytest.mark.parametrize("count", [1, 8, 4093, 4096, 8200])
def test_gelu_with_dropout_takes_one_or_more_vectors_a_thread(launched, way, count):
    assert way in GELU_DROPOUT_WAYS
    x, key = torch.randn(count).to(BF16), key_of()
    with variants.forced("gelu_dropout", way):
        close(ops.gelu_tanh(x, p=0.25, key=key), reference.gelu_tanh(x, 0.25, key))
    assert [spec.options["each"] for spec in launched] == [int(way[0])]


@pytest.mark.parametrize("p", [1.0, 1.0 - 2**-20, 1.0 - 2**-16])
def test_chances_to_drop_that_are_rounded_to_one_leave_nothing(p):
    x, key = torch.randn(4096).to(BF16).requires_grad_(), key_of()
    for function in (ops.gelu_tanh, ops.dropout_residual):
        with simulated_gpu():
            y = function(x, p=p, key=key)
            (dx,) = torch.autograd.grad(y.float().sum(), x)
        kept = int((reference.random_bits(4096, key) >= reference.threshold_of(p)).sum())
        assert kept < 10
        assert int((y != 0).sum()) <= kept
        assert int((dx != 0).sum()) <= kept


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_cast_scale_equals_torch_bit_for_bit_and_counts_bad_values(launched, source, target):
    x = torch.randn(203).to(source)
    x[17], x[50], x[201] = float("inf"), float("nan"), 60000.0
    for scale in (None, torch.full((), 2.0)):
        y, bad = ops.cast_scale(x, target, factor=1.0 if scale is not None else 2.0, scale=scale)
        want = (x.float() * 2.0).to(target)
        assert torch.equal(torch.nan_to_num(y.float(), 1.0), torch.nan_to_num(want.float(), 1.0))
        assert bad.item() == int((~torch.isfinite(want)).sum())


def test_the_counter_hands_out_keys_and_moves_on(launched):
    counter = ops.philox_counter(2**40 + 5, "cpu")
    assert ops.philox_next(counter, steps=2**33).tolist() == [2**40 + 5, 0]
    assert ops.philox_next(counter).tolist() == [2**40 + 5, 2**33]
    assert counter.tolist() == [2**40 + 5, 2**33 + 1]


def norm_of(x, residual, gain, offset, *, layer, modulate, dtype):
    groups = 1 if gain is None and offset is None else (gain if gain is not None else offset).shape[0]
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    y, total, _, _ = reference.norm(
        rows, None if residual is None else residual.reshape(-1, width), gain, offset, layer, modulate,
        rows.shape[0] // groups, 1e-5, dtype,
    )  # fmt: skip
    return y.view(x.shape), None if residual is None else total.view(x.shape)


NORM_FORMS = {
    "weights": (True, False, True, True),
    "modulation": (True, True, True, True),
    "bare": (True, False, False, False),
    "rms": (False, False, True, False),
    "bare rms": (False, False, False, False),
}


def check_norm(width, form, dtype, *, residual, batch=2, rows=3, needs_weights=True):
    layer, modulate, gained, moved = NORM_FORMS[form]
    x = (torch.randn(batch, rows, width) * 2 + 1).to(dtype)
    r = torch.randn(batch, rows, width).to(dtype) if residual else None
    groups = batch if modulate else 1
    gain = torch.randn(groups, width).to(dtype) if gained else None
    offset = torch.randn(groups, width).to(dtype) if moved else None
    tables = [t for t in (gain, offset) if t is not None]
    for t in tables:
        t.requires_grad_(needs_weights)
    leaves = [t.requires_grad_() for t in (x, r) if t is not None] + [t for t in tables if t.requires_grad]

    def ours():
        g, o = (None if t is None else (t if modulate else t[0]) for t in (gain, offset))
        if not layer:
            return ops.rms_norm(x, residual=r, weight=g, eps=1e-5)
        named = {"scale": g, "shift": o} if modulate else {"weight": g, "bias": o}
        return ops.layer_norm_modulate(x, residual=r, eps=1e-5, **named)

    seeds = [torch.randn(x.shape).to(dtype) for _ in range(2 if residual else 1)]
    got = ours()
    outs = got if residual else (got,)
    grads = torch.autograd.grad(outs, leaves, seeds)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    names = iter(wide)
    xd = next(names)
    rd = next(names) if residual else None
    gd = next(names) if gained and needs_weights else (None if gain is None else gain.detach().double())
    od = next(names) if moved and needs_weights else (None if offset is None else offset.detach().double())
    if residual:  # the kernel normalises the rounded sum
        rounded = (x.detach().float() + r.detach().float()).to(dtype).double()
        xd, rd = rounded.requires_grad_(), torch.zeros_like(rounded, requires_grad=True)
    want, total = norm_of(xd, rd, gd, od, layer=layer, modulate=modulate, dtype=torch.float64)
    truth = (want, total) if residual else (want,)
    against = [
        xd,
        *([rd] if residual else []),
        *([t for t in (gd, od) if t is not None] if needs_weights else []),
    ]
    wanted = torch.autograd.grad(truth, against, [s.double() for s in seeds])
    for a, b in zip((*outs, *grads), (*truth, *wanted), strict=True):
        close(a.detach(), b.detach().to(a.dtype), dtype, scale=2.0)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", NORM_FORMS)
@pytest.mark.parametrize("width", [48, 136, 256])
def test_norms_equal_float64_forward_and_backward(launched, width, form, residual):
    for dtype in DTYPES if width == 48 else DTYPES[:1]:
        check_norm(width, form, dtype, residual=residual)
    assert "norm_backward" in makers(launched)


MODEL_NORMS = ((1152, "weights"), (1536, "modulation"), (2048, "rms"), (4608, "weights"))


@pytest.mark.parametrize(
    ("width", "form"),
    [
        pytest.param(w, f, marks=() if (w, f) in MODEL_NORMS else pytest.mark.slow)
        for w, f in itertools.product((1152, 1536, 2048, 4608), NORM_FORMS)
    ],
)
def test_norms_of_model_widths_equal_float64(launched, width, form):
    check_norm(width, form, BF16, residual=False, rows=4 if width < 2000 else 2)
    check_norm(width, form, BF16, residual=True, rows=1, needs_weights=False)


def plans() -> list:
    found = []
    for width, layer, flag in itertools.product((1152, 1536, 2048), (True, False), (False, True)):
        if not layer and width != 2048:
            continue
        forward = norm_launch.forward_job(width, layer=layer, residual=flag, large=False)
        backward = norm_launch.backward_job(
            width, layer=layer, columns=flag, large=False, modulate=layer and flag
        )
        ways = norm_plan.forward_ways(width, residual=flag, large=False, layer=layer)
        found += [(width, layer, forward, name) for name in ways]
        backs = norm_plan.backward_ways(width, columns=flag, large=False, layer=layer)
        found += [(width, layer, backward, name) for name in backs]
    # Every fifth always, all of them with the slow tests.
    return [pytest.param(*p, marks=() if i % 5 == 0 else pytest.mark.slow) for i, p in enumerate(found)]


@pytest.mark.parametrize(("width", "layer", "job", "way"), plans())
def test_every_plan_that_tuning_may_choose_is_right(width, layer, job, way):
    with simulated_gpu(processors=1, seed=5) as launched, variants.forced(job, way):
        residual, columns = "residual" in job, "columns" in job
        form = "rms" if not layer else ("modulation" if columns else "weights")
        check_norm(
            width, form, BF16, residual=residual, rows=3, needs_weights=columns or "backward" not in job
        )
    assert makers(launched) >= {"norm_forward", "norm_backward"}


STAGED = [
    pytest.param(width, name, marks=() if i == 0 else pytest.mark.slow)
    for width in (1152, 1536, 2048)
    for i, name in enumerate(
        n for n in norm_plan.backward_ways(width, columns=True, large=False) if "stages" in n
    )
]


@pytest.mark.parametrize(("width", "way"), STAGED)
@pytest.mark.parametrize("rows", [1, 23])
def test_rows_that_are_copied_ahead_are_all_added_once(width, way, rows):
    # Few blocks, so that each walks more rows than it copies ahead, and the rows do not come out even.
    job = norm_launch.backward_job(width, layer=True, columns=True, large=False)
    gain = torch.randn(1, width).to(BF16)
    x, g = torch.randn(rows, width).to(BF16), torch.randn(rows, width).to(BF16)
    carry, mean, rstd = torch.randn(rows, width).to(BF16), torch.randn(rows) / 8, torch.rand(rows) + 0.5
    call = (g, carry, x, gain, mean, rstd, True, False, rows, True, True, 1)
    with simulated_gpu(processors=1, seed=7) as launched, variants.forced(job, way):
        dx, sums = norm_launch.run_norm_backward(*call, torch.float32)
    assert launched[0].options["stages"] > 0
    wide = [t.double() if t.is_floating_point() else t for t in (g, carry, x, gain, mean, rstd)]
    want, totals = reference.norm_backward(*wide, True, False, rows, True, True, 1)
    close(dx, want.to(BF16), scale=2.0)
    close(sums.view(-1, width), totals.float().view(-1, width), torch.float32, scale=20.0)


def test_float32_rows_far_from_zero_keep_their_digits(launched):
    x = (torch.randn(2, 3, 256) + 300).requires_grad_()
    w, b = torch.randn(256, requires_grad=True), torch.randn(256, requires_grad=True)
    y = ops.layer_norm_modulate(x, weight=w, bias=b)
    seed = torch.randn(2, 3, 256)
    got = torch.autograd.grad(y, (x, w, b), seed)
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    want = torch.autograd.grad(
        torch.nn.functional.layer_norm(wide[0], (256,), *wide[1:]), wide, seed.double()
    )
    for a, t in zip(got, want, strict=True):
        assert float((a - t).abs().max()) < 1e-4 * float(t.abs().max())


@pytest.mark.parametrize(
    ("chunks", "groups", "width"),
    [(1, 5, 8), (13, 2, 264), (16, 3, 264), (17, 2, 264), (64, 1, 128), (65, 3, 40), (300, 1, 40)],
)
def test_partial_sums_are_added_whatever_their_number(launched, chunks, groups, width):
    part = torch.randn(groups, chunks, width)
    got = add_partials(part, torch.float32, "test")
    # Few partial sums need few rows in flight.
    assert (launched[0].options["ahead"] == 4) == (chunks <= 16)
    assert float((got - part.double().sum(1)).abs().max()) < 1e-4
    assert torch.equal(add_partials(part, torch.float32, "test"), got)


@pytest.mark.parametrize("residual", [False, True])
def test_a_joined_table_gives_what_scale_and_shift_give(launched, residual):
    results = []
    for joined in (True, False):
        torch.manual_seed(1)
        x, r, table = (
            torch.randn(*s).to(BF16).requires_grad_() for s in ((3, 5, 64), (3, 5, 64), (3, 1, 128))
        )
        if joined:
            named = {"table": table}
        else:
            named = dict(zip(("scale", "shift"), table.chunk(2, -1), strict=True))
        out = ops.layer_norm_modulate(x, residual=r if residual else None, **named)
        outs = out if residual else (out,)
        leaves = [x, table, *([r] if residual else [])]
        results.append([*outs, *torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs])])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 72), (300, 72)])
def test_linear_sums_its_bias_gradient(launched, rows, width):
    x, w = torch.randn(rows, 8).to(BF16), torch.randn(width, 8).to(BF16)
    b = torch.zeros(width, dtype=BF16, requires_grad=True)
    seed = torch.randn(rows, width).to(BF16)
    ops.linear(x, w, b).backward(seed)
    close(b.grad, seed.double().sum(0).to(BF16))
    assert makers(launched) == {"bias_sums"}
    close(products.sum_rows(seed, torch.float32), seed.double().sum(0).float())


@pytest.mark.parametrize(("width", "heads"), [(16, 1), (16, 4), (64, 3), (128, 4), (256, 2)])
def test_head_norm_rope_equals_the_reference_forward_and_backward(launched, width, heads):
    for dtype in (BF16, torch.float32):
        x = torch.randn(2, 5, heads, width).to(dtype).requires_grad_()
        w = torch.randn(width).to(dtype).requires_grad_()
        angles = torch.randn(5, width)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        seed = torch.randn(x.shape).to(dtype)
        y = ops.head_norm_rope(x, w, cos, sin)
        got = (y.detach(), *torch.autograd.grad(y, (x, w), seed))
        wide = [t.detach().double() for t in (x, w, cos, sin)]
        leaves = [t.requires_grad_() for t in wide[:2]]
        truth = torch.ops.loongforge.head_norm_rope(*leaves, *wide[2:], 1e-6)  # the CPU's implementation
        want = (truth.detach(), *torch.autograd.grad(truth, leaves, seed.double()))
        for a, b in zip(got, want, strict=True):
            close(a, b.to(a.dtype), dtype, scale=2.0)
    ops.reset_op_counters()  # the truth in double precision has no kernel
    assert makers(launched) == {"head_norm_rope_forward", "head_norm_rope_backward", "column_sums"}


@pytest.mark.parametrize("state", [torch.float32, BF16])
def test_adamw_follows_the_reference_with_clipping_scale_and_masters(launched, monkeypatch, state):
    monkeypatch.setattr(
        adamw_tables.Uploader, "send", lambda self, array, device: (torch.from_numpy(array), torch.empty(0))
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    sizes, types = (3, 21, 40), (torch.float32, BF16, BF16)
    start = [torch.randn(n).to(t) for n, t in zip(sizes, types, strict=True)]
    grads = [torch.randn(n).to(t) * 8 for n, t in zip(sizes, types, strict=True)]
    ends = []
    for refused in (None, "the reference"):
        monkeypatch.setattr(FusedAdamW, "_refusal", lambda self, slots, refused=refused: refused)
        params = [torch.nn.Parameter(t.clone()) for t in start]
        optimizer = FusedAdamW(params, lr=1e-2, max_grad_norm=1.0, master_weights=True, state_dtype=state)
        for _ in range(2):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.clone()
            optimizer.step(grad_scale=torch.full((), 4.0), found_inf=torch.zeros(()))
        params[0].grad = torch.full_like(params[0], float("inf"))
        optimizer.step()
        ends.append([*(p.detach() for p in params), *(optimizer.state[p]["exp_avg"] for p in params)])
    for got, want in zip(*ends, strict=True):
        close(got, want)
    assert makers(launched) == {"gradient_norm", "prepare_step", "adamw_update"}
