"""Open-loop evaluation: predict chunk after chunk along recorded episodes and compare with what was done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from loongforge.errors import ConfigError

Array = npt.NDArray[np.float32]
Sample = Mapping[str, object]


class ActionPredictor(Protocol):
    """A policy that can be asked for actions in the robot's units."""

    @property
    def names(self) -> list[str]:
        """Name of each action dimension."""
        ...

    @property
    def steps(self) -> int:
        """Number of predicted steps."""
        ...

    def predict(
        self,
        samples: Sequence[Sample],
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
    ) -> Array:
        """Predict raw actions (B, T, D); of B generators, number ``i`` draws for sample ``i``."""
        ...

    def truth(self, samples: Sequence[Sample]) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Return recorded actions (B, T, D) and which steps lie inside the episode (B, T)."""
        ...


class EpisodeLike(Protocol):
    """An episode of a data set."""

    @property
    def index(self) -> int:
        """Number of the episode in the data set."""
        ...

    @property
    def length(self) -> int:
        """Number of frames."""
        ...


class EpisodicSource(Protocol):
    """A data set of whole episodes, frames in order."""

    @property
    def episodes(self) -> Sequence[EpisodeLike]:
        """The chosen episodes, in order."""
        ...

    def __getitem__(self, index: int, /) -> Sample:
        """Return one frame's sample."""
        ...


@dataclass(frozen=True, kw_only=True)
class EpisodeTrace:
    """Predicted and recorded actions of one episode.

    Attributes:
        episode: Number of the episode.
        predicted: (T, D) raw units; chunks that follow each other.
        recorded: (T, D) raw units.
        chunk: Steps predicted at once.
    """

    episode: int
    predicted: Array
    recorded: Array
    chunk: int

    @property
    def mse(self) -> Array:
        """Mean squared error per dimension (D,)."""
        return ((self.predicted - self.recorded) ** 2).mean(0)

    @property
    def l1(self) -> Array:
        """Mean absolute error per dimension (D,)."""
        return np.abs(self.predicted - self.recorded).mean(0)


@dataclass(frozen=True, kw_only=True)
class OpenLoopReport:
    """Errors over all evaluated episodes; every frame weighs the same.

    Attributes:
        names: Name of each action dimension.
        traces: One per episode.
    """

    names: tuple[str, ...]
    traces: tuple[EpisodeTrace, ...]

    @property
    def frames(self) -> int:
        """Number of compared frames."""
        return sum(len(trace.predicted) for trace in self.traces)

    def per_dimension(self) -> list[dict[str, float | str]]:
        """Return mean squared and absolute error of each dimension, and the spread of what was recorded."""
        predicted = np.concatenate([trace.predicted for trace in self.traces]).astype(np.float64)
        recorded = np.concatenate([trace.recorded for trace in self.traces]).astype(np.float64)
        difference = predicted - recorded
        return [
            {
                "name": name,
                "mse": float((difference[:, i] ** 2).mean()),
                "l1": float(np.abs(difference[:, i]).mean()),
                "recorded_std": float(recorded[:, i].std()),
            }
            for i, name in enumerate(self.names)
        ]

    def to_json(self) -> dict[str, object]:
        """Return errors in all, per dimension and per episode."""
        rows = self.per_dimension()
        return {
            "format": 1,
            "episodes": len(self.traces),
            "frames": self.frames,
            "mse": float(np.mean([row["mse"] for row in rows])),
            "l1": float(np.mean([row["l1"] for row in rows])),
            "per_dimension": rows,
            "per_episode": [
                {
                    "episode": trace.episode,
                    "frames": len(trace.predicted),
                    "mse": float(trace.mse.mean()),
                    "l1": float(trace.l1.mean()),
                }
                for trace in self.traces
            ],
        }


def evaluate_open_loop(
    predictor: ActionPredictor,
    dataset: EpisodicSource,
    *,
    episodes: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> OpenLoopReport:
    """Compare predicted with recorded actions along whole episodes.

    At frames 0, n, 2n, … of an episode (n = predicted steps) the policy sees the recorded observation and
    predicts the next n actions; together the chunks cover the episode once.

    Args:
        predictor: The policy.
        dataset: Data set with action windows of ``predictor.steps``.
        episodes: Evaluate at most this many, in order; None means all.
        batch_size: Chunks predicted at once.
        seed: Seed of the start noise; each chunk's noise depends on it and the chunk's place alone.
        progress: Called with (episodes done, episodes in all).

    Raises:
        ConfigError: Nothing to evaluate.
    """
    chosen = list(dataset.episodes)[: episodes if episodes is not None else None]
    if not chosen:
        msg = "there is no episode to evaluate: choose episodes that the data set has"
        raise ConfigError(msg)
    if batch_size < 1:
        msg = f"batch_size must be at least 1, got {batch_size}"
        raise ConfigError(msg)
    traces = []
    first = 0
    for number, episode in enumerate(chosen):
        starts = range(0, episode.length, predictor.steps)
        parts: list[tuple[Array, Array]] = []
        for at in range(0, len(starts), batch_size):
            group = starts[at : at + batch_size]
            samples = [dataset[first + start] for start in group]
            base = seed * 1_000_003 + episode.index * 10_007
            places = range(at, at + len(group))
            generators = [torch.Generator().manual_seed(base + place) for place in places]
            predicted = predictor.predict(samples, generators)
            recorded, valid = predictor.truth(samples)
            parts += [(p[keep], r[keep]) for p, r, keep in zip(predicted, recorded, valid, strict=True)]
        traces.append(
            EpisodeTrace(
                episode=episode.index,
                predicted=np.concatenate([p for p, _ in parts]),
                recorded=np.concatenate([r for _, r in parts]),
                chunk=predictor.steps,
            )
        )
        first += episode.length
        if progress is not None:
            progress(number + 1, len(chosen))
    return OpenLoopReport(names=tuple(predictor.names), traces=tuple(traces))
