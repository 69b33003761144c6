"""What stands in a checkpoint: taking it from a running engine, and putting it back.

The saved parts are listed once, in :data:`PARTS`; a test compares the list with what a resume restores (fault
T22).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from loongforge.checkpoint.layout import (
    FORMAT,
    STATE,
    TRAINER,
    load_tensors,
    memory_file,
    rank_file,
    read_manifest,
)
from loongforge.checkpoint.sharded import (
    AVERAGE,
    METADATA,
    MODEL,
    OPTIMIZER,
    SHARDS,
    flat_state,
    is_sharded,
    load_shards,
    read_moments,
    read_whole,
    stored_tensors,
)
from loongforge.checkpoint.write import Snapshot, load_safetensors
from loongforge.composition import steps_from
from loongforge.config import TrainConfig, to_dict
from loongforge.engine import StepEngine
from loongforge.errors import CheckpointError
from loongforge.optim import (
    OPTIMIZER_FORMAT,
    PlannedSchedule,
    go_on_schedule,
    load_group_settings,
    named_state,
)
from loongforge.rng import capture_rng, restore_rng, seed_rank
from loongforge.sources import takes_other_ranks

MDG_FILE = "mdg.json"
AVERAGE_FILE = f"{STATE}/average.pt"
Copies = dict[tuple[object, ...], tuple[Tensor, Tensor]]
"""Place in memory -> (source, host copy)."""
PARTS = (
    "model", "optimizer", "scheduler", "average", "scaler",
    "rng", "data", "guard", "memory", "plans", "step", "samples",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a resume found."""

    folder: Path
    step: int
    epoch: int
    notes: tuple[str, ...] = ()
    """What was converted, in words."""
    total: int | None = None
    """Optimizer steps of the whole run, where other ranks or batches have changed it."""


def take_snapshot(engine: StepEngine, config: TrainConfig, *, loss: float | None) -> Snapshot:
    """Copy the engine's state to host memory; a collective for split state, so call it on all ranks.

    With ``checkpoint.layout`` sharded the snapshot holds the live shards instead; the writer copies them
    before it returns.
    """
    parts, rank = engine.parts, engine.parts.ranks.rank
    copies: Copies = {}
    sharded = config.checkpoint.layout == "sharded" and parts.parallel.sharded
    state = {
        "format": FORMAT,
        "rng": capture_rng(),
        "data": parts.source.state_dict(),
        "guard": parts.guard.state_dict(),
        "samples": engine.at.samples,
    }
    tensors: dict[str, object] = {rank_file(rank): host_copy(state, copies)}
    texts = {memory_file(rank): json.dumps(memory)} if (memory := parts.memory.state_dict()) else {}
    weights: dict[str, Mapping[str, object]] = {}
    shards: dict[str, Tensor] | None = None
    if sharded:
        average = parts.average.state_dict() if parts.average is not None else None
        shards = flat_state(parts.model, parts.optimizer, average)
        groups = named_state(parts.optimizer, parts.model)["param_groups"]
        whole: dict[str, object] = {
            "optimizer.pt": {"format": OPTIMIZER_FORMAT, "state": {}, "param_groups": groups}
        }
    else:
        whole, weights = _whole(engine, config, copies)
    plans = parts.parallel.plans()
    if rank == 0:
        tensors |= whole
        tensors["scheduler.pt"] = plain_schedule(parts.schedule.state_dict())
        if parts.scaler is not None:
            tensors[f"{STATE}/scaler.pt"] = dict(parts.scaler.state_dict())
        texts |= {f"{STATE}/{name}": text for name, text in {**parts.documents, **plans}.items()}
        texts[TRAINER] = json.dumps(describe(engine, config), indent=1)
    return Snapshot(
        step=engine.at.step,
        epoch=parts.source.epoch,
        loss=loss,
        tensors=tensors,
        weights=weights if rank == 0 else {},
        texts=texts,
        shards=shards,
    )


def _whole(
    engine: StepEngine, config: TrainConfig, copies: Copies
) -> tuple[dict[str, object], dict[str, Mapping[str, object]]]:
    """Gather weights, moments and average, and copy them on rank 0: (torch.save files, safetensors files)."""
    parts = engine.parts

    def keep(value: object) -> object:
        return host_copy(value, copies) if parts.ranks.rank == 0 else None

    model = keep(parts.parallel.model_state())
    files = {"optimizer.pt": keep(parts.parallel.optimizer_state(parts.optimizer))}
    if parts.average is not None:
        files[AVERAGE_FILE] = keep(parts.parallel.gather(parts.average.state_dict()))
    weights: dict[str, Mapping[str, object]] = {}
    if config.checkpoint.model_format in {"pt", "both"}:
        files["model.pt"] = model
    if config.checkpoint.model_format in {"safetensors", "both"} and isinstance(model, dict):
        weights["model.safetensors"] = model
    return files, weights


