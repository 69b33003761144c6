"""Symbolic trace with torch.fx: exact edges for models it can follow, and marks where it cannot."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from loongforge_comm.mdg.graph import ControlFlow
from loongforge_comm.mdg.observe import is_leaf


class _Tracer(fx.Tracer):
    """Leaf policy of the graph; a submodule that cannot be followed becomes a leaf with a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque: dict[str, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m) or module_qualified_name in self.opaque

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = len(self.graph.nodes)
        try:
            return super().call_module(m, forward, args, kwargs)
        except (fx.proxy.TraceError, TypeError, ValueError, RuntimeError) as error:
            path = self.path_of_module(m)
            self.opaque[path] = str(error).splitlines()[0]
            for node in reversed(list(self.graph.nodes)[before:]):
                self.graph.erase_node(node)
            return self.create_proxy("call_module", path, args, kwargs)


def trace_edges(
    model: nn.Module, concrete: Mapping[str, object]
) -> tuple[set[tuple[str, str]], dict[str, str]]:
    """Edges between leaf modules, inputs and directly used parameters, with functions in between collapsed.

    Args:
        model: the model.
        concrete: arguments fixed for the trace, above all optional inputs that are absent (fx would silently
            take the branch where they are present).

    Returns:
        Edges, and for each submodule that could not be followed the reason.

    Raises:
        fx.proxy.TraceError and others: the model's own forward cannot be followed.
    """
    tracer = _Tracer()
    graph = tracer.trace(model, concrete_args=dict(concrete) or None)
    origin: dict[fx.Node, frozenset[str]] = {}
    edges: set[tuple[str, str]] = set()
    for node in graph.nodes:
        sources = frozenset().union(*(origin.get(n, frozenset()) for n in node.all_input_nodes))
        if node.op == "placeholder":
            origin[node] = frozenset({f"input:{node.name.rstrip('_').removesuffix('_1')}"})
        elif node.op == "call_module":
            target = str(node.target)
            edges |= {(source, target) for source in sources if source != target}
            origin[node] = frozenset({target})
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            origin[node] = frozenset({f"{owner}#{name}"})
        else:
            origin[node] = sources
    return edges, tracer.opaque


def scan_source(model: nn.Module) -> list[ControlFlow]:
    """Branches and loops in the source of every forward that is not torch's own, classified by their
    condition.
    """
    found: list[ControlFlow] = []
    classes: dict[type, list[ControlFlow]] = {}
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("torch."):
            continue
        if kind not in classes:
            classes[kind] = _scan_class(kind)
        found += [
            ControlFlow(module=path, kind=mark.kind, detail=mark.detail, line=mark.line)
            for mark in classes[kind]
        ]
    return found


def _scan_class(kind: type) -> list[ControlFlow]:
    forward = getattr(kind, "forward", None)
    try:
        source, first = inspect.getsourcelines(forward)  # type: ignore[arg-type]
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError):
        return []
    function = tree.body[0]
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    arguments = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
    marks = []
    for node in ast.walk(function):
        line = first + getattr(node, "lineno", 1) - 1
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            marks.append(_mark(node.test, line, arguments, loop=isinstance(node, ast.While)))
        elif isinstance(node, ast.For):
            marks.append(
                ControlFlow(
                    module="", kind="python-loop", detail=f"for over {ast.unparse(node.iter)}", line=line
                )
            )
    return sorted(marks, key=lambda mark: mark.line)


def _mark(test: ast.expr, line: int, arguments: set[str], *, loop: bool) -> ControlFlow:
    text = ast.unparse(test)
    names = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
    none = any(isinstance(n, ast.Constant) and n.value is None for n in ast.walk(test))
    reads = any(
        isinstance(n, ast.Attribute)
        and n.attr in ("item", "any", "all", "sum", "mean", "max", "min", "norm", "tolist")
        for n in ast.walk(test)
    )
    if reads:
        kind = "data-dependent"
    elif none and names & arguments:
        kind = "optional-input"
    else:
        kind = "python-loop" if loop else "python-branch"
    return ControlFlow(module="", kind=kind, detail=text, line=line)
