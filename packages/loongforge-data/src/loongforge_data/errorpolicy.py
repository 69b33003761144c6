"""What happens with samples that cannot be loaded: stop at the first, or leave them out within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from loongforge_data.errors import DataError

OnError = Literal["raise", "skip"]
_MIN_RATE_SAMPLES = 100


@dataclass(frozen=True, kw_only=True)
class SkippedSample:
    """A sample that was left out."""

    epoch: int
    """Epoch."""
    index: int
    """Sample index."""
    message: str
    """What went wrong."""


class ErrorPolicy:
    """Applies ``on_error`` and ``error_budget``, and keeps the list of what was left out.

    Args:
        on_error: "raise" or "skip".
        budget: With "skip": the most samples (int) or the largest share (float) that may be bad. A share
            counts over at least 100 samples.
    """

    def __init__(self, on_error: OnError, budget: float) -> None:
        if on_error not in ("raise", "skip"):
            msg = f"on_error is {on_error!r}, allowed are 'raise' and 'skip'"
            raise ValueError(msg)
        if budget < 0:
            msg = f"error_budget is {budget}, allowed is a count or a share >= 0"
            raise ValueError(msg)
        self.on_error: OnError = on_error
        self.budget = budget
        self.skipped: list[SkippedSample] = []

    def apply(self, bad: Sequence[tuple[int, str]], *, epoch: int, seen: int) -> int:
        """Take note of bad samples of a batch; returns how many.

        Args:
            bad: (sample index, what went wrong) each.
            epoch: Epoch of the batch.
            seen: Samples asked for so far, with this batch.

        Raises:
            DataError: By policy; names the sample and the cause.
        """
        if not bad:
            return 0
        index, text = bad[0]
        if self.on_error == "raise":
            msg = (
                f"sample {index} cannot be loaded: {text}; use on_error='skip' to leave such samples out, "
                "within error_budget"
            )
            raise DataError(msg, row=index)
        found = [SkippedSample(epoch=epoch, index=i, message=t) for i, t in dict(bad).items()]
        self.skipped += found
        count = len(self.skipped)
        share = self.budget * max(seen, _MIN_RATE_SAMPLES)
        allowed = self.budget if isinstance(self.budget, int) else max(1.0, share)
        if count > allowed:
            msg = (
                f"{count} samples of {seen} were bad, error_budget={self.budget} allows {allowed:g}; the "
                f"last one: "
                f"sample {index}: {text}"
            )
            raise DataError(msg, row=index)
        return len(found)
