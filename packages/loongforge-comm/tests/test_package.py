"""Import contract and the README's first example."""

import re
import subprocess
import sys
from pathlib import Path

import loongforge_comm
import pytest
import torch
from torch import nn

README = Path(__file__).parents[1] / "README.md"


def test_import_starts_no_thread_and_touches_no_gpu() -> None:
    code = (
        "import threading, torch, loongforge_comm; "
        "assert threading.active_count() == 1; "
        "assert not torch.cuda.is_initialized(); "
        "import sys; assert 'matplotlib' not in sys.modules and 'pynvml' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists() -> None:
    assert all(hasattr(loongforge_comm, name) for name in loongforge_comm.__all__)


@pytest.mark.skipif(not README.is_file(), reason="README.md is not beside the tests")
def test_readme_example_runs() -> None:
    match = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match is not None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).mean()

    model = Model()
    names = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "batches": [torch.ones(2, 3)] * 2,
    }
    exec(match.group(1), names)
    assert names["scheduler"].active is False