def describe(engine: StepEngine, config: TrainConfig) -> dict[str, object]:
    """Return what identifies a checkpoint: format, topology, fingerprints, configuration."""
    parts = engine.parts
    return {
        "format": FORMAT,
        "step": engine.at.step,
        "epoch": parts.source.epoch,
        "world_size": parts.ranks.world_size,
        "strategy": config.strategy,
        "accumulation": config.accumulation,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "model_fingerprint": model_fingerprint(parts.model),
        "data_fingerprint": parts.source.fingerprint,
        "config": to_dict(config),
        "torch": torch.__version__,
    }


def restore(engine: StepEngine, config: TrainConfig, folder: Path) -> Restored:
    """Put a checkpoint back into an engine of the same model.

    Raises:
        CheckpointError: Something does not fit; the message names it.
    """
    parts, rank = engine.parts, engine.parts.ranks.rank
    manifest = read_manifest(folder)
    facts = json.loads((folder / TRAINER).read_text())
    notes: list[str] = []
    _restore_tensors(engine, config, folder, notes)
    parts.schedule.load_state_dict(dict(_mapping(folder / "scheduler.pt")))
    if parts.scaler is not None:
        if (folder / STATE / "scaler.pt").exists():
            parts.scaler.load_state_dict(dict(_mapping(folder / STATE / "scaler.pt")))
        else:
            notes.append(
                "the checkpoint has no loss scale (it was not trained with fp16): a fresh one is used"
            )
    if facts["accumulation"] != config.accumulation:
        notes.append(
            f"accumulation was {facts['accumulation']}, is {config.accumulation}: the data position is "
            "counted in micro-batches, so the next one is exact; a step now means another number of samples"
        )
    regular = parts.source.batches_per_epoch()
    restored = _restore_rank(engine, config, folder, facts, notes=notes)
    total = None
    other = (manifest.world_size, facts["batch_size"]) != (parts.ranks.world_size, config.batch_size)
    if other and isinstance(parts.schedule, PlannedSchedule):
        total = steps_from(config, parts.source, regular=regular, step=manifest.step)
        parts.schedule = go_on_schedule(parts.optimizer, config, total, parts.schedule.state_dict())
    memory = folder / memory_file(rank)
    if memory.exists():
        parts.memory.load_state_dict(json.loads(memory.read_text()))
    if (folder / STATE / MDG_FILE).exists():
        parts.documents[MDG_FILE] = (folder / STATE / MDG_FILE).read_text()
    plans = {path.name: path.read_text() for path in sorted((folder / STATE).glob("*.json"))}
    if manifest.world_size == parts.ranks.world_size:
        parts.parallel.load_plans(plans)
    engine.at.step = manifest.step
    engine.at.samples = restored
    return Restored(
        folder=folder, step=manifest.step, epoch=parts.source.epoch, notes=tuple(notes), total=total
    )


def _restore_tensors(engine: StepEngine, config: TrainConfig, folder: Path, notes: list[str]) -> None:
    """Restore weights, moments and average, from whole files or from shards, under any strategy."""
    parts = engine.parts
    stored = _mapping(folder / "optimizer.pt")
    sharded = is_sharded(folder)
    if sharded and parts.parallel.sharded:
        load_group_settings(parts.optimizer, parts.model, stored)
        _restore_shards(engine, folder)
    else:
        if sharded:
            stored = {**stored, "state": read_moments(folder)}
        parts.parallel.load_optimizer_state(parts.optimizer, stored)
        parts.parallel.load_model_state(load_weights(folder))  # type: ignore[arg-type]
    if parts.average is None:
        return
    averages = load_average(folder)
    if averages is None:
        notes.append(
            "the checkpoint has no moving average of the weights: it starts from the restored weights"
        )
        parts.average.restart()
        return
    try:
        parts.average.load_state_dict(averages)
    except ValueError as error:
        msg = f"{folder}: {error}"
        raise CheckpointError(msg) from error


def _restore_shards(engine: StepEngine, folder: Path) -> None:
    """Read this rank's shards in place, whatever number of ranks wrote them (a collective)."""
    parts = engine.parts
    parts.parallel.make_moments(parts.optimizer)
    names = {name.rpartition("/")[0] for name in stored_tensors(folder) if name.startswith(OPTIMIZER)}
    for name, parameter in parts.model.named_parameters():
        # A parameter without gradient so far has no moments yet, neither there nor here.
        if OPTIMIZER + name not in names:
            parts.optimizer.state.pop(parameter, None)
    load_shards(flat_state(parts.model, parts.optimizer), folder, parts.ranks.votes)


