"""``loongforge eval`` and ``loongforge export``."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from loongforge.evaluation.policies import Policy
    from loongforge.recipes.base import SampleSource

log = logging.getLogger("loongforge")


def evaluate(
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint of a run, its run folder, or a published folder or hub id.")
    ],
    dataset: Annotated[str | None, typer.Option(help="LeRobot data set; default: the run's own.")] = None,
    episodes: Annotated[int, typer.Option(help="Evaluate at most this many episodes.")] = 100,
    episode: Annotated[
        list[int] | None,
        typer.Option(help="Evaluate this episode (repeatable); default: the held-out ones, else all."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe, where the checkpoint does not know it.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for report.json, report.html, episode.png.")] = Path(
        "eval"
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    batch_size: Annotated[int, typer.Option(help="Chunks predicted at once.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the start noise.")] = 0,
    samples: Annotated[int, typer.Option(help="Samples of the validation loss; 0 leaves it out.")] = 256,
    ema: Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")] = False,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="Recipe option, e.g. --option image.short_edge=84.")
    ] = None,
) -> int:
    """Compare predicted with recorded actions on held-out episodes.

    Prints one JSON object with the errors; writes it, an HTML page with trajectories, and a PNG where
    matplotlib is installed.
    """
    from loongforge.evaluation.policies import load_policy

    policy = load_policy(
        checkpoint, recipe=recipe, overrides=_pairs(option or []), device=device, average=ema
    )
    summary = run_evaluation(
        policy,
        dataset=dataset,
        chosen=episode,
        limit=episodes,
        output=output,
        batch_size=batch_size,
        seed=seed,
        samples=samples,
    )
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


def export(
    checkpoint: Annotated[str, typer.Option(help="Checkpoint of a run, or its run folder (newest).")],
    output: Annotated[Path, typer.Option(help="Folder to write; created if absent.")],
    dataset: Annotated[
        str | None, typer.Option(help="Data set whose statistics go along; default: the run's own.")
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Write the moving average of the weights.")] = False,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="Recipe option, e.g. --option embodiment.tag=gr1.")
    ] = None,
) -> int:
    """Write a trained policy in the published layout, with the processor files the original code reads.

    Prints the paths of the weight files, one a line.
    """
    from loongforge.errors import ConfigError
    from loongforge.evaluation.policies import load_policy

    policy = load_policy(checkpoint, overrides=_pairs(option or []), average=ema)
    writer = getattr(policy.recipe, "export", None)
    if not callable(writer):
        msg = f"recipe '{policy.recipe.name}' has no published layout to export to"
        raise ConfigError(msg)
    root = dataset or policy.dataset
    if root is None:
        msg = "no data set: pass --dataset DIR, its statistics belong to the policy"
        raise ConfigError(msg)
    source = policy.recipe.build_dataset(root, policy.options)
    for path in writer(policy.model, source, policy.options, output):
        sys.stdout.write(f"{path}\n")
    return 0


def run_evaluation(
    policy: Policy,
    *,
    dataset: str | None,
    chosen: Sequence[int] | None,
    limit: int,
    output: Path,
    batch_size: int,
    seed: int,
    samples: int,
) -> dict[str, object]:
    """Evaluate a loaded policy and write the reports; return the summary.

    Raises:
        ConfigError: No data set is known, or the recipe cannot predict actions.
    """
    from loongforge.errors import ConfigError, MissingPillarError
    from loongforge.evaluation.openloop import ActionPredictor, EpisodicSource, evaluate_open_loop
    from loongforge.evaluation.plots import write_html, write_png
    from loongforge.evaluation.validation import Validation

    root = dataset or policy.dataset
    if root is None:
        msg = "no data set: pass --dataset DIR"
        raise ConfigError(msg)
    predictor_of = getattr(policy.recipe, "predictor", None)
    if not callable(predictor_of):
        msg = f"recipe '{policy.recipe.name}' predicts no actions, so there is nothing to compare"
        raise ConfigError(msg)
    # Episode numbers that a run held out mean nothing in another data set; all of that is unseen.
    foreign = is_foreign(policy, root)
    held_out = () if foreign else tuple(getattr(policy.options, "held_out", ()))
    wanted = list(chosen) if chosen else list(held_out)
    if not wanted and not foreign:
        log.warning("no episode was held out: the errors are those of data the run may have trained on")
    options = everything(policy.options) if foreign else policy.options
    source = policy.recipe.build_dataset(root, options, episodes=wanted or None)
    # Values are normalised as in training: with the statistics of the training episodes, not of these.
    trained = training_data(policy, root)
    collate = policy.recipe.build_collate(trained, policy.model, policy.options)
    predictor = cast(ActionPredictor, predictor_of(policy.model, collate))
    report = evaluate_open_loop(
        predictor,
        cast(EpisodicSource, source),
        episodes=limit,
        batch_size=batch_size,
        seed=seed,
        progress=lambda done, total: log.info("evaluated %d of %d episodes", done, total),
    )
    summary = report.to_json()
    summary["held_out"] = foreign or bool(wanted)
    if samples:
        validation = Validation(source, collate, samples=samples, batch_size=batch_size, seed=seed)
        summary["validation_loss"] = validation.loss(policy.model)
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.json").write_text(json.dumps(summary, indent=1) + "\n")
    title = f"{policy.recipe.name}: {policy.source.name}"
    written = [str(write_html(report, output / "report.html", title=title))]
    try:
        written.append(str(write_png(report, output / "episode.png", title=title)))
    except MissingPillarError as missing:
        log.warning("%s", missing)
    summary["files"] = [str(output / "report.json"), *written]
    return summary


def training_data(policy: Policy, root: str) -> SampleSource:
    """Open the data whose statistics belong to the policy: what the run trained on, else that of ``root``."""
    from loongforge.errors import ConfigError

    if policy.dataset is None or not is_foreign(policy, root):
        return policy.recipe.build_dataset(root, policy.options)
    if Path(policy.dataset).is_dir():
        try:
            return policy.recipe.build_dataset(policy.dataset, policy.options)
        except ConfigError as error:
            msg = f"the data set the run trained on, {policy.dataset}, no longer fits the policy: {error}"
            raise ConfigError(msg) from error
    log.warning(
        "the data set the run trained on (%s) is not here: values are normalised by the statistics of %s, so "
        "actions are in its range; --option statistics=DIR names an export of the policy",
        policy.dataset,
        root,
    )
    return policy.recipe.build_dataset(root, everything(policy.options))


def is_foreign(policy: Policy, root: str) -> bool:
    """Tell whether ``root`` is another data set than the run trained on."""
    return policy.dataset is not None and Path(root).resolve() != Path(policy.dataset).resolve()


def everything(options: object) -> object:
    """Return the options without held-out episodes."""
    if is_dataclass(options) and not isinstance(options, type) and hasattr(options, "held_out"):
        return replace(options, held_out=())
    return options


def _pairs(settings: Sequence[str]) -> dict[str, object]:
    from loongforge.errors import ConfigError

    result: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            msg = f"--option {setting} must be NAME=VALUE"
            raise ConfigError(msg)
        result[name] = value
    return result
