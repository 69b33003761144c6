"""One optimizer step of GR00T N1.6 over 16 samples: plain, fused, graphed, compiled, and the rivals.

Every column takes the same model, the same 16 samples (4 micro-batches of 4; other numbers by
``--samples``), fused AdamW and gradient clipping, in one process on one GPU. Columns:

* ``eager_4x4``, ``eager_1x16``: plain PyTorch, accumulated or as one batch;
* ``fused_eager``: the four micro-batches in one pass;
* ``graph_4x4``, ``graph_fused``: the same two, replayed as CUDA graphs, optimizer inside;
* ``graph_fused_compile``: with the repeated blocks compiled before capture;
* ``ours+OPTION+...``: that with options: ``adam`` our one-pass AdamW (clipping inside), ``masters`` 16-bit
  weights with float32 masters in it instead of float32 weights under autocast, ``cudnn`` or ``flash``
  attention first, ``ops`` our fused operators, ``plain`` without compiled blocks, ``beside`` the gradients of
  weights on a stream of their own, ``join`` queries, keys and values of the action head as one product,
  ``ahead`` the frozen part of the next step's samples beside the present step (``split``: its end beside the
  optimizer; ``spareN``: its products leave N multiprocessors free; ``first``: the step's kernels go first),
  ``combo``, ``multi`` or ``descent`` settings of the compiler, ``fp8`` frozen linear layers in float8
  (opt-in, changes the numbers);
* ``stock_4x4``, ``stock_1x16``: plain PyTorch as ``eager`` is, on the model as a user meets it:
  transformers' SigLIP2 tower and Qwen3 decoder around the same parameters, with the logits, boolean masks
  and look-ups of the published code that our model leaves out. ``_step_stock.py`` says what was taken over
  and what was not; needs transformers. ``stock_loss_deviation`` is how far its loss is from that of our
  model, dropout off;
* ``compile_1x16``: ``torch.compile`` of the whole model on one batch of 16; ``compile_regions_1x16``: of its
  blocks.

Every round begins with the weights the model was built with; a column whose loss is not finite fails.
All columns are prepared first (compiled, captured), the whole model's compile last: it takes four to five
minutes and may run out of time. Then they take turns of one second each (three steps at least), round after
round, and a ratio is taken within each round: the host's speed drifts by a third within minutes, and with it
everything that waits for the host. ``host_ms`` is what the host needs for a step: close to ``ms``, the step
waits for the host. ``clock_mhz`` and ``power_w`` are the driver's: at its power limit a GPU slows down.
Each row has milliseconds per step, peak memory, kernels, GPU time by family of kernels, and the gaps between
kernels. A column that fails leaves its error in its row; the result is written after every step of the way,
so that an interrupted run still has what was measured.
"""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _common
from _gpu_use import Samples
from _step_columns import COLUMNS, MIXED_COLUMNS, SAMPLES, Bench, make_bench
from _step_equality import check_equality
from _step_rounds import (
    GIB,
    WATCHED,
    Deadline,
    Turn,
    limited,
    prepare,
    problem,
    profile,
    summarise,
    take_turns,
)
from _step_stock import STOCK

PREPARE_S = 60.0
"""Seconds a column other than the compiled whole model may take to get ready."""
ROUNDS_S = 75.0
"""Seconds that three rounds of all columns and their profiles take."""
ESSENTIAL = frozenset(
    {"eager_4x4", "eager_1x16", "fused_eager", "ours+adam+ops+plain+beside+ahead+spare66", *STOCK}
)
"""Columns that the published figures need; the others use what time is left."""


def expected_s(name: str) -> float:
    """Return the seconds a column usually takes to get ready on one H200."""
    compiles = "compile" in name or (name.startswith("ours") and "plain" not in name)
    return 25.0 if compiles else 8.0