def load_average(folder: Path) -> Mapping[str, Tensor] | None:
    """Return the moving average of the weights of a checkpoint, or None when it has none."""
    if is_sharded(folder):
        return read_whole(folder, AVERAGE) or None
    if (folder / AVERAGE_FILE).exists():
        return _mapping(folder / AVERAGE_FILE)  # type: ignore[return-value]
    return None


def _restore_rank(
    engine: StepEngine, config: TrainConfig, folder: Path, facts: Mapping[str, object], *, notes: list[str]
) -> int:
    """Restore random state, data position and guard of this rank; return its samples so far."""
    parts, rank, world = engine.parts, engine.parts.ranks.rank, engine.parts.ranks.world_size
    stored_ranks, batch_size = int(str(facts["world_size"])), int(str(facts["batch_size"]))
    own = folder / rank_file(min(rank, stored_ranks - 1))
    state = _mapping(own)
    data = state["data"]
    if not isinstance(data, Mapping):
        msg = f"{own} has no data position: the file is damaged"
        raise CheckpointError(msg)
    dealt_anew = batch_size != config.batch_size and takes_other_ranks(parts.source.loader)
    if batch_size != config.batch_size:
        notes.append(f"the batch size was {batch_size}, is {config.batch_size}: a step means other samples")
    if stored_ranks != world:
        notes.append(f"the checkpoint has {stored_ranks} rank(s), this run {world}")
    if stored_ranks != world or dealt_anew:
        parts.source.load_resharded(
            data, stored_ranks=stored_ranks, ranks=world, allow_mismatch=config.allow_mismatch
        )
    else:
        parts.source.load_state_dict(data, allow_mismatch=config.allow_mismatch)
    guard = state.get("guard")
    if isinstance(guard, dict):
        parts.guard.load_state_dict(guard)
    rng = state["rng"]
    if rank < stored_ranks and isinstance(rng, Mapping):
        restore_rng(rng)
    else:
        # A rank that was not there before: a seed of its own, from the run's seed, its number and the step.
        seed_rank(config.seed + int(str(facts["step"])), rank)
    return int(str(state.get("samples", 0)))


def load_weights(folder: Path) -> Mapping[str, object]:
    """Return the model's whole state dict, from model.pt, model.safetensors or the shards."""
    if is_sharded(folder):
        return read_whole(folder, MODEL)
    if (folder / "model.pt").exists():
        return _mapping(folder / "model.pt")
    if (folder / "model.safetensors").exists():
        return load_safetensors(folder / "model.safetensors")
    msg = f"{folder} has neither model.pt nor model.safetensors nor {SHARDS}/{METADATA}"
    raise CheckpointError(msg)


def _mapping(path: Path) -> Mapping[str, object]:
    loaded = load_tensors(path)
    if not isinstance(loaded, Mapping):
        msg = f"{path} holds a {type(loaded).__name__} instead of a mapping: the file is damaged"
        raise CheckpointError(msg)
    return loaded


def host_copy(value: object, copies: Copies) -> object:
    """Copy nested tensors to host memory, compactly; tied ones (same memory) stay one (fault M14).

    Args:
        value: Tensors, mappings, lists and tuples of them; anything else is passed through.
        copies: What was copied so far, by place in memory. Each source is kept beside its copy: a tensor
            gathered for the snapshot alone would otherwise be freed, and the next one made at its address
            would be taken for it.
    """
    if isinstance(value, Tensor):
        key = (
            value.device,
            value.untyped_storage().data_ptr(),
            value.storage_offset(),
            value.shape,
            value.stride(),
        )
        if value.numel() == 0:
            return value.detach().cpu().clone()
        if key not in copies:
            host = value.detach().to("cpu")
            if host.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                host = host.clone(memory_format=torch.preserve_format)
            copies[key] = (value, host)
        return copies[key][1]
    if isinstance(value, Mapping):
        return {key: host_copy(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(host_copy(item, copies) for item in value)
    return value


def plain_schedule(state: Mapping[str, object]) -> dict[str, object]:
    """Keep what torch.load reads safely (numbers, text, tensors, nested); anything else becomes None."""
    return {str(key): _plain(value) for key, value in state.items()}


def _plain(value: object) -> object:
    if isinstance(value, (int, float, str, bool, Tensor)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None


def model_fingerprint(model: nn.Module) -> str:
    """Return a hash over names, shapes and dtypes of parameters and buffers."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name}:{tuple(value.shape)}:{value.dtype};".encode())
    return digest.hexdigest()[:16]
