"""Images of six sizes in one window: what fusing gains over buckets and over padding to the largest size.

A small vision transformer reads micro-batches whose images have one of six sizes (a seeded histogram, as
robot data sets with several cameras give). Every micro-batch has one size, as a bucketing loader delivers
it; the four of a window differ. Compared, forward and backward of a window:

* ``bucketed``: the four micro-batches one after the other, nothing padded;
* ``pad_to_max``: every image padded to the largest size and the window concatenated into one pass, masked;
* ``ours``: the fuser, which packs or pads by its cost model (fitted to passes measured here);
* ``ours_graph``, on a GPU: that replayed from CUDA graphs, packed rows filled up to a multiple.

``fusion_success`` is the share of micro-batches that ran fused over all windows, ``launches_down`` how many
kernels fewer than ``bucketed`` a window of ``ours`` launches: counted by the profiler on a GPU, as operators
without one. Ratios are theirs / ours in time, taken within each window.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
import _common
from loongforge_fuse import (
    CostModel,
    FusionConfig,
    GraphConfig,
    GraphRunner,
    MicroBatchFuser,
    PackedLayout,
    PackRule,
    PadRule,
    packed_attention,
)

GRIDS = ((9, 9), (9, 12), (12, 12), (12, 16), (16, 16), (16, 21))
WEIGHTS = (0.30, 0.25, 0.15, 0.15, 0.10, 0.05)
PATCH = 588
GROUP = 4
VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "transpose",
    "t",
    "expand",
    "unbind",
    "detach",
    "split",
    "permute",
}
VIEWS |= {"split_with_sizes", "unsqueeze", "squeeze", "select", "slice", "alias", "as_strided"}


class Block(nn.Module):
    """Pre-norm transformer block that runs padded (B, T, D) or packed (total, D)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, layout: object, keep: Tensor | None) -> Tensor:
        """Transform the tokens."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if layout is not None:
            mixed = packed_attention(q, k, v, layout).flatten(-2)
        else:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mask = None if keep is None else keep[:, None, None, :]
            mixed = (
                functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(-2)
            )
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    """Patches with their place -> blocks -> a value per image."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.pad_rules = {"patches": PadRule(), "place": PadRule(), "keep": PadRule()}
        self.pack_rules = {"patches": PackRule(lengths="lengths"), "place": PackRule(lengths="lengths")}
        self.embed, self.place = nn.Linear(PATCH, width), nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 1)
        # Attention within sequences as one operator, as on a GPU, instead of one for each sequence.
        self.count_as_gpu = False

    def loss_count(self, batch: dict[str, object]) -> Tensor:
        """One element per image."""
        return torch.ones(len(batch["lengths"]), device=self.head.weight.device)

    def forward(self, batch: dict[str, object]) -> dict[str, Tensor]:
        """Return losses per image."""
        layout, keep = batch.get("packed"), batch.get("keep")
        if self.count_as_gpu and isinstance(layout, PackedLayout):
            layout = layout.on_device(layout.offsets, layout.segments, layout.positions)
        x = self.embed(batch["patches"]) + self.place(batch["place"])
        for block in self.blocks:
            x = block(x, layout, keep)
        values = self.head(x).squeeze(-1)
        if layout is not None:
            totals = layout.sums(values)
        else:
            totals = (values.float() * keep).sum(1)
        sizes = keep.sum(1) if layout is None else layout.sizes
        sums = (totals / sizes - batch["target"]).square()
        return {"loss": sums.mean(), "loss_sum": sums, "loss_count": torch.ones_like(sums)}


def micro_batch(
    samples: int, grid: tuple[int, int], seed: int, device: str, dtype: torch.dtype
) -> dict[str, object]:
    """Make one micro-batch of images of one size."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = grid
    places = torch.cartesian_prod(torch.linspace(0, 1, rows), torch.linspace(0, 1, columns))
    length = rows * columns
    return {
        "patches": torch.randn(samples, length, PATCH, generator=generator).to(device, dtype),
        "place": places.expand(samples, -1, -1).to(device, dtype),
        "keep": torch.ones(samples, length, dtype=torch.bool, device=device),
        "lengths": [length] * samples,
        "target": torch.randn(samples, generator=generator).to(device),
    }


def to_largest(batch: dict[str, object]) -> dict[str, object]:
    """Pad a micro-batch to the largest size of the histogram."""
    longest = max(r * c for r, c in GRIDS)
    missing = longest - batch["patches"].shape[1]
    padded = {k: functional.pad(batch[k], (0, 0, 0, missing)) for k in ("patches", "place")}
    return {**batch, **padded, "keep": functional.pad(batch["keep"], (0, missing))}


class Count(TorchDispatchMode):
    """Counts operators: what a GPU would launch at least once each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        self.calls += func._schema.name.removeprefix("aten::") not in VIEWS
        return func(*args, **(kwargs or {}))


def fit(model: nn.Module, samples: int, device: str, dtype: torch.dtype) -> CostModel:
    """Fit the cost model to passes of every size."""
    passes = []
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=1))
    for count in (samples, 4 * samples):
        for seed, grid in enumerate(GRIDS):
            batch = micro_batch(count, grid, seed, device, dtype)
            seconds = min(timed(lambda b=batch: fuser.run([b]), device) for _ in range(4))
            tokens = grid[0] * grid[1]
            passes.append((count * tokens, count * tokens**2, seconds * 1e3))
    return CostModel.fit(passes)