class Report:
    """The result, written anew after each step of the way."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.turns: dict[str, dict[str, Turn]] = {}
        self.notes: list[str] = []

    def result(self) -> dict[str, object]:
        """Return the result as far as it is known."""
        rows: list[dict[str, object]] = []
        figures: dict[str, float | None] = {}
        rounds = 0
        for precision, turns in self.turns.items():
            found, extra = summarise(turns)
            rows += [{"precision": precision, **turn.row} for turn in turns.values()]
            rows += [{"precision": precision, **row} for row in extra]
            rounds = max([rounds, *(len(turn.ms) for turn in turns.values())])
            if precision == "bf16":
                figures = found
            else:
                figures["mixed_step_ms"] = found["step_ms"]
                figures["mixed_vs_eager_1x16"] = found["vs_eager_1x16"]
        return _common.result("step", rows=rows, figures=figures, repetitions=rounds, notes=self.notes)

    def write(self) -> None:
        """Write the JSON file, where one was asked for."""
        if self.args.json is not None:
            self.args.json.parent.mkdir(parents=True, exist_ok=True)
            self.args.json.write_text(json.dumps(self.result(), indent=1) + "\n")

    def say(self, text: str) -> None:
        """Print a line at once and keep the file up to date."""
        print(text, flush=True)
        self.write()


def run(bench: Bench, columns: list[str], report: Report, deadline: Deadline, precision: str) -> None:
    """Prepare the columns of one precision and let them take turns until the rounds or the time are up."""
    args = report.args
    turns = report.turns.setdefault(precision, {})
    base = warm_stock(bench)
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(Samples(*WATCHED))
        for place, name in enumerate(columns):
            # The columns that figures need, and three rounds at most, must still fit behind this one.
            later = [after for after in columns[place + 1 :] if after in ESSENTIAL]
            reserve = sum(map(expected_s, later)) + ROUNDS_S * min(args.rounds, 3) / 3
            limit = args.compile_limit if name == "compile_1x16" else PREPARE_S
            limit = min(limit, deadline.left() - reserve)
            if limit < 3.0:
                turns[name] = Turn(name=name, column=None, row={"column": name, "error": "no time left"})
            else:
                turns[name] = prepare(
                    name,
                    bench,
                    stack,
                    limit=limit,
                    base_gib=base,
                    turn_s=args.turn_s,
                    least_steps=args.steps,
                )
            report.say(json.dumps(turns[name].row)[:700])
        round_s = 0.0
        for number in range(args.rounds):
            # Profiles take a second or two a column.
            if number and deadline.left() < round_s + 2.0 * len(columns) + 10.0:
                report.notes.append(f"{precision}: time for {number} of {args.rounds} rounds")
                break
            before_s = deadline.left()
            take_turns(list(turns.values()), bench, gpu)
            round_s = before_s - deadline.left()
            shown = {name: round(turn.ms[-1], 1) for name, turn in turns.items() if turn.ms and turn.ms[-1]}
            report.say(f"round {number}: {shown}")
        for turn in turns.values():
            if deadline.left() > 3.0:
                profile(turn, bench)
                report.write()


def warm_stock(bench: Bench) -> float:
    """Make the shared optimizer's state; return what it and the model hold, GiB."""
    for parameter in bench.trainable():
        parameter.grad = torch.zeros_like(parameter)
    bench.stock.step()
    bench.stock.zero_grad(set_to_none=True)
    return torch.cuda.memory_allocated() / GIB if bench.device == "cuda" else 0.0


def arguments() -> ArgumentParser:
    """Return the argument parser."""
    parser = _common.parser(__doc__)
    parser.add_argument("--columns", default=",".join(COLUMNS), help="comma-separated, in order of preparing")
    parser.add_argument(
        "--mixed-columns",
        default=",".join(MIXED_COLUMNS),
        help="columns with float32 trainable weights, measured afterwards; empty for none",
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, for a dry run on the CPU")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison of gradients")
    parser.add_argument(
        "--compile-limit", type=float, default=300.0, help="seconds for the whole-model compile"
    )
    parser.add_argument("--budget-s", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--rounds", type=int, default=None, help="turns of each column, default 9 (quick: 3)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples of each of the 4 micro-batches")
    parser.add_argument("--turn-s", type=float, default=1.0, help="seconds of a turn of every column")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn at least")
    return parser


def main() -> None:
    """Run everything within the budget."""
    parser = arguments()
    args = parser.parse_args()
    args.rounds = args.rounds or (3 if args.quick else 9)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        parser.error("no GPU here; use --tiny for a dry run")
    deadline, report = Deadline(args.budget_s), Report(args)
    mixed = [name for name in args.mixed_columns.split(",") if name]
    join = any("join" in name.split("+") for name in args.columns.split(","))
    bench = make_bench(tiny=args.tiny, device=device, mixed=False, join=join, samples=args.samples)
    # The mixed columns, when asked for, get a fifth of the time.
    share = Deadline(deadline.left() * (0.8 if mixed else 1.0))
    if not args.no_check:
        try:
            with limited(PREPARE_S):
                report.notes.append("equality: " + json.dumps(check_equality(bench)))
        except Exception as error:
            report.notes.append(f"equality failed: {problem(error)}")
        report.say(report.notes[-1])
    run(bench, args.columns.split(","), report, share, "bf16")
    if mixed:
        del bench
        torch.cuda.empty_cache()
        try:
            run(
                make_bench(tiny=args.tiny, device=device, mixed=True, samples=args.samples),
                mixed,
                report,
                deadline,
                "mixed",
            )
        except Exception as error:
            report.notes.append(f"mixed failed: {problem(error)}")
    outcome = report.result()
    hidden = {"top", "error", "turns_ms", "turns_host_ms", "turns_loss", "gaps"}
    short = [{k: v for k, v in row.items() if k not in hidden} for row in outcome["rows"]]
    _common.finish({**outcome, "rows": short}, None)
    report.write()


if __name__ == "__main__":
    main()
