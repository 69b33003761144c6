"""Time to plan 2 000 parameters, on a straight and on a measured-like cost curve, and exactness on small
instances.
"""

from __future__ import annotations

import itertools
import time

import _common
import numpy as np
from loongforge_comm import Curve, GradientSpec, LinkModel, plan_buckets
from loongforge_comm.planner import cost_curve, segment


def piecewise() -> LinkModel:
    """A link with the shape measured between namespaces: four curves with bends and measured ranges."""
    sizes = [2.0**k for k in range(10, 23)]
    ring = Curve.fit(sizes, [0.3 + 8.6 * s / 2**20 for s in sizes])
    others = {
        name: Curve.fit(sizes[:11], [alpha + rate * s / 2**20 for s in sizes[:11]])
        for name, alpha, rate in (("tree", 0.22, 7.2), ("direct", 0.18, 8.3), ("all_gather", 0.25, 8.1))
    }
    return LinkModel(world_size=2, backend="model", curves={"ring": ring, **others})


def gradients(count: int) -> list[GradientSpec]:
    """Parameters from 1 KiB to 4 MiB over a backward of 250 ms."""
    generator = np.random.default_rng(0)
    sizes = generator.choice([256, 1024, 2**18, 2**20], count)
    ready = np.sort(generator.uniform(0.0, 250.0, count))
    return [
        GradientSpec(
            name=f"p{i}", shape=(int(n),), stride=(1,), dtype="float32", device="cpu", ready_ms=float(r)
        )
        for i, (n, r) in enumerate(zip(sizes, ready, strict=True))
    ]


def brute_force(ready: np.ndarray, sizes: np.ndarray, curve: Curve) -> float:
    """Finish time of the best of all segmentations."""
    best = float("inf")
    count = len(sizes)
    for cuts in itertools.product((False, True), repeat=count - 1):
        finish, start = 0.0, 0
        for stop in [i + 1 for i, cut in enumerate(cuts) if cut] + [count]:
            cost = float(curve.predict(np.asarray([sizes[start:stop].sum()]))[0])
            finish = max(finish, float(ready[stop - 1])) + cost
            start = stop
        best = min(best, finish)
    return best


def main() -> None:
    """Parse, measure, report."""
    arguments = _common.parser(__doc__).parse_args()
    repeat = 5 if arguments.quick else 15
    rows: list[dict[str, object]] = []
    specs = gradients(2000)
    links = {
        "straight, 5 GB/s": LinkModel.from_alpha_beta(0.2, 5.0),
        "straight, hidden": LinkModel.from_alpha_beta(0.02, 50.0),
        "piecewise, 0.12 GB/s": piecewise(),
    }
    worst = 0.0
    for name, link in links.items():
        times = []
        for _ in range(repeat):
            begin = time.perf_counter()
            plan = plan_buckets(specs, link)
            times.append((time.perf_counter() - begin) * 1e3)
        spread = _common.spread(times)
        worst = max(worst, spread["median"])
        rows.append({"link": name, "plan_ms": spread, "buckets": len(plan.buckets)})
    generator = np.random.default_rng(1)
    gap = 0.0
    curve = cost_curve(piecewise())
    for _ in range(10 if arguments.quick else 40):
        ready = np.sort(generator.uniform(0, 50, 9))
        sizes = generator.choice([1e3, 1e5, 1e6, 4e6], 9)
        gap = max(gap, abs(segment(ready, sizes, [curve])[1] - brute_force(ready, sizes, curve)))
    rows.append({"link": "9 tensors against brute force", "largest_gap_ms": gap})
    result = _common.result(
        "comm_plan",
        rows=rows,
        figures={"plan_ms_2000": worst, "brute_force_gap_ms": gap},
        repetitions=repeat,
        notes=(
            "plan_ms_2000 is the slowest link's median for the whole of plan_buckets (specs to plan object)",
        ),
    )
    _common.finish(result, arguments.json)


if __name__ == "__main__":
    main()
