"""What each "no wasted work" switch of GR00T N1.6 saves, and that loss and gradients stay the same.

Three kinds of numbers per switch, each with the switch on and off:
  counts  of one training step of the full-size model (16 samples of two 252 x 252 views, 220 tokens) on the
          meta device: floating-point operations, bytes kept for backward, bytes of parameters, gradients
          and moments. Counts have no noise.
  times   of a smaller model with the full one's proportions on this CPU: rounds in which both variants run
          in turns, the difference within each round, its median and spread.
  proof   the largest difference of loss and gradients between the two, on the smaller model in float32.

    uv run benchmarks/groot_work.py --json OUT
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent))
import _common
from loongforge.recipes import get_recipe
from loongforge.recipes.gr00t_n1_6.config import (
    DiTConfig,
    GrootConfig,
    HeadConfig,
    LanguageConfig,
    VisionConfig,
    WorkConfig,
)
from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta, materialise, random_fill
from loongforge.recipes.gr00t_n1_6.layout import layout_tokens
from loongforge.recipes.gr00t_n1_6.slots import use_single_slot

SIDE, TOKENS, SAMPLES = 252, 220, 16
# Switch: the same work with it on and off. live_slots is not a switch of the model's own configuration.
SWITCHES: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "skip_logits": ({}, {"skip_logits": False}),
    "split_cross_attention": ({}, {"split_cross_attention": False}),
    "frozen_without_autograd": ({}, {"frozen_without_autograd": False}),
    "keep_unused = false": ({"keep_unused": False}, {}),
    "live_slots": ({"live_slots": True}, {"live_slots": False}),
    "recompute (memory for work)": ({"recompute": True}, {}),
}
# The full model's proportions at a width a CPU can run: vocabulary, layers that train, slots, horizon.
SMALL = GrootConfig(
    vision=VisionConfig(hidden_size=144, layers=7, heads=4, mlp_size=538),
    language=LanguageConfig(
        hidden_size=256, layers=4, heads=4, kv_heads=2, head_dim=64, mlp_size=768, vocab_size=4_700,
        image_token_id=4_600, pad_token_id=0,
    ),
    dit=DiTConfig(layers=8, heads=4, head_dim=48, output_size=128, dropout=0.0),
    head=HeadConfig(hidden_size=128, max_positions=64),
)  # fmt: skip
SMALL = replace(SMALL, tune=replace(SMALL.tune, top_language_layers=1))


def main() -> None:
    parser = _common.parser(__doc__)
    parser.add_argument("--rounds", type=int, help="rounds of the paired times (default 25, quick 3)")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 25)
    torch.set_num_threads(1)
    full = get_recipe("gr00t_n1_6").options().config
    rows: list[dict[str, object]] = []
    figures: dict[str, float | int | bool | str | None] = {}
    for name, (on, off) in SWITCHES.items():
        counts = {key: count(full, settings) for key, settings in (("on", on), ("off", off))}
        row: dict[str, object] = {"switch": name, **compared(counts["on"], counts["off"])}
        row |= paired(on, off, rounds)
        rows.append(row)
        print(_common.table([row]), flush=True)
    figures["largest_difference"] = max(row["largest_difference"] for row in rows)
    by_name = {row["switch"]: row for row in rows}
    for name in ("skip_logits", "split_cross_attention", "live_slots"):
        figures[f"{name}_ms_saved_share"] = by_name[name]["ms_saved_share"]
    figures["logits_flops_saved"] = by_name["skip_logits"]["tflop_saved_share"]
    figures["split_attention_flops_saved"] = by_name["split_cross_attention"]["tflop_saved_share"]
    figures["live_slots_gradient_gib_saved"] = by_name["live_slots"]["gradient_gib_saved"]
    figures["live_slots_state_gib_saved"] = by_name["live_slots"]["state_gib_saved"]
    figures["unused_gib_saved"] = by_name["keep_unused = false"]["state_gib_saved"]
    notes = [
        "Counts are of one step of the full-size model; a negative saving is a cost (recompute).",
        "state_gib: parameters, gradients, two moments. kept_gib: what autograd keeps for backward.",
        "ms_saved: off minus on within a round; processor time of the small model on one thread.",
        "frozen_without_autograd saves nothing that counts: without a trainable input autograd keeps nothing "
        "there in either case.",
    ]
    outcome = _common.result("groot_work", rows=rows, figures=figures, repetitions=rounds, notes=notes)
    _common.finish(outcome, options.json)


def build(config: GrootConfig, settings: dict[str, bool]) -> nn.Module:
    """Build a model on the meta device, bound to slot 0."""
    work = {key: value for key, value in settings.items() if key != "live_slots"}
    return build_on_meta(replace(config, work=WorkConfig(**work)))


def bind(model: nn.Module, settings: dict[str, bool]) -> nn.Module:
    use_single_slot(model, 0, live_only=settings.get("live_slots", True))
    return model.train()


def make_batch(config: GrootConfig, samples: int, *, side: int, device: str) -> dict[str, Tensor]:
    """Make a batch with its draws; contents are random, or nothing on the meta device."""
    language, head = config.language, config.head
    images = 2 * config.image_tokens(side, side)
    rows = [[1] * 20 + [language.image_token_id] * images + [2] * (30 + i % 3) for i in range(samples)]
    layout = layout_tokens(
        rows, image_token_id=language.image_token_id, pad_token_id=0, pad_to=images + TOKENS - 162
    )
    g = torch.Generator().manual_seed(0)
    shape = (samples, head.action_horizon, head.max_action_dim)
    mask = torch.zeros(shape)
    mask[:, :16, :26] = 1
    batch = {
        **layout.items(),
        "pixel_values": torch.randn(samples, 2, 3, side, side, generator=g),
        "state": torch.randn(samples, 1, head.max_state_dim, generator=g),
        "action": torch.randn(shape, generator=g).clamp(-1, 1),
        "action_mask": mask,
        "embodiment_id": torch.zeros(samples, dtype=torch.int64),
        "noise": torch.randn(shape, generator=g),
        "time": torch.rand(samples, generator=g),
    }
    return {name: value.to(device) for name, value in batch.items()}


# ---- counts ----------------------------------------------------------------------------------------------


def count(config: GrootConfig, settings: dict[str, bool]) -> dict[str, float]:
    """Count one training step of a model without memory."""
    model = bind(build(config, settings), settings)
    batch = make_batch(config, SAMPLES, side=SIDE, device="meta")
    parameters = {id(p) for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        base = value if value._base is None else value._base
        if id(base) not in parameters:
            kept[id(base.untyped_storage())] = base.untyped_storage().nbytes()
            alive.append(base.untyped_storage())
        return value

    alive: list[object] = []
    with (
        FlopCounterMode(display=False) as flops,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value),
    ):
        loss = model(batch)["loss"]
        loss.backward()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    return {
        "tflop": flops.get_total_flops() / 1e12,
        "kept_gib": sum(kept.values()) / 2**30,
        "gradient_gib": 4 * trainable / 2**30,
        "state_gib": (16 * trainable + 2 * frozen) / 2**30,
    }


def compared(on: dict[str, float], off: dict[str, float]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key in on:
        result[key] = on[key]
        result[f"{key}_saved"] = off[key] - on[key]
    result["tflop_saved_share"] = (off["tflop"] - on["tflop"]) / off["tflop"]
    return result


# ---- times and proof -------------------------------------------------------------------------------------


def paired(on: dict[str, bool], off: dict[str, bool], rounds: int) -> dict[str, object]:
    """Time both variants in turns on a model with weights, and compare their loss and gradients."""
    variants = {"on": on, "off": off}
    models, optimizers = {}, {}
    for key, settings in variants.items():
        model = build(SMALL, settings)
        materialise(model, "cpu", frozen_dtype=torch.float32, fill=random_fill(0, SMALL))
        models[key] = bind(model, settings)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizers[key] = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=1e-5, foreach=True)
    batch = make_batch(SMALL, 2, side=112, device="cpu")

    def step(key: str) -> Tensor:
        loss = models[key](batch)["loss"]
        loss.backward()
        return loss.detach()

    losses = {key: step(key) for key in variants}
    difference, allowed = largest_difference(models, losses)
    times: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(rounds + 1):
        # The order changes with the round, so that neither variant always runs after the other.
        for key in ("on", "off") if number % 2 else ("off", "on"):
            optimizers[key].zero_grad(set_to_none=False)
            elapsed = timed(lambda key=key: (step(key), optimizers[key].step()))
            if number:
                times[key].append(elapsed)
    saved = [b - a for a, b in zip(times["on"], times["off"], strict=True)]
    return {
        "on_ms": _common.spread(times["on"]),
        "off_ms": _common.spread(times["off"]),
        "ms_saved": _common.spread(saved),
        "ms_saved_share": statistics.median(saved) / statistics.median(times["off"]),
        "rounds_faster": sum(s > 0 for s in saved) / len(saved),
        "largest_difference": difference,
        "allowed": allowed,
    }


def timed(work: Callable[[], object]) -> float:
    # Processor time of this one thread: what other programs do counts less.
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def largest_difference(models: dict[str, nn.Module], losses: dict[str, Tensor]) -> tuple[float, float]:
    """Return the largest relative difference of loss and gradients, and what rounding allows.

    A gradient is compared relative to its parameter's largest, or to a thousandth of the model's largest
    where that is more: key biases have gradients of zero, of which only rounding is left. The slots that
    ``live_slots`` leaves out have zero gradients in the full model; that is checked too.
    """
    largest = max(p.grad.abs().max() for p in models["off"].parameters() if p.grad is not None)
    worst = abs(losses["on"] / losses["off"] - 1).item()
    other = {name: p.grad for name, p in models["off"].named_parameters() if p.grad is not None}
    for name, parameter in models["on"].named_parameters():
        if parameter.grad is None:
            continue
        reference = other.pop(name)
        if reference.shape != parameter.grad.shape:
            if reference[1:].abs().max() > 0:
                return float("inf"), 0.0
            reference = reference[:1]
        scale = reference.abs().max().clamp(min=1e-3 * largest)
        worst = max(worst, ((parameter.grad - reference).abs().max() / scale).item())
    return (float("inf"), 0.0) if other else (worst, 1e-5)


if __name__ == "__main__":
    main()
