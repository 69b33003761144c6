"""Draws the graph as SVG or HTML, layered by depth, coloured by communication group."""

from __future__ import annotations

import html
from collections.abc import Mapping

from loongforge_comm.mdg.graph import ModuleDependencyGraph, Node
from loongforge_comm.plan import CommPlan

COLOURS = ("#9ec5e8", "#f3c08a", "#a9d5b5", "#e3a3ac", "#c5b6e0", "#d7c3b3", "#e8bfdd")
NONE_COLOUR = "#eeeeee"
BOX_W, BOX_H, GAP_X, GAP_Y = 210, 44, 24, 46


def communication_groups(
    graph: ModuleDependencyGraph, plan: CommPlan | None, crossover_bytes: float
) -> dict[str, str]:
    """Group of each node with gradients: the plan's when given, else high or low load by the crossover
    size.
    """
    of_parameter = (
        {piece.name: bucket.group for bucket in plan.buckets for piece in bucket.pieces} if plan else {}
    )
    result = {}
    for node in graph.nodes:
        if not node.parameters:
            continue
        fallback = "high" if node.gradient_bytes > crossover_bytes else "low"
        result[node.name] = of_parameter.get(node.parameters[0], fallback)
    return result


def collapse(graph: ModuleDependencyGraph, depth: int) -> tuple[list[Node], list[tuple[str, str]]]:
    """Merge nodes whose paths agree in the first ``depth`` parts (0: keep all)."""

    def short(name: str) -> str:
        if depth <= 0 or name.startswith("input:"):
            return name
        return ".".join(name.replace("#", ".").split(".")[:depth])

    merged: dict[str, Node] = {}
    for node in graph.nodes:
        name = short(node.name)
        if name not in merged:
            merged[name] = Node(**{**node.__dict__, "name": name})
        else:
            old = merged[name]
            merged[name] = Node(
                **{
                    **old.__dict__,
                    "type": old.type if old.name == node.name else "...",
                    "outputs": node.outputs or old.outputs,
                    "parameters": old.parameters + node.parameters,
                    "gradient_bytes": old.gradient_bytes + node.gradient_bytes,
                    "flops": old.flops + node.flops,
                    "calls": max(old.calls, node.calls),
                    "branch": old.branch if old.branch == node.branch else "",
                }
            )
    edges = {(short(e.source), short(e.target)) for e in graph.edges}
    return list(merged.values()), sorted((a, b) for a, b in edges if a != b)


def to_svg(graph: ModuleDependencyGraph, groups: Mapping[str, str], *, depth: int = 0) -> str:
    """The drawing as SVG text; rows follow the longest path from an input."""
    nodes, edges = collapse(graph, depth)
    node_groups = {}
    for node in nodes:
        member = next(
            (groups[n] for n in groups if n == node.name or n.startswith((node.name + ".", node.name + "#"))),
            "",
        )
        node_groups[node.name] = member
    level = _levels([n.name for n in nodes], edges)
    rows: dict[int, list[Node]] = {}
    for node in nodes:
        rows.setdefault(level[node.name], []).append(node)
    place: dict[str, tuple[float, float]] = {}
    widest = max((len(row) for row in rows.values()), default=1)
    for depth_, row in sorted(rows.items()):
        left = (widest - len(row)) * (BOX_W + GAP_X) / 2
        for i, node in enumerate(row):
            place[node.name] = (20 + left + i * (BOX_W + GAP_X), 60 + depth_ * (BOX_H + GAP_Y))
    names = list(dict.fromkeys(g for g in node_groups.values() if g))
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    width = 40 + widest * (BOX_W + GAP_X)
    height = 90 + (max(rows, default=0) + 1) * (BOX_H + GAP_Y)
    title = f"{graph.model}: {graph.gradient_bytes / 2**20:.2f} MiB of gradients"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="20" y="20" font-size="14">{html.escape(title)}</text>',
    ]
    for i, name in enumerate(names):
        parts.append(f'<rect x="{20 + 120 * i}" y="30" width="14" height="14" fill="{colour[name]}"/>')
        parts.append(f'<text x="{38 + 120 * i}" y="41">{html.escape(name)}</text>')
    parts += [_curve(place[a], place[b]) for a, b in edges if a in place and b in place]
    parts += [_box(n, place[n.name], colour.get(node_groups[n.name], NONE_COLOUR)) for n in nodes]
    parts.append("</svg>")
    return "\n".join(parts)


def to_html(graph: ModuleDependencyGraph, groups: Mapping[str, str], *, depth: int = 0) -> str:
    """A page with the drawing and the table."""
    return (
        "<!doctype html><meta charset='utf-8'>"
        f"<title>{html.escape(graph.model)}</title>"
        "<style>body{font-family:sans-serif;margin:1em}pre{font-size:12px;overflow:auto}"
        "div{overflow:auto;border:1px solid #ccc;max-height:75vh}</style>"
        f"<div>{to_svg(graph, groups, depth=depth)}</div><pre>{html.escape(graph.table())}</pre>\n"
    )


def _levels(names: list[str], edges: list[tuple[str, str]]) -> dict[str, int]:
    """Longest path from the sources; edges against the order of execution are ignored (merged nodes form
    cycles).
    """
    position = {name: i for i, name in enumerate(names)}
    level = dict.fromkeys(names, 0)
    for a, b in sorted(edges, key=lambda e: (position.get(e[1], 0), position.get(e[0], 0))):
        if a in position and b in position and position[a] < position[b]:
            level[b] = max(level[b], level[a] + 1)
    for a, b in edges:  # a parameter used directly sits one row above its first user
        if "#" in a and a in level and b in level:
            level[a] = max(0, level[b] - 1)
    return level


def _curve(a: tuple[float, float], b: tuple[float, float]) -> str:
    x1, y1, x2, y2 = a[0] + BOX_W / 2, a[1] + BOX_H, b[0] + BOX_W / 2, b[1]
    mid = (y1 + y2) / 2
    return (
        f'<path d="M{x1:.0f},{y1:.0f} C{x1:.0f},{mid:.0f} {x2:.0f},{mid:.0f} {x2:.0f},{y2:.0f}" '
        'fill="none" stroke="#999" stroke-width="1"/>'
    )


def _box(node: Node, at: tuple[float, float], colour: str) -> str:
    x, y = at
    shape = "x".join(map(str, node.outputs[0].shape)) if node.outputs else ""
    size = f"{node.gradient_bytes / 2**20:.3f} MiB" if node.gradient_bytes else ""
    dashed = ' stroke-dasharray="4 3"' if node.branch else ""
    title = html.escape(f"{node.name} ({node.type}) branch: {node.branch or 'trunk'}")
    caption = html.escape(f"{node.type} {shape} {size}"[:38])
    return (
        f'<g><title>{title}</title><rect x="{x:.0f}" y="{y:.0f}" width="{BOX_W}" height="{BOX_H}" rx="5" '
        f'fill="{colour}" stroke="#555"{dashed}/>'
        f'<text x="{x + 6:.0f}" y="{y + 16:.0f}">{html.escape(node.name[-34:])}</text>'
        f'<text x="{x + 6:.0f}" y="{y + 34:.0f}" fill="#444">{caption}</text></g>'
    )
