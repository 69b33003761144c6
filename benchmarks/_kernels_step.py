"""The full-size GR00T N1.6 step with and without fused operators: kernel time by family, error, time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from itertools import starmap

import _common
import _groot_full as groot
import torch
from loongforge_fuse import apply_fused_ops
from loongforge_fuse.ops import op_counters
from torch import Tensor, nn

SAMPLES = 16
SEEDS = (0, 1, 2, 3)
SMALL = ("elementwise", "copy", "reduce", "inductor")


def step(model: nn.Module, batch: dict[str, object]) -> None:
    """One forward and backward."""
    model(batch)["loss"].backward()


def families(work: Callable[[], None]) -> tuple[dict[str, float], int]:
    """Return milliseconds of GPU time by kernel family and the number of kernels, of one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    count = 0
    for event in trace.events():
        if str(event.device_type).endswith("CUDA"):
            found[groot.category(event.name)] += event.device_time_total / 1e3
            count += 1
    return dict(found), count


def replay_times(work: Callable[[], None], model: nn.Module, repetitions: int) -> list[float]:
    """Return milliseconds of a captured step, per replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            work()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    values = []
    for _ in range(repetitions + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        values.append(start.elapsed_time(end))
    del graph
    model.zero_grad(set_to_none=True)
    return values[2:]


def gradient_error(model: nn.Module, truth: dict[str, Tensor]) -> float:
    """Return the relative error of all gradients together."""
    pairs = [
        (p.grad.float(), truth[n]) for n, p in model.named_parameters() if p.grad is not None and n in truth
    ]
    wrong = sum(starmap(lambda a, b: float((a - b).double().square().sum()), pairs))
    size = sum(float(b.double().square().sum()) for _, b in pairs)
    return (wrong / size) ** 0.5


def oracle(model: nn.Module, batch: dict[str, object]) -> dict[str, Tensor]:
    """Return the gradients of the same step in float32."""
    wide = copy.deepcopy(model).float()
    floats = {
        k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()
    }
    step(wide, floats)
    return {n: p.grad for n, p in wide.named_parameters() if p.grad is not None}


def measure(
    rows: list[dict[str, object]], figures: dict[str, object], repetitions: int, *, tiny: bool = False
) -> None:
    """Measure the step eager and fused; write rows and figures."""
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = groot.build(tiny=tiny, dropout=0.0)
    batches = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        batches.append(plain.draw(groot.micro_batch(SAMPLES, model=plain, seed=seed)))
    batch = batches[0]
    truths = [oracle(plain, b) for b in batches]
    model = groot.build(tiny=tiny)
    for way in ("eager", "fused"):
        reports = [apply_fused_ops(m, "auto" if way == "fused" else "off") for m in (plain, model)]
        errors = []
        for one, truth in zip(batches, truths, strict=True):
            plain.zero_grad(set_to_none=True)
            step(plain, one)
            errors.append(gradient_error(plain, truth))
        # Rounding near the loss moves all gradients of a batch together, so one batch alone says little.
        error = (sum(e * e for e in errors) / len(errors)) ** 0.5
        plain.zero_grad(set_to_none=True)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            step(model, batch)
        model.zero_grad(set_to_none=True)
        parts, kernels = families(lambda: step(model, batch))
        small = sum(parts.get(name, 0.0) for name in SMALL)
        model.zero_grad(set_to_none=True)
        row: dict[str, object] = {
            "part": "step", "case": f"{way}, {SAMPLES} samples", "kernels": kernels, "small_kernel_ms": small,
            "gradient_error": error,
            "gradient_errors": errors, **{f"{k}_ms": v for k, v in sorted(parts.items())},
            "patched": reports[1].counts() if way == "fused" else {},
        }  # fmt: skip
        try:
            row["graph_replay_ms"] = _common.spread(
                replay_times(lambda: step(model, batch), model, repetitions)
            )
        except Exception as failure:  # the profile above is the figure that is asked for
            row["graph_replay_ms"] = f"{type(failure).__name__}: {failure}"[:200]
        rows.append(row)
        key = "step_small_kernel_ms" if way == "fused" else "step_small_kernel_ms_eager"
        figures[key] = small
        figures[f"step_gradient_error_{way}"] = error
        if way == "fused":
            figures["step_modules_fused"] = sum(reports[1].counts().values())
            figures["step_fallbacks"] = sum(op_counters()["fallbacks"].values())
