"""Cost model: is a group of mixed shapes cheaper padded, packed, or one micro-batch after the other?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Layout = Literal["pad", "pack", "separate"]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Predicted time of a pass: ``launch_ms + token_ms * tokens + pair_ms * pairs``.

    Pairs are the query-key products of self attention, the sum of squared lengths. The defaults are orders of
    magnitude for a transformer of two billion parameters on an H200, taken from the step benchmark: what
    counts for the choice is the ratio of the fixed cost of a pass to that of a token. :meth:`fit` takes
    them from measured passes instead.

    Attributes:
        launch_ms: Host time of one pass, milliseconds. Default 60.
        token_ms: Milliseconds per token. Default 0.01.
        pair_ms: Milliseconds per query-key pair. Default 2e-6.
        pack_overhead: Factor on a packed pass: gathers, and kernels that take offsets. Default 1.05.
    """

    launch_ms: float = 60.0
    token_ms: float = 0.01
    pair_ms: float = 2e-6
    pack_overhead: float = 1.05

    def __post_init__(self) -> None:
        if min(self.launch_ms, self.token_ms, self.pair_ms) < 0 or self.pack_overhead <= 0:
            message = f"a cost cannot be negative: {self}"
            raise ValueError(message)

    def padded(self, lengths: Sequence[Sequence[int]]) -> float:
        """Milliseconds of one pass in which every sample is as long as the longest of its group."""
        samples, longest = sum(map(len, lengths)), max(max(group) for group in lengths)
        return self._pass(samples * longest, samples * longest**2)

    def packed(self, lengths: Sequence[Sequence[int]]) -> float:
        """Milliseconds of one pass over the valid rows alone."""
        flat = [n for group in lengths for n in group]
        return self._pass(sum(flat), sum(n * n for n in flat)) * self.pack_overhead

    def separate(self, lengths: Sequence[Sequence[int]]) -> float:
        """Milliseconds of one pass per micro-batch, each padded to its own longest sample."""
        return sum(self.padded([group]) for group in lengths)

    def _pass(self, tokens: int, pairs: int) -> float:
        return self.launch_ms + self.token_ms * tokens + self.pair_ms * pairs

    def choose(self, lengths: Sequence[Sequence[int]], allowed: Sequence[Layout]) -> tuple[Layout, float]:
        """Return the cheapest of the allowed layouts and its predicted milliseconds.

        Args:
            lengths: Valid lengths of each sample, by micro-batch.
            allowed: Layouts the model can run, in order of preference on equal cost.
        """
        costs: dict[Layout, float] = {
            "pad": self.padded(lengths),
            "pack": self.packed(lengths),
            "separate": self.separate(lengths),
        }
        best = min(allowed, key=lambda layout: costs[layout])
        return best, costs[best]

    @classmethod
    def fit(cls, passes: Sequence[tuple[int, int, float]], *, pack_overhead: float = 1.05) -> CostModel:
        """Fit the three constants to measured padded passes by least squares, negative ones set to zero.

        Args:
            passes: ``(tokens, pairs, milliseconds)`` of at least three passes of different size.
            pack_overhead: As in the class.
        """
        if len(passes) < 3:
            message = f"three passes of different size are needed to fit three constants, got {len(passes)}"
            raise ValueError(message)
        rows = torch.tensor([[1.0, tokens, pairs] for tokens, pairs, _ in passes], dtype=torch.float64)
        target = torch.tensor([ms for *_, ms in passes], dtype=torch.float64)
        scale = rows.abs().amax(dim=0).clamp(min=1e-300)
        solution = torch.linalg.lstsq(rows / scale, target[:, None], driver="gelsd").solution[:, 0] / scale
        launch, token, pair = (max(float(v), 0.0) for v in solution)
        return cls(launch_ms=launch, token_ms=token, pair_ms=pair, pack_overhead=pack_overhead)
