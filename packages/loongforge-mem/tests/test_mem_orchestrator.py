"""The orchestrator in a plain training loop, without a GPU."""

from __future__ import annotations

import gc
import json

import pytest
from loongforge_mem import MemoryConfig, MemoryOrchestrator, get_mla_stats

torch = pytest.importorskip("torch")


def _training(mode: str, steps: int = 4, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    orchestrator = MemoryOrchestrator(MemoryConfig(mode=mode, backend="host", **settings)).attach(
        model, optimizer
    )
    history, losses = [], []
    for _ in range(steps):
        with orchestrator.step():
            loss = model(torch.randn(32, 64)).square().mean()
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        history.append(orchestrator.stats())
    return orchestrator, model, optimizer, history, losses


def test_the_second_step_is_replayed_and_the_third_is_all_hits():
    orchestrator, _, _, history, _ = _training("global", plan=True)
    assert [h["step_source"] for h in history] == ["profiled", "replayed", "replayed", "replayed"]
    assert history[1]["planned_hit_rate"] > 0.6, "the first step also made the optimizer's state"
    assert history[2]["planned_hit_rate"] == 1.0
    assert history[3]["step_device_calls"] == 0
    orchestrator.close()


def test_run_fit_stays_while_a_plan_would_save_little():
    orchestrator, _, _, history, _ = _training("global")
    assert [h["step_source"] for h in history] == ["profiled", "run_fit", "run_fit", "run_fit"]
    stats = orchestrator.stats()
    assert stats["placement"] == "run_fit"
    assert "is more than the steps need; a plan is used from 3.0 %" in stats["placement_reason"]
    assert stats["plans"] == 0
    orchestrator.close()


def test_without_a_plan_steps_are_recorded_but_never_replayed():
    orchestrator, _, _, history, _ = _training("global", plan=False)
    assert {h["step_source"] for h in history} == {"run_fit"}
    assert history[-1]["placement_reason"] == "the settings or a loaded plan ask for it"
    assert history[-1]["step_allocations"] > 0
    orchestrator.close()


@pytest.mark.parametrize("mode", ["off", "advisor", "global"])
def test_no_mode_changes_the_numbers(mode):
    *_, losses = _training(mode)
    *_, stock = _training("off")
    assert losses == stock


def test_statistics_name_the_pool_and_its_fragmentation():
    orchestrator, *_ = _training("global")
    stats = get_mla_stats()
    assert stats["mode"] == "global"
    assert 0.0 <= stats["freelist_fragmentation"] < 1.0
    assert stats["global_pool_used_gb"] >= 0.0
    orchestrator.close()
    del orchestrator
    gc.collect()
    assert get_mla_stats()["mode"] == "off"


def test_a_saved_plan_is_replayed_from_the_first_step_on():
    first, *_ = _training("global", plan=True)
    state = json.loads(json.dumps(first.state_dict()))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    again = MemoryOrchestrator(MemoryConfig(mode="global", backend="host")).attach(model, optimizer)
    again.load_state_dict(state)
    with again.step():
        model(torch.randn(32, 64)).square().mean().backward()
    assert again.stats()["step_source"] == "replayed"
    assert again.stats()["planned_hit_rate"] > 0.5


def test_a_state_of_another_model_is_refused_by_name():
    first, *_ = _training("global")
    other = torch.nn.Linear(3, 3)
    wrong = MemoryOrchestrator(MemoryConfig(mode="global", backend="host")).attach(other)
    with pytest.raises(ValueError, match=r"belongs to another model.*tensors: saved 4, now 2"):
        wrong.load_state_dict(first.state_dict())


def test_a_step_inside_a_step_is_refused():
    orchestrator = MemoryOrchestrator(MemoryConfig(mode="global", backend="host"))
    with (
        orchestrator.step(),
        pytest.raises(RuntimeError, match="a step is open; end it first"),
        orchestrator.step(),
    ):
        pass


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mode": "fast"}, "allowed: \\['off', 'advisor', 'pool', 'global'\\]"),
        ({"backend": "rocm"}, "backend is 'rocm'"),
        ({"pool_gb": -1}, "pool_gb is -1 GiB"),
        ({"pool_gb": 4, "limit_gb": 2}, "raise limit_gb or lower pool_gb"),
        ({"grow_mb": 0}, "set one of them"),
        ({"plan": "sometimes"}, "plan is 'sometimes'; allowed: 'auto', True"),
        ({"plan_above": 1.5}, "plan_above is 1.5; allowed: a share"),
    ],
)
def test_bad_settings_say_what_is_allowed(settings, text):
    with pytest.raises(ValueError, match=text):
        MemoryConfig(**settings)


def test_a_step_that_fails_closes_and_teaches_nothing():
    orchestrator = MemoryOrchestrator(MemoryConfig(mode="global", backend="host", plan=True))
    x = torch.ones(256, 256)
    for _ in range(3):
        with orchestrator.step():
            (x @ x).sum()
    plans = orchestrator.stats()["plans"]

    def broken():
        with orchestrator.step():
            x.sum()
            msg = "half-way"
            raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="half-way"):
        broken()
    assert orchestrator.stats()["plans"] == plans
    with orchestrator.step():
        (x @ x).sum()
    assert orchestrator.stats()["planned_hit_rate"] == 1.0
    orchestrator.close()
