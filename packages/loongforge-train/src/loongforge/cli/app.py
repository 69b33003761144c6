"""All commands of ``loongforge``."""

from __future__ import annotations

import typer

from loongforge.cli import train as train_command

app = typer.Typer(
    name="loongforge",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def group() -> None:
    """Train vision-language-action models: fast data, fused work, planned communication, managed memory."""


app.command("train")(train_command.train)
