"""The pillars stand alone: no pillar imports another, and importing one starts nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PILLARS = ("loongforge_comm", "loongforge_mem", "loongforge_data", "loongforge_fuse")
SOURCES = {name: ROOT / "packages" / name.replace("_", "-") / "src" / name for name in PILLARS}

PROBE = """
import json, os, sys, threading
name = sys.argv[1]
before = set(os.listdir("/proc/self/fd"))
__import__(name)
after = set(os.listdir("/proc/self/fd"))
native = len(os.listdir("/proc/self/task"))
torch = sys.modules.get("torch")
print(json.dumps({
    "threads": [t.name for t in threading.enumerate()],
    "native_threads": native,
    "modules": sorted(m for m in sys.modules if m.split(".")[0].startswith("loongforge")),
    "heavy": sorted(m for m in ("numba", "pynvml", "matplotlib", "transformers") if m in sys.modules),
    "cuda": bool(torch is not None and torch.cuda.is_initialized()),
    "new_fds": len(after - before),
}))
"""


def probe(name: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, name], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PILLARS)
def test_importing_a_pillar_starts_no_thread_and_touches_no_gpu(name: str) -> None:
    seen = probe(name)
    assert seen["threads"] == ["MainThread"]
    assert not seen["cuda"]
    assert seen["new_fds"] == 0
    assert seen["heavy"] == []
    assert {m.split(".")[0] for m in seen["modules"]} == {name}


@pytest.mark.parametrize("name", ["loongforge_data", "loongforge_mem"])
def test_data_and_mem_import_without_torch(name: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import {name}; print('ok')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.parametrize("name", PILLARS)
def test_no_pillar_mentions_another_in_an_import(name: str) -> None:
    foreign = {*PILLARS, "loongforge"} - {name}
    for path in [*SOURCES[name].rglob("*.py"), *(SOURCES[name].parent.parent / "tests").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert not {n.split(".")[0] for n in names} & foreign, f"{path}:{node.lineno}"


def test_rust_cores_do_not_depend_on_python() -> None:
    for core in ("pool", "ring"):
        manifest = (ROOT / "rust" / core / "Cargo.toml").read_text()
        assert "pyo3" not in manifest
        for path in (ROOT / "rust" / core).rglob("*.rs"):
            assert "pyo3" not in path.read_text(), path
