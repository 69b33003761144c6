"""docs/verify.md is what scripts/verify_docs.py makes of the kept verdicts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "verify_docs.py"), "--check"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0, "run scripts/verify_docs.py"


def test_kept_verdicts_name_their_rule_and_their_machine() -> None:
    files = sorted((ROOT / "docs" / "verify").glob("*.json"))
    assert files
    for path in files:
        data = json.loads(path.read_text())
        assert {"device", "versions", "steps", "recipe", "ranks"} <= set(data)
        for verdict in data["verdicts"]:
            assert verdict["rule"], f"{path.name}: {verdict['name']}"
            if data["device"] == "cpu" and verdict["kind"] == "exact":
                assert (verdict["rule"], verdict["passed"]) == ("bit-exact", True)
