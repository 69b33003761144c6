"""The request word: any rank's wish for the next step border, as every rank sees it after a reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from loongforge_comm.internals import cuda_event


class RequestWord:
    """Reads the control element of the first bucket after each reduction.

    On CUDA the word of the reduction before the last one counts, whose copy to the host has long arrived:
    reading the last one would make the host wait for the device in every step.
    """

    def __init__(self) -> None:
        self._seen = False
        self._last: tuple[Tensor, torch.cuda.Event] | None = None
        self._older: tuple[Tensor, torch.cuda.Event] | None = None

    def read(self, control: Tensor) -> None:
        """Note the word of the reduction that has just ended (CUDA: been queued)."""
        if not control.is_cuda:
            self._seen = abs(control.tolist()[0]) > 0.0
            return
        host = torch.empty(1, dtype=control.dtype, pin_memory=True)
        host.copy_(control, non_blocking=True)
        self._last = (host, cuda_event())

    def take(self) -> bool:
        """Whether some rank asked for the step border; the answer is equal on all ranks."""
        ready, self._older = self._older, self._last
        self._last = None
        if ready is not None:
            host, event = ready
            event.synchronize()
            self._seen = abs(host.tolist()[0]) > 0.0
        result, self._seen = self._seen, False
        return result
