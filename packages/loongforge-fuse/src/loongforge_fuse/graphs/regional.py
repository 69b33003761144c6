"""Regional compilation: the repeated blocks of a model are compiled, each kind once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import _dynamo as dynamo
from torch import nn

from loongforge_fuse.protocol import restore_forward

RECOMPILE_LIMIT = 64
"""Variants of one block: masks or none, modes, shapes. Beyond it torch falls back to eager without a word."""


@dataclass(frozen=True, kw_only=True)
class CompiledRegions:
    """What was compiled.

    Attributes:
        modules: Names of the compiled modules.
        undo: Puts the plain forward functions back.
    """

    modules: tuple[str, ...]
    undo: Callable[[], None]


def compile_regions(model: nn.Module, *, min_repeats: int = 2, mode: str | None = None) -> CompiledRegions:
    """Compile the forward of every element of a ``ModuleList`` that holds repeated blocks.

    Blocks of one class share the compiled code, so the time to compile does not grow with the depth.
    Parameters, names and the state dict stay as they are. Static shapes are assumed; another shape compiles
    once more.

    Args:
        model: The model.
        min_repeats: Least number of elements of one class in a list. Default 2.
        mode: As in ``torch.compile``. Default None, the ordinary one; the graph runner captures its result.
    """
    chosen: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(
            name.startswith(outer + ".") for outer in chosen
        ):
            continue
        kinds = [type(child) for child in module]
        for index, child in enumerate(module):
            if kinds.count(type(child)) >= min_repeats and any(True for _ in child.children()):
                chosen[f"{name}.{index}"] = child
    limit = dynamo.config.recompile_limit
    dynamo.config.recompile_limit = max(limit, RECOMPILE_LIMIT)
    plain = {name: module.__dict__.get("forward") for name, module in chosen.items()}
    codes = set()
    for module in chosen.values():
        code = getattr(module.forward, "__code__", None)
        if code is not None:
            codes.add(code)
        # An instance attribute: code objects of different classes then keep separate caches.
        module.forward = torch.compile(module.forward, dynamic=False, mode=mode)

    def undo() -> None:
        for name, module in chosen.items():
            restore_forward(module, plain[name])
        for code in codes:
            # Compiled code of a dropped region still counts towards the limit of its code object.
            dynamo.eval_frame.reset_code(code)
        dynamo.config.recompile_limit = limit

    return CompiledRegions(modules=tuple(chosen), undo=undo)
