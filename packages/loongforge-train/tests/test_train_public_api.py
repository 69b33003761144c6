"""The original public API, by the example that uses all of it, and the README's first lines."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "public_api.py"
README = Path(__file__).resolve().parents[1] / "README.md"
NAMES = (
    "enable_loongforge",
    "build_mdg",
    "ADFEDataLoader",
    "DynamicPadCollator",
    "LoongTrainer",
    "get_mla_stats",
    "gcts_comm_strategy",
    "gcts_rebuild_interval",
    "mla_global_pool_gb",
    "adfe_prefetch_factor",
    "dmf_fusion_batch_size",
    "mdg_config",
    "gradient_accumulation_steps",
    "mixed_precision",
    "checkpoint_dir",
    "log_interval",
    "num_epochs",
    "lr_scheduler",
    "persistent_workers",
    "pin_memory",
    "max_ratio",
)


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the example lies in the repository, not in the wheel")
def test_every_import_and_setting_of_the_original_api_works(tmp_path: Path) -> None:
    comm = pytest.importorskip("loongforge_comm")
    if not hasattr(comm, "build_mdg"):
        pytest.skip("loongforge_comm has no build_mdg")
    shown = runpy.run_path(str(EXAMPLE))["main"](tmp_path)
    assert shown["steps"] == 4
    assert shown["modules"] > 3
    assert shown["checkpoint"] is not None
    text = EXAMPLE.read_text()
    for name in NAMES:
        assert name in text, name


def test_the_first_lines_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = README.read_text().split("```python\n", 1)[1].split("```", 1)[0]
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_import_loads_neither_torch_nor_a_pillar_and_starts_no_thread() -> None:
    code = (
        "import sys, threading, loongforge\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'loongforge_comm', 'loongforge_mem', 'loongforge_data', 'loongforge_fuse')]\n"
        "assert not loaded, loaded\n"
        "assert threading.active_count() == 1\n"
        "import loongforge.trainer, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_missing_pillar_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import loongforge.data
    from loongforge.errors import MissingPillarError

    monkeypatch.setitem(sys.modules, "loongforge_data", None)
    with pytest.raises(MissingPillarError, match="pip install loongforge-data"):
        _ = loongforge.data.ADFEDataLoader