def timed(work: Callable[[], object], device: str) -> float:
    """Return the seconds of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


@dataclass
class Ways:
    """The ways to run a window, with what was measured of each.

    Attributes:
        fusers: Way -> its fuser.
        times: Way -> milliseconds of each timed window.
        launches: Way -> kernels (on a GPU) or operators of one window.
    """

    fusers: dict[str, MicroBatchFuser]
    times: dict[str, list[float]]
    launches: dict[str, int]


def make_ways(model: nn.Module, cost: CostModel, windows: int, device: str) -> Ways:
    """Build the ways for one model."""
    config = FusionConfig(fusion_batch_size=GROUP, cost=cost, trace_length=windows)
    fusers = {
        "ours": MicroBatchFuser(model, config),
        "bucketed": MicroBatchFuser(model, FusionConfig(fusion_batch_size=1)),
        "pad_to_max": MicroBatchFuser(model, FusionConfig(fusion_batch_size=GROUP, layout="pad")),
    }
    if device == "cuda":
        runner = GraphRunner(model, GraphConfig(packed_rows=512, max_graphs=12))
        fusers["ours_graph"] = MicroBatchFuser(model, config, executor=runner)
    return Ways(fusers=fusers, times={name: [] for name in fusers}, launches={})


def count(model: nn.Module, work: Callable[[], object], device: str) -> int:
    """Return what a window launches: kernels by the profiler on a GPU, else operators."""
    if device == "cuda":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as taken:
            work()
            torch.cuda.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        return sum(e.device_type == cuda and e.device_time > 0 for e in taken.events())
    model.count_as_gpu = True
    try:
        with Count() as counter:
            work()
    finally:
        model.count_as_gpu = False
    return counter.calls


def run_windows(model: nn.Module, ways: Ways, *, windows: int, timed_windows: int, samples: int) -> None:
    """Run all windows: the first ones in every way, the others in ours alone."""
    device, dtype = model.head.weight.device.type, model.head.weight.dtype
    generator = torch.Generator().manual_seed(1)
    choices = torch.multinomial(torch.tensor(WEIGHTS), windows * GROUP, replacement=True, generator=generator)
    for window in range(windows):
        grids = [GRIDS[i] for i in choices[window * GROUP : (window + 1) * GROUP].tolist()]
        batches = [micro_batch(samples, g, 10 * window + i, device, dtype) for i, g in enumerate(grids)]
        batches_of = dict.fromkeys(ways.fusers, batches)
        batches_of["pad_to_max"] = [to_largest(batch) for batch in batches]
        for name, fuser in ways.fusers.items():
            if window >= timed_windows and name != "ours":
                continue

            def work(
                fuser: MicroBatchFuser = fuser, data: list[dict[str, object]] = batches_of[name]
            ) -> None:
                model.zero_grad(set_to_none=True)
                fuser.run(data)

            if window == 0:
                work()
                ways.launches[name] = count(model, work, device)
            seconds = timed(work, device)
            if window < timed_windows:
                ways.times[name].append(seconds * 1e3)


def main() -> None:
    """Run all windows in all ways, interleaved."""
    args = _common.parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    width, layers, heads, samples = (768, 12, 12, 4) if device == "cuda" else (32, 4, 2, 1)
    torch.manual_seed(0)
    model = Vision(width, layers, heads).to(device, dtype)
    windows, timed_windows = (200, 20) if args.quick else (1000, 100)
    cost = fit(model, samples, device, dtype)
    ways = make_ways(model, cost, windows, device)
    run_windows(model, ways, windows=windows, timed_windows=timed_windows, samples=samples)
    trace = ways.fusers["ours"].trace
    summary, layouts = trace.summary(), [record.layout for record in trace.records()]
    ratio = {
        name: [t / o for t, o in zip(times, ways.times["ours"], strict=True)]
        for name, times in ways.times.items()
    }
    rows: list[dict[str, object]] = [
        {
            "way": name,
            "ms_per_window": _common.spread(times),
            "times_ours": _common.spread(ratio[name]),
            "launches": ways.launches[name],
        }
        for name, times in ways.times.items()
    ]
    figures = {
        "fusion_success": summary["fused_share"],
        "vs_pad_to_max": statistics.median(ratio["pad_to_max"]),
        "vs_bucketed": statistics.median(ratio["bucketed"]),
        "launches_down": 1 - ways.launches["ours"] / ways.launches["bucketed"],
        "windows": windows,
    }
    if "ours_graph" in ratio:
        figures["graph_vs_bucketed"] = statistics.median(
            b / g for b, g in zip(ways.times["bucketed"], ways.times["ours_graph"], strict=True)
        )
    notes = [
        f"layouts: { {name: layouts.count(name) for name in sorted(set(layouts))} }",
        f"reasons: {summary['reasons']}",
        f"cost model: {dataclasses.asdict(cost)}",
    ]
    if device == "cpu":
        notes.append("launches: operators, attention within packed sequences counted as one, as on a GPU")
    outcome = _common.result(
        "mixed_resolution", rows=rows, figures=figures, repetitions=timed_windows, notes=notes
    )
    _common.finish(outcome, args.json)


if __name__ == "__main__":
    main()
