"""Each pillar's wheel, alone in an empty environment, passes that package's own tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PILLARS = {
    "loongforge-comm": "plot",
    "loongforge-mem": "torch,plot",
    "loongforge-data": "torch,plot",
    "loongforge-fuse": "plot",
}
TEST_TOOLS = ("pytest>=9", "pytest-timeout", "hypothesis", "psutil", "scipy")


def find_uv() -> str:
    recorded = ROOT / ".tools" / "uv-path"
    uv = shutil.which("uv") or (recorded.read_text().strip() if recorded.exists() else None)
    if uv is None:
        pytest.skip("uv is not on PATH; run make setup")
    return uv if Path(uv).is_absolute() else str(ROOT / uv)


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(PILLARS))
def test_a_pillar_passes_its_own_tests_from_its_wheel_alone(package: str, tmp_path: Path) -> None:
    uv = find_uv()
    env = {k: v for k, v in os.environ.items() if k not in {"VIRTUAL_ENV", "PYTHONPATH"}}
    constraints = tmp_path / "constraints.txt"
    exported = subprocess.run(
        [uv, "export", "--frozen", "--all-packages", "--no-emit-workspace", "--no-hashes", "--no-annotate"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=True, env=env,
    )  # fmt: skip
    constraints.write_text(exported.stdout)

    def call(*command: str, cwd: Path = tmp_path, timeout: int = 900) -> None:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False, env=env
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"

    call(
        uv,
        "build",
        "--wheel",
        "--no-sources",
        "--package",
        package,
        "--out-dir",
        str(tmp_path / "dist"),
        cwd=ROOT,
    )
    wheel = next((tmp_path / "dist").glob("*.whl"))
    call(uv, "venv", "--python", sys.executable, str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    call(
        uv, "pip", "install", "--python", python, "--constraint", str(constraints),
        f"{wheel}[{PILLARS[package]}]", *TEST_TOOLS,
    )  # fmt: skip
    # The tests are copied beside an own configuration, so that nothing of the checkout is importable.
    shutil.copytree(ROOT / "packages" / package / "tests", tmp_path / "suite" / "tests")
    shutil.copy(ROOT / "packages" / package / "README.md", tmp_path / "suite")
    (tmp_path / "suite" / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib --strict-markers\ntimeout = 300\n"
        "markers =\n    gpu: GPU\n    slow: slow\n    netns: namespaces\n"
    )
    data = os.environ.get("LOONGFORGE_TEST_DATA") or str(ROOT.parent / "shared" / "data")
    env["LOONGFORGE_TEST_DATA"] = data
    call(
        python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow and not gpu",
        "tests",
        cwd=tmp_path / "suite",
        timeout=1500,
    )
