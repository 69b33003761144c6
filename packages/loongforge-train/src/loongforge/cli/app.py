"""All commands of ``loongforge``."""

from __future__ import annotations

import typer

from loongforge.cli import elastic, inspect, live
from loongforge.cli import train as train_command
from loongforge.cli import verify as verify_command
from loongforge.evaluation import command as evaluation_command

app = typer.Typer(
    name="loongforge",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)


@app.callback()
def group() -> None:
    """Train vision-language-action models: fast data, fused work, planned communication, managed memory."""


TRAIN, LIVE, LOOK = "Train", "A running training", "Before and after a run"
app.command("train", rich_help_panel=TRAIN)(train_command.train)
app.command("eval", rich_help_panel=TRAIN)(evaluation_command.evaluate)
app.command("export", rich_help_panel=LOOK)(evaluation_command.export)
app.command("verify", rich_help_panel=TRAIN)(verify_command.verify)
app.command("profile-step", rich_help_panel=LIVE)(live.profile_step)
app.command("monitor-comm", rich_help_panel=LIVE)(live.monitor_comm)
app.command("switch-strategy", rich_help_panel=LIVE)(live.switch_strategy)
app.command("hot-rejoin", rich_help_panel=LIVE)(elastic.hot_rejoin)
app.command("stop", rich_help_panel=LIVE)(live.stop)
app.command("debug-dmf", rich_help_panel=LIVE)(live.debug_dmf)
app.command("doctor", rich_help_panel=LOOK)(inspect.doctor)
app.command("report", rich_help_panel=LOOK)(inspect.report)
app.command("compare", rich_help_panel=LOOK)(inspect.compare)
app.command("validate-checkpoint", rich_help_panel=LOOK)(inspect.validate_checkpoint)
