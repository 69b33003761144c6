"""CUDA graphs of training passes."""

from loongforge_fuse.graphs.ahead import Ahead, AheadStats, FrozenAhead
from loongforge_fuse.graphs.buckets import BucketPlan, ShapeHistogram, choose_sizes
from loongforge_fuse.graphs.config import GraphConfig
from loongforge_fuse.graphs.reasons import AheadReason, GraphReason
from loongforge_fuse.graphs.regional import compile_regions
from loongforge_fuse.graphs.runner import GraphRunner, GraphStats

__all__ = [
    "Ahead",
    "AheadReason",
    "AheadStats",
    "BucketPlan",
    "FrozenAhead",
    "GraphConfig",
    "GraphReason",
    "GraphRunner",
    "GraphStats",
    "ShapeHistogram",
    "choose_sizes",
    "compile_regions",
]
