"""The first Python block of every package README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READMES = sorted((ROOT / "packages").glob("*/README.md"))
# What a snippet may take for granted, the reader's own loop: a model that returns a loss, batches, optimizer.
OWN_LOOP = """
import torch

class Model(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch).square().mean()

model = Model(8, 4)
optimizer = torch.optim.AdamW(model.parameters())
batches = [torch.ones(2, 8) for _ in range(3)]
"""


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.parent.name)
def test_the_five_lines_of_the_readme_run(readme: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), flags=re.DOTALL)
    assert blocks, f"{readme} has no python block"
    script = tmp_path / "snippet.py"
    # The guard lets snippets that start worker processes run under spawn and forkserver.
    body = "\n".join("    " + line for line in (OWN_LOOP + blocks[0]).splitlines())
    script.write_text(f"if __name__ == '__main__':\n{body}\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
