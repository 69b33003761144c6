"""Module Dependency Graph: what the planner knows about a model before it trains."""

from loongforge_comm.mdg.build import build_mdg
from loongforge_comm.mdg.graph import ControlFlow, Edge, ModuleDependencyGraph, Node, TensorInfo

__all__ = ["ControlFlow", "Edge", "ModuleDependencyGraph", "Node", "TensorInfo", "build_mdg"]
