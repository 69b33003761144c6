"""The README's block and the examples run as they stand."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from loongforge_data.synthetic import write_dataset

PACKAGE = Path(__file__).resolve().parents[1]
EXAMPLES = PACKAGE.parents[1] / "examples"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("example") / "my_robot_data"
    write_dataset(path, episodes=2, frames=24, cameras=1, size=(64, 96), codec="h264", gop=8)
    return path


def run(arguments, folder):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name, needs", [("plain", "torch"), ("lightning", "lightning"), ("accelerate", "accelerate")]
)
def test_example_runs(name, needs, root, tmp_path):
    script = EXAMPLES / f"data_{name}.py"
    if not script.exists():
        pytest.skip("the repository's examples are not here")
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    assert "waited" in run([str(script), str(root)], tmp_path)


def test_first_block_of_the_readme_runs(root):
    readme = PACKAGE / "README.md"
    if not readme.exists():
        pytest.skip("the README is not here")
    block = re.search(r"```python\n(.*?)```", readme.read_text(), re.DOTALL).group(1)
    assert len([line for line in block.splitlines() if line.strip()]) <= 5
    run(["-c", block], root.parent)
