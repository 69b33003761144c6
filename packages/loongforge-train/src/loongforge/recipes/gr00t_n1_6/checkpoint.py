"""Checkpoints in the published layout: sharded safetensors by exact names, tensor by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from loongforge.errors import CheckpointError, ConfigError
from loongforge.recipes.gr00t_n1_6.config import GrootConfig, LanguageConfig, VisionConfig
from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta, materialise, random_fill
from loongforge.recipes.gr00t_n1_6.lora import LoraConfig, LoraLinear
from loongforge.recipes.gr00t_n1_6.model import GrootModel
from loongforge.recipes.gr00t_n1_6.published import read_config, written_config
from loongforge.recipes.settings import updated

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
SIZES_FILE = "loongforge_config.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_unused(name: str) -> bool:
    """Tell whether the original stores the tensor ``name`` and never uses it."""
    return ".vision_model.head." in name or name.endswith("language_model.lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A folder in the published layout.

    Attributes:
        folder: Where it lies.
        files: File by tensor name.
        raw_config: Contents of ``config.json``.
    """

    folder: Path
    files: Mapping[str, Path]
    raw_config: Mapping[str, object]

    def config(self, base: GrootConfig | None = None) -> GrootConfig:
        """Return the model configuration; sizes the folder does not name come from ``base``."""
        base = base or GrootConfig()
        sizes = self.folder / SIZES_FILE
        if sizes.is_file():
            own = _json(sizes)
            vision = updated(VisionConfig(), _table(own, "vision", sizes), where="vision")
            language = updated(LanguageConfig(), _table(own, "language", sizes), where="language")
            top = min(base.tune.top_language_layers, language.layers)
            tune = replace(base.tune, top_language_layers=top)
            base = replace(base, vision=vision, language=language, tune=tune)
        return read_config(self.raw_config, base=base)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, from the headers."""
        result: dict[str, tuple[int, ...]] = {}
        for path in dict.fromkeys(self.files.values()):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if self.files.get(name) == path:
                        result[name] = tuple(file.get_slice(name).get_shape())
        return result

    def read(self, name: str) -> Tensor:
        """Return one tensor on the host, memory-mapped until it is copied."""
        with _opened(self.files[name]) as file:
            return file.get_tensor(name)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a load did.

    Attributes:
        tensors: Number of tensors copied.
        left_in_file: Unused tensors that the model does not hold.
        not_in_file: Unused tensors of the model that the file lacks; they are zero.
    """

    tensors: int
    left_in_file: tuple[str, ...]
    not_in_file: tuple[str, ...]


def find_checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint: a local one, or a hub id fetched by huggingface_hub.

    Raises:
        CheckpointError: Neither a folder nor reachable.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if not _HUB_ID.fullmatch(name):
        msg = (
            f"checkpoint folder {name} does not exist; give a folder or a hub id such as nvidia/GR00T-N1.6-3B"
        )
        raise CheckpointError(msg)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        msg = (
            f"checkpoint {name} is no local folder, and huggingface_hub is not installed; "
            "run `pip install loongforge-train[hub]` or download it and give the folder"
        )
        raise CheckpointError(msg) from error
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except Exception as error:
        msg = f"checkpoint {name} is no local folder and cannot be fetched ({error}); give a local folder"
        raise CheckpointError(msg) from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read index and configuration of a checkpoint folder; no tensor is touched.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    config = folder / CONFIG_FILE
    if not config.is_file():
        msg = f"{folder} has no {CONFIG_FILE}; is it a checkpoint folder in the published layout?"
        raise CheckpointError(msg)
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = _table(_json(index), "weight_map", index)
        files = {name: folder / str(file) for name, file in weight_map.items()}
        missing = sorted({path.name for path in files.values() if not path.is_file()})
        if missing:
            msg = f"{index} names files that are not there: {', '.join(missing)}; fetch them again"
            raise CheckpointError(msg)
    elif (folder / SINGLE_FILE).is_file():
        with _opened(folder / SINGLE_FILE) as file:
            files = dict.fromkeys(file.keys(), folder / SINGLE_FILE)
    else:
        msg = f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}"
        raise CheckpointError(msg)
    return Checkpoint(folder=folder, files=files, raw_config=_json(config))


