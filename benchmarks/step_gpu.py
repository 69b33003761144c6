"""One optimizer step of GR00T N1.6 over 16 samples: plain, fused, graphed, compiled, and the rivals.

Every column takes the same model, the same 16 samples (4 micro-batches of 4), the same fused AdamW and
gradient clipping, in one process on one GPU. Columns:

* ``eager_4x4``, ``eager_1x16``: plain PyTorch, accumulated or as one batch;
* ``fused_eager``: the four micro-batches in one pass;
* ``graph_4x4``, ``graph_fused``: the same two, replayed as CUDA graphs, optimizer inside;
* ``graph_fused_compile``: with the repeated blocks compiled before capture;
* ``ours+OPTION+...``: that with options: ``adam`` our one-pass AdamW (clipping inside), ``masters`` 16-bit
  weights with float32 masters in it instead of float32 weights under autocast, ``cudnn`` or ``flash``
  attention first, ``ops`` our fused operators, ``fp8`` frozen linear layers in float8 (opt-in, changes the
  numbers);
* ``compile_1x16``: ``torch.compile`` of the whole model on one batch of 16; ``compile_regions_1x16``: of its
  blocks.

Each column reports milliseconds per step, kernels, GPU busy time by family of kernels, and peak memory.
"""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))
import _common
import _groot_full as groot
from loongforge_fuse import (
    FusionConfig,
    GraphConfig,
    GraphRunner,
    MicroBatchFuser,
    PrecisionPolicy,
    apply_precision,
    compile_regions,
)

COLUMNS = (
    "eager_4x4",
    "eager_1x16",
    "fused_eager",
    "graph_4x4",
    "graph_fused",
    "graph_fused_compile",
    "ours+adam",
    "ours+adam+fp8",
    "compile_regions_1x16",
    "compile_1x16",
)
MICRO, SAMPLES, CLIP, LR = 4, 4, 1.0, 1e-4


@dataclass
class Bench:
    """Settings and the model that all columns share."""

    args: object
    device: str
    model: nn.Module
    window: list[dict[str, object]]
    large: dict[str, object]
    autocast: bool = False


def optimizer_for(bench: Bench) -> torch.optim.Optimizer:
    """Return a fresh fused AdamW over the trainable parameters."""
    trainable = [p for p in bench.model.parameters() if p.requires_grad]
    cuda = bench.device == "cuda"
    return torch.optim.AdamW(trainable, lr=LR, weight_decay=1e-5, fused=True, capturable=cuda)


@contextlib.contextmanager
def precision(bench: Bench) -> Iterator[None]:
    """Autocast when the trainable weights are float32."""
    with torch.autocast(bench.device, dtype=torch.bfloat16, enabled=bench.autocast):
        yield


def plain_step(
    bench: Bench, batches: list[dict[str, object]], model: nn.Module | None = None
) -> Callable[[], Tensor]:
    """Plain PyTorch: accumulate over ``batches``, clip, step."""
    optimizer = optimizer_for(bench)
    model = bench.model if model is None else model
    trainable = [p for p in bench.model.parameters() if p.requires_grad]

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for batch in batches:
            with precision(bench):
                loss = model(bench.model.draw(batch))["loss"] / len(batches)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(trainable, CLIP, foreach=True)
        optimizer.step()
        return torch.stack(losses).sum()

    return step


def fused_step(bench: Bench) -> Callable[[], Tensor]:
    """Fused micro-batches, eager."""
    optimizer = optimizer_for(bench)
    trainable = [p for p in bench.model.parameters() if p.requires_grad]
    fuser = MicroBatchFuser(bench.model, FusionConfig(fusion_batch_size=MICRO))

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with precision(bench):
            outcome = fuser.run(bench.window)
        if not outcome.fused:
            message = f"not fused: {outcome.reason}: {outcome.detail}"
            raise RuntimeError(message)
        torch.nn.utils.clip_grad_norm_(trainable, CLIP, foreach=True)
        optimizer.step()
        return outcome.loss

    return step


