"""The graph as data: nodes are modules, edges are tensors, and the order in which gradients become ready."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from loongforge_comm.gradients import GradientSpec, order_by_ready

MDG_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Shape, dtype (without the ``torch.`` prefix) and device type of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Node:
    """A module, a model input or a parameter used outside of leaf modules.

    Attributes:
        name: module path; ``input:NAME`` for inputs; ``MODULE#PARAMETER`` for parameters used directly.
        kind: ``module``, ``input`` or ``parameter``.
        type: class name.
        inputs: tensors of the first call.
        outputs: tensors of the first call.
        parameters: names of the trainable parameters it owns (a tied parameter belongs to its first module).
        gradient_bytes: bytes of their gradients.
        flops: floating-point operations of the forward calls, 0 where unknown.
        calls: forward calls in one pass; 0 when a branch left it out.
        branch: optional input without which it does not run, empty for the trunk.
    """

    name: str
    kind: str
    type: str
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    parameters: tuple[str, ...] = ()
    gradient_bytes: int = 0
    flops: int = 0
    calls: int = 0
    branch: str = ""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A tensor that flows from one node to another, possibly through functions between them."""

    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class ControlFlow:
    """A place where the path depends on something.

    Attributes:
        module: path of the module whose forward holds it.
        kind: ``optional-input``, ``python-branch``, ``python-loop`` or ``data-dependent`` (a tensor's value
            decides).
        detail: the condition or the tracer's reason.
        line: line in the source file of the class, 0 where unknown.
    """

    module: str
    kind: str
    detail: str
    line: int = 0


@dataclass(frozen=True, kw_only=True)
class ModuleDependencyGraph:
    """The graph of one model for one set of example inputs.

    Attributes:
        model: class name.
        source: how edges were found: ``fx`` (symbolic trace) or ``hooks`` (observed calls).
        run: where shapes and order come from: ``meta`` (no memory) or ``eager`` (a copy of the model was
            run).
        nodes: in order of first execution.
        edges: sorted by target, then source.
        gradients: in the order in which they become ready, ``ready_ms`` as the share (0 to 1) of backward's
            work.
        control_flow: marked places.
        notes: what could not be done and what was done instead.
    """

    model: str
    source: str
    run: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    gradients: tuple[GradientSpec, ...]
    control_flow: tuple[ControlFlow, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(g.nbytes for g in self.gradients)

    @property
    def hash(self) -> str:
        """Digest of the whole graph."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def ready_ms(self, backward_ms: float = 1.0) -> dict[str, float]:
        """Predicted ready time of each gradient for a backward of the given length in milliseconds."""
        return {g.name: g.ready_ms * backward_ms for g in self.gradients}

    def gradient_specs(self, backward_ms: float = 1.0) -> tuple[GradientSpec, ...]:
        """The planner's input, in ready order."""
        times = self.ready_ms(backward_ms)
        return order_by_ready(
            GradientSpec(**{**asdict(g), "ready_ms": times[g.name]}) for g in self.gradients
        )

    def node(self, name: str) -> Node:
        """The node called ``name``; KeyError names the closest ones."""
        for node in self.nodes:
            if node.name == name:
                return node
        near = [n.name for n in self.nodes if name.split(".")[-1] in n.name][:5]
        msg = f"no node {name!r} in the graph of {self.model}; similar: {near}"
        raise KeyError(msg)

    def branches(self) -> dict[str, tuple[str, ...]]:
        """Modules that run only when an optional input is given, by that input."""
        result: dict[str, list[str]] = {}
        for node in self.nodes:
            if node.branch:
                result.setdefault(node.branch, []).append(node.name)
        return {name: tuple(members) for name, members in result.items()}

    def table(self) -> str:
        """One line per module: calls, gradient MiB, GFLOP, output shape, branch."""
        lines = [
            f"{self.model}: {len(self.nodes)} nodes, {len(self.edges)} edges, "
            f"{self.gradient_bytes / 2**20:.2f} MiB of gradients (edges by {self.source}, shapes by "
            f"{self.run})",
            f"{'node':<44} {'type':<22} calls {'grad MiB':>9} {'GFLOP':>9}  {'output':<26} branch",
        ]
        for n in self.nodes:
            shape = "x".join(map(str, n.outputs[0].shape)) if n.outputs else "-"
            lines.append(
                f"{n.name[-44:]:<44} {n.type[:22]:<22} {n.calls:>5} {n.gradient_bytes / 2**20:>9.3f} "
                f"{n.flops / 1e9:>9.3f}  {shape:<26} {n.branch}"
            )
        lines += [f"{c.kind}: {c.module or '(model)'} line {c.line}: {c.detail}" for c in self.control_flow]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Versioned JSON text."""
        return json.dumps({"version": MDG_VERSION, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModuleDependencyGraph:
        """Read what ``to_json`` wrote; ValueError names a wrong version."""
        data = json.loads(text)
        version = data.pop("version", None) if isinstance(data, dict) else None
        if version != MDG_VERSION:
            msg = f"module dependency graph has version {version}, allowed is {MDG_VERSION}; build it again"
            raise ValueError(msg)
        return cls(
            model=data["model"],
            source=data["source"],
            run=data["run"],
            nodes=tuple(_node(n) for n in data["nodes"]),
            edges=tuple(Edge(**e) for e in data["edges"]),
            gradients=tuple(
                GradientSpec(**{**g, "shape": tuple(g["shape"]), "stride": tuple(g["stride"])})
                for g in data["gradients"]
            ),
            control_flow=tuple(ControlFlow(**c) for c in data["control_flow"]),
            notes=tuple(data["notes"]),
        )


def _node(data: Mapping[str, object]) -> Node:
    def infos(key: str) -> tuple[TensorInfo, ...]:
        entries = data[key]
        assert isinstance(entries, list)
        return tuple(TensorInfo(**{**e, "shape": tuple(e["shape"])}) for e in entries)

    parameters = data["parameters"]
    assert isinstance(parameters, list)
    plain = {k: v for k, v in data.items() if k not in ("inputs", "outputs", "parameters")}
    return Node(
        **plain,  # type: ignore[arg-type]
        inputs=infos("inputs"),
        outputs=infos("outputs"),
        parameters=tuple(parameters),
    )
