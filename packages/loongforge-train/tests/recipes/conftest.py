"""Where the recipe tests find reference data and robot recordings; both may be absent."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loongforge.recipes import get_recipe
from loongforge.recipes.gr00t_n1_6 import GrootConfig, GrootModel
from loongforge.recipes.gr00t_n1_6.published import read_config
from safetensors.torch import load_file


def _shared(name: str) -> Path | None:
    data = os.environ.get("LOONGFORGE_TEST_DATA")
    roots = [Path(data).resolve().parent] if data else []
    roots += [parent / "shared" for parent in Path(__file__).resolve().parents]
    return next((root / name for root in roots if (root / name).exists()), None)


@dataclass(frozen=True)
class GrootReference:
    """Reference tensors of the original implementation on a tiny configuration."""

    folder: Path
    config: GrootConfig
    golden: dict[str, torch.Tensor]
    gradient_names: list[str]

    def model(self, **work: bool) -> GrootModel:
        """Return the tiny model with the reference weights, in evaluation mode."""
        config = replace(self.config, work=replace(self.config.work, **work))
        model = GrootModel(config)
        weights = load_file(self.folder / "tiny_weights.safetensors")
        model.load_state_dict(weights if config.work.keep_unused else used_only(weights))
        return model.eval()

    def batch(self, case: str) -> dict[str, object]:
        """Return the inputs of a case, as the original takes them."""
        prefix = f"{case}.in."
        batch: dict[str, object] = {
            name.removeprefix(prefix): value for name, value in self.golden.items() if name.startswith(prefix)
        }
        images = sorted(name for name in batch if name.startswith("pixel_values."))
        batch["pixel_values"] = [batch.pop(name) for name in images]
        return batch


def used_only(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out what the original stores and never uses."""
    return {n: w for n, w in weights.items() if "lm_head" not in n and ".vision_model.head." not in n}


@pytest.fixture(scope="session")
def groot_reference() -> GrootReference:
    folder = _shared("gr00t_n1_6")
    if folder is None:
        pytest.skip("reference tensors of GR00T N1.6 are not here (shared/gr00t_n1_6)")
    raw = json.loads((folder / "tiny_config.json").read_text())
    config = read_config(raw["groot"], raw["eagle"])
    ids = raw["golden"]["token_ids"]
    config = replace(config, language=replace(config.language, pad_token_id=ids["pad"]))
    golden = load_file(folder / "tiny_golden.safetensors")
    return GrootReference(folder, config, golden, raw["golden"]["grad_norm_names"])


@pytest.fixture(scope="session")
def groot_parameter_table() -> list[dict[str, str]]:
    folder = _shared("gr00t_n1_6")
    if folder is None:
        pytest.skip("the parameter table of GR00T N1.6 is not here (shared/gr00t_n1_6)")
    lines = (folder / "parameters_full.tsv").read_text().splitlines()
    names = lines[0].split("\t")
    return [dict(zip(names, line.split("\t"), strict=False)) for line in lines[1:]]


@pytest.fixture(scope="session")
def g1_pick() -> Path:
    folder = _shared("data/g1_pick")
    if folder is None:
        pytest.skip("the recording g1_pick is not here (LOONGFORGE_TEST_DATA or shared/data)")
    return folder


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_samples() -> list[dict[str, object]]:
    """Samples as a robot data set gives them, made up."""
    rng = np.random.default_rng(3)
    return [
        {
            "observation.images.front": rng.integers(0, 256, (60, 80, 3), dtype=np.uint8),
            "observation.images.wrist": rng.integers(0, 256, (60, 80, 3), dtype=np.uint8),
            "observation.state": rng.standard_normal(7).astype(np.float32),
            "action": rng.standard_normal((16, 7)).astype(np.float32),
            "action_is_pad": np.arange(16) >= 16 - 3 * (i % 2),
            "task": ["Pick up the red cube.", "Open the drawer!"][i % 2],
            "index": np.int64(10 + i),
        }
        for i in range(4)
    ]


@pytest.fixture(scope="session")
def tiny_dataset(tiny_samples):
    """A stand-in for an opened data set: features and statistics of the samples."""
    camera = SimpleNamespace(dtype="video", shape=(60, 80, 3))
    vector = SimpleNamespace(dtype="float32", shape=(7,))
    ones = np.ones(7)
    statistics = {"min": -3 * ones, "max": 3 * ones, "mean": 0 * ones, "std": ones}
    return SimpleNamespace(
        features={
            "observation.images.front": camera,
            "observation.images.wrist": camera,
            "observation.state": vector,
            "action": vector,
        },
        stats={"observation.state": statistics, "action": statistics},
        modality=None,
        samples=tiny_samples,
    )


@pytest.fixture
def tiny_batch(tiny_dataset) -> dict[str, object]:
    """A host batch of the tiny recipe with its draws."""
    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options()
    model = recipe.build_model(options, 0).train()
    collate = recipe.build_collate(tiny_dataset, model, options)
    return model.draw(collate(tiny_dataset.samples), torch.Generator().manual_seed(1))
