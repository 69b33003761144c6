"""``loongforge train``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loongforge.config import TrainConfig
    from loongforge.session import Result

DEFAULTS = {"pillars": {"mem": "auto", "fuse": "auto"}}
"""What the command line switches on beyond the library's defaults: pillars that give the same numbers."""
RUN, MODEL, PILLARS, SAFETY = "Run", "Model and optimizer", "Pillars", "Checkpoints and safety"


def train(
    dataset: Annotated[
        str | None, typer.Option(help="LeRobot data set directory (v2.x or v3.0).", rich_help_panel=RUN)
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe name, e.g. gr00t_n1_6_tiny.", rich_help_panel=RUN)
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="Run directory for metrics.jsonl and checkpoints.", rich_help_panel=RUN)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML or YAML file; flags win over it.", rich_help_panel=RUN)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all.", rich_help_panel=RUN)] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", rich_help_panel=RUN)] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per micro-batch and rank.", rich_help_panel=RUN)
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Micro-batches per optimizer step.", rich_help_panel=RUN)
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Loader workers per rank.", rich_help_panel=RUN)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights, data order and draws.", rich_help_panel=RUN)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=RUN)
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.", rich_help_panel=MODEL)] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate.", rich_help_panel=MODEL)
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Across ranks: ddp, zero1, fsdp2 or hsdp.", rich_help_panel=MODEL)
    ] = None,
    compile_model: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile.", rich_help_panel=MODEL)
    ] = None,
    mem: Annotated[
        str | None, typer.Option(help="Memory: off, advisor, pool or global.", rich_help_panel=PILLARS)
    ] = None,
    comm: Annotated[
        str | None,
        typer.Option(help="Communication: off (stock DDP), hybrid or simple.", rich_help_panel=PILLARS),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Data: on, or off (torch DataLoader).", rich_help_panel=PILLARS)
    ] = None,
    fuse: Annotated[
        str | None,
        typer.Option(help="Micro-batches per fused pass: a number, auto or off.", rich_help_panel=PILLARS),
    ] = None,
    graph: Annotated[
        bool | None, typer.Option("--graph/--no-graph", help="CUDA graphs.", rich_help_panel=PILLARS)
    ] = None,
    fused_ops: Annotated[
        bool | None,
        typer.Option("--fused-ops/--no-fused-ops", help="Fused kernels.", rich_help_panel=PILLARS),
    ] = None,
    fused_optimizer: Annotated[
        bool | None,
        typer.Option(
            "--fused-optimizer/--no-fused-optimizer",
            help="AdamW that clips in its own pass.",
            rich_help_panel=PILLARS,
        ),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto, never, or a checkpoint directory.", rich_help_panel=SAFETY)
    ] = None,
    earlier_run: Annotated[
        str | None,
        typer.Option(
            help="Files of an earlier run in OUTPUT: refuse, or move aside.", rich_help_panel=SAFETY
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints; 0 = last only.", rich_help_panel=SAFETY),
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(help="Newest checkpoints kept.", rich_help_panel=SAFETY)
    ] = None,
    elastic: Annotated[
        bool | None,
        typer.Option(
            "--elastic/--no-elastic",
            help="Go on without ranks that stop answering; hot-rejoin lets new ones in.",
            rich_help_panel=SAFETY,
        ),
    ] = None,
    allow_mismatch: Annotated[
        bool | None,
        typer.Option(
            "--allow-mismatch/--no-allow-mismatch",
            help="Resume on other data or another number of ranks; restarts the epoch.",
            rich_help_panel=SAFETY,
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting, e.g. --set guards.max_skips=3.", rich_help_panel=RUN),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the merged configuration as TOML and end.")
    ] = False,
) -> int:
    """Train a recipe on a data set; under torchrun on many ranks.

    Writes one JSON record per step and rank to OUTPUT/metrics.jsonl and checkpoints to OUTPUT/epoch_E_step_S.
    The paths of both are printed at the end. Ctrl-C and SIGTERM finish the step, write a checkpoint, and end
    with exit code 130 or 143.
    """
    flags: dict[str, object] = {
        "dataset": dataset,
        "recipe": recipe,
        "output": output,
        "steps": steps,
        "epochs": epochs,
        "batch_size": batch_size,
        "accumulation": accumulation,
        "workers": workers,
        "seed": seed,
        "device": device,
        "precision": precision,
        "learning_rate": learning_rate,
        "strategy": strategy,
        "compile": compile_model,
        "resume": resume,
        "earlier_run": earlier_run,
        "allow_mismatch": allow_mismatch,
        "pillars": {
            "mem": mem,
            "comm": comm,
            "data": data,
            "fuse": fuse,
            "graph": graph,
            "fused_ops": fused_ops,
            "fused_optimizer": fused_optimizer,
        },
        "checkpoint": {"every": checkpoint_every, "keep_last": keep_last},
        "elastic": {"enabled": elastic},
    }
    merged = merge(config, flags, setting or [])
    if print_config:
        from loongforge.config import to_toml

        sys.stdout.write(to_toml(merged))
        return 0
    return start(merged)


