"""Our allocator on a real GPU, every check in a process of its own (torch takes an allocator once)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from loongforge_mem import selfcheck

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SCRIPT = """
import json, sys
from loongforge_mem import selfcheck
print(json.dumps(selfcheck.CHECKS[sys.argv[1]](ours=True, quick=True)))
"""


@pytest.mark.parametrize("name", sorted(selfcheck.CHECKS))
def test_check_passes_on_this_gpu(name):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert selfcheck.passed(name, out), out