def check_fit(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> LoadReport:
    """Compare names and shapes.

    Raises:
        CheckpointError: Names every missing, unknown and wrong-shaped tensor. Tensors that the original never
            uses may be absent on either side.
    """
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    wrong = [
        f"{name} has shape {list(found[name])}, the model needs {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    bad = [f"missing: {name}" for name in missing if not is_unused(name)]
    bad += [f"unknown: {name}" for name in unknown if not is_unused(name)]
    bad += [f"wrong shape: {line}" for line in wrong]
    if bad:
        shown = "\n  ".join(bad[:40])
        more = f"\n  and {len(bad) - 40} more" if len(bad) > 40 else ""
        msg = (
            f"the checkpoint does not fit the model ({len(bad)} tensors):\n  {shown}{more}\n"
            "Use the configuration that belongs to it, or a checkpoint of this architecture"
        )
        raise CheckpointError(msg)
    return LoadReport(
        tensors=len(expected) - len(missing),
        left_in_file=tuple(name for name in unknown if is_unused(name)),
        not_in_file=tuple(name for name in missing if is_unused(name)),
    )


def load_model(
    checkpoint: Checkpoint,
    config: GrootConfig,
    *,
    lora: LoraConfig | None = None,
    seed: int = 0,
    device: str = "cpu",
    frozen_dtype: torch.dtype = torch.bfloat16,
) -> tuple[GrootModel, LoadReport]:
    """Build a model from a checkpoint, one tensor after the other, so that no second copy ever exists.

    Args:
        checkpoint: Opened folder.
        config: Model configuration.
        lora: Adapters; they start at zero effect.
        seed: Seed of the adapters' weights.
        device: Where the parameters go.
        frozen_dtype: Storage of parameters that do not train; the others are float32.

    Raises:
        CheckpointError: Names every tensor that does not fit, before anything is loaded.
    """
    model = build_on_meta(config, lora)
    named = {n: tuple(p.shape) for n, p in model.named_parameters() if ".lora_" not in n}
    report = check_fit(named, checkpoint.shapes())
    fresh = random_fill(seed, config)

    @torch.no_grad()
    def fill(name: str, value: Tensor) -> None:
        if ".lora_" in name:
            fresh(name, value)
        elif name in checkpoint.files:
            value.copy_(checkpoint.read(name))
        else:
            value.zero_()

    materialise(model, device, frozen_dtype=frozen_dtype, fill=fill)
    return model, report


def export_model(
    model: GrootModel,
    folder: Path,
    *,
    source: Checkpoint | None = None,
    shard_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write a model in the published layout; adapters are folded into their weights.

    Args:
        model: The model; unused embodiment slots are written too.
        folder: Created if absent.
        source: Checkpoint the model came from: its ``config.json`` fields are kept, and unused tensors that
            the model does not hold are copied from it.
        shard_bytes: Largest size of one file, bytes; at most one file's tensors are on the host at a time.

    Returns:
        Paths of the weight files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _plan_shards(model, source, shard_bytes)
    weight_map: dict[str, str] = {}
    paths = []
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE_FILE
        wanted = set(names)
        tensors = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in _tensors(model) if n in wanted}
        for name in wanted - set(tensors):
            if source is not None:
                tensors[name] = source.read(name).contiguous()
        partial = folder / f".{file}.part"
        save_file(tensors, str(partial), metadata={"format": "pt"})
        partial.rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
        paths.append(folder / file)
    total = sum(size for _, size in _sizes(model, source))
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    raw = None if source is None else source.raw_config
    _write_json(folder / CONFIG_FILE, written_config(model.config, raw))
    sizes = {"vision": asdict(model.config.vision), "language": asdict(model.config.language)}
    _write_json(folder / SIZES_FILE, sizes)
    return paths


def _tensors(model: GrootModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the published tensors of a model, adapters folded in."""
    adapted = {n: m for n, m in model.named_modules() if isinstance(m, LoraLinear)}
    for name, value in model.state_dict().items():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".")
        yield name, adapted[owner].merged_weight() if leaf == "weight" and owner in adapted else value


def _sizes(model: GrootModel, source: Checkpoint | None) -> list[tuple[str, int]]:
    own = [(n, v.numel() * v.element_size()) for n, v in model.state_dict().items() if ".lora_" not in n]
    if source is None:
        return own
    held = {name for name, _ in own}
    extra = [name for name in source.files if is_unused(name) and name not in held]
    return own + [(name, source.read(name).nbytes) for name in extra]


def _plan_shards(model: GrootModel, source: Checkpoint | None, limit: int) -> Sequence[Sequence[str]]:
    if limit <= 0:
        msg = f"shard_bytes must be positive, got {limit}"
        raise ConfigError(msg)
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in _sizes(model, source):
        if used and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        msg = f"{path} cannot be read as safetensors ({error}); fetch it again"
        raise CheckpointError(msg) from error


def _json(path: Path) -> dict[str, object]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read as JSON: {error}"
        raise CheckpointError(msg) from error
    if not isinstance(value, dict):
        msg = f"{path} must hold a JSON object"
        raise CheckpointError(msg)
    return value


def _table(value: Mapping[str, object], key: str, path: Path) -> Mapping[str, object]:
    table = value.get(key)
    if not isinstance(table, Mapping):
        msg = f"{path} has no table '{key}'"
        raise CheckpointError(msg)
    return table


def _write_json(path: Path, value: object) -> None:
    partial = path.with_name(f".{path.name}.part")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.rename(path)
