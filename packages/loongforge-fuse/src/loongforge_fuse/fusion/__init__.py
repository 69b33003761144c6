"""Fusion of the micro-batches of one accumulation window."""

from loongforge_fuse.fusion.batch import PadRule
from loongforge_fuse.fusion.config import FusionConfig
from loongforge_fuse.fusion.cost import CostModel
from loongforge_fuse.fusion.fuser import MicroBatchFuser, WindowOutcome
from loongforge_fuse.fusion.packing import PackedLayout, PackRule, packed_attention
from loongforge_fuse.fusion.reasons import RefusalReason

__all__ = [
    "CostModel",
    "FusionConfig",
    "MicroBatchFuser",
    "PackRule",
    "PackedLayout",
    "PadRule",
    "RefusalReason",
    "WindowOutcome",
    "packed_attention",
]
