"""Fusion of the micro-batches of one accumulation window."""

from loongforge_fuse.fusion.batch import PadRule
from loongforge_fuse.fusion.config import FusionConfig
from loongforge_fuse.fusion.fuser import MicroBatchFuser, WindowOutcome
from loongforge_fuse.fusion.reasons import RefusalReason

__all__ = ["FusionConfig", "MicroBatchFuser", "PadRule", "RefusalReason", "WindowOutcome"]
