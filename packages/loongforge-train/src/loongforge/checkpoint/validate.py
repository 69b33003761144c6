"""``loongforge validate-checkpoint``: does a checkpoint hold together, and does it fit a model?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from loongforge.checkpoint.find import file_problems
from loongforge.checkpoint.layout import STATE, TRAINER, load_tensors, rank_file, read_manifest
from loongforge.checkpoint.sharded import is_sharded, read_moments
from loongforge.checkpoint.state import load_weights, model_fingerprint
from loongforge.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check: what was looked at, whether it is in order, and what to do if not."""

    part: str
    ok: bool
    detail: str
    remedy: str = ""


def validate_checkpoint(folder: Path, *, model: nn.Module | None = None) -> list[Finding]:
    """Check every file, name, shape, fingerprint, plan and free list of a checkpoint.

    Args:
        folder: Checkpoint folder.
        model: Model it should fit; names, shapes and dtypes are compared when given.

    Returns:
        Findings in order; the checkpoint is usable when all are ok.
    """
    delete = f"delete {folder.name}; a resume then takes the newest complete one beside it"
    if not folder.is_dir():
        return [Finding(part="folder", ok=False, detail=f"{folder} does not exist", remedy="check the path")]
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [Finding(part="completeness", ok=False, detail=str(error), remedy=delete)]
    findings = [
        Finding(
            part="completeness",
            ok=True,
            detail=f"step {manifest.step}, epoch {manifest.epoch}, {manifest.world_size} rank(s)",
        )
    ]
    problems = file_problems(folder, manifest, checksums=True)
    findings += [Finding(part="files", ok=False, detail=text, remedy=delete) for text in problems]
    if problems:
        return findings
    size = sum(entry.size for entry in manifest.files.values())
    findings.append(
        Finding(part="files", ok=True, detail=f"{len(manifest.files)} files, {size / 2**20:.1f} MiB")
    )
    try:
        weights = load_weights(folder)
        findings += _check_optimizer(folder, weights, model)
        findings += _check_ranks(folder, manifest.world_size)
        findings += _check_texts(folder)
    except CheckpointError as error:
        return [*findings, Finding(part="content", ok=False, detail=str(error), remedy=delete)]
    if model is not None:
        findings += _check_model(folder, weights, model)
    return findings


def _check_optimizer(folder: Path, weights: Mapping[str, object], model: nn.Module | None) -> list[Finding]:
    """Compare moments with the parameters (a model may save its weights in another shape)."""
    stored = load_tensors(folder / "optimizer.pt")
    state = stored.get("state", {}) if isinstance(stored, Mapping) else {}
    if is_sharded(folder):
        state = read_moments(folder)
    parameters: Mapping[str, object] = dict(model.named_parameters()) if model is not None else {}
    unknown = sorted(set(state) - set(parameters or weights))
    wrong = [
        name
        for name, values in state.items()
        for value in [dict(values).get("exp_avg")]
        if isinstance(value, Tensor)
        and name in parameters
        and value.shape != getattr(parameters[name], "shape", ())
    ]
    if unknown or wrong:
        detail = f"moments without a weight: {unknown[:5]}; of another shape: {wrong[:5]}"
        remedy = (
            "the files are of two runs, or the recipe's options differ; see loongforge_state/trainer.json"
        )
        return [Finding(part="optimizer", ok=False, detail=detail, remedy=remedy)]
    return [Finding(part="optimizer", ok=True, detail=f"moments of {len(state)} parameters, by name")]


def _check_ranks(folder: Path, world_size: int) -> list[Finding]:
    for rank in range(world_size):
        state = load_tensors(folder / rank_file(rank))
        missing = [k for k in ("rng", "data") if not isinstance(state, Mapping) or k not in state]
        if missing:
            text = f"rank {rank} lacks {', '.join(missing)}"
            return [Finding(part="ranks", ok=False, detail=text, remedy="start afresh from the weights")]
    return [Finding(part="ranks", ok=True, detail=f"random state and data position of {world_size} rank(s)")]


def _check_texts(folder: Path) -> list[Finding]:
    findings = []
    for path in sorted((folder / STATE).glob("*.json")):
        try:
            json.loads(path.read_text())
        except ValueError as error:
            remedy = f"delete {path.name}; the plan is made again at the start"
            findings.append(
                Finding(part=path.name, ok=False, detail=f"not valid JSON: {error}", remedy=remedy)
            )
    kinds = {
        "comm_plan.json": "communication plan",
        "mdg.json": "dependency graph",
        "memory_00000.json": "free list",
    }
    for name, what in kinds.items():
        there = (folder / STATE / name).exists()
        findings.append(
            Finding(part=what, ok=True, detail="stored" if there else "not stored (pillar off or one rank)")
        )
    return findings


def _check_model(folder: Path, weights: Mapping[str, object], model: nn.Module) -> list[Finding]:
    own = model.state_dict()
    missing, extra = sorted(set(own) - set(weights)), sorted(set(weights) - set(own))
    shapes = [
        f"{name} {tuple(getattr(weights[name], 'shape', ()))} for {tuple(own[name].shape)}"
        for name in own
        if name in weights and getattr(weights[name], "shape", None) != own[name].shape
    ]
    findings = []
    for what, names in (("missing", missing), ("not in the model", extra), ("of another shape", shapes)):
        if names:
            text = f"{len(names)} {what}: {', '.join(names[:5])}"
            remedy = "use the recipe and options of this checkpoint (see loongforge_state/trainer.json)"
            findings.append(Finding(part="model", ok=False, detail=text, remedy=remedy))
    if findings:
        return findings
    facts = json.loads((folder / TRAINER).read_text())
    same = facts.get("model_fingerprint") == model_fingerprint(model)
    detail = (
        "names, shapes and dtypes fit" if same else "names and shapes fit, dtypes differ (converted on load)"
    )
    return [Finding(part="model", ok=True, detail=detail)]
