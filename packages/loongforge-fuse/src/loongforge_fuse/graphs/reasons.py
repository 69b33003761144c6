"""Why a step ran eagerly although a graph runner is attached."""

from __future__ import annotations

import enum


class GraphReason(enum.StrEnum):
    """Reason codes of eager steps, as they stand in the step record."""

    OFF = "off"
    """``mode`` is ``"off"``."""
    NO_DEVICE = "no_device"
    """The model is not on a device that has graphs."""
    WARM_UP = "warm_up"
    """The shape has not been seen often enough to be worth a capture."""
    EVICTED = "evicted"
    """The shape's graph gave way to others; it is captured again when it is seen often enough."""
    CUSTOM_BACKWARD = "custom_backward"
    """The caller brought its own backward function, which a graph cannot contain."""
    CAPTURE_FAILED = "capture_failed"
    """Capturing this shape failed; it stays eager. The detail holds the error."""
    MEMORY_CAP = "memory_cap"
    """The graph would exceed the memory cap even alone."""
    MOVING = "moving"
    """Weights, modules or gradients moved after each capture of this shape, so it stays eager."""
    PACKED = "packed"
    """A packed batch, and ``packed_rows`` is 0."""
    HOOKS = "hooks"
    """The model has module hooks, or the optimizer step hooks, whose Python code a replay would not run."""
    RELEASED = "released"
    """The runner was released."""
    WITHOUT_GRADIENTS = "without_gradients"
    """Gradients are disabled; only training passes are captured."""


class AheadReason(enum.StrEnum):
    """Why the frozen part of a batch was left to its step."""

    NO_FROZEN_PART = "no_frozen_part"
    """The model does not say which part of its forward pass is frozen, or nothing before it is."""
    TRAINS = "trains"
    """A parameter that the frozen part reads has ``requires_grad``."""
    HOOKS = "hooks"
    """A module of the frozen part has hooks, whose Python code a replay would not run."""
    RANDOM = "random"
    """The frozen part has active dropout, whose numbers would be drawn in another order."""
    STATEFUL = "stateful"
    """A norm of the frozen part takes running statistics, which is work of its step; put it in eval mode."""


def root_cause(error: BaseException) -> str:
    """Return the first error of a chain in one line: what broke a capture, not what failed after it."""
    first = error
    while (before := first.__cause__ or first.__context__) is not None:
        first = before
    lines = str(first).splitlines()
    hint = ""
    if "legacy stream" in str(first):
        hint = " (an autograd graph of an earlier eager pass is still alive: detach stored losses)"
    return f"{type(first).__name__}: {lines[0] if lines else ''}{hint}"
