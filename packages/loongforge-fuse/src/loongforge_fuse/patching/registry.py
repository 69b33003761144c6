"""The registry of patterns: the built-in ones, then what users add."""

from __future__ import annotations

from loongforge_fuse.patching.builtin import BUILTIN
from loongforge_fuse.patching.pattern import Pattern

_registry: dict[str, Pattern] = {pattern.name: pattern for pattern in BUILTIN}


def register_pattern(pattern: Pattern, *, replace: bool = False) -> None:
    """Add a pattern to those that ``apply_fused_ops`` tries; the last registered is tried first.

    Raises:
        ValueError: the name is taken and `replace` is False.
    """
    if pattern.name in _registry and not replace:
        message = f"a pattern named {pattern.name!r} is registered; pass replace=True to replace it"
        raise ValueError(message)
    _registry.pop(pattern.name, None)
    _registry[pattern.name] = pattern


def patterns() -> tuple[Pattern, ...]:
    """Return the registered patterns, in the order they are tried: blocks before the modules inside them."""
    return tuple(reversed(_registry.values()))
