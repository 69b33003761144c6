"""What a pattern is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

Examples = Callable[[nn.Module], tuple[object, ...]]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One kind of module and its fused forward.

    Attributes:
        name: shown in the report.
        refuses: returns why a module does not fit, or None when it does. A reason that starts with "not a"
            is not reported: the module is something else altogether.
        forward: replacement, called as ``forward(module, *arguments)``; its numbers may differ from the
            original's by rounding only.
        examples: arguments for the check that runs original and replacement on the module once for each
            configuration; None: the type alone decides.
        covers: submodules whose own forward is bypassed, as dotted names; they are not patched on their own
            and must have no hooks.
    """

    name: str
    refuses: Callable[[nn.Module], str | None]
    forward: Callable[..., object]
    examples: Examples | None = None
    covers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A structural description: submodules by exact type name and parameters by shape relations.

    Attributes:
        type_name: name of the class, without its module.
        children: exact names of the direct submodules, with the type names allowed for each.
        attributes: plain attributes that must exist.
    """

    type_name: str
    children: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()

    def refuses(self, module: nn.Module) -> str | None:
        """Return why the module does not have this structure, or None."""
        if type(module).__name__ != self.type_name:
            return f"not a {self.type_name}"
        found = {name: type(child).__name__ for name, child in module.named_children()}
        if set(found) != set(self.children):
            return f"submodules {sorted(found)}, expected {sorted(self.children)}"
        for name, kinds in self.children.items():
            if found[name] not in kinds:
                return f"{name} is a {found[name]}, expected {' or '.join(kinds)}"
        for name in self.attributes:
            if not hasattr(module, name):
                return f"no attribute {name}"
        return None
