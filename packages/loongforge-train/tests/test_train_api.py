"""Configuration, and the trainer of the original API."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loongforge.config import PillarConfig, TrainConfig, build_config, to_toml
from loongforge.enable import enable_loongforge, settings_of
from loongforge.errors import ConfigError
from loongforge.records import read_metrics
from loongforge.testing import ToyData, ToyModel, collate
from loongforge.trainer import LoongTrainer
from torch import nn
from torch.utils.data import DataLoader


def test_the_fusion_batch_size_must_divide_the_accumulation() -> None:
    # Mission F2.
    with pytest.raises(
        ConfigError, match=r"fusion_batch_size is 3 but gradient_accumulation_steps is 8.*\[1, 2, 4, 8\]"
    ):
        TrainConfig(steps=1, accumulation=8, pillars=PillarConfig(fuse=3))
    with pytest.raises(ValueError, match="must divide"):
        LoongTrainer(ToyModel(), [], gradient_accumulation_steps=2, pillars=PillarConfig(fuse=4))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"steps": 0}, "steps is 0: allowed is a whole number of at least 1"),
        ({"steps": "many"}, "steps is 'many'"),
        ({"stepz": 3}, "unknown setting stepz: allowed here are steps"),
        (
            {"steps": 1, "pillars": {"mem": "big"}},
            "pillars.mem is 'big': allowed are off, auto, advisor, pool, global",
        ),
        ({"steps": 1, "precision": "int8"}, "precision is 'int8': allowed are fp32, bf16, fp16"),
        ({}, "neither steps nor epochs"),
        ({"steps": 1, "checkpoint": {"keep_last": 0}}, "keep_last is 0"),
    ],
)
def test_wrong_settings_say_what_is_allowed(layer: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(layer)
    assert words in str(caught.value)


def test_the_configuration_survives_toml_and_yaml(tmp_path: Path) -> None:
    import tomllib

    import yaml
    from loongforge.config import read_file, to_dict

    config = build_config(
        {"steps": "5", "pillars": {"fuse": "2"}, "accumulation": 4, "sinks": "tensorboard,wandb"}
    )
    assert build_config(tomllib.loads(to_toml(config))) == config
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(to_dict(config)))
    assert build_config(read_file(tmp_path / "c.yaml")) == config
    with pytest.raises(ConfigError, match="does not exist"):
        read_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="not valid"):
        read_file(tmp_path / "bad.toml")


class KeywordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, index: torch.Tensor, **rest: object) -> object:
        loss = self.layer(x).square().mean()
        return {"loss": loss, "logits": x}


class TupleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.mse_loss(self.layer(x), y), x


def test_loong_trainer_takes_any_module_that_returns_a_loss(tmp_path: Path) -> None:
    data = ToyData(32)
    by_name = DataLoader(data, batch_size=4, collate_fn=collate)
    pairs = DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randn(32, 1)), batch_size=4)
    for number, (model, loader) in enumerate(
        [(ToyModel(), by_name), (KeywordModel(), by_name), (TupleModel(), pairs)]
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
        seen: list[int] = []
        result = LoongTrainer(
            model=model,
            train_dataloader=loader,
            optimizer=optimizer,
            lr_scheduler=schedule,
            gradient_accumulation_steps=2,
            mixed_precision="no",
            checkpoint_dir=str(tmp_path / str(number)),
            log_interval=1,
            callbacks=[lambda record, seen=seen: seen.append(record.step)],
        ).train(num_epochs=2)
        assert result.steps == 8
        assert seen == list(range(1, 9))
        rates = [r["lr"] for r in read_metrics(tmp_path / str(number))]
        assert rates == [0.01] * 4 + [0.005] * 4
        assert result.checkpoint is not None


def test_loong_trainer_matches_a_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    data = ToyData(32)
    loader = DataLoader(data, batch_size=4, collate_fn=collate)
    ours, plain = KeywordModel(), KeywordModel()
    plain.load_state_dict(ours.state_dict())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    LoongTrainer(ours, loader, optimizer, None, 2, checkpoint_dir=str(tmp_path)).train(num_epochs=3)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        for number, batch in enumerate(loader):
            (plain(**batch)["loss"] / 2).backward()
            if number % 2:
                reference.step()
                reference.zero_grad()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_enable_marks_classes_and_objects_and_refuses_bad_values() -> None:
    @enable_loongforge(gcts=True, mla=False, adfe=False, dmf=True, dmf_fusion_batch_size=2)
    class Marked(ToyModel):
        pass

    found = settings_of(Marked())
    assert found is not None
    assert (found.comm, found.mem, found.data, found.fuse) == ("hybrid", "off", "off", 2)
    model = ToyModel()
    assert enable_loongforge(model) is model
    assert settings_of(model) is not None
    assert settings_of(ToyModel()) is None
    with pytest.raises(ConfigError, match="gcts_comm_strategy is 'fast'"):
        enable_loongforge(gcts_comm_strategy="fast")
    with pytest.raises(ConfigError, match="dmf_fusion_batch_size"):
        enable_loongforge(dmf_fusion_batch_size="many")
