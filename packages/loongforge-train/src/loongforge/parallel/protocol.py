"""What a parallel strategy is to the step engine and to checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from loongforge.config import TrainConfig

Groups = Sequence[Mapping[str, object]]


class Parallel(Protocol):
    """How ranks work together. ``finish`` is called after the last backward of a step, before clipping."""

    module: nn.Module
    deferred: bool
    """Gradients come together in :meth:`finish`, after the window, instead of beside the last backward."""
    sharded: bool
    """Weights and moments are split over the ranks (DTensors)."""

    def no_sync(self) -> AbstractContextManager[object]:
        """Return a context in which gradients only accumulate."""
        ...

    def finish(self) -> None:
        """Bring gradients together where the backward has not done so."""
        ...

    def check(self) -> None:
        """Raise when a rank was lost since; called before weights are changed."""
        ...

    def step_end(self, step: int) -> None:
        """Border between two steps."""
        ...

    def clip(self, limit: float | None) -> Tensor:
        """Return the global gradient norm and scale gradients down to ``limit``."""
        ...

    def stats(self) -> dict[str, float]:
        """Return the communication counters."""
        ...

    def switch(self, strategy: str) -> None:
        """Change the communication strategy; on all ranks at the same border."""
        ...

    def optimizer(self, groups: Groups, config: TrainConfig) -> Optimizer:
        """Build the optimizer that fits the strategy."""
        ...

    def model_state(self) -> dict[str, Tensor]:
        """Return whole weights by name on rank 0."""
        ...

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Load whole weights by name."""
        ...

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Return the optimizer's state by parameter name on rank 0."""
        ...

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, object]) -> None:
        """Restore the optimizer's state by parameter name."""
        ...

    def gather(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors of a state that is split like the weights; a collective of all ranks."""
        ...

    def make_moments(self, optimizer: Optimizer) -> None:
        """Create the optimizer's state where a load in place needs it."""
        ...

    def plans(self) -> dict[str, str]:
        """Return files of the communication pillar: name -> JSON text."""
        ...

    def load_plans(self, plans: Mapping[str, str]) -> None:
        """Take over stored plans."""
        ...

    def close(self) -> None:
        """Release groups and hooks."""
        ...
