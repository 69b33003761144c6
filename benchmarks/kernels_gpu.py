"""Fused kernels on one GPU: bandwidth, model shapes against eager, compiled and Triton code, cost of a call.

Times are device times: calls are captured in a CUDA graph that rotates over enough buffers to defeat the
L2 cache, and the replay is timed by events. Only the section on call cost measures the host.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import _common
import _kernels_rivals as rivals
from loongforge_fuse import ops
from loongforge_fuse.kernels import launcher
from loongforge_fuse.kernels.catalog import BACKWARD_CHOICES, FORWARD_CHOICES, NORMS
from loongforge_fuse.ops import norm_launch as norm_ops
from loongforge_fuse.ops.adamw import FusedAdamW
from loongforge_fuse.ops.elementwise import elementwise_spec
from loongforge_fuse.ops.norm_plan import RowPlan

BF16 = torch.bfloat16
L2_BYTES = 64 * 2**20
Call = Callable[[], object]


def device_time(calls: list[Call], repetitions: int) -> list[float]:
    """Return seconds per call, one value per repetition, of calls replayed from one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    values = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        values.append(start.elapsed_time(end) * 1e-3 / len(calls))
    del graph
    return values


def host_time(call: Call, repetitions: int, inner: int = 200) -> list[float]:
    """Return host seconds per call; the queue is drained before each round and never full."""
    for _ in range(50):
        call()
    values = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        values.append((time.perf_counter() - start) / inner)
    torch.cuda.synchronize()
    return values


def rotating(make: Callable[[], tuple[Call, int]]) -> tuple[list[Call], int]:
    """Make calls on separate buffers until they exceed the L2 cache four times over."""
    calls, total, size = [], 0, 0
    while total < 4 * L2_BYTES or len(calls) < 2:
        call, size = make()
        calls.append(call)
        total += size
        if len(calls) == 64:
            break
    return calls, size


