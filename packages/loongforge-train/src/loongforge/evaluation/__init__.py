"""How good a policy is without a robot: open-loop action error, validation loss, plots."""

from loongforge.evaluation.openloop import EpisodeTrace, OpenLoopReport, evaluate_open_loop
from loongforge.evaluation.validation import Validation

__all__ = ["EpisodeTrace", "OpenLoopReport", "Validation", "evaluate_open_loop"]
