"""The README's first lines of code run as they stand, and importing the package starts nothing."""

import re
import subprocess
import sys
from pathlib import Path

import loongforge_fuse
import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


def test_the_usage_block_runs_and_is_five_lines():
    if not README.exists():
        pytest.skip("the README is not installed with the package")
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.S).group(1)
    assert len(block.strip().splitlines()) <= 5
    names = {}
    exec(compile(block, str(README), "exec"), names)
    assert names["outcome"].fused
    assert all(torch.isfinite(loss) for loss in names["outcome"].micro_losses)
    assert any(p.grad is not None for p in names["model"].parameters())


def test_importing_touches_no_gpu_and_starts_no_thread():
    code = (
        "import sys, threading, loongforge_fuse\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules, 'heavy import'\n"
        "assert threading.active_count() == 1\n"
        "import loongforge_fuse.fusion, loongforge_fuse.graphs, loongforge_fuse.precision\n"
        "import loongforge_fuse.resize, loongforge_fuse.frozen, torch\n"
        "assert 'numba' not in sys.modules and 'matplotlib' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_unknown_names_list_what_there_is():
    with pytest.raises(AttributeError, match="MicroBatchFuser"):
        loongforge_fuse.NoSuchName
    for name in (
        "MicroBatchFuser",
        "GraphRunner",
        "apply_precision",
        "adaptive_resize",
        "FrozenFeatureCache",
    ):
        assert name in dir(loongforge_fuse)
        assert getattr(loongforge_fuse, name).__doc__
