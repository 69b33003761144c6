"""What averaging costs the host per parameter and backward: 517 tiny parameters, so hooks are the time.

A step that is bound by the host gets longer by exactly this. One rank alone shows the work of the host
without waiting for anybody; two ranks on Gloo include the exchange. Every turn times every variant; figures
are differences to the plain module inside a turn, from the fastest quarter of its backwards, as medians over
turns.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import _common
import torch
from loongforge_comm import GradientScheduler, LinkModel, SchedulerConfig
from loongforge_comm.testing import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

PARAMETERS = 517
"""As many tensors as full-size GR00T N1.6 trains."""


class Chain(nn.Module):
    """Products of eight numbers: one cheap node of the graph per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply through."""
        for factor in self.factors:
            x = x * factor
        return x.sum()


def per_parameter(
    net: nn.Module,
    call: nn.Module,
    rounds: int,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    border: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Microseconds per parameter of forward, backward and step border, from the fastest quarter."""
    times: dict[str, list[float]] = {"forward": [], "backward": [], "border": []}
    x = torch.ones(8)
    for _ in range(rounds):
        marks = [time.perf_counter()]
        with no_sync():
            loss = call(x)
            marks.append(time.perf_counter())
            loss.backward()
            marks.append(time.perf_counter())
        border()
        marks.append(time.perf_counter())
        net.zero_grad(set_to_none=True)
        for name, start, stop in zip(times, marks, marks[1:], strict=False):
            times[name].append((stop - start) * 1e6 / PARAMETERS)
    return {name: statistics.quantiles(series, n=4)[0] for name, series in times.items()}


def turn(net: Chain, rounds: int) -> dict[str, dict[str, float]]:
    """Every variant once."""
    found = {"none": per_parameter(net, net, rounds)}
    handles = [p.register_post_accumulate_grad_hook(lambda _: None) for p in net.parameters()]
    found["empty hook"] = per_parameter(net, net, rounds)
    for handle in handles:
        handle.remove()
    for p in net.parameters():
        p._post_accumulate_grad_hooks = None  # an emptied table would still be asked
    stock = DistributedDataParallel(net, gradient_as_bucket_view=True)
    per_parameter(net, stock, 4)
    found["ddp no_sync"] = per_parameter(net, stock, rounds, stock.no_sync)
    found["ddp synced"] = per_parameter(net, stock, rounds)
    del stock
    gc.collect()
    if torch.distributed.get_world_size() == 1:
        with GradientScheduler(net) as inactive:
            found["inactive"] = per_parameter(net, net, rounds, inactive.no_sync, inactive.step_end)
    config = SchedulerConfig(heartbeat_interval_s=0.0, heartbeat_every=0, allow_single_rank=True)
    link = LinkModel.from_alpha_beta(0.05, 1.0, world_size=torch.distributed.get_world_size())
    with GradientScheduler(net, config=config, link=link) as scheduler:
        per_parameter(net, net, config.warmup_steps + 10, border=scheduler.step_end)
        found["ours no_sync"] = per_parameter(net, net, rounds, scheduler.no_sync)
        found["ours synced"] = per_parameter(net, net, rounds, border=scheduler.step_end)
    for p in net.parameters():
        p._post_accumulate_grad_hooks = None
    return found


def rank_program(rank: int, world_size: int, turns: int, rounds: int) -> list[dict[str, dict[str, float]]]:
    """All turns on one rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    net = Chain()
    return [turn(net, rounds) for _ in range(turns)]


def main() -> None:
    """Parse, measure with one and two ranks, report."""
    arguments = _common.parser(__doc__).parse_args()
    turns, rounds = (2, 8) if arguments.quick else (9, 24)
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    for world_size in (1, 2):
        result = run_ranks(rank_program, world_size, turns, rounds, timeout_s=200.0)[0]
        assert result is not None
        for name in result[0]:
            row: dict[str, object] = {"ranks": world_size, "variant": name}
            for part in ("forward", "backward", "border"):
                extra = [
                    found[name][part] - (found["none"][part] if name != "none" else 0.0) for found in result
                ]
                row[f"{part}_us"] = _common.spread(extra)
            rows.append(row)
            if name != "none":
                key = f"{name.replace(' ', '_')}_{world_size}"
                figures[f"{key}_us"] = row["backward_us"]["median"]  # type: ignore[index]
    outcome = _common.result(
        "comm_hooks",
        rows=rows,
        figures=figures,
        repetitions=turns,
        notes=(
            "microseconds per parameter and backward beyond the plain module; its own time stands in 'none'",
        ),
    )
    _common.finish(outcome, arguments.json)


if __name__ == "__main__":
    main()
