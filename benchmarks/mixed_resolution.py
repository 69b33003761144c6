"""Images of six sizes in one window: what fusing gains over buckets and over padding to the largest size.

A small vision transformer reads micro-batches whose images have one of six sizes (a seeded histogram, as
robot data sets with several cameras give). Every micro-batch has one size, as a bucketing loader delivers
it; the four of a window differ. Compared, forward and backward of a window:

* ``bucketed``: the four micro-batches one after the other, nothing padded;
* ``pad_to_max``: every image padded to the largest size and the window concatenated into one pass, masked;
* ``ours``: the fuser, which packs or pads by its cost model (fitted to passes measured here).

``fusion_success`` is the share of micro-batches that ran fused over all windows. Ratios are theirs / ours
in time.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
import _common
from loongforge_fuse import CostModel, FusionConfig, MicroBatchFuser, PackRule, PadRule, packed_attention

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

    def loss_count(self, batch: dict[str, object]) -> Tensor:
        """One element per image."""
        return torch.ones(len(batch["lengths"]), device=self.head.weight.device)

    def forward(self, batch: dict[str, object]) -> dict[str, Tensor]:
        """Return losses per image."""
        layout, keep = batch.get("packed"), batch.get("keep")
        x = self.embed(batch["patches"]) + self.place(batch["place"])
        if layout is None and keep is not None and not batch.get("mixed", True):
            keep = None
        for block in self.blocks:
            x = block(x, layout, keep)
        values = self.head(x).squeeze(-1)
        if layout is not None:
            totals = layout.sums(values)
        else:
            totals = values.float().sum(1) if keep is None else (values.float() * keep).sum(1)
        lengths = torch.tensor(batch["lengths"], dtype=torch.float32, device=totals.device)
        sums = (totals / lengths - batch["target"]).square()
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


def main() -> None:
    """Run all windows in all three ways, interleaved."""
    args = _common.parser(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    width, layers, heads, samples = (768, 12, 12, 4) if device == "cuda" else (32, 4, 2, 1)
    torch.manual_seed(0)
    model = Vision(width, layers, heads).to(device, dtype)
    windows, timed_windows = (200, 20) if args.quick else (1000, 100)
    cost = fit(model, samples, device, dtype)
    generator = torch.Generator().manual_seed(1)
    choices = torch.multinomial(torch.tensor(WEIGHTS), windows * GROUP, replacement=True, generator=generator)
    ours = MicroBatchFuser(
        model, FusionConfig(fusion_batch_size=GROUP, cost=cost, trace_length=windows * GROUP)
    )
    plain = MicroBatchFuser(model, FusionConfig(fusion_batch_size=1))
    large = MicroBatchFuser(model, FusionConfig(fusion_batch_size=GROUP, layout="pad"))
    times: dict[str, list[float]] = {"ours": [], "bucketed": [], "pad_to_max": []}
    calls: dict[str, int] = {}
    for window in range(windows):
        grids = [GRIDS[i] for i in choices[window * GROUP : (window + 1) * GROUP].tolist()]
        batches = [micro_batch(samples, g, 10 * window + i, device, dtype) for i, g in enumerate(grids)]
        enlarged = [to_largest(batch) for batch in batches]
        ways = {
            "ours": lambda b=batches: ours.run(b),
            "bucketed": lambda b=batches: plain.run(b),
            "pad_to_max": lambda b=enlarged: large.run(b),
        }
        if window == 0:
            for way in ways.values():
                way()
        for name, way in ways.items():
            if window < timed_windows or name == "ours":
                model.zero_grad(set_to_none=True)
                seconds = timed(way, device)
                if window < timed_windows:
                    times[name].append(seconds * 1e3)
        if window == timed_windows:
            for name, way in ways.items():
                model.zero_grad(set_to_none=True)
                with Count() as counter:
                    way()
                calls[name] = counter.calls
    summary = ours.trace.summary()
    layouts = [r.layout for r in ours.trace.records()]
    rows = [
        {"way": n, "ms_per_window": _common.spread(t), "operators": calls.get(n)} for n, t in times.items()
    ]
    # The three ways of a window run one after the other, so their ratio also holds on a busy machine.
    ratio = {
        name: statistics.median(t / o for t, o in zip(times[name], times["ours"], strict=True))
        for name in times
    }
    figures = {
        "fusion_success": summary["fused_share"],
        "vs_pad_to_max": ratio["pad_to_max"],
        "vs_bucketed": ratio["bucketed"],
        "operators_saved": 1 - calls["ours"] / calls["bucketed"],
        "windows": windows,
    }
    notes = [
        f"layouts: { {name: layouts.count(name) for name in sorted(set(layouts))} }",
        f"reasons: {summary['reasons']}",
        "operators: on the CPU packed attention runs sequence by sequence, on a GPU as one kernel a layer",
        f"cost model: {dataclasses.asdict(cost)}",
    ]
    _common.finish(
        _common.result(
            "mixed_resolution", rows=rows, figures=figures, repetitions=timed_windows, notes=notes
        ),
        args.json,
    )


if __name__ == "__main__":
    main()
