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
from loongforge.checkpoint.write import Snapshot, load_safetensors
from loongforge.config import TrainConfig, to_dict
from loongforge.engine import StepEngine
from loongforge.errors import CheckpointError
from loongforge.rng import capture_rng, restore_rng, seed_rank

MDG_FILE = "mdg.json"
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


def take_snapshot(engine: StepEngine, config: TrainConfig, *, loss: float | None) -> Snapshot:
    """Copy the engine's state to host memory. Collective for sharded optimizers; call it on all ranks."""
    parts = engine.parts
    rank = parts.ranks.rank
    copies: dict[tuple[object, ...], Tensor] = {}
    model = host_copy(parts.parallel.model_state(), copies)
    optimizer = host_copy(parts.parallel.optimizer_state(parts.optimizer), copies)
    tensors: dict[str, object] = {
        rank_file(rank): host_copy(
            {
                "format": FORMAT,
                "rng": capture_rng(),
                "data": parts.source.state_dict(),
                "guard": parts.guard.state_dict(),
                "samples": engine.at.samples,
            },
            copies,
        )
    }
    weights: dict[str, Mapping[str, object]] = {}
    texts: dict[str, str] = {}
    plans = parts.parallel.plans()
    memory = parts.memory.state_dict()
    if memory:
        texts[memory_file(rank)] = json.dumps(memory)
    if rank == 0:
        if config.checkpoint.model_format in {"pt", "both"}:
            tensors["model.pt"] = model
        if config.checkpoint.model_format in {"safetensors", "both"} and isinstance(model, dict):
            weights["model.safetensors"] = model
        tensors["optimizer.pt"] = optimizer
        tensors["scheduler.pt"] = plain_schedule(parts.schedule.state_dict())
        if parts.average is not None:
            tensors[f"{STATE}/average.pt"] = host_copy(parts.average.state_dict(), copies)
        if parts.scaler is not None:
            tensors[f"{STATE}/scaler.pt"] = dict(parts.scaler.state_dict())
        texts |= {f"{STATE}/{name}": text for name, text in {**parts.documents, **plans}.items()}
        texts[TRAINER] = json.dumps(describe(engine, config), indent=1)
    return Snapshot(
        step=engine.at.step,
        epoch=parts.source.epoch,
        loss=loss,
        tensors=tensors,
        weights=weights,
        texts=texts,
    )


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
    parts.parallel.load_optimizer_state(parts.optimizer, _mapping(folder / "optimizer.pt"))
    parts.parallel.load_model_state(load_weights(folder))  # type: ignore[arg-type]
    parts.schedule.load_state_dict(dict(_mapping(folder / "scheduler.pt")))
    if parts.average is not None:
        parts.average.load_state_dict(_mapping(folder / STATE / "average.pt"))  # type: ignore[arg-type]
    if parts.scaler is not None:
        parts.scaler.load_state_dict(dict(_mapping(folder / STATE / "scaler.pt")))
    if facts["accumulation"] != config.accumulation:
        notes.append(
            f"accumulation was {facts['accumulation']}, is {config.accumulation}: the data position is "
            f"counted in "
            "micro-batches, so the next one is exact; a step now means another number of samples"
        )
    restored = _restore_rank(engine, config, folder, stored_ranks=manifest.world_size, notes=notes)
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
    return Restored(folder=folder, step=manifest.step, epoch=parts.source.epoch, notes=tuple(notes))


def _restore_rank(
    engine: StepEngine, config: TrainConfig, folder: Path, *, stored_ranks: int, notes: list[str]
) -> int:
    """Restore random state, data position and guard of this rank; return its samples so far."""
    parts, rank, world = engine.parts, engine.parts.ranks.rank, engine.parts.ranks.world_size
    own = folder / rank_file(min(rank, stored_ranks - 1))
    state = _mapping(own)
    data = state["data"]
    if not isinstance(data, Mapping):
        msg = f"{own} has no data position: the file is damaged"
        raise CheckpointError(msg)
    if stored_ranks != world:
        notes.append(f"the checkpoint has {stored_ranks} rank(s), this run {world}")
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
        seed_rank(config.seed + int(str(json.loads((folder / TRAINER).read_text())["step"])), rank)
    return int(str(state.get("samples", 0)))


def load_weights(folder: Path) -> Mapping[str, object]:
    """Return the model's state dict of a checkpoint, from model.pt or model.safetensors."""
    if (folder / "model.pt").exists():
        return _mapping(folder / "model.pt")
    if (folder / "model.safetensors").exists():
        return load_safetensors(folder / "model.safetensors")
    msg = f"{folder} has neither model.pt nor model.safetensors"
    raise CheckpointError(msg)


def _mapping(path: Path) -> Mapping[str, object]:
    loaded = load_tensors(path)
    if not isinstance(loaded, Mapping):
        msg = f"{path} holds a {type(loaded).__name__} instead of a mapping: the file is damaged"
        raise CheckpointError(msg)
    return loaded


def host_copy(value: object, copies: dict[tuple[object, ...], Tensor]) -> object:
    """Copy nested tensors to host memory, compactly; tensors that are one (tied weights) stay one (fault
    M14).
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
            copies[key] = host
        return copies[key]
    if isinstance(value, Mapping):
        return {key: host_copy(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(host_copy(item, copies) for item in value)
    return value


def plain_schedule(state: Mapping[str, object]) -> dict[str, object]:
    """Keep what torch.load reads safely (numbers, text, tensors, nested); functions and objects become
    None.
    """
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
