"""Ways that tuning may choose, in the simulator: barriers of rows, groups of rows, cleared buffers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from loongforge_fuse import ops
from loongforge_fuse.kernels import launcher
from loongforge_fuse.kernels.catalog import catalog
from loongforge_fuse.kernels.simulator.operators import simulated_gpu
from loongforge_fuse.ops import norm_launch, norm_plan, patch_launch, patch_plan, reference, rope, variants
from torch import Tensor

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def without_fallbacks(poisoned):
    """Every kernel of every test has to run."""
    yield
    assert not ops.op_counters()["fallbacks"], ops.op_counters()["fallbacks"]


def close(got: Tensor, want: Tensor, limit: float) -> None:
    assert got.shape == want.shape
    gap = (got.double() - want.double()).abs() / (want.double().abs() + 1.0)
    assert float(gap.max()) <= limit


def backward_cases() -> list:
    """Ways whose rows wait for themselves alone, or whose groups begin elsewhere."""
    found, seen = [], set()
    for width in (1152, 1536, 2048):
        ways = norm_plan.backward_ways(width, columns=True, modulate=True, large=False)
        for name, plan in ways.items():
            kind = (plan.apart, plan.turned, plan.stages > 0, plan.fetch)
            if plan.apart or plan.turned:
                found.append(pytest.param(width, name, marks=() if kind not in seen else pytest.mark.slow))
                seen.add(kind)
    return found


@pytest.mark.parametrize(("width", "way"), backward_cases())
@pytest.mark.parametrize(("groups", "rows"), [(1, 13), (3, 5)])
def test_rows_of_a_block_that_do_not_wait_for_each_other_add_up(width, way, groups, rows):
    # Few blocks, so that each walks several rows, and rows and groups do not come out even.
    modulate = groups > 1
    if "turned" in way and not modulate:
        pytest.skip("one group has nowhere else to begin")
    job = norm_launch.backward_job(width, layer=True, columns=True, large=False, modulate=modulate)
    count = groups * rows
    gain = torch.randn(groups, width).to(BF16)
    x, g, carry = (torch.randn(count, width).to(BF16) for _ in "xgc")
    mean, rstd = torch.randn(count) / 8, torch.rand(count) + 0.5
    form = (True, modulate, rows, True, True, groups)
    with simulated_gpu(processors=1, seed=3) as launched, variants.forced(job, way):
        dx, sums = norm_launch.run_norm_backward(g, carry, x, gain, mean, rstd, *form, torch.float32)
    assert launched[0].options["apart"] == ("apart" in way)
    assert launched[0].options["turned"] == ("turned" in way)
    assert launched[0].options["fetch"] == ("fetch" in way)
    # The kernel that adds the partial sums may start early when, and only when, the one before says so.
    assert [spec.options.get("early", spec.follows) for spec in launched] == ["early" in way] * 2
    want, totals = reference.norm_backward(*(t.double() for t in (g, carry, x, gain, mean, rstd)), *form)
    close(dx, want, 2**-7)
    close(sums.view(-1, width), totals.view(-1, width), 2e-5)


@pytest.mark.parametrize("layer", [True, False])
def test_statistics_that_nobody_reads_share_one_buffer(layer, monkeypatch):
    shared = torch.full((2**16,), float("nan"))
    monkeypatch.setitem(norm_launch._unread, -1, shared)
    x, w = torch.randn(3, 7, 256).to(BF16), torch.randn(256).to(BF16)
    with simulated_gpu() as launched:
        norm = ops.layer_norm_modulate if layer else ops.rms_norm
        y = norm(x, weight=w, eps=1e-6)
    assert len(launched) == 1
    assert torch.isfinite(shared[:21]).all() and torch.isnan(shared[21:]).all()
    form = (layer, False, 21, 1e-6, torch.float64)
    want = reference.norm(x.view(21, 256).double(), None, w.double().unsqueeze(0), None, *form)[0]
    close(y.view(21, 256), want, 2**-7)


def test_statistics_that_are_read_have_memory_of_their_own(monkeypatch):
    shared = torch.full((2**16,), float("nan"))
    monkeypatch.setitem(norm_launch._unread, -1, shared)
    x, w = torch.randn(3, 256).to(BF16).requires_grad_(), torch.randn(256).to(BF16)
    with simulated_gpu():
        ops.layer_norm_modulate(x, weight=w).sum().backward()
        large = norm_launch._statistics(x, 2**16 + 1)
    assert torch.isnan(shared).all()
    assert large.numel() == 2**16 + 1


def test_a_buffer_for_all_is_not_made_during_a_capture(monkeypatch):
    monkeypatch.setattr(norm_launch, "_unread", {})
    x = torch.zeros(1)
    monkeypatch.setattr(norm_launch, "capturing", lambda: True)
    assert norm_launch._statistics(x, 5).numel() == 5
    assert not norm_launch._unread
    monkeypatch.setattr(norm_launch, "capturing", lambda: False)
    assert norm_launch._statistics(x, 5) is norm_launch._statistics(x, 2**16)


def test_a_buffer_that_another_thread_has_made_meanwhile_stays(monkeypatch):
    # A graph may have been captured with it.
    first = torch.zeros(2**16)
    monkeypatch.setattr(norm_launch, "_unread", {})

    def capturing() -> bool:
        norm_launch._unread[-1] = first
        return False

    monkeypatch.setattr(norm_launch, "capturing", capturing)
    assert norm_launch._statistics(torch.zeros(1), 5) is first
    assert norm_launch._unread[-1] is first


def forward_cases() -> list:
    """Ways of one warp for a row, that walk the rows and read gain and offset late, or find them in shared
    memory.
    """
    found, seen = [], set()
    for width in (1152, 1536, 2048):
        ways = norm_plan.forward_ways(width, residual=False, large=True, layer=True, modulate=True)
        for name, plan in ways.items():
            kind = (plan.ahead and plan.late, plan.threads <= 32, plan.shared)
            if any(kind):
                found.append(pytest.param(width, name, marks=() if kind not in seen else pytest.mark.slow))
                seen.add(kind)
    return found


@pytest.mark.parametrize(("width", "way"), forward_cases())
@pytest.mark.parametrize(("groups", "rows"), [(1, 13), (3, 5)])
def test_forward_ways_normalise_every_row_of_every_group(width, way, groups, rows):
    modulate = groups > 1
    # Few blocks where they walk, so that each takes several rows.
    plan = norm_plan.forward_ways(width, residual=False, large=False, layer=True, modulate=True)[way]
    job = norm_launch.forward_job(width, layer=True, residual=False, large=False, modulate=modulate)
    x = (torch.randn(groups, rows, width) * 2 + 1).to(BF16)
    gain, offset = (torch.randn(groups, width).to(BF16) for _ in "go")
    with simulated_gpu(processors=1, seed=4) as launched, variants.forced(job, way):
        done = norm_launch.run_norm(x, None, gain, offset, True, modulate, 1e-5, BF16)
    assert done is not None
    assert launched[0].options["ahead"] == plan.ahead
    assert launched[0].options["late"] == plan.late
    assert launched[0].options["shared"] == plan.shared
    y, _, mean, rstd = reference.norm(
        x.view(-1, width).double(),
        None,
        gain.double(),
        offset.double(),
        True,
        modulate,
        rows,
        1e-5,
        torch.float64,
    )
    close(done[0].view(-1, width), y, 2**-7)
    close(done[2], mean.view(-1), 1e-5)
    close(done[3], rstd.view(-1), 1e-5)


@pytest.mark.parametrize("way", rope.BACKWARD_WAYS)
@pytest.mark.parametrize("heads", [4, 3])
def test_every_way_of_the_rotation_backward_gives_the_same_gradients(way, heads):
    x, g = (torch.randn(2, 7, heads, 128).to(BF16) for _ in "xg")
    w, cos, sin = torch.randn(128).to(BF16), torch.randn(7, 128).to(BF16), torch.randn(7, 128).to(BF16)
    with simulated_gpu(processors=1, seed=2) as launched, variants.forced(rope.BACKWARD_JOB, way):
        dx, dw = rope._rope_backward_cuda(g, x, w, cos, sin, 1e-6, True)
    assert [spec.options.get("early", spec.follows) for spec in launched] == ["early" in way] * 2
    assert launched[0].options["heads_each"] == (1 if heads == 3 else int(way[0]))
    want, sums = rope._backward_reference(*(t.double() for t in (g, x, w, cos, sin)), 1e-6, True)
    close(dx, want, 2**-7)
    close(dw, sums, 2e-5)


@pytest.mark.parametrize("operator", ["norm", "rotation"])
def test_where_no_kernel_starts_early_another_plan_runs(operator):
    x, g, w = torch.randn(5, 1152).to(BF16), torch.randn(5, 1152).to(BF16), torch.randn(1, 1152).to(BF16)
    mean, rstd = torch.randn(5) / 8, torch.rand(5) + 0.5
    heads, table = torch.randn(1, 3, 4, 128).to(BF16), torch.randn(3, 128).to(BF16)
    with simulated_gpu(processors=1, seed=6) as launched:
        there_is = launcher.function

        def function(spec, device):
            if not spec.runs_on("sm_80"):
                raise launcher.KernelUnavailableError(spec.name)
            return there_is(spec, device)

        with mock.patch.object(launcher, "function", function):
            if operator == "norm":
                norm_launch.run_norm_backward(g, None, x, w, mean, rstd, True, False, 5, True, True, 1)
            else:
                rope._rope_backward_cuda(heads, heads, table[0], table, table, 1e-6, True)
    assert [spec.maker for spec in launched][1:] == ["column_sums"]
    assert not launched[0].options["early"]
    assert not launched[1].follows
    assert all(spec.name in {s.name for s in catalog()} for spec in launched)


@pytest.mark.parametrize("way", patch_plan.CLEAR_WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_way_of_clearing_leaves_zeros_where_no_patch_is(way, dtype):
    patch, sizes = 14, [(28, 42)]
    table = ops.patch_table(sizes, patch, planar=True)[1:]  # the first patch is missing
    count = 28 * 42 * 3 + 5  # and some pixels lie behind the last
    g = torch.randn(table.shape[0], patch_plan.padded_length(patch)).to(dtype)
    call = (table, None, patch, False, True, count, dtype, False)
    with simulated_gpu(seed=1) as launched, variants.forced(patch_plan.CLEAR_JOB, way):
        got = patch_launch.rows_backward_cuda(g, *call)
    assert ("clear_down" in {spec.maker for spec in launched}) == (way != "torch")
    assert torch.equal(got, patch_launch.patch_reference.rows_backward(g, *call))