def merge(file: Path | None, flags: dict[str, object], settings: Sequence[str]) -> TrainConfig:
    """Merge recipe defaults, file, flags and ``--set`` pairs, later ones winning."""
    from loongforge.config import build_config, read_file
    from loongforge.errors import ConfigError

    from_file = read_file(file) if file is not None else {}
    from_flags = _given(flags)
    pairs: dict[str, object] = {}
    for pair in settings:
        key, sign, value = pair.partition("=")
        if not sign:
            msg = f"--set {pair!r}: allowed is NAME=VALUE, e.g. --set guards.max_skips=3"
            raise ConfigError(msg)
        into = pairs
        *path, last = key.split(".")
        for part in path:
            into = into.setdefault(part, {})  # type: ignore[assignment]
        into[last] = value
    return build_config(DEFAULTS, _suggested(from_file, from_flags, pairs), from_file, from_flags, pairs)


def _given(flags: dict[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for key, value in flags.items():
        if isinstance(value, dict):
            inner = _given(value)
            if inner:
                kept[key] = inner
        elif value is not None:
            kept[key] = value
    return kept


def _suggested(*layers: dict[str, object]) -> dict[str, object]:
    """Return the training settings that the chosen recipe suggests."""
    from loongforge.config import TrainConfig
    from loongforge.recipes import get_recipe

    name = TrainConfig(steps=1).recipe
    for layer in layers:
        name = str(layer.get("recipe", name))
    return dict(getattr(get_recipe(name), "training", {}))


def start(config: TrainConfig) -> int:
    """Build and run a training; print where its records and checkpoint are."""
    result, rank = _start_elastic(config) if config.elastic.enabled else _start_fixed(config)
    return tell(result, rank)


def tell(result: Result, rank: int) -> int:
    """Print, as rank 0, where records and checkpoint are; return the exit code."""
    if rank == 0:
        sys.stdout.write(f"metrics: {result.metrics.resolve()}\n")
        sys.stdout.write(f"checkpoint: {result.checkpoint.resolve() if result.checkpoint else 'none'}\n")
    return result.exit_code


def _start_fixed(config: TrainConfig) -> tuple[Result, int]:
    """Train with the ranks that are there at the start; return the result and this process's rank."""
    from loongforge.ranks import join
    from loongforge.runs import build_run

    ranks = join(config.device)
    try:
        return build_run(config, ranks=ranks).session.train(), ranks.rank
    finally:
        ranks.close()


def _start_elastic(config: TrainConfig) -> tuple[Result, int]:
    """Train with whoever is there; return the result and this process's rank at the end."""
    from loongforge.elastic.supervise import Supervisor

    supervisor = Supervisor.found(config)
    return supervisor.train(), supervisor.last_rank