def graph_step(
    bench: Bench,
    *,
    factor: int,
    regional: bool,
    stack: contextlib.ExitStack,
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[[], Tensor]:
    """Graphed steps, clip and optimizer inside the graph."""
    runner = GraphRunner(
        bench.model,
        GraphConfig(
            mode="auto" if bench.device == "cuda" else "emulated",
            gradients="overwrite" if factor == MICRO else "accumulate",
            zero_in_graph=True,
            max_norm=CLIP,
            compile=regional,
        ),
        optimizer=optimizer or optimizer_for(bench),
    )
    stack.callback(runner.release)
    fuser = MicroBatchFuser(bench.model, FusionConfig(fusion_batch_size=factor), executor=runner)
    tries = 0

    def step() -> Tensor:
        nonlocal tries
        with precision(bench):
            outcome = fuser.run(bench.window)
        tries += 1
        if tries > 4 and not outcome.graph:
            message = f"no graph: {outcome.graph_reason}: {runner.stats().failures}"
            raise RuntimeError(message)
        return outcome.loss

    return step


def build_column(name: str, bench: Bench, stack: contextlib.ExitStack) -> Callable[[], Tensor]:
    """Return the step function of one column."""
    if name == "eager_4x4":
        return plain_step(bench, bench.window)
    if name == "eager_1x16":
        return plain_step(bench, [bench.large])
    if name == "fused_eager":
        return fused_step(bench)
    if name == "graph_4x4":
        return graph_step(bench, factor=1, regional=False, stack=stack)
    if name == "graph_fused":
        return graph_step(bench, factor=MICRO, regional=False, stack=stack)
    if name == "graph_fused_compile":
        return graph_step(bench, factor=MICRO, regional=True, stack=stack)
    if name.split("+")[0] == "ours":
        optimizer = optimise(bench, stack, set(name.split("+")[1:]))
        return graph_step(bench, factor=MICRO, regional=True, stack=stack, optimizer=optimizer)
    if name == "compile_regions_1x16":
        stack.callback(compile_regions(bench.model).undo)
        return plain_step(bench, [bench.large])
    if name == "compile_1x16":
        return plain_step(bench, [bench.large], torch.compile(bench.model, dynamic=False))
    message = f"unknown column {name}, known: {COLUMNS}"
    raise ValueError(message)


def optimise(bench: Bench, stack: contextlib.ExitStack, options: set[str]) -> torch.optim.Optimizer | None:
    """Switch on what the options ask for, undone after the column; return the optimizer if it is ours."""
    orders = {
        "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
        "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    }
    unknown = options - {"adam", "masters", "ops", "fp8", *orders}
    if unknown:
        message = f"unknown options {sorted(unknown)}"
        raise ValueError(message)
    for name in sorted(options & set(orders)):
        stack.enter_context(sdpa_kernel([*orders[name], SDPBackend.MATH], set_priority=True))
    if "ops" in options:
        from loongforge_fuse import apply_fused_ops

        report = apply_fused_ops(bench.model)
        stack.callback(report.undo)
    if "fp8" in options:
        stack.callback(apply_precision(bench.model, PrecisionPolicy.float8_frozen()).undo)
    trainable = [p for p in bench.model.parameters() if p.requires_grad]
    if "masters" in options:
        stack.callback(halved(bench, trainable))
    if not options & {"adam", "masters"}:
        return None
    from loongforge_fuse import FusedAdamW

    wide = torch.float32 if "masters" in options else None
    return FusedAdamW(
        trainable, lr=LR, weight_decay=1e-5, master_weights="masters" in options, state_dtype=wide
    )


def halved(bench: Bench, trainable: list[nn.Parameter]) -> Callable[[], None]:
    """Store trainable weights in bf16 and switch autocast off; return the undo."""
    before = [p.data for p in trainable]
    for parameter in trainable:
        parameter.data = parameter.data.to(torch.bfloat16)
    bench.autocast = False

    def undo() -> None:
        for parameter, data in zip(trainable, before, strict=True):
            parameter.grad = None
            parameter.data = data
        bench.autocast = bench.args.precision == "mixed"

    return undo


def measure(name: str, bench: Bench, *, repeats: int, steps: int) -> dict[str, object]:
    """Time, profile and weigh one column."""
    cuda = bench.device == "cuda"
    with contextlib.ExitStack() as stack:
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        step = build_column(name, bench, stack)
        for _ in range(5):
            loss = step()
        wait(cuda)
        prepared = time.perf_counter() - begun
        times = []
        for _ in range(repeats):
            wait(cuda)
            started = time.perf_counter()
            for _ in range(steps):
                loss = step()
            wait(cuda)
            times.append((time.perf_counter() - started) / steps * 1e3)
        row: dict[str, object] = {
            "column": name,
            "ms": _common.spread(times),
            "prepare_s": round(prepared, 1),
        }
        row["loss"] = round(float(loss), 4)
        if cuda:
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
            row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 1)
            row.update(profile(step))
    del step
    bench.model.zero_grad(set_to_none=True)
    gc.collect()
    return row


def wait(cuda: bool) -> None:
    """Wait for the device."""
    if cuda:
        torch.cuda.synchronize()


def profile(step: Callable[[], Tensor]) -> dict[str, object]:
    """Count the kernels of one step and add up their time by family."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA]) as taken:
        step()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    tops: Counter[str] = Counter()
    kernels = 0
    for event in taken.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.device_time <= 0:
            continue
        kernels += 1
        spent[groot.category(event.name)] += event.device_time
        tops[event.name[:90]] += event.device_time
    result: dict[str, object] = {"kernels": kernels, "gpu_busy_ms": round(sum(spent.values()) / 1e3, 2)}
    result.update({f"{family}_ms": round(t / 1e3, 2) for family, t in sorted(spent.items())})
    result["top"] = [[name, round(t / 1e3, 2)] for name, t in tops.most_common(25)]
    return result


def check_equality(bench: Bench) -> dict[str, object]:
    """Compare loss and gradients of the graphed, fused, compiled pass with plain eager, dropout off."""
    bench.model.eval()
    trainable = [(n, p) for n, p in bench.model.named_parameters() if p.requires_grad]
    window = [bench.model.draw(b) for b in bench.window]
    large = groot.joined(window)
    with precision(bench):
        out = bench.model(large)
        loss = out["loss_sum"].sum() / out["loss_count"].sum()
    loss.backward()
    # A graph that stays alive keeps its accumulation nodes on this stream, which would break a capture.
    plain = float(loss.detach())
    del out, loss
    expected = {n: p.grad for n, p in trainable if p.grad is not None}
    bench.model.zero_grad(set_to_none=True)
    mode = "auto" if bench.device == "cuda" else "emulated"
    with GraphRunner(bench.model, GraphConfig(mode=mode, compile=bench.device == "cuda")) as runner:
        fuser = MicroBatchFuser(bench.model, FusionConfig(fusion_batch_size=MICRO), executor=runner)
        for _ in range(4):
            bench.model.zero_grad(set_to_none=True)
            with precision(bench):
                outcome = fuser.run(window, drawn=True)
        difference = sum(
            ((p.grad.float() - expected[n].float()) ** 2).sum() for n, p in trainable if n in expected
        )
        size = sum((g.float() ** 2).sum() for g in expected.values())
        row = {
            "graph": outcome.graph,
            "graph_reason": outcome.graph_reason,
            "failures": dict(runner.stats().failures),
            "fusion_reason": outcome.reason,
            "loss": float(outcome.loss),
            "loss_eager": plain,
            "gradient_difference": float((difference / size).sqrt()),
            "missing": [n for n in expected if bench.model.get_parameter(n).grad is None][:5],
        }
    bench.model.zero_grad(set_to_none=True)
    bench.model.train()
    gc.collect()
    return row


def in_subprocess(name: str, args: object, limit: float) -> dict[str, object]:
    """Measure a column in a process of its own, so that a compile that takes too long can be stopped."""
    command = [sys.executable, __file__, "--columns", name, "--precision", args.precision, "--no-check"]
    command += [f"--repeats={args.repeats}"] if args.repeats else []
    command += [f"--steps={args.steps}"] if args.steps else []
    command += ["--row"] + (["--tiny"] if args.tiny else []) + (["--quick"] if args.quick else [])
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not lines:
        return {"column": name, "error": done.stderr[-1500:]}
    return json.loads(lines[-1][4:])


def figures(rows: list[dict[str, object]]) -> dict[str, float | None]:
    """Return the figures that are published."""
    ms = {r["column"]: r["ms"]["median"] for r in rows if "ms" in r}
    kernels = {r["column"]: r["kernels"] for r in rows if "kernels" in r}
    own = [t for c, t in ms.items() if c.split("+")[0] in {"ours", "graph_fused_compile"} and "fp8" not in c]
    low = [t for c, t in ms.items() if c.split("+")[0] == "ours" and "fp8" in c]
    step = min(own) if own else None
    compiled = [ms[c] for c in ("compile_1x16", "compile_regions_1x16") if c in ms]

    def over(base: float | None) -> float | None:
        return base / step if base is not None and step is not None else None

    launches = None
    if "eager_4x4" in kernels and "fused_eager" in kernels:
        launches = kernels["eager_4x4"] / kernels["fused_eager"]
    return {
        "step_ms": step,
        "vs_eager_4x4": over(ms.get("eager_4x4")),
        "vs_eager_1x16": over(ms.get("eager_1x16")),
        "vs_compile_1x16": over(min(compiled) if compiled else None),
        "launches_ratio": launches,
        "step_fp8_ms": min(low) if low else None,
    }


def main() -> None:
    """Run the columns one after the other; a failing one leaves its error in its row."""
    parser = _common.parser(__doc__)
    parser.add_argument("--columns", default=",".join(COLUMNS), help="comma-separated, in order")
    parser.add_argument("--precision", choices=("bf16", "mixed"), default="bf16")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a dry run on the CPU")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison of gradients")
    parser.add_argument("--row", action="store_true", help="print each row as one JSON line")
    parser.add_argument(
        "--compile-limit", type=float, default=240.0, help="seconds for the whole-model compile"
    )
    parser.add_argument("--repeats", type=int, default=None, help="timed groups of steps in a column")
    parser.add_argument("--steps", type=int, default=None, help="steps in a group")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        parser.error("no GPU here; use --tiny for a dry run")
    model = groot.build(tiny=args.tiny, device=device, masters=args.precision == "mixed")
    window = [groot.micro_batch(SAMPLES, model=model, device=device, seed=i) for i in range(MICRO)]
    bench = Bench(args=args, device=device, model=model, window=window, large=groot.joined(window))
    bench.autocast = args.precision == "mixed"
    rows, notes = [], []
    if not args.no_check:
        try:
            notes.append("equality: " + json.dumps(check_equality(bench)))
        except Exception as error:
            notes.append(
                f"equality failed: {type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
            )
        print(notes[-1], flush=True)
    repeats, steps = (3, 3) if args.quick or args.tiny else (5, 10)
    repeats, steps = args.repeats or repeats, args.steps or steps
    for name in args.columns.split(","):
        started = time.perf_counter()
        try:
            if name == "compile_1x16" and not args.row:
                row = in_subprocess(name, args, args.compile_limit)
            else:
                row = measure(name, bench, repeats=repeats, steps=steps)
        except Exception as error:
            row = {
                "column": name,
                "error": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}",
            }
            bench.model.zero_grad(set_to_none=True)
            gc.collect()
        row["seconds"] = round(time.perf_counter() - started, 1)
        rows.append(row)
        print(("ROW " if args.row else "") + json.dumps(row), flush=True)
    outcome = _common.result("step", rows=rows, figures=figures(rows), repetitions=repeats, notes=notes)
    _common.finish({**outcome, "rows": [{k: v for k, v in r.items() if k != "top"} for r in rows]}, None)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
