"""Where compiled kernels live on disk, and how the right one is found again.

Search order: ``LOONGFORGE_CUBIN_DIR``, the cubins inside the installed package, the user cache
(``LOONGFORGE_CACHE_DIR`` or ``~/.cache/loongforge``). A file is used when the hash of the kernel's source
and description in its name matches and it was built for the same or a lower minor of the same major
architecture. Files are compressed with zlib. The user cache is separated by the versions of the compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from loongforge_fuse.kernels.compiler import CompiledKernel, tool_versions
from loongforge_fuse.kernels.specs import KernelSpec

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1


def user_cache() -> Path:
    """Return the directory of kernels compiled on this machine by these tool versions."""
    root = os.environ.get("LOONGFORGE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    base = Path(root) if root else Path.home() / ".cache"
    versions = hashlib.sha256(json.dumps(tool_versions(), sort_keys=True).encode()).hexdigest()[:12]
    return base / "loongforge" / "cubins" / versions


def search_path() -> tuple[Path, ...]:
    """Return the directories that are searched for cubins, first hit wins."""
    explicit = os.environ.get("LOONGFORGE_CUBIN_DIR")
    packaged = Path(__file__).parent / "cubins"
    return (*((Path(explicit),) if explicit else ()), packaged, user_cache())


def file_name(spec: KernelSpec, arch: str) -> str:
    """Return the file name of a kernel: name, architecture and source hash."""
    return f"{spec.name}.{arch}.{spec.source_hash()}.cubin.z"


def find(spec: KernelSpec, arch: str) -> bytes | None:
    """Return the machine code of `spec` that runs on `arch`, or None when no directory has it."""
    major, minor = int(arch[3:-1]), int(arch[-1])
    for folder in search_path():
        # A cubin runs on its own and on later minors of the same major.
        for lower in range(minor, -1, -1):
            path = folder / file_name(spec, f"sm_{major}{lower}")
            if path.is_file():
                return zlib.decompress(path.read_bytes())
    return None


def save(kernel: CompiledKernel, folder: Path) -> Path:
    """Write one cubin so that a reader never sees half of it; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(kernel.spec, kernel.arch)
    descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(zlib.compress(kernel.cubin, 9))
    Path(temporary).replace(path)
    return path


def write_manifest(kernels: Iterable[CompiledKernel], folder: Path) -> Path:
    """Write what is in `folder`: tool versions, and per kernel its architecture, source hash and report.

    Entries of earlier builds stay as long as their files do.
    """
    entries = {str(e["file"]): e for e in _entries(folder) if (folder / str(e["file"])).is_file()}
    for k in kernels:
        name = file_name(k.spec, k.arch)
        entries[name] = {
            "name": k.spec.name,
            "arch": k.arch,
            "file": name,
            "source_hash": k.spec.source_hash(),
            "arguments": k.spec.arguments,
            "block": k.spec.block,
            "sha256": hashlib.sha256(k.cubin).hexdigest(),
            **k.report.as_dict(),
        }
    content = {
        "format_version": MANIFEST_VERSION,
        "tools": tool_versions(),
        "kernels": [entries[name] for name in sorted(entries)],
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _entries(folder: Path) -> list[dict[str, object]]:
    """Return the kernels of an existing manifest; a missing, foreign or damaged one counts as empty."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        if content["format_version"] != MANIFEST_VERSION or content["tools"] != tool_versions():
            return []
        return [e for e in content["kernels"] if isinstance(e, dict) and "file" in e]
    except (OSError, ValueError, KeyError, TypeError):
        return []
