"""The side of ``data_loader.py`` that runs other loaders: their environment, and one process for each."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

RIVALS = ("lerobot-pyav", "lerobot-torchcodec", "torchcodec", "spdl", "pyav")
RIVAL_PACKAGES = ("lerobot==0.4.4", "torch==2.10.*", "spdl==0.8.0", "spdl-io==0.8.0")
START_SECONDS, RATE_SECONDS = 180.0, 120.0
Row = dict[str, object]


class Rival:
    """Another loader in its own environment, asked for one repetition at a time."""

    shuffle = "full"

    def __init__(self, python: Path, kind: str, root: Path, *, batches: int) -> None:
        libraries = python.parent.parent / "ffmpeg"
        quiet = {"LD_LIBRARY_PATH": str(libraries), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        script = Path(__file__).with_name("_data_rivals.py")
        command = [str(python), str(script), kind, str(root), "--batches", str(batches)]
        self.name = kind
        self.problem: str | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._text = ""
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **quiet},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._answer("ready", START_SECONDS)

    def _answer(self, key: str, seconds: float) -> object:
        """Return what the process says under a key; None, with the problem noted, when it ends or hangs."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            if self.process.stdout is None:
                return None
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                line, separator, rest = self._text.partition("\n")
                if separator:
                    self._text = rest
                    if line.startswith("{") and key in (answer := json.loads(line)):
                        return answer[key]
                    continue
                if not selector.select(left):
                    break
                data = os.read(self.process.stdout.fileno(), 1 << 16)
                if not data:
                    self._errors.seek(0)
                    said = self._errors.read().strip().splitlines()
                    self.problem = (said or ["ended without a word"])[-1][:200]
                    return None
                self._text += data.decode(errors="replace")
        self.problem = f"no answer within {seconds:g} s"
        return None

    def rate(self) -> float | None:
        """Return samples per second, or None when it does not run."""
        if self.problem is not None or self.process.stdin is None:
            return None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        found = self._answer("rate", RATE_SECONDS)
        return found if isinstance(found, float) else None

    def facts(self) -> Row:
        """Return why it did not run, if so."""
        return {} if self.problem is None else {"skipped": self.problem}

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()
        self._errors.close()


def rival_python() -> Path:
    """Make the rivals' environment if it is absent and return its interpreter."""
    folder = Path(os.environ.get("LOONGFORGE_RIVAL_ENV", Path.home() / ".cache" / "loongforge" / "rivals"))
    python = folder / "bin" / "python"
    if not python.exists():
        uv = shutil.which("uv")
        if uv is None:
            msg = "uv is not installed, so the rivals' environment cannot be made"
            raise RuntimeError(msg)
        subprocess.run([uv, "venv", "--python", "3.11", str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "--python", str(python), *RIVAL_PACKAGES], check=True)
    _link_ffmpeg(folder)
    return python


def _link_ffmpeg(folder: Path) -> None:
    """Give torchcodec the FFmpeg libraries that PyAV's wheel brings, under the names it looks for."""
    target = folder / "ffmpeg"
    target.mkdir(exist_ok=True)
    for library in folder.glob("lib/python*/site-packages/av.libs/*"):
        stem, _, version = library.name.partition(".so.")
        plain = f"{stem.split('-')[0]}.so.{version.split('.')[0]}"
        for name in (library.name, plain):
            if not (target / name).exists():
                (target / name).symlink_to(library.resolve())
