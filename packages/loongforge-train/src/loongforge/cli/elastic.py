"""``loongforge hot-rejoin``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def hot_rejoin(
    run: Annotated[Path, typer.Argument(help="Run directory of a training that was started with --elastic.")],
    wait: Annotated[float, typer.Option(help="Longest wait to be let in, in seconds.")] = 3600.0,
) -> int:
    """Let this process into a running training, at one of its next step borders.

    The training goes on meanwhile; at the border the newcomer gets weights, optimizer state and data position
    from rank 0. Under torchrun (--standalone --nproc-per-node N) all N come in together.
    """
    from loongforge.cli.train import tell
    from loongforge.elastic.notice import read
    from loongforge.elastic.supervise import Supervisor

    supervisor = Supervisor.rejoin(read(run), limit_s=wait)
    return tell(supervisor.train(), supervisor.last_rank)
