"""Swap modules of a model for fused forwards, by exact type, configuration and a numerical check."""

from loongforge_fuse.patching.apply import FusedOpsReport, PatchPolicy, PatchRecord, apply_fused_ops
from loongforge_fuse.patching.pattern import Pattern
from loongforge_fuse.patching.registry import patterns, register_pattern

__all__ = [
    "FusedOpsReport",
    "PatchPolicy",
    "PatchRecord",
    "Pattern",
    "apply_fused_ops",
    "patterns",
    "register_pattern",
]
