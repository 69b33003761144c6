"""Reuse of the outputs of a frozen prefix."""

from loongforge_fuse.frozen.cache import (
    FrozenCacheConfig,
    FrozenCacheStats,
    FrozenFeatureCache,
    FrozenReuseError,
)

__all__ = ["FrozenCacheConfig", "FrozenCacheStats", "FrozenFeatureCache", "FrozenReuseError"]
