"""Which way of doing a job runs: the default, a forced one, or what a measurement decided."""

from __future__ import annotations

import json

import pytest
import torch
from loongforge_fuse import Autotuner, TuneConfig, ops
from loongforge_fuse.__main__ import main
from loongforge_fuse.kernels import launcher
from loongforge_fuse.kernels.catalog import catalog
from loongforge_fuse.kernels.simulator.operators import simulated_gpu
from loongforge_fuse.ops import norm_plan, tuning, variants


@pytest.fixture
def tuner(tmp_path):
    """A tuner with its own file, forgotten at the end."""
    yield Autotuner(TuneConfig(path=tmp_path / "tuned.json"), timer=lambda work: work())
    variants.reload()


def decided(tuner: Autotuner, job: str, winner: str, *others: str) -> None:
    times = {name: (lambda: 2.0) for name in others} | {winner: lambda: 1.0}
    assert tuner.decide(variants.PREFIX + job, times).winner == winner


def test_the_first_way_is_the_default_and_forcing_ends_with_its_context():
    ways = ("a", "b", "c")
    assert variants.chosen("some job", ways) == "a"
    with variants.forced("some job", "b"):
        assert variants.chosen("some job", ways) == "b"
        with variants.forced("some job", "c"):
            assert variants.chosen("some job", ways) == "c"
        assert variants.chosen("some job", ways) == "b"
        assert variants.chosen("another", ways) == "a"
    assert variants.chosen("some job", ways) == "a"


def test_a_decision_is_used_until_it_names_a_way_that_is_gone(tuner):
    decided(tuner, "some job", "b", "a")
    variants.reload(tuner)
    assert variants.chosen("some job", ("a", "b")) == "b"
    assert variants.chosen("some job", ("a", "c")) == "a"


def test_a_decision_reaches_the_operators_launch(tuner):
    x, key = torch.randn(3000).to(torch.bfloat16), torch.tensor([1, 2])
    with simulated_gpu() as launched:
        ops.gelu_tanh(x, p=0.1, key=key)
        decided(tuner, "gelu_dropout", "1", "2 min 6")
        variants.reload(tuner)
        ops.gelu_tanh(x, p=0.1, key=key)
    assert [spec.options["each"] for spec in launched] == [2, 1]


def test_where_the_chosen_kernel_is_missing_the_default_runs(tuner, monkeypatch):
    x, key = torch.randn(3000).to(torch.bfloat16), torch.tensor([1, 2])
    decided(tuner, "gelu_dropout", "1 min 8", "2 min 6")
    ops.reset_op_counters()
    with simulated_gpu() as launched:
        there_is = launcher.function

        def function(spec, device):
            if spec.min_blocks == 8:
                raise launcher.KernelUnavailableError(spec.name)
            return there_is(spec, device)

        with monkeypatch.context() as inside:  # undone before the simulator is
            inside.setattr(launcher, "function", function)
            variants.reload(tuner)
            ops.gelu_tanh(x, p=0.1, key=key)
    assert [spec.options["each"] for spec in launched] == [2]
    assert ops.op_counters()["fallbacks"] == {}


def test_jobs_offer_real_choices_whose_kernels_are_built_ahead():
    jobs = tuning.jobs()
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert all(len(set(job.ways)) == len(job.ways) > 1 for job in jobs)
    assert {"gelu_dropout", "masked_unfold u8 bf16 14 last woven", "rms_norm 2048 residual small"} <= set(
        names
    )
    shipped, tuned = ({s.name for s in catalog(f)} for f in (None, "tuning"))
    assert len(tuned - shipped) > 50


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_norms_with_modulation_have_their_own_default_among_the_plans(residual, large):
    form = {"residual": residual, "large": large, "layer": True}
    shipped = {spec.name for spec in catalog()}
    for width in (1536, 2048):
        plain = norm_plan.forward_ways(width, **form)
        modulated = norm_plan.forward_ways(width, **form, modulate=True)
        assert plain.keys() == modulated.keys()
        for ways, gain in ((plain, "scale"), (modulated, "modulate")):
            spec = norm_plan.forward_spec(
                next(iter(ways.values())), width, layer=True, **dict.fromkeys("xrwy", "bf16"), gain=gain,
                offset=True, residual=residual,
            )  # fmt: skip
            assert spec.name in shipped


def test_the_default_of_a_modulated_norm_reaches_its_launch():
    # A residual and few rows: there modulated rows are spread over other threads than plain ones.
    x, table = torch.randn(2, 3, 2048).to(torch.bfloat16), torch.randn(2, 2048).to(torch.bfloat16)
    with simulated_gpu() as launched:
        ops.layer_norm_modulate(x, residual=x, scale=table, shift=table)
        ops.layer_norm_modulate(x, residual=x, weight=table[0], bias=table[0])
        ops.layer_norm_modulate(x, scale=table, shift=table)
    assert [(spec.options["gain"], spec.options["threads"]) for spec in launched[:2]] == [
        ("modulate", 256),
        ("scale", 128),
    ]
    assert [spec.options["shared"] for spec in launched] == [False, False, True]


def test_known_decisions_are_not_measured_again(tuner):
    job = tuning.Job(name="x", ways=("a", "b"), make=lambda: pytest.fail("measured"), size=1)
    decided(tuner, "x", "b", "a")
    assert tuning.tune(tuner, [job])["x"].winner == "b"
    assert json.loads(tuner.path.read_text())["decisions"][variants.PREFIX + "x"]["winner"] == "b"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_tuning_without_a_gpu_says_so(capsys):
    assert main(["kernels", "tune"]) == 1
    assert "there is none here" in capsys.readouterr().out
