"""What a kernel is: where its source stands, with which options it is generated, what its arguments are."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
Option = str | int | bool


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One kernel variant, identified by its name.

    Attributes:
        module: module under ``loongforge_fuse.kernels.source`` that holds the maker.
        maker: function of that module which returns the kernel function.
        options: keyword arguments of the maker.
        arguments: one letter per kernel argument: ``P`` address, ``q`` int64, ``i`` int32, ``f`` float32.
        block: threads per block the kernel is made for.
        min_blocks: blocks that must fit on a multiprocessor, which limits registers; 0: the compiler's
        choice.
        vector: 16-byte accesses are expected in the code (checked by the compile gate).
        follows: a launch may start before the kernel in front of it has ended; the kernel waits itself.
        capability: lowest compute capability that has the kernel's instructions, times ten; 0: any.
    """

    module: str
    maker: str
    options: Mapping[str, Option] = field(default_factory=dict)
    arguments: str = ""
    block: int = 256
    min_blocks: int = 0
    vector: bool = True
    capability: int = 0
    follows: bool = False

    def runs_on(self, arch: str) -> bool:
        """Tell whether an architecture (such as ``"sm_90"``) has the kernel's instructions."""
        return int(arch.removeprefix("sm_")) >= self.capability

    @property
    def name(self) -> str:
        """Unique, readable and usable as a file name and as a PTX symbol."""
        parts = [self.maker]
        for key, value in sorted(self.options.items()):
            parts.append(f"{key}{int(value)}" if isinstance(value, bool) else f"{key}{value}")
        limit = f"m{self.min_blocks}" if self.min_blocks else ""
        return "_".join([*parts, f"b{self.block}{limit}"])

    def __hash__(self) -> int:
        return hash(self.name)

    def source_hash(self) -> str:
        """Hash of everything of ours that shapes the machine code: the sources and this description."""
        text = "|".join((self.name, self.module, self.arguments, _source_text_hash(self.module)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_IMPORT = re.compile(r"^from loongforge_fuse\.kernels\.source(?:\.(\w+))? import (.*)$", re.MULTILINE)


def source_modules(module: str) -> tuple[str, ...]:
    """Return `module` and all modules of kernel source that it imports, directly or not, sorted."""
    found, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for package, names in _IMPORT.findall((SOURCE / f"{name}.py").read_text()):
            waiting += [package] if package else [n.split(" as ")[0].strip() for n in names.split(",")]
    return tuple(sorted(found))


@cache
def _source_text_hash(module: str) -> str:
    digest = hashlib.sha256()
    for name in source_modules(module):
        digest.update((SOURCE / f"{name}.py").read_bytes())
    return digest.hexdigest()
