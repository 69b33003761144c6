"""From robot samples to the model's batch, on the host: uint8 images, padded tokens, normalised vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.layout import layout_tokens
from loongforge.recipes.gr00t_n1_6.processing.embodiment import Embodiment, Features
from loongforge.recipes.gr00t_n1_6.processing.images import ImageOptions, ImagePlan, plan_image, resize_uint8
from loongforge.recipes.gr00t_n1_6.processing.normalise import StateActionProcessor
from loongforge.recipes.gr00t_n1_6.processing.text import PromptBuilder

Sample = Mapping[str, object]


class GrootCollate:
    """Collate function of the recipe.

    The batch holds uint8 ``images`` (B, V, H, W, 3) when all views have one size, else ``images.0``,
    ``images.1``, … (B, H, W, 3); token entries; ``state``, ``action``, ``action_mask``, ``embodiment_id``;
    and ``index`` (B,) int64, the sample numbers.

    Args:
        embodiment: The robot, matched with the data set.
        plans: One image plan per view.
        prompts: Prompt builder.
        vectors: Normaliser of states and actions.
        image_options: Settings of the image pipeline.
        pad_to: Fixed number of tokens a row; None rounds the longest row up to ``multiple``.
        multiple: Rounding of the row length, tokens.
        tasks: Text by task number; an instruction column that holds numbers is looked up here.
    """

    def __init__(
        self,
        *,
        embodiment: Embodiment,
        plans: Sequence[ImagePlan],
        prompts: PromptBuilder,
        vectors: StateActionProcessor,
        image_options: ImageOptions,
        pad_to: int | None = None,
        multiple: int = 8,
        tasks: Mapping[int, str] | None = None,
    ) -> None:
        self.tasks = dict(tasks or {})
        self.embodiment, self.plans, self.prompts = embodiment, tuple(plans), prompts
        self.vectors, self.image_options = vectors, image_options
        self.pad_to, self.multiple = pad_to, multiple
        self._image_tokens = [plan.tokens for plan in self.plans]

    def __call__(self, samples: Sequence[Sample]) -> dict[str, object]:
        """Join samples into one batch of tensors on the host."""
        rows = [self.prompts.ids(self.instruction(sample), self._image_tokens) for sample in samples]
        tokenizer = self.prompts.tokenizer
        layout = layout_tokens(
            rows,
            image_token_id=tokenizer.image_token_id,
            pad_token_id=tokenizer.pad_token_id,
            pad_to=self.pad_to,
            multiple=self.multiple,
        )
        states = self.raw_states(samples)
        batch: dict[str, object] = {**self.images(samples), **layout.items()}
        batch["state"] = torch.from_numpy(self.vectors.states(states))
        if all(column in samples[0] for column in self.embodiment.action_columns):
            raw = {c: _stack(samples, c) for c in self.embodiment.action_columns}
            first = self.embodiment.action_columns[0]
            pads = [
                np.asarray(s.get(f"{first}_is_pad", np.zeros(raw[first].shape[1], bool))) for s in samples
            ]
            actions = self.vectors.actions(raw, states, np.stack(pads).astype(bool))
            batch["action"], batch["action_mask"] = (
                torch.from_numpy(actions.values),
                torch.from_numpy(actions.mask),
            )
        count = len(samples)
        batch["embodiment_id"] = torch.full((count,), self.embodiment.slot, dtype=torch.int64)
        batch["index"] = torch.tensor([_integer(s.get("index", i)) for i, s in enumerate(samples)])
        return batch

    def instruction(self, sample: Sample) -> str:
        """Return the instruction of a sample; a number is one of the data set's tasks.

        Raises:
            ConfigError: The sample has no instruction, or its number is not in the task table.
        """
        name = self.embodiment.language or "task"
        if name not in sample:
            msg = (
                f"the sample has no instruction '{name}'; it has {', '.join(sorted(sample))}. Set "
                "embodiment.language to the column that holds it"
            )
            raise ConfigError(msg)
        value = sample[name]
        if isinstance(value, str):
            return value
        number = np.asarray(value).reshape(-1)
        if number.size != 1 or not np.issubdtype(number.dtype, np.integer):
            return str(value)
        if int(number[0]) not in self.tasks:
            msg = (
                f"column '{name}' names task {int(number[0])}, the data set's task table has "
                f"{', '.join(map(str, sorted(self.tasks))) or 'no task'}; set embodiment.language to a "
                "column that holds texts or numbers of that table"
            )
            raise ConfigError(msg)
        return self.tasks[int(number[0])]

    def raw_states(self, samples: Sequence[Sample]) -> dict[str, npt.NDArray[np.float32]]:
        """Return raw state columns (B, D); of a window the last row counts."""
        result = {}
        for column in self.embodiment.state_columns:
            value = _stack(samples, column)
            result[column] = value[:, -1] if value.ndim == 3 else value
        return result

    def images(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Stack the views of all samples as uint8."""
        views = [
            torch.stack([self._image(sample, view, plan) for sample in samples])
            for view, plan in zip(self.embodiment.views, self.plans, strict=True)
        ]
        if len({view.shape for view in views}) == 1:
            return {"images": torch.stack(views, dim=1)}
        return {f"images.{number}": view for number, view in enumerate(views)}

    def _image(self, sample: Sample, view: str, plan: ImagePlan) -> Tensor:
        value = sample.get(view)
        if value is None:
            msg = f"the sample has no view '{view}'; it has {', '.join(sorted(sample))}"
            raise ConfigError(msg)
        image = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        if image.ndim == 4:
            image = image[-1]
        if image.dtype != torch.uint8 or image.shape[-1] != 3:
            msg = f"view '{view}' must be uint8 (H, W, 3), got {image.dtype} {tuple(image.shape)}"
            raise ConfigError(msg)
        if tuple(image.shape[:2]) != plan.decoded:
            wide = image.permute(2, 0, 1)[None].float()
            image = resize_uint8(wide, plan.decoded, mode="area")[0].permute(1, 2, 0).to(torch.uint8)
        return image


def view_plans(embodiment: Embodiment, features: Features, options: ImageOptions) -> tuple[ImagePlan, ...]:
    """Return the image plan of each view from the sizes in the data set's features."""
    plans = []
    for view in embodiment.views:
        shape = features[view].shape
        if len(shape) != 3:
            msg = f"feature '{view}' has shape {shape}; expected (height, width, channels)"
            raise ConfigError(msg)
        plans.append(plan_image(shape[0], shape[1], options))
    return tuple(plans)


def _stack(samples: Sequence[Sample], column: str) -> npt.NDArray[np.float32]:
    try:
        stacked = np.stack([np.asarray(sample[column], dtype=np.float32) for sample in samples])
    except KeyError as error:
        msg = f"the sample has no column '{column}'; it has {', '.join(sorted(samples[0]))}"
        raise ConfigError(msg) from error
    return stacked[..., None] if stacked.ndim == 1 else stacked


def _integer(value: object) -> int:
    return int(np.asarray(value).reshape(-1)[0])
