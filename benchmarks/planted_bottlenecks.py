"""Runs with one planted bottleneck each: does the report name the right one?

Slow disk: every sample takes 25 ms to read. Slow link: two ranks exchange 64 MB of gradients for a few
milliseconds of work. Tiny kernels: several hundred operators on a handful of values. Host sync: a blocking
callback after each step and, on a GPU, a read of every layer's value. A fifth run with honest work checks
that nothing is invented.
Figures: named_right, planted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _common import finish, parser, result
from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.rank_testing import run_ranks
from loongforge.ranks import choose_device
from loongforge.records import StepRecord, read_metrics
from loongforge.report.bottleneck import diagnose
from loongforge.report.html import page
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader

LINK_BYTES_PER_S = 20e6
RIGHT = {
    "slow disk": "data stall",
    "slow link": "communication wait",
    "tiny kernels": "kernel launch",
    "host sync": "host sync",
    "honest work": "serial dependency",
}


class Samples:
    """Random vectors; reading one takes ``delay`` seconds."""

    def __init__(self, delay: float = 0.0) -> None:
        self._delay = delay

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._delay)
        return torch.full((64,), index / 4096)


class Work(nn.Module):
    """``layers`` matrix products of ``width``, or chains of tiny operators, or reads after each layer."""

    def __init__(self, *, width: int = 256, layers: int = 4, tiny: int = 0, reads: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self._tiny = tiny
        self._reads = reads

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        hidden = self.first(batch)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
            if self._reads and float(hidden[0, 0]) > 1e9:
                raise ValueError("never")
        for _ in range(self._tiny):
            hidden = hidden * 1.0001
        loss = hidden.square().mean()
        return {"loss": loss}


class SlowWork:
    """An all-reduce that ends no earlier than its bytes take on a slow link."""

    def __init__(self, work: object, nbytes: int) -> None:
        self._work = work
        self._ends = time.monotonic() + nbytes / LINK_BYTES_PER_S

    def wait(self, *arguments: object) -> bool:
        """Wait for the collective and for the link."""
        self._work.wait(*arguments)  # type: ignore[attr-defined]
        time.sleep(max(0.0, self._ends - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        """Tell whether both are done."""
        return bool(self._work.is_completed()) and time.monotonic() >= self._ends  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._work, name)


def slow_down_link() -> None:
    """Put the slow link under every all-reduce of this process."""
    real = dist.all_reduce

    def all_reduce(tensor: Tensor, *arguments: object, async_op: bool = False, **named: object) -> object:
        work = SlowWork(
            real(tensor, *arguments, async_op=True, **named), tensor.numel() * tensor.element_size()
        )
        if async_op:
            return work
        work.wait()
        return None

    dist.all_reduce = all_reduce


def train(run: Path, plan: str, device: str, steps: int) -> None:
    """Train one planted run; under torchrun's variables with all ranks."""
    from loongforge.ranks import join

    if plan == "slow link":
        slow_down_link()
    ranks = join(device)
    on_gpu = ranks.device.type == "cuda"
    models = {
        "slow disk": lambda: Work(),
        "slow link": lambda: Work(),
        "tiny kernels": lambda: Work(width=16, layers=1, tiny=1200),
        "host sync": lambda: Work(width=64, layers=200 if on_gpu else 2, reads=True),
        "honest work": lambda: Work(width=4096 if on_gpu else 768, layers=24 if on_gpu else 6),
    }

    def block(record: StepRecord) -> None:
        if plan == "host sync" and not on_gpu:
            time.sleep(0.02)

    loader: Iterable[object] = [torch.rand(2048 if on_gpu else 128, 64) for _ in range(16)]
    if plan == "slow disk":
        loader = DataLoader(Samples(0.025), batch_size=4)
    elif plan in {"tiny kernels", "slow link"}:
        loader = [torch.rand(16, 64) for _ in range(16)]
    config = TrainConfig(
        output=str(run),
        steps=steps,
        schedule="constant",
        log_interval=10**9,
        control=False,
        clip_norm=None,
        resume="never",
        # A planned strategy would see the slow all-reduce and go around it.
        pillars=PillarConfig(comm="simple"),
        checkpoint=CheckpointConfig(every=0),
    )
    from loongforge.batches import LossAdapter

    model = models[plan]()
    parts = build_parts(
        config,
        model,
        BatchSource(loader),
        ranks,
        module=LossAdapter(model),
    )
    Session(config, parts, callbacks=[block]).train()
    ranks.close()


def main() -> None:
    """Run all plans and compare the report's answer."""
    arguments = parser(__doc__)
    arguments.add_argument("--pages", type=Path, help="write the HTML reports into this folder")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="loongforge_planted_"))
    device = str(choose_device("auto"))
    steps = 30 if options.quick else 60
    rows = []
    for plan, expected in RIGHT.items():
        run = folder / plan.replace(" ", "_")
        if plan == "slow link":
            script = (
                f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                "import planted_bottlenecks, json, torch\ntorch.set_num_threads(1)\nfrom pathlib import "
                "Path\n"
                "run, steps = json.loads(sys.argv[1])\n"
                "planted_bottlenecks.train(Path(run), 'slow link', 'cpu', steps)\n"
            )
            outcomes = run_ranks(
                script, [json.dumps([str(run), steps])], folder=folder / "ranks", timeout_s=300
            )
            failed = [o.stderr[-2000:] for o in outcomes if o.returncode]
            if failed:
                raise RuntimeError(failed[0])
        else:
            train(run, plan, device, steps)
        records = read_metrics(run)
        diagnosis = diagnose(records)
        first, second = diagnosis.findings[:2]
        rows.append(
            {
                "planted": plan,
                "expected": expected,
                "named": first.name,
                "share": first.share,
                "next": f"{second.name} {second.share:.2f}",
                "step_ms": diagnosis.summary.step_ms,
                "right": first.name == expected,
            }
        )
        if options.pages is not None:
            options.pages.mkdir(parents=True, exist_ok=True)
            target = options.pages / f"{run.name}.html"
            target.write_text(page(diagnosis, records, title=f"planted: {plan}"), encoding="utf-8")
    planted = [row for row in rows if row["planted"] != "honest work"]
    figures = {"named_right": sum(bool(row["right"]) for row in planted), "planted": len(planted)}
    figures["honest_work_named_right"] = bool(rows[-1]["right"])
    finish(result("planted_bottlenecks", rows=rows, figures=figures, repetitions=1), options.json)


if __name__ == "__main__":
    main()
