"""Loads kernel source for the simulator: functions that synchronise become generators, numbers get widths.

A thread gives way at a barrier or shuffle by ``yield``; so every function that contains one, or calls one
that does, is turned into a generator, and calls to it into ``yield from``.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from functools import cache
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from loongforge_fuse.kernels.simulator import intrinsics
from loongforge_fuse.kernels.specs import SOURCE, source_modules

if TYPE_CHECKING:
    from loongforge_fuse.kernels.simulator.machine import Block

_PACKAGE = "loongforge_fuse.kernels.source"
_NATIVE = ("intrinsics", "reading", "barriers", "lowering")  # replaced, not executed
_EVENTS = {"syncthreads": "block", "syncwarp": "warp", "shfl_xor_sync": "shuffle"}
_SOME = "some_barrier"  # of kernel source itself: its arguments are a number and how many threads wait


def _integer(bits: int, *, signed: bool) -> Any:
    limit = 1 << bits
    half = limit >> 1

    def cast(value: Any) -> int:
        wrapped = int(value) & (limit - 1)
        return wrapped - limit if signed and wrapped >= half else wrapped

    return cast


_NUMBA: dict[str, Any] = {
    "float32": np.float32,
    **{f"int{b}": _integer(b, signed=True) for b in (32, 64)},
    **{f"uint{b}": _integer(b, signed=False) for b in (32, 64)},
}


def _event_of(call: ast.Call) -> str | None:
    function = call.func
    if isinstance(function, ast.Name) and function.id == _SOME:
        return "some"
    if (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "cuda"
    ):
        return _EVENTS.get(function.attr)
    return None


class _Calls(ast.NodeVisitor):
    """Collects the calls of one function body, without those of functions inside it."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.synchronises = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Leave nested functions to themselves."""

    def visit_Call(self, node: ast.Call) -> None:
        """Note what is called."""
        if _event_of(node):
            self.synchronises = True
        elif isinstance(node.func, ast.Name):
            self.names.add(node.func.id)
        self.generic_visit(node)


def _generators(trees: Mapping[str, ast.Module]) -> set[str]:
    """Return the names of all functions that synchronise, directly or through others."""
    calls: dict[str, _Calls] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found = _Calls()
                for statement in node.body:
                    found.visit(statement)
                # Kernels share the name `kernel`, and nobody calls them by it.
                calls[node.name if node.name != "kernel" else f"{module}:{node.lineno}"] = found
    names = {name for name, found in calls.items() if found.synchronises}
    while True:
        more = {name for name, found in calls.items() if found.names & names} - names
        if not more:
            return names
        names |= more


class _Rewrite(ast.NodeTransformer):
    """Turns synchronising calls into yields."""

    def __init__(self, generators: set[str]) -> None:
        self._generators = generators

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace a barrier, a shuffle, or a call to a function that contains one."""
        self.generic_visit(node)
        event = _event_of(node)
        if event is not None:
            offered: list[ast.expr] = [ast.Constant(None), ast.Constant(0)]
            if event in ("shuffle", "some"):
                offered = node.args[1:3] if event == "shuffle" else node.args
            return ast.Yield(ast.Tuple([ast.Constant(event), *offered], ast.Load()))
        if isinstance(node.func, ast.Name) and node.func.id in self._generators:
            return ast.YieldFrom(node)
        return node


@cache
def _compiled(texts: tuple[tuple[str, str], ...]) -> dict[str, CodeType]:
    """Return the translated code of modules given by (name, source text)."""
    trees = {name: ast.parse(text, f"{name}.py") for name, text in texts}
    rewrite = _Rewrite(_generators(trees))
    return {
        name: compile(ast.fix_missing_locations(rewrite.visit(tree)), f"{name}.py", "exec")
        for name, tree in trees.items()
    }


def load_module(name: str, device: Block) -> dict[str, Any]:
    """Execute a module of kernel source and what it imports for one simulated device; return its names."""
    names = [n for n in source_modules(name) if n not in _NATIVE]
    code = _compiled(tuple((n, (SOURCE / f"{n}.py").read_text()) for n in names))
    stand_in = SimpleNamespace(**intrinsics.bound(device.memory))
    numba = SimpleNamespace(cuda=device, **_NUMBA)
    done: dict[str, dict[str, Any]] = {}

    def imported(target: str, *arguments: Any, **named: Any) -> Any:
        if target == "numba":
            return numba
        if target in (f"{_PACKAGE}.intrinsics", f"{_PACKAGE}.reading"):
            return stand_in
        if target == f"{_PACKAGE}.barriers":
            # Calls of the first have become events; kernels run one after the other here.
            return SimpleNamespace(some_barrier=None, begin_next=lambda: None, await_last=lambda: None)
        if target.startswith(f"{_PACKAGE}."):
            return SimpleNamespace(**execute(target.removeprefix(f"{_PACKAGE}.")))
        return builtins.__import__(target, *arguments, **named)

    def execute(module: str) -> dict[str, Any]:
        if module not in done:
            done[module] = {
                "__builtins__": {**vars(builtins), "__import__": imported},
                "__name__": f"simulated.{module}",
            }
            exec(code[module], done[module])
        return done[module]

    return {**_NUMBA, **execute(name)}
