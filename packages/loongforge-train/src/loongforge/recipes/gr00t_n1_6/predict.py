"""From samples to actions in the robot's own units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongforge.recipes.gr00t_n1_6.collate import GrootCollate
from loongforge.recipes.gr00t_n1_6.model import GrootModel

Array = npt.NDArray[np.float32]
Sample = Mapping[str, object]


class GrootPredictor:
    """Runs the policy on samples of a data set.

    Args:
        model: The model, on any device.
        collate: Collate function of the data set.
    """

    def __init__(self, model: GrootModel, collate: GrootCollate) -> None:
        self.model, self.collate = model, collate

    @property
    def names(self) -> list[str]:
        """Name of each action dimension: key and index."""
        robot = self.collate.embodiment
        return [f"{key.name}[{i}]" for key in robot.action for i in range((key.end or 0) - key.start)]

    @property
    def steps(self) -> int:
        """Number of predicted steps."""
        return self.collate.embodiment.action_steps

    @torch.no_grad()
    def predict(
        self,
        samples: Sequence[Sample],
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
    ) -> Array:
        """Predict raw actions (B, T, D).

        Args:
            samples: Samples of the data set; their actions are not looked at.
            generator: Host generator of the start noise, or one per sample, so that a sample's noise does
                not depend on the batch it is in; None draws from the global one.

        Raises:
            ValueError: Not one generator per sample.
        """
        robot = self.collate.embodiment
        hidden = {*robot.action_columns, *(f"{c}_is_pad" for c in robot.action_columns)}
        hidden -= set(robot.state_columns)
        blind = [{n: v for n, v in s.items() if n not in hidden} for s in samples]
        device = next(self.model.parameters()).device
        batch = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in self.collate(blind).items()}
        noise = self._noise(len(samples), generator)
        was_training = self.model.training
        self.model.eval()
        try:
            actions = self.model.get_action({**batch, "initial_noise": noise.to(device)})
        finally:
            self.model.train(was_training)
        decoded = self.collate.vectors.decode(actions.float().cpu().numpy(), self.collate.raw_states(samples))
        return np.concatenate([decoded[key.name] for key in self.collate.embodiment.action], axis=-1)

    def _noise(self, count: int, generator: torch.Generator | Sequence[torch.Generator] | None) -> Tensor:
        """Draw start noise (B, horizon, max_action_dim) on the host."""
        head = self.model.config.head
        shape = (head.action_horizon, head.max_action_dim)
        if generator is None or isinstance(generator, torch.Generator):
            return torch.randn((count, *shape), generator=generator)
        if len(generator) != count:
            msg = f"predict got {len(generator)} generators for {count} samples; give one per sample"
            raise ValueError(msg)
        return torch.stack([torch.randn(shape, generator=one) for one in generator])

    def truth(self, samples: Sequence[Sample]) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Return the recorded actions (B, T, D) and which steps lie inside the episode (B, T)."""
        robot = self.collate.embodiment
        parts = [
            np.stack([np.asarray(s[key.column], dtype=np.float32)[:, key.start : key.end] for s in samples])
            for key in robot.action
        ]
        pad_name = f"{robot.action[0].column}_is_pad"
        pads = [np.asarray(s.get(pad_name, np.zeros(parts[0].shape[1])), dtype=bool) for s in samples]
        return np.concatenate(parts, axis=-1), ~np.stack(pads)
