"""Fused kernels on one GPU: bandwidth, model shapes against eager, compiled and Triton code, cost of a call.

Times are device times: calls are captured in a CUDA graph that rotates over enough buffers to defeat the
L2 cache, and the replay is timed by events. Only the section on call cost measures the host. With ``--tune``
the ways of doing each job (kernels, row plans) are measured first and the fastest are used from then on.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import _common
import _kernels_rivals as rivals
from _kernels_cases import bandwidth_cases
from _kernels_timing import Call, Run, bf, captured, host_times, ratio, replay_times, warm_host
from loongforge_fuse import Autotuner, TuneConfig, ops
from loongforge_fuse.kernels import launcher
from loongforge_fuse.ops import tuning
from loongforge_fuse.ops.elementwise import elementwise_spec


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


def measure_ways(run: Run) -> None:
    """Measure every way of doing each job once, and use the fastest from here on."""
    folder = Path(tempfile.mkdtemp())
    tuner = Autotuner(TuneConfig(path=folder / "tuned.json", rounds=5 if run.quick else 15))
    for job in tuning.jobs():
        with run.part("choice " + job.name):
            decision = tuning.tune(tuner, [job])[job.name]
            run.rows.append(
                {"part": "choice", "case": job.name, "winner": decision.winner, "default": job.ways[0],
                 "us": dict(decision.micros)}
            )  # fmt: skip
    run.figures["choices_changed"] = sum(
        r["winner"] != r["default"] for r in run.rows if r["part"] == "choice"
    )


def measure_model_shapes(run: Run) -> None:
    """Blocks of the models at their real shapes: ours, eager, compiled, Triton; forward alone and with
    backward.
    """
    against: dict[str, float] = {"eager": 0.0, "compile": 0.0, "triton": 0.0}
    for case in rivals.model_cases():
        with run.part(case.name):
            row: dict[str, object] = {"part": "model shapes", "case": case.name, "shape": str(case.shape)}
            ready: dict[str, torch.cuda.CUDAGraph] = {}
            kept: list[Call] = []  # a replay reads what the calls hold
            for way, function in case.ways().items():
                try:
                    kept += (calls := [case.call(function) for _ in range(8)])
                    ready[way] = captured(calls)
                except Exception as error:  # a rival that does not run is recorded and skipped
                    row[way + "_us"] = f"{type(error).__name__}: {error}"[:120]
            times = replay_times(list(ready.values()), [8] * len(ready), run.repetitions)
            taken = dict(zip(ready, times, strict=True))
            row |= {f"{way}_us": _common.spread([v * 1e6 for v in t]) for way, t in taken.items()}
            del kept
            run.rows.append(row)
            for way in against.keys() & taken.keys():
                against[way] = max(against[way], ratio(taken["ours"], taken[way]))
                row["vs_" + way] = ratio(taken["ours"], taken[way])
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
    runs: list[Call] = [lambda: function.run(1, 1, at), lambda: function.launch(1, 1, stream, *at)]
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
    # As operators launch, on the current stream, and as they do where torch has no launcher of its own.
    warm_host(runs)
    bare, packed = (_common.spread([v * 1e6 for v in t]) for t in host_times(runs, run.repetitions))
    run.rows.append({"part": "calls", "case": "bare launch, 4 arguments", "ours_us": bare})
    run.rows.append({"part": "calls", "case": "bare launch, packed in Python", "ours_us": packed})
    run.figures["launch_us"] = bare["median"]
    ratios = {}
    for name, (ours, torchs) in pairs.items():
        with run.part("call " + name):
            taken = host_times([ours, torchs], run.repetitions)
            a, b = (_common.spread([v * 1e6 for v in t]) for t in taken)
            ratios[name] = ratio(*taken)
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
    parser.add_argument(
        "--tune", action="store_true", help="first choose kernels and row plans by measurement"
    )
    parser.add_argument(
        "--step", action="store_true", help="only the full-size step, with and without patches"
    )
    parser.add_argument("--bandwidth", action="store_true", help="only the share of a copy")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels_gpu.py needs an NVIDIA GPU")
    run = Run(arguments.quick)
    if arguments.bandwidth:
        measure_bandwidth(run)
    elif not arguments.step:
        with run.part("calls"):
            measure_calls(run)
        if arguments.tune:
            measure_ways(run)
        measure_bandwidth(run)
        measure_model_shapes(run)
    if not arguments.bandwidth:
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
