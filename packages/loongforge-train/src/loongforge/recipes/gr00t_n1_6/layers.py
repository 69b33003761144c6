"""Small parts shared by the blocks: norms that keep their input's dtype, and dtype borders."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.RMSNorm):
    """RMSNorm that computes in float32 where its weight is float32 and returns the input's dtype.

    A trainable layer keeps float32 weights while its residual stream is bfloat16; casting the weight down
    instead would round away small updates.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x`` (..., D)."""
        if self.weight is None or self.weight.dtype == x.dtype:
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps).to(x.dtype)
        wide = functional.rms_norm(x.to(self.weight.dtype), self.normalized_shape, self.weight, self.eps)
        return wide.to(x.dtype)


def plain_layer_norm(x: Tensor, eps: float) -> Tensor:
    """LayerNorm without affine in the dtype of ``x`` (float32 inside), under autocast as well."""
    # The native op is outside autocast's float32 list, so a bfloat16 stream stays bfloat16 in one kernel.
    return torch.native_layer_norm(x, (x.shape[-1],), None, None, eps)[0]


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the 16-bit type autocast uses on ``device`` now, or None while it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast is off on ``device``."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def at_dtype_of(x: Tensor, weight: Tensor) -> Tensor:
    """Cast ``x`` to the dtype of ``weight`` unless autocast will do so at each matrix product."""
    return x.to(weight.dtype) if autocast_dtype(x.device) is None else x


def is_low_precision(weight: Tensor) -> bool:
    """Tell whether ``weight`` is stored in a 16-bit float."""
    return weight.dtype in (torch.bfloat16, torch.float16)
