"""The HTML report in a real browser: charts are drawn, nothing is logged, the kept picture is small."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHARTS = {"stacked step time", "loss", "samples_per_s", "fusion trace"}
"""What a run on the CPU without communication can show."""


@pytest.fixture(scope="module")
def screenshots() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "report_screenshot", ROOT / "scripts" / "report_screenshot.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["report_screenshot"] = module
    spec.loader.exec_module(module)
    if module.browser() is None:
        pytest.skip("no Chromium on PATH")
    return module


def a_run(folder: Path) -> Path:
    import torch
    from loongforge.config import CheckpointConfig, TrainConfig
    from loongforge.ranks import Ranks
    from loongforge.session import Session, build_parts
    from loongforge.sources import BatchSource
    from loongforge.testing import ToyData, ToyModel, collate

    data = ToyData(64)
    loader = [collate([data[8 * n + i] for i in range(8)]) for n in range(8)]
    config = TrainConfig(
        output=str(folder), steps=30, control=False, log_interval=100, checkpoint=CheckpointConfig(every=0)
    )
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    Session(config, build_parts(config, ToyModel(), BatchSource(loader), ranks)).train()
    return folder


@pytest.mark.slow
def test_the_report_draws_its_charts_in_a_browser_and_logs_nothing(
    tmp_path: Path, screenshots: ModuleType
) -> None:
    from loongforge.cli import run
    from matplotlib.image import imread

    assert run(["report", str(a_run(tmp_path / "run"))]) == 0
    rendering = screenshots.render(tmp_path / "run" / "report.html", tmp_path / "page.png")
    assert rendering.console == ()
    labels = set(re.findall(r'<svg[^>]*aria-label="([^"]+)"', rendering.dom))
    assert labels == CHARTS
    chart = re.search(r'<svg[^>]*aria-label="stacked step time".*?</svg>', rendering.dom, re.DOTALL)
    assert chart is not None
    assert chart.group(0).count("<rect") >= 60, "30 steps with at least forward and backward"
    pixels = (255 * imread(tmp_path / "page.png")[..., :3]).round().astype(int)
    for name, colour in (("forward", (0x00, 0x79, 0x8C)), ("backward", (0x3D, 0x6F, 0xA5))):
        assert (abs(pixels - colour).sum(axis=-1) <= 3).sum() > 500, f"{name} is not seen in the picture"


@pytest.mark.slow
def test_a_page_that_logs_an_error_is_noticed(tmp_path: Path, screenshots: ModuleType) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><script>console.error('planted')</script>")
    rendering = screenshots.render(page, tmp_path / "broken.png")
    assert any("planted" in line for line in rendering.console)


def test_the_kept_picture_of_a_report_is_a_small_png() -> None:
    picture = ROOT / "docs" / "report.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size < 200_000
