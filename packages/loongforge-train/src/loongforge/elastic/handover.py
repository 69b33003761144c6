"""What a generation takes over from the one before: rank 0 knows it, everybody gets it.

Weights and buffers are not sent here: every strategy of whole weights broadcasts rank 0's when it is made.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loongforge.checkpoint.state import plain_schedule
from loongforge.composition import steps_from
from loongforge.config import TrainConfig
from loongforge.engine import Parts, StepEngine
from loongforge.optim import go_on_schedule
from loongforge.ranks import Ranks
from loongforge.rng import seed_rank

if TYPE_CHECKING:
    from loongforge_comm import Membership

    from loongforge.elastic.border import StepBorder

SMALL = 64
"""Tensors of up to so many elements travel with the description instead of on their own."""
Place = tuple[str, str]
"""Where a tensor belongs: parameter name and key of its optimizer state, or ``AVERAGE``."""
AVERAGE = "average"


def hand_over(engine: StepEngine, config: TrainConfig, members: Membership, border: StepBorder | None) -> int:
    """Bring an engine to where the run stands; all ranks of a generation call it.

    Args:
        engine: Just built among the ranks of this generation.
        config: The run.
        members: Says who needs the state.
        border: Where this rank stood; None for one that is new. Rank 0 is never new.

    Returns:
        Optimizer steps of the whole run, which another number of ranks may have changed.

    Raises:
        RankFailureError: A rank was lost meanwhile.
    """
    parts, ranks = engine.parts, engine.parts.ranks
    story: dict[str, object] = {}
    large: dict[Place, Tensor] = {}
    if border is not None and ranks.rank == 0:
        story = _describe(engine, border)
        if members.generation.receivers:
            story["state"], large = _divide(parts)
            story["large"] = [[*place, *_form(value)] for place, value in large.items()]
    story = _tell(ranks, story)
    received = {place: _send(ranks, large.get(place), form) for place, form in _rows(story)}
    regular = parts.source.batches_per_epoch()
    engine.at.step = _whole(story["step"])
    position = _table(story["position"])
    parts.source.load_resharded(position, stored_ranks=_whole(story["ranks"]), ranks=ranks.world_size)
    if members.receives:
        _take(engine, story, received)
        seed_rank(config.seed + engine.at.step, members.member)
    elif border is not None:
        border.draws.restore(ranks.device)
    total = steps_from(config, parts.source, regular=regular, step=engine.at.step)
    parts.schedule = go_on_schedule(parts.optimizer, config, total, _table(story["schedule"]))
    ranks.commit()
    members.settled()
    return total


def _describe(engine: StepEngine, border: StepBorder) -> dict[str, object]:
    parts = engine.parts
    return {
        "step": border.step,
        "samples": engine.at.samples,
        "position": dict(border.position),
        "ranks": border.ranks,
        "schedule": plain_schedule(parts.schedule.state_dict()),
        "scaler": dict(parts.scaler.state_dict()) if parts.scaler is not None else {},
        "guard": parts.guard.state_dict(),
        "documents": dict(parts.documents),
        "large": [],
    }


def _divide(parts: Parts) -> tuple[dict[str, object], dict[Place, Tensor]]:
    """Split optimizer state and average into a description and the tensors that are sent one by one."""
    large: dict[Place, Tensor] = {}
    stored = parts.parallel.optimizer_state(parts.optimizer)
    kept: dict[str, dict[str, object]] = {}
    for name, values in _table(stored["state"]).items():
        kept[name] = {}
        for key, value in _table(values).items():
            if isinstance(value, Tensor) and value.numel() > SMALL:
                large[name, key] = value
            else:
                kept[name][key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    if parts.average is not None:
        large |= {(name, AVERAGE): value for name, value in parts.average.state_dict().items()}
    return {**stored, "state": kept}, large


def _form(value: Tensor) -> list[object]:
    return [list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type]


def _tell(ranks: Ranks, story: dict[str, object]) -> dict[str, object]:
    """Return rank 0's description on all ranks."""
    raw = io.BytesIO()
    torch.save(story, raw)
    told = torch.load(
        io.BytesIO(ranks.broadcast_bytes(raw.getvalue())), weights_only=True, map_location="cpu"
    )
    return dict(told)


def _send(ranks: Ranks, value: Tensor | None, form: list[object]) -> Tensor:
    """Return rank 0's tensor on all ranks; one at a time, so that few need room twice."""
    if value is not None:
        contiguous = value.detach().contiguous()
    else:
        shape, dtype, kind = form
        device = ranks.device if kind == ranks.device.type else torch.device(str(kind))
        contiguous = torch.empty(shape, dtype=getattr(torch, str(dtype)), device=device)  # type: ignore[call-overload]
    ranks.broadcast(contiguous)
    return contiguous


def _take(engine: StepEngine, story: Mapping[str, object], received: Mapping[Place, Tensor]) -> None:
    """Take rank 0's state over, where this rank has none of this step."""
    parts = engine.parts
    stored = _table(story["state"])
    state = {name: dict(_table(values)) for name, values in _table(stored["state"]).items()}
    average = {name: value for (name, key), value in received.items() if key == AVERAGE}
    for (name, key), value in received.items():
        if key != AVERAGE:
            state[name][key] = value
    parts.parallel.load_optimizer_state(parts.optimizer, {**stored, "state": state})
    if parts.average is not None:
        parts.average.load_state_dict(average)
    if parts.scaler is not None and story["scaler"]:
        parts.scaler.load_state_dict(dict(_table(story["scaler"])))
    parts.guard.load_state_dict(dict(_table(story["guard"])))
    parts.documents.update({name: str(text) for name, text in _table(story["documents"]).items()})
    engine.at.samples = _whole(story["samples"])


def _rows(story: Mapping[str, object]) -> list[tuple[Place, list[object]]]:
    """Return where the tensors belong that follow, with shape, dtype and kind of device."""
    rows = story["large"]
    if not isinstance(rows, list):
        return []
    return [((str(name), str(key)), form) for name, key, *form in rows]


def _table(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        msg = f"rank 0's state holds {type(value).__name__} where a table belongs: all ranks need one version"
        raise TypeError(msg)
    return value


def _whole(value: object) -> int:
    return int(str(value))
