"""Errors of the package, each a subclass of the standard one that callers already catch."""

from __future__ import annotations


class CompiledModelError(ValueError):
    """A whole-model ``torch.compile`` wrapper was passed where the original module is needed."""


class PlanMismatchError(RuntimeError):
    """Ranks do not hold the same parameters, plan or request; nothing was sent."""


class DivergentGradientError(RuntimeError):
    """A gradient changed after its bucket had been sent, so the average would be wrong."""


class RankFailureError(RuntimeError):
    """A rank did not take part in a collective within the time limit.

    Attributes:
        ranks: global ranks that are silent or gone, empty when the heartbeat could not tell.
        bucket: index of the bucket that was waited for, ``None`` outside of a bucket.
        group: group label of that bucket (``high``, ``low`` or a configured name).
        elapsed_s: seconds waited before giving up.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...] = (),
        bucket: int | None = None,
        group: str | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.bucket = bucket
        self.group = group
        self.elapsed_s = elapsed_s
