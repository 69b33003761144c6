"""Render an HTML report with headless Chromium: a picture, what the page logged, and its elements.

``python scripts/report_screenshot.py RUN_DIR docs/report.png`` makes the report of a run and its picture.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1040, 1500
LIMIT_S = 120


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """What the browser made of a page."""

    dom: str
    """The document after loading."""
    console: tuple[str, ...]
    """Lines the page logged, errors among them."""


def browser() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def render(page: Path, picture: Path, *, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Rendering:
    """Write a picture of a page and return its document and its console.

    Raises:
        FileNotFoundError: No Chromium is on PATH.
        RuntimeError: The browser failed or wrote nothing.
    """
    program = browser()
    if program is None:
        msg = f"no Chromium on PATH (looked for {', '.join(BROWSERS)}): install one"
        raise FileNotFoundError(msg)
    with tempfile.TemporaryDirectory(prefix="loongforge_browser_", ignore_cleanup_errors=True) as profile:
        common = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-dev-shm-usage", "--force-device-scale-factor=1", f"--user-data-dir={profile}",
            "--enable-logging=stderr", f"--window-size={size[0]},{size[1]}",
        ]  # fmt: skip
        address = page.resolve().as_uri()
        shot = _run([*common, f"--screenshot={picture.resolve()}", address])
        dom = _run([*common, "--dump-dom", address])
    if not picture.exists():
        raise RuntimeError(shot.stderr[-2000:])
    lines = (shot.stderr + dom.stderr).splitlines()
    return Rendering(dom=dom.stdout, console=tuple(line for line in lines if "CONSOLE" in line))


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)


def main() -> int:
    """Make the report of a run and its picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run directory, or an HTML page")
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("--title", help="title of the page; by default the folder's name")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = options.run
        if options.run.is_dir():
            from loongforge.records import read_metrics
            from loongforge.report.bottleneck import diagnose
            from loongforge.report.html import page as html_page

            records = read_metrics(options.run)
            page = Path(folder) / "report.html"
            title = options.title or f"LoongForge run {options.run.resolve().name}"
            page.write_text(html_page(diagnose(records), records, title=title), encoding="utf-8")
        rendering = render(page, options.picture)
    for line in rendering.console:
        sys.stderr.write(line + "\n")
    print(f"wrote {options.picture}: {options.picture.stat().st_size / 1024:.0f} KiB")
    return 1 if rendering.console else 0


if __name__ == "__main__":
    sys.exit(main())
