"""Saved state of a scheduler, its checks, and small collective reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loongforge_comm.gradients import dense_stride, is_local, trainable_parameters
from loongforge_comm.link import LinkModel
from loongforge_comm.plan import CommPlan

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """What a state dict held."""

    plan: CommPlan | None
    link: LinkModel | None
    world_size: int
    steps: int
    rebuilds: int
    strategy: str


def pack(
    plan: CommPlan | None,
    link: LinkModel | None,
    *,
    world_size: int,
    steps: int,
    rebuilds: int,
    strategy: str,
) -> dict[str, object]:
    """Plain data for a checkpoint."""
    return {
        "version": STATE_VERSION,
        "world_size": world_size,
        "plan": plan.to_json() if plan is not None else None,
        "link": link.to_json() if link is not None else None,
        "steps": steps,
        "rebuilds": rebuilds,
        "strategy": strategy,
    }


def pack_again(saved: LoadedState | None, *, steps: int, strategy: str) -> dict[str, object]:
    """What an inactive scheduler saves: what it was given, so that a run on more ranks finds it again."""
    if saved is None:
        return pack(None, None, world_size=1, steps=steps, rebuilds=0, strategy=strategy)
    return pack(
        saved.plan,
        saved.link,
        world_size=saved.world_size,
        steps=steps,
        rebuilds=saved.rebuilds,
        strategy=strategy,
    )


def unpack(state: Mapping[str, object]) -> LoadedState:
    """Read what :func:`pack` wrote; ValueError names a wrong version."""
    if state.get("version") != STATE_VERSION:
        msg = (
            f"scheduler state has version {state.get('version')}, allowed is {STATE_VERSION}; start "
            "without it"
        )
        raise ValueError(msg)
    plan, link = state["plan"], state["link"]
    return LoadedState(
        plan=CommPlan.from_json(str(plan)) if plan is not None else None,
        link=LinkModel.from_json(str(link)) if link is not None else None,
        world_size=_whole(state["world_size"]),
        steps=_whole(state["steps"]),
        rebuilds=_whole(state["rebuilds"]),
        strategy=str(state["strategy"]),
    )


def _whole(value: object) -> int:
    if not isinstance(value, int):
        msg = f"scheduler state holds {value!r} where a whole number belongs; start without it"
        raise ValueError(msg)  # noqa: TRY004 - the content of a file is a value
    return value


def check_plan_fits(plan: CommPlan, model: nn.Module, local: Collection[str], world_size: int) -> None:
    """Raise ValueError that names the difference between a plan and the model and group it is to serve."""
    if plan.world_size != world_size:
        msg = (
            f"plan {plan.hash} is for {plan.world_size} ranks, this group has {world_size}; "
            "plan again (load_state_dict(..., on_mismatch='replan'))"
        )
        raise ValueError(msg)
    parameters = trainable_parameters(model, local)
    planned = {spec.name: spec for spec in plan.gradients}
    lacking, extra = sorted(set(parameters) - set(planned)), sorted(set(planned) - set(parameters))
    if lacking or extra:
        msg = (
            f"plan {plan.hash} does not fit the model: it lacks trainable parameters {lacking[:5]} "
            f"({len(lacking)}) "
            f"and has {extra[:5]} ({len(extra)}) that the model does not train; plan again"
        )
        raise ValueError(msg)
    for name, parameter in parameters.items():
        spec = planned[name]
        actual = (
            tuple(parameter.shape),
            dense_stride(parameter),
            str(parameter.dtype).removeprefix("torch."),
        )
        if (spec.shape, spec.stride, spec.dtype) != actual:
            msg = (
                f"plan {plan.hash} does not fit parameter {name!r}: plan has {spec.shape}, {spec.stride}, "
                f"{spec.dtype}, model has {actual[0]}, {actual[1]}, {actual[2]}; plan again"
            )
            raise ValueError(msg)


@torch.no_grad()
def gather_local(
    model: nn.Module, local: Collection[str], group: dist.ProcessGroup
) -> dict[str, list[Tensor]]:
    """All-gather every per-rank parameter; all ranks must hold equal shapes."""
    result: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if is_local(name, local):
            parts = [torch.empty_like(parameter).contiguous() for _ in range(group.size())]
            dist.all_gather(parts, parameter.detach().contiguous(), group=group)
            result[name] = parts
    return result


def straggler_table(plan: CommPlan, ranks: Sequence[int], parts: Sequence[object]) -> dict[str, object]:
    """Waiting time per rank: its bucket times minus the minimum over ranks, summed over buckets.

    The rank that waits least is the one the others wait for.

    Args:
        plan: the plan in use.
        ranks: global ranks.
        parts: per rank, [milliseconds by bucket index, mean backward milliseconds].
    """
    pairs = [part if isinstance(part, list) else [{}, None] for part in parts]
    tables = [table for table, _ in pairs]
    common = [str(b.index) for b in plan.buckets if all(str(b.index) in table for table in tables)]
    fastest = {i: min(float(table[i]) for table in tables) for i in common}
    waits = [sum(float(table[i]) - fastest[i] for i in common) for table in tables]
    slowest = ranks[min(range(len(waits)), key=waits.__getitem__)] if common and len(ranks) > 1 else None
    return {
        "collective_ms": sum(fastest.values()) if common else None,
        "waiting_ms": {str(r): w for r, w in zip(ranks, waits, strict=True)} if common else {},
        "backward_ms": {str(r): backward for r, (_, backward) in zip(ranks, pairs, strict=True)},
        "waited_for": slowest,
    }
