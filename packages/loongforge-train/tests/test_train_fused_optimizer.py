"""AdamW in one pass inside the trainer: the numbers of torch's, its checkpoints, guards and fallbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from loongforge.config import CheckpointConfig, GuardConfig, PillarConfig, TrainConfig
from loongforge.optim import (
    ClippingOptimizer,
    build_optimizer,
    clips_itself,
    load_named_state,
    named_state,
)
from loongforge.records import read_metrics
from loongforge.session import Session
from loongforge.testing import ToyModel
from torch import nn

pytest.importorskip("loongforge_fuse")

ON = PillarConfig(comm="off", fused_optimizer=True)
OFF = PillarConfig(comm="off")
Make = Callable[..., Session]
Records = list[dict[str, float]]


def weights(session: Session) -> list[torch.Tensor]:
    return [p.detach().clone() for p in session.parts.model.parameters()]


def trained(make: Make, run: Path, pillars: PillarConfig, **settings: object) -> tuple[Session, Records]:
    session = make(run, pillars=pillars, learning_rate=1e-2, clip_norm=0.05, **settings)
    session.train()
    return session, read_metrics(run / "metrics.jsonl")


def test_losses_norms_and_weights_are_those_of_torchs_adamw(session: Make, tmp_path: Path) -> None:
    ours, records = trained(session, tmp_path / "a", ON, accumulation=2)
    theirs, wanted = trained(session, tmp_path / "b", OFF, accumulation=2)
    assert isinstance(ours.parts.optimizer, ClippingOptimizer)
    assert not isinstance(theirs.parts.optimizer, ClippingOptimizer)
    assert len(records) == len(wanted) > 4
    for a, b in zip(records, wanted, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
        assert b["grad_norm"] > 0.05, "the clip has to bite"
    for p, q in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), [(OFF, ON), (ON, OFF), (ON, ON)])
def test_a_run_goes_on_from_a_checkpoint_of_either(
    session: Make, tmp_path: Path, first: PillarConfig, second: PillarConfig
) -> None:
    keep = {"checkpoint": CheckpointConfig(every=4), "schedule": "constant"}
    whole, wanted = trained(session, tmp_path / "constant", OFF, steps=8, **keep)
    trained(session, tmp_path / "run", first, steps=4, **keep)
    ours, records = trained(session, tmp_path / "run", second, steps=8, **keep)
    assert [r["step"] for r in records] == list(range(1, 9))
    for a, b in zip(records, wanted, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    for p, q in zip(weights(ours), weights(whole), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_settings_that_only_torchs_adamw_has_stay_as_configured_after_a_checkpoint_without_them() -> None:
    from loongforge_fuse import FusedAdamW

    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    ours = FusedAdamW(model.parameters(), lr=0.5)
    ours.step()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    load_named_state(theirs, model, named_state(ours, model))
    assert theirs.param_groups[0]["fused"] is True
    assert theirs.param_groups[0]["lr"] == 0.5
    theirs.step()


class Poisoned(ToyModel):
    """The loss is fine and one gradient is infinite in the third step."""

    calls = 0

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = super().forward(batch)
        self.calls += 1
        if self.calls == 3:
            self.head.weight.register_hook(lambda g: g + float("inf") if self.calls == 3 else g)
        return out


def test_a_step_with_an_infinite_gradient_is_skipped_and_counted(session: Make, tmp_path: Path) -> None:
    before: list[list[torch.Tensor]] = []
    run = session(tmp_path, model=Poisoned(), pillars=ON, steps=5, clip_norm=1.0)
    step = run.engine.run_step

    def watched() -> bool:
        before.append(weights(run))
        return step()

    run.engine.run_step = watched  # type: ignore[method-assign]
    run.train()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [bool(r["skipped"]) for r in records] == [False, False, True, False, False]
    unchanged = [all(map(torch.equal, a, b)) for a, b in pairwise(before)]
    assert unchanged == [False, False, True, False]


def test_where_one_pass_is_not_possible_torchs_adamw_runs_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Linear(2, 2)
    cases = {
        "fp16": TrainConfig(pillars=ON, precision="fp16", epochs=1),
        "nonfinite": TrainConfig(pillars=ON, guards=GuardConfig(nonfinite="off"), epochs=1),
        "zero1": TrainConfig(pillars=ON, strategy="zero1", epochs=1),
    }
    for word, config in cases.items():
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="loongforge.optim"):
            made = build_optimizer([{"params": list(model.parameters())}], config, torch.device("cpu"))
        assert type(made) is torch.optim.AdamW
        assert word in caplog.text


def test_an_optimizer_that_clips_to_another_norm_does_not_replace_the_clip() -> None:
    from loongforge_fuse import FusedAdamW

    own = FusedAdamW(nn.Linear(2, 2).parameters(), max_grad_norm=0.5)
    assert clips_itself(own, 0.5) is own
    assert clips_itself(own, 1.0) is None
    assert clips_itself(own, None) is None
    assert clips_itself(torch.optim.AdamW(nn.Linear(2, 2).parameters()), None) is None
