"""Where a rank stands between two steps: all that is needed to do the next one again."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from loongforge_comm import Generation

    from loongforge.engine import StepEngine


class Members(Protocol):
    """What a session asks the membership of its run (``loongforge_comm.Membership``)."""

    def border(self, step: int) -> Generation | None:
        """Return the generation that begins behind a step, or None to go on."""
        ...

    def part(self, leaving: Collection[int], step: int) -> Generation:
        """Let ranks go behind a step; returns the generation of the others."""
        ...

    def check(self, *, ask: bool = False) -> None:
        """Raise when the others went on without this rank; ``ask`` looks into the run's store for that."""
        ...


class MembersChanged(Exception):
    """No error: ranks come or go at this step border, and all leave their session here.

    Args:
        generation: The composition that goes on.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__(f"generation {generation.number} begins")
        self.generation = generation


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Random state of this process as its libraries hold it: taken in microseconds, not for files."""

    python: tuple[object, ...]
    numpy: dict[str, object]
    host: Tensor
    device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """Take the present state."""
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        state = np.random.get_state(legacy=False)  # noqa: NPY002 - user code draws from it
        return cls(python=random.getstate(), numpy=dict(state), host=torch.get_rng_state(), device=on_gpu)

    def restore(self, device: torch.device) -> None:
        """Go back to it."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@dataclass(frozen=True, kw_only=True)
class StepBorder:
    """A step border of one rank."""

    step: int
    """Steps done."""
    ranks: int
    """Number of ranks that shared the data."""
    position: Mapping[str, object]
    """Where the data stand."""
    draws: Draws
    """Random state."""

    @classmethod
    def of(cls, engine: StepEngine) -> Self:
        """Take the border the engine stands at."""
        position = {k: v for k, v in engine.parts.source.state_dict().items() if k != "epoch_rng"}
        ranks = engine.parts.ranks
        return cls(
            step=engine.at.step, ranks=ranks.world_size, position=position, draws=Draws.now(ranks.device)
        )
