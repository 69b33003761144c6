"""The reasons for which fusion steps aside."""

from __future__ import annotations

import enum


class RefusalReason(enum.StrEnum):
    """Why a group of micro-batches ran one after the other instead of fused."""

    OFF = "off"
    """``fusion_batch_size`` is 1."""
    ONE_MICRO_BATCH = "one_micro_batch"
    """The group holds a single micro-batch (a short last window)."""
    NO_SAMPLE_LOSSES = "no_sample_losses"
    """The model returns only a mean loss, which could not be split by micro-batch."""
    BATCH_NORM = "batch_norm"
    """A layer in training mode normalises over the batch."""
    SAMPLES_INTERACT = "samples_interact"
    """The model declares, or the probe found, that samples of one batch change each other's loss."""
    MOE_CAPACITY = "moe_capacity"
    """A mixture-of-experts layer drops tokens by a capacity that depends on the batch."""
    DATA_DEPENDENT = "data_dependent"
    """The forward pass reads tensor values on the host or makes shapes from them."""
    HOOKS = "hooks"
    """Module hooks are registered: they would see fewer and larger calls."""
    KEYS_DIFFER = "keys_differ"
    """The micro-batches do not have the same keys or kinds of values."""
    DTYPES_DIFFER = "dtypes_differ"
    """The same key has different dtypes or devices."""
    SHAPES_DIFFER = "shapes_differ"
    """Shapes differ and the model gives no rule for padding or packing them."""
    SHARED_VALUES_DIFFER = "shared_values_differ"
    """A value without a sample dimension differs between micro-batches."""
    MEMORY_PREDICTED = "memory_predicted"
    """The fused activations would not fit, by prediction."""
    MEMORY_CAUGHT = "memory_caught"
    """The fused forward pass ran out of memory; nothing had been accumulated yet."""
    OTHER_RANK = "other_rank"
    """Another rank cannot fuse this window, so this one does not either."""
    NOT_CHEAPER = "not_cheaper"
    """By the cost model the padding would cost more than fusing saves."""
