"""What a newcomer meets first: the set-up script explains every missing tool, the two commands exist."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASICS = ("sh", "dirname", "uname", "head", "sed", "printf")


def run_setup(tmp_path: Path, tools: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a copy of setup.sh with a PATH that holds the basics and the given fake tools only."""
    scripts = tmp_path / "checkout" / "scripts"
    scripts.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", scripts / "setup.sh")
    path = tmp_path / "bin"
    path.mkdir()
    for name in BASICS:
        found = shutil.which(name)
        if found:
            (path / name).symlink_to(found)
    for name, body in tools.items():
        (path / name).write_text(f"#!/bin/sh\n{body}\n")
        (path / name).chmod(0o755)
    env = {"PATH": str(path), "HOME": str(tmp_path)}
    return subprocess.run(
        ["sh", str(scripts / "setup.sh")], env=env, capture_output=True, text=True, timeout=30, check=False
    )


CARGO = "echo 'cargo 1.95.0 (x)'"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "git is missing"),
        ({"git": ""}, "no C compiler"),
        ({"git": "", "cc": ""}, "cargo is missing"),
        ({"git": "", "cc": "", "cargo": "echo 'rustup could not choose'; exit 1"}, "RUSTUP_HOME"),
        ({"git": "", "cc": "", "cargo": "echo 'cargo 1.70.0 (x)'"}, "rustup update"),
        ({"git": "", "cc": "", "cargo": CARGO}, "no CPython"),
        ({"git": "", "cc": "", "cargo": CARGO, "python3": "exit 1"}, "no CPython"),
    ],
)
def test_a_missing_tool_costs_one_line_with_the_remedy(
    tmp_path: Path, tools: dict[str, str], message: str
) -> None:
    done = run_setup(tmp_path, tools)
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert message in lines[0]


def test_the_readme_names_both_commands_on_its_first_screen() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:30])
    assert "make demo" in first
    assert "make test" in first


def test_make_lists_its_targets() -> None:
    done = subprocess.run(
        ["make", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ},
    )
    assert {"demo", "test", "lint", "bench", "docs"} <= {line.split()[1] for line in done.stdout.splitlines()}
