"""Graphs under shapes that change at random: captures, memory and time over 500 steps.

A model reads texts of random length (1 to 64 tokens, skewed to short ones). The first 50 steps run without
buckets and are only observed; then the runner pads to the sizes chosen from that histogram and captures one
graph each. After a warm-up of 100 further steps no capture may happen. On a GPU the same steps are also
timed eagerly, shape by shape; without one the stand-in backend checks the logic alone and no time is
compared.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _common
from loongforge_fuse import FusionConfig, GraphConfig, GraphRunner, MicroBatchFuser, ShapeHistogram
from loongforge_fuse.testing import TinyVLA, tiny_batch

DIMS = {("text", 1): "text", ("text_mask", 1): "text"}
OBSERVED, WARM_UP, BUCKETS, CAP_GB = 50, 100, 6, 2.0


def lengths(steps: int) -> list[int]:
    """Return seeded random text lengths, short ones more often."""
    generator = torch.Generator().manual_seed(0)
    return [1 + int(63 * u**2) for u in torch.rand(steps, generator=generator).tolist()]


def main() -> None:
    """Run the steps and count."""
    args = _common.parser(__doc__).parse_args()
    steps = 250 if args.quick else 500
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = 1024 if device == "cuda" else 32
    torch.manual_seed(0)
    model = TinyVLA(width=width).to(device)
    histogram = ShapeHistogram(DIMS)
    sizes = lengths(OBSERVED + steps)

    def batch(step: int) -> dict[str, object]:
        made = tiny_batch(4, seed=step, text=sizes[step], width=width)
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in model.draw(made).items()}

    for step in range(OBSERVED):
        histogram.observe(batch(step))
    plan = histogram.plan(buckets=BUCKETS, rules=model.pad_rules)
    longest = max(sizes)
    if plan.sizes["text"][-1] < longest:
        plan = type(plan)(dims=DIMS, sizes={"text": (*plan.sizes["text"], longest)}, rules=model.pad_rules)
    config = GraphConfig(
        mode="auto" if device == "cuda" else "emulated", buckets=plan, max_graphs=8, memory_cap_gb=CAP_GB
    )
    eager = MicroBatchFuser(model, FusionConfig(fusion_batch_size=1))
    spent: dict[str, list[float]] = {"graph": [], "eager": []}
    after_warm_up, held, real, padded = None, 0, 0, 0
    with GraphRunner(model, config) as runner:
        for step in range(OBSERVED, OBSERVED + steps):
            data = batch(step)
            if step == OBSERVED + WARM_UP:
                after_warm_up = runner.stats().captures
            for name in ("graph", "eager"):
                model.zero_grad(set_to_none=False)
                if device == "cuda":
                    torch.cuda.synchronize()
                started = time.perf_counter()
                if name == "graph":
                    runner.run(data)
                else:
                    eager.run([data], drawn=True)
                if device == "cuda":
                    torch.cuda.synchronize()
                if step >= OBSERVED + WARM_UP:
                    spent[name].append((time.perf_counter() - started) * 1e3)
            held = max(held, runner.stats().graph_bytes)
            real += sizes[step]
            padded += next((s for s in plan.sizes["text"] if s >= sizes[step]), sizes[step])
        stats = runner.stats()
    recaptures = stats.captures - (after_warm_up or 0)
    rows = [{"way": name, "ms": _common.spread(t)} for name, t in spent.items()]
    ratio = (
        sorted(spent["graph"])[len(spent["graph"]) // 2] / sorted(spent["eager"])[len(spent["eager"]) // 2]
    )
    figures = {
        "recaptures_after_warmup": recaptures,
        "graphs": stats.graphs if stats.graphs else stats.captures,
        "largest_memory_gb": held / 2**30,
        "memory_cap_gb": CAP_GB,
        "padding_share": 1 - real / padded,
        "time_vs_eager": ratio if device == "cuda" else None,
    }
    notes = [f"bucket sizes {plan.sizes['text']}", f"eager steps by reason: {dict(stats.eager)}"]
    if device == "cpu":
        notes.append("no GPU: stand-in backend, so times say nothing about graphs")
    _common.finish(
        _common.result("graph_cache", rows=rows, figures=figures, repetitions=steps, notes=notes), args.json
    )


if __name__ == "__main__":
    main()