class Run:
    """Collects rows and figures; a failing part is recorded, not fatal."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.repetitions = 7 if quick else 25
        self.rows: list[dict[str, object]] = []
        self.figures: dict[str, float | int | bool | str | None] = {}
        self.notes: list[str] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Report the time of a section and record its failure."""
        start = time.time()
        try:
            yield
        except Exception as error:  # one broken part must not waste the rest
            self.notes.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"[{name}: {time.time() - start:.0f} s]", flush=True)

    def copy_bandwidth(self, size: int) -> float:
        """Median bandwidth of a device copy that moves about `size` bytes, at most 1 GiB, measured now."""
        # bf16, read and written; whole MiB, because odd sizes take a slower copy, and not a power of two,
        # because then source and target fall on the same memory channels.
        n = min(size // 4, 195 * 2**20) // 2**19 * 2**19

        def make() -> tuple[Call, int]:
            a = torch.randint(0, 2**15, (n,), device="cuda", dtype=torch.int16).view(BF16)
            b = torch.empty_like(a)
            return lambda: b.copy_(a), 4 * n

        calls, moved = rotating(make)
        return moved / statistics.median(device_time(calls, self.repetitions))

    def bandwidth(self, name: str, make: Callable[[], tuple[Call, int]], **extra: object) -> float:
        """Measure a kernel and the copy of as many bytes beside it; return its share of the copy."""
        calls, size = rotating(make)
        values = device_time(calls, self.repetitions)
        copy = self.copy_bandwidth(size)
        spread = _common.spread([size / v / 1e12 for v in values])
        share = spread["median"] * 1e12 / copy
        self.rows.append(
            {"part": "bandwidth", "case": name, "MB": round(size / 1e6, 1), "TB/s": spread,
             "copy_TB/s": copy / 1e12, "share": share, **extra}
        )  # fmt: skip
        return share


def bf(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def bandwidth_cases(scale: int) -> dict[str, Callable[[], tuple[Call, int]]]:
    """Every bandwidth-bound kernel on at least `scale` * 64 MB of its largest tensor."""
    rows = scale * 16384  # x 2048 bf16 = 64 MiB
    n = rows * 2048
    key = ops.philox_next(ops.philox_counter(1, "cuda"))

    def gelu() -> tuple[Call, int]:
        x = bf(rows, 2048)
        return lambda: ops.gelu_tanh(x), 4 * n

    def gelu_dropout() -> tuple[Call, int]:
        x = bf(rows, 2048)
        return lambda: ops.gelu_tanh(x, p=0.2, key=key), 4 * n

    def gelu_back() -> tuple[Call, int]:
        x, g = bf(rows, 2048), bf(rows, 2048)
        return lambda: torch.ops.loongforge.gelu_tanh_backward(g, x, 0.0, None), 6 * n

    def silu() -> tuple[Call, int]:
        x, g = bf(rows, 2048), bf(rows, 2048)
        return lambda: ops.silu_mul(x, g), 6 * n

    def silu_back() -> tuple[Call, int]:
        x, g, d = bf(rows, 2048), bf(rows, 2048), bf(rows, 2048)
        return lambda: torch.ops.loongforge.silu_mul_backward(d, x, g), 10 * n

    def dropout() -> tuple[Call, int]:
        x, r = bf(rows, 2048), bf(rows, 2048)
        return lambda: ops.dropout_residual(x, r, p=0.2, key=key), 6 * n

    def cast() -> tuple[Call, int]:
        x = torch.randn(n, device="cuda")
        return lambda: ops.cast_scale(x, BF16, factor=0.5), 6 * n

    def uncast() -> tuple[Call, int]:
        x = bf(n)
        return lambda: ops.cast_scale(x, torch.float32, factor=0.5), 6 * n

    def image() -> tuple[Call, int]:
        x = torch.randint(0, 256, (scale * 512, 252, 252, 3), device="cuda", dtype=torch.uint8)
        return lambda: ops.image_to_half(x), 3 * x.numel()

    def table() -> tuple[Call, int]:
        x = torch.randint(0, 256, (scale * 512, 256, 256, 3), device="cuda", dtype=torch.uint8)
        t = ops.image_table([(256, 256)] * x.shape[0], crops=[(2, 2, 252, 252)] * x.shape[0]).cuda()
        return lambda: ops.image_table_to_half(x.view(-1), t, (256, 256)), x.numel() * 3

    def unfold(patch: int, source: torch.dtype, planar: bool) -> Callable[[], tuple[Call, int]]:
        def make() -> tuple[Call, int]:
            side = patch * 18
            images = scale * 400
            count = images * side * side * 3
            if source == torch.uint8:
                x = torch.randint(0, 256, (count,), device="cuda", dtype=torch.uint8)
            else:
                x = bf(count)
            t = ops.patch_table([(side, side)] * images, patch, planar=planar).cuda()
            out = t.shape[0] * (-(-patch * patch * 3 // 8) * 8)
            moved = count * x.element_size() + 2 * out
            return lambda: ops.masked_unfold(x, t, patch=patch, last=not planar, planar=planar), moved

        return make

    def unfold_back() -> tuple[Call, int]:
        images = scale * 400
        count = images * 252 * 252 * 3
        t = ops.patch_table([(252, 252)] * images, 14, planar=True).cuda()
        g = bf(t.shape[0], 592)
        # The buffer is cleared first: one more write of the pixels.
        return lambda: torch.ops.loongforge.masked_unfold_backward(
            g, t, None, 14, False, True, count, BF16
        ), 6 * count

    def rope() -> tuple[Call, int]:
        x, w = bf(16, rows // 16, 16, 128), bf(128)
        cos, sin = bf(rows // 16, 128), bf(rows // 16, 128)
        return lambda: ops.head_norm_rope(x, w, cos, sin), 4 * n

    def rope_back(columns: bool) -> Callable[[], tuple[Call, int]]:
        def make() -> tuple[Call, int]:
            x, w, g = bf(16, rows // 16, 16, 128), bf(128), bf(16, rows // 16, 16, 128)
            cos, sin = bf(rows // 16, 128), bf(rows // 16, 128)
            back = torch.ops.loongforge.head_norm_rope_backward
            return lambda: back(g, x, w, cos, sin, 1e-6, columns), 6 * n

        return make

    def adamw(state: torch.dtype, masters: bool) -> Callable[[], tuple[Call, int]]:
        def make() -> tuple[Call, int]:
            # A model's worth of elements: the two small launches in front do not count then.
            p = torch.nn.Parameter(bf(8 * rows, 2048))
            p.grad = bf(8 * rows, 2048)
            optimizer = FusedAdamW([p], state_dtype=state, master_weights=masters)
            optimizer.step()
            size = 2 if state == BF16 else 4
            each = (
                2 + (2 + 2 if not masters else 2 + 8) + 2 * 2 * size + 2
            )  # the norm reads gradients once more
            return optimizer.step, each * 8 * n

        return make

    cases = {
        "gelu_tanh": gelu, "gelu_tanh dropout": gelu_dropout, "gelu_tanh backward": gelu_back, "silu_mul":
        silu, "silu_mul backward": silu_back, "dropout_residual": dropout, "cast_scale f32 to bf16": cast,
        "cast_scale bf16 to f32": uncast, "image_to_half": image, "image_table_to_half": table,
        "masked_unfold 14 u8": unfold(14, torch.uint8, planar=False),
        "masked_unfold 16 u8": unfold(16, torch.uint8, planar=False),
        "masked_unfold 14 bf16 planar": unfold(14, BF16, planar=True), "masked_unfold backward": unfold_back,
        "head_norm_rope": rope, "head_norm_rope backward": rope_back(columns=True),
        "head_norm_rope backward frozen": rope_back(columns=False),
        "adamw bf16 state": adamw(BF16, masters=False), "adamw f32 state": adamw(torch.float32,
        masters=False), "adamw f32 master": adamw(torch.float32, masters=True),
    }  # fmt: skip
    for width in (1152, 1536, 2048):
        lines = n // width
        for layer, gain, _ in NORMS[width]:
            cases |= norm_cases(width, lines, layer=layer, gain=gain)
    return cases


def norm_cases(width: int, rows: int, *, layer: bool, gain: str) -> dict[str, Callable[[], tuple[Call, int]]]:
    """Forward and backward of one kind of norm, with residual and weight gradients."""
    groups = 16 if gain == "modulate" else 1
    rows = rows // groups * groups
    n = rows * width
    w = None if gain == "none" else bf(groups, width)
    o = w if layer else None
    tail = (layer, gain == "modulate", rows // groups)

    def forward(residual: bool) -> tuple[Call, int]:
        x, r = bf(rows, width), bf(rows, width) if residual else None
        call = functools.partial(torch.ops.loongforge.norm, x, r, w, o, *tail, 1e-6, BF16)
        return call, (8 if residual else 4) * n

    def backward(columns: bool) -> tuple[Call, int]:
        x, g = bf(rows, width), bf(rows, width)
        mean, rstd = torch.zeros(rows if layer else 0, device="cuda"), torch.ones(rows, device="cuda")
        call = functools.partial(
            torch.ops.loongforge.norm_backward,
            g,
            None,
            x,
            w,
            mean,
            rstd,
            *tail,
            columns,
            layer and columns,
            groups,
        )
        return call, 6 * n

    name = f"{'layer' if layer else 'rms'}_norm {gain} {width}"
    return {
        f"{name}": functools.partial(forward, residual=False),
        f"{name} residual": functools.partial(forward, residual=True),
        f"{name} backward": functools.partial(backward, columns=gain != "none"),
        f"{name} backward frozen": functools.partial(backward, columns=False),
    }


def measure_bandwidth(run: Run) -> None:
    """Every kernel at 64 MB and above."""
    worst: dict[str, float] = {}
    for name, make in bandwidth_cases(1).items():
        with run.part(name):
            worst[name] = run.bandwidth(name, make)
        torch.cuda.empty_cache()
    if worst:
        low = min(worst, key=lambda k: worst[k])
        run.figures["worst_bandwidth_share"] = worst[low]
        run.figures["worst_bandwidth_case"] = low


def measure_choices(run: Run) -> None:
    """Ways to spread rows over threads, for the plan tables."""
    for width, threads, vectors, each, ahead in FORWARD_CHOICES:
        plan = RowPlan(threads=threads, vectors=vectors, block=max(threads, 96), each=each, ahead=ahead)
        for waves, suffix in itertools.product((8, 16, 32) if ahead else (8,), ("", " residual")):
            choice(run, width, plan, suffix, forward=waves)
    for width, threads, vectors, each, blocks in BACKWARD_CHOICES:
        plan = RowPlan(threads=threads, vectors=vectors, block=threads, each=each, min_blocks=blocks)
        choice(run, width, plan, " backward")
        for waves in (8, 16, 32):
            choice(run, width, plan, " backward frozen", backward=waves)


def choice(run: Run, width: int, plan: RowPlan, suffix: str, **waves: int) -> None:
    """Measure one row plan on LayerNorm with weights."""
    norm_ops.forward_plans[width, True] = norm_ops.forward_plans[width, False] = plan
    norm_ops.backward_plans[width, True] = norm_ops.backward_plans[width, False] = plan
    saved = dict(norm_ops.waves)
    norm_ops.waves.update(waves)
    name = f"layer_norm scale {width}{suffix}"
    detail = f"t{plan.threads} v{plan.vectors} e{plan.each} ahead{int(plan.ahead)} m{plan.min_blocks} {waves}"
    try:
        with run.part(f"choice {name} {detail}"):
            case = norm_cases(width, 2**25 // width, layer=True, gain="scale")[name]
            run.bandwidth(f"choice {name} {detail}", case)
    finally:
        norm_ops.waves.update(saved)
        for cache in ("forward_plans", "backward_plans", "_forward_calls", "_backward_calls"):
            getattr(norm_ops, cache).clear()


def measure_model_shapes(run: Run) -> None:
    """Blocks of the models at their real shapes: ours, eager, compiled, Triton; forward alone and with
    backward.
    """
    against: dict[str, float] = {"eager": 0.0, "compile": 0.0, "triton": 0.0}
    for case in rivals.model_cases():
        with run.part(case.name):
            row: dict[str, object] = {"part": "model shapes", "case": case.name, "shape": str(case.shape)}
            for way, function in case.ways().items():
                try:
                    calls = [case.call(function) for _ in range(8)]
                    row[way + "_us"] = _common.spread([v * 1e6 for v in device_time(calls, run.repetitions)])
                except Exception as error:  # a rival that does not run is recorded and skipped
                    row[way + "_us"] = f"{type(error).__name__}: {error}"[:120]
            run.rows.append(row)
            mine = row.get("ours_us")
            for way in against:
                other = row.get(way + "_us")
                if isinstance(mine, dict) and isinstance(other, dict):
                    ratio = mine["median"] / other["median"]
                    row["vs_" + way] = ratio
                    against[way] = max(against[way], ratio)
        torch.cuda.empty_cache()
    for way, value in against.items():
        run.figures[f"worst_vs_{way}"] = value or None


def measure_calls(run: Run) -> None:
    """Host cost: a bare launch, and whole operators beside torch operators of the same kind."""
    x, y = bf(1024), bf(1024)
    spec = elementwise_spec("silu_mul_forward", x="bf16", vector=True)
    function = launcher.function(spec, 0)
    at = (x.data_ptr(), y.data_ptr(), y.data_ptr(), x.numel())
    stream = torch.cuda.current_stream().cuda_stream
    w = bf(2048)
    rows = bf(8, 2048)
    grad_rows, grad_x = bf(8, 2048).requires_grad_(), bf(1024).requires_grad_()
    pairs: dict[str, tuple[Call, Call]] = {
        "gelu_tanh": (lambda: ops.gelu_tanh(x), lambda: F.gelu(x, approximate="tanh")),
        "silu_mul": (lambda: ops.silu_mul(x, y), lambda: torch.mul(x, y)),
        "rms_norm": (lambda: ops.rms_norm(rows, weight=w), lambda: F.rms_norm(rows, (2048,), w)),
        "residual+rms_norm": (
            lambda: ops.rms_norm(rows, residual=rows, weight=w), lambda: F.rms_norm(rows + rows, (2048,), w)
        ),
        "layer_norm": (
            lambda: ops.layer_norm_modulate(rows, weight=w, bias=w), lambda: F.layer_norm(rows, (2048,), w, w)
        ),
        "gelu_tanh with grad": (lambda: ops.gelu_tanh(grad_x), lambda: F.gelu(grad_x, approximate="tanh")),
        "layer_norm with grad": (
            lambda: ops.layer_norm_modulate(grad_rows, weight=w, bias=w),
            lambda: F.layer_norm(grad_rows, (2048,), w, w),
        ),
        "gelu_tanh dispatcher": (
            lambda: torch.ops.loongforge.gelu_tanh(x, 0.0, None), lambda: F.gelu(x, approximate="tanh")
        ),
    }  # fmt: skip
    bare = _common.spread(
        [v * 1e6 for v in host_time(lambda: function.launch(1, 1, stream, *at), run.repetitions)]
    )
    run.rows.append({"part": "calls", "case": "bare launch, 4 arguments", "ours_us": bare})
    run.figures["launch_us"] = bare["median"]
    ratios = {}
    for name, (ours, torchs) in pairs.items():
        with run.part("call " + name):
            a = _common.spread([v * 1e6 for v in host_time(ours, run.repetitions)])
            b = _common.spread([v * 1e6 for v in host_time(torchs, run.repetitions)])
            ratios[name] = a["median"] / b["median"]
            run.rows.append(
                {"part": "calls", "case": name, "ours_us": a, "eager_us": b, "vs_eager": ratios[name]}
            )
    plain = [v for k, v in ratios.items() if "grad" not in k and "dispatcher" not in k]
    run.figures["operator_vs_torch"] = max(plain, default=None)
    run.figures["operator_vs_torch_with_grad"] = max(
        (v for k, v in ratios.items() if "grad" in k), default=None
    )


def main() -> None:
    parser = _common.parser(__doc__)
    parser.add_argument("--choices", action="store_true", help="also measure candidate row plans")
    parser.add_argument(
        "--step", action="store_true", help="only the full-size step, with and without patches"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels_gpu.py needs an NVIDIA GPU")
    run = Run(arguments.quick)
    if not arguments.step:
        with run.part("calls"):
            measure_calls(run)
        measure_bandwidth(run)
        if arguments.choices:
            measure_choices(run)
        measure_model_shapes(run)
    with run.part("step"):
        import _kernels_step

        _kernels_step.measure(run.rows, run.figures, run.repetitions)
    counters = ops.op_counters()["fallbacks"]
    run.notes += [f"fallback {reason}: {count}" for reason, count in counters.items()]
    outcome = _common.result(
        "kernels", rows=run.rows, figures=run.figures, repetitions=run.repetitions, notes=run.notes
    )
    _common.finish(outcome, arguments.json)


if __name__ == "__main__":
    main()
