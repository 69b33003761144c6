"""Operators: fused kernels registered with torch, each with a CPU reference, a shape function and a
derivative.

Importing this package registers the operators under ``torch.ops.loongforge``; it needs torch, but neither
numba nor a GPU.
"""

from loongforge_fuse.ops._common import op_counters, reset_op_counters
from loongforge_fuse.ops.cast import cast_scale
from loongforge_fuse.ops.dropout import dropout_residual, philox_counter, philox_next, series_probability
from loongforge_fuse.ops.elementwise import gelu_tanh, silu_mul
from loongforge_fuse.ops.image import image_table, image_table_to_half, image_to_half
from loongforge_fuse.ops.normalize import layer_norm_modulate, rms_norm
from loongforge_fuse.ops.patch_plan import patch_table
from loongforge_fuse.ops.patches import masked_patch_embed, masked_unfold
from loongforge_fuse.ops.products import linear
from loongforge_fuse.ops.quantise import quantise_rows
from loongforge_fuse.ops.rope import head_norm_rope

__all__ = [
    "cast_scale",
    "dropout_residual",
    "gelu_tanh",
    "head_norm_rope",
    "image_table",
    "image_table_to_half",
    "image_to_half",
    "layer_norm_modulate",
    "linear",
    "masked_patch_embed",
    "masked_unfold",
    "op_counters",
    "patch_table",
    "philox_counter",
    "philox_next",
    "quantise_rows",
    "reset_op_counters",
    "rms_norm",
    "series_probability",
    "silu_mul",
]
