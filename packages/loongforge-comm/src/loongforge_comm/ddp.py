"""Mode ``plan-only``: the plan drives stock ``DistributedDataParallel``."""

from __future__ import annotations

import inspect
from statistics import median

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from loongforge_comm.config import SchedulerConfig
from loongforge_comm.gradients import is_local
from loongforge_comm.internals import ignore_in_stock_ddp
from loongforge_comm.plan import CommPlan


def bucket_arguments(plan: CommPlan) -> dict[str, object]:
    """Arguments of ``DistributedDataParallel`` that make it close its buckets where the plan does.

    torch >= 2.11 takes one cap per bucket. Older versions take one cap for all: the median planned size,
    which also drops their small first bucket. The order is the one the stock reducer sees in its first
    backward.
    """
    caps = plan.bucket_cap_mb_list()
    if not caps:
        return {}
    if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
        return {"bucket_cap_mb_list": caps}
    return {"bucket_cap_mb": median(caps)}


def wrap(
    model: nn.Module,
    plan: CommPlan,
    group: dist.ProcessGroup,
    config: SchedulerConfig,
) -> DistributedDataParallel:
    """Wrap ``model`` so that the stock reducer follows the plan's bucket sizes.

    The stock rules hold: call the wrapper, and every parameter must get a gradient unless
    ``find_unused_parameters`` is set (which keeps the stock reducer from ever ordering its buckets).
    """
    ignored = [
        n
        for n, _ in (*model.named_parameters(), *model.named_buffers())
        if is_local(n, config.local_parameters)
    ]
    if ignored:
        ignore_in_stock_ddp(model, ignored)
    device_ids = None
    devices = {p.device for p in model.parameters()}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        device_ids = [next(iter(devices))]
    # 2.13 renamed the option; the new name is the one without a warning.
    known = inspect.signature(DistributedDataParallel).parameters
    sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        model,
        device_ids=device_ids,
        process_group=group,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.find_unused_parameters,
        **{sync: config.buffers == "forward", **bucket_arguments(plan)},  # type: ignore[arg-type]
    )


def compress(wrapper: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """Send float32 buckets as bfloat16."""
    wrapper.register_comm_hook(group, bf16_compress_hook)
