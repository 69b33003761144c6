"""Precision per module."""

from loongforge_fuse.precision.apply import AppliedPrecision, Deviation, apply_precision, measure_deviation
from loongforge_fuse.precision.policy import PrecisionPolicy, PrecisionRule

__all__ = [
    "AppliedPrecision",
    "Deviation",
    "PrecisionPolicy",
    "PrecisionRule",
    "apply_precision",
    "measure_deviation",
]
