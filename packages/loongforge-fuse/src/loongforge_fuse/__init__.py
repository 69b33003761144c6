"""LoongForge fuse: micro-batch fusion, CUDA graphs, precision per module and Numba-CUDA kernels.

Importing this package touches no GPU and starts nothing; public names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module

_EXPORTS = {
    # micro-batch fusion, graphs, precision, resize, frozen features
    "FusionConfig": "loongforge_fuse.fusion",
    "MicroBatchFuser": "loongforge_fuse.fusion",
    "PadRule": "loongforge_fuse.fusion",
    "PackRule": "loongforge_fuse.fusion",
    "PackedLayout": "loongforge_fuse.fusion",
    "packed_attention": "loongforge_fuse.fusion",
    "CostModel": "loongforge_fuse.fusion",
    "RefusalReason": "loongforge_fuse.fusion",
    "WindowOutcome": "loongforge_fuse.fusion",
    "BucketPlan": "loongforge_fuse.graphs",
    "FrozenAhead": "loongforge_fuse.graphs",
    "GraphConfig": "loongforge_fuse.graphs",
    "GraphReason": "loongforge_fuse.graphs",
    "GraphRunner": "loongforge_fuse.graphs",
    "ShapeHistogram": "loongforge_fuse.graphs",
    "compile_regions": "loongforge_fuse.graphs",
    "PrecisionPolicy": "loongforge_fuse.precision",
    "PrecisionRule": "loongforge_fuse.precision",
    "apply_precision": "loongforge_fuse.precision",
    "measure_deviation": "loongforge_fuse.precision",
    "ResizeConfig": "loongforge_fuse.resize",
    "ResizedBatch": "loongforge_fuse.resize",
    "adaptive_resize": "loongforge_fuse.resize",
    "batch_positions": "loongforge_fuse.resize",
    "PatchTokens": "loongforge_fuse.resize",
    "embed_patches": "loongforge_fuse.resize",
    "grid_positions": "loongforge_fuse.resize",
    "masked_attention": "loongforge_fuse.resize",
    "masked_mean": "loongforge_fuse.resize",
    "pack_patches": "loongforge_fuse.resize",
    "FrozenCacheConfig": "loongforge_fuse.frozen",
    "FrozenFeatureCache": "loongforge_fuse.frozen",
    "FrozenReuseError": "loongforge_fuse.frozen",
    # fused operators and kernels
    "JoinedLinears": "loongforge_fuse.joined",
    "Autotuner": "loongforge_fuse.autotune",
    "FusedAdamW": "loongforge_fuse.ops.adamw",
    "FusedOpsReport": "loongforge_fuse.patching",
    "PatchPolicy": "loongforge_fuse.patching",
    "TuneConfig": "loongforge_fuse.autotune",
    "apply_fused_ops": "loongforge_fuse.patching",
    "cast_scale": "loongforge_fuse.ops",
    "image_to_half": "loongforge_fuse.ops",
    "join_linears": "loongforge_fuse.joined",
    "masked_patch_embed": "loongforge_fuse.ops",
    "register_pattern": "loongforge_fuse.patching",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        message = f"module 'loongforge_fuse' has no attribute '{name}'; it exports {', '.join(__all__)}"
        raise AttributeError(message)
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
