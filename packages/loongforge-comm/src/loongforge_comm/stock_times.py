"""Times of the buckets of stock DDP, for mode ``plan-only``: a communication hook of equal arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from loongforge_comm.internals import at_end_of_backward, cuda_event
from loongforge_comm.records import BackwardRecord, DeviceTimes, Mark


class StockTimes:
    """Averages each bucket as stock DDP does and notes when it left and landed.

    Backward is taken to begin when forward returns. The stock reducer orders its buckets after its first
    backward, so that one is marked as not overlapped.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        group: dist.ProcessGroup,
        report: Callable[[BackwardRecord], None],
        *,
        compress: bool,
    ) -> None:
        """Register the hooks on ``wrapper``; ``report`` gets the record of each finished backward."""
        self._group = group
        self._report = report
        self._compress = compress
        self._backwards = 0
        self._forward_end = 0.0
        self._forward_mark: Mark | None = None
        self._cuda = any(p.is_cuda for p in wrapper.parameters())
        self._record: BackwardRecord | None = None
        wrapper.register_forward_hook(self._forward_done)
        wrapper.register_comm_hook(self, lambda state, bucket: state.average(bucket))

    def _forward_done(self, *_: object) -> None:
        self.flush()
        self._forward_end = time.perf_counter()
        self._forward_mark = cuda_event() if self._cuda else None

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The average of one bucket over the ranks; the hook of the stock reducer."""
        buffer = bucket.buffer()
        record = self._record or self._begin()
        index, launched = bucket.index(), time.perf_counter()
        start = cuda_event() if record.device is not None else None
        payload = buffer.to(torch.bfloat16) if self._compress and buffer.dtype == torch.float32 else buffer
        payload.mul_(1.0 / self._group.size())
        work = dist.all_reduce(payload, group=self._group, async_op=True)
        assert work is not None

        def landed(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            record.spans[index] = (launched, time.perf_counter())
            if record.device is not None and start is not None:
                record.device.spans[index] = (start, cuda_event())
            value = future.value()[0]
            return value if payload is buffer else buffer.copy_(value)

        return work.get_future().then(landed)

    def _begin(self) -> BackwardRecord:
        self._backwards += 1
        now = time.perf_counter()
        record = self._record = BackwardRecord(
            begin=self._forward_end or now,
            first_ready=now,
            deferred=self._backwards == 1,
            on_device=self._cuda,
        )
        if self._forward_mark is not None:
            record.device = DeviceTimes(begin=self._forward_mark)
        at_end_of_backward(self._end)
        return record

    def _end(self) -> None:
        """Runs before the stock reducer waits for its buckets."""
        if self._record is not None:
            self._record.end = time.perf_counter()
            if self._record.device is not None:
                self._record.device.end = cuda_event()

    def flush(self) -> None:
        """Report the last backward; call it when that has returned."""
        record, self._record = self._record, None
        if record is None or not record.end:
            return
        record.finish = max([record.end, *(landed for _, landed in record.spans.values())])
        self._report(record)
