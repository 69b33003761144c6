"""What goes into a checkpoint: plan, free list and live table, never memory or addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from loongforge_mem.planning import Plan, PlanParts

if TYPE_CHECKING:
    import torch

FORMAT = "loongforge-mem-state/1"
POLICY = "run-fit-64k+slab-512/1"


def fingerprint(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> dict[str, str | int]:
    """Return what a plan depends on: parameters (names, shapes, types) and the kind of optimizer."""
    digest = hashlib.sha256()
    count = 0
    for name, tensor in _named(model):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{tensor.requires_grad}\n".encode())
        count += 1
    return {
        "tensors": count,
        "model": digest.hexdigest()[:32],
        "optimizer": type(optimizer).__name__ if optimizer is not None else "none",
    }


def _named(model: torch.nn.Module | None) -> Iterable[tuple[str, torch.Tensor]]:
    if model is None:
        return ()
    return (*model.named_parameters(), *model.named_buffers())


def make_state(
    mode: str,
    mark: dict[str, str | int],
    parts: tuple[PlanParts | None, list[tuple[int, int]], list[tuple[int, int, int]], int] | None,
) -> dict[str, Any]:
    """Assemble the state dictionary."""
    state: dict[str, Any] = {
        "format": FORMAT,
        "policy": POLICY,
        "mode": mode,
        "fingerprint": mark,
        "plan": None,
    }
    if parts is None:
        return state
    plan, free_runs, live, units = parts
    if plan is not None:
        sizes, ends, offsets, high_water, marks = plan
        state["plan"] = {
            "sizes": sizes,
            "ends": ends,
            "offsets": offsets,
            "high_water": high_water,
            "marks": [list(m) for m in marks],
        }
    state["free_runs"] = [list(run) for run in free_runs]
    state["live"] = [list(block) for block in live]
    state["units"] = units
    return state


def load_state(state: dict[str, Any], mark: dict[str, str | int]) -> PlanParts | None:
    """Check a state and return its plan.

    Raises:
        ValueError: another format or policy version, another model, or a plan whose blocks overlap.
    """
    for key, wanted in (("format", FORMAT), ("policy", POLICY)):
        if state.get(key) != wanted:
            msg = (
                f"the memory state has {key} {state.get(key)!r}; allowed: {wanted!r}. Start without it: the "
                "first step is profiled again"
            )
            raise ValueError(msg)
    saved = state.get("fingerprint")
    if saved != mark:
        named = saved if isinstance(saved, dict) else {}
        parts = [f"{k}: saved {named.get(k)!r}, now {v!r}" for k, v in mark.items() if named.get(k) != v]
        raise ValueError(
            "the memory state belongs to another model ("
            + "; ".join(parts)
            + "). Start without it: the first step is profiled again"
        )
    raw = state.get("plan")
    if raw is None:
        return None
    plan = Plan(
        sizes=[int(x) for x in raw["sizes"]],
        ends=[int(x) for x in raw["ends"]],
        offsets=[int(x) for x in raw["offsets"]],
        high_water=int(raw["high_water"]),
        marks=[(str(name), int(index)) for name, index in raw["marks"]],
    )
    plan.verify()
    return plan.parts()
