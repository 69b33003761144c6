"""Settings of the graph runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loongforge_fuse.graphs.buckets import BucketPlan


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """Settings of :class:`~loongforge_fuse.graphs.runner.GraphRunner`.

    Attributes:
        mode: ``"auto"``: CUDA graphs where the model is on a GPU, else eager with a reason. ``"emulated"``: a
            stand-in on any device that re-executes with static buffers. ``"off"``. Default ``"auto"``.
        warmup_steps: Eager runs of a shape before it is captured; they are ordinary training passes,
            nothing is computed twice. Default 2.
        max_graphs: Graphs kept; the least recently used one goes first. Default 8.
        memory_cap_gb: Bound on the memory of all graphs together, GiB. Default None, no bound.
        gradients: ``"accumulate"``: gradients are added to ``p.grad``, whose tensors never change.
            ``"overwrite"``: a pass that is a whole window writes fresh gradients and saves zeroing and adding
            (``p.grad`` then points to tensors of the replayed graph). Default ``"accumulate"``.
        weight_gradients: ``"beside"``: layers whose operators allow it (:func:`loongforge_fuse.ops.linear`)
            compute the gradients of their weights on a stream of their own, beside the chain of input
            gradients. ``"in_line"``: in their place in the backward pass. Default ``"in_line"``.
        zero_in_graph: The first pass of a window clears the gradients inside the graph. Default False: the
            caller zeroes them.
        check_finite: ``"loss"``: a flag on the device says whether the loss was finite. ``"gradients"``: also
            whether all gradients were. ``"off"``. Default ``"loss"``.
        max_norm: Clip the gradients' global norm inside the graph; needs an optimizer. Default None.
        compile: Compile the repeated blocks of the model (``torch.compile``, region by region) before
            capture. Default False.
        packed_rows: Packed batches are filled up to a multiple of this many rows, so that windows of about
            the same number of tokens share a graph. 0: packed passes run eagerly. Default 256.
        hooks: ``"refuse"``: a model with module hooks, or an optimizer in the graph with step hooks, runs
            eagerly, since a replay runs no Python code. ``"allow"``: hooks may run at capture only. Hooks of
            parameters are not looked at and never run in a replay. Default ``"refuse"``.
        buckets: Sizes to which varying dimensions are padded before a graph is looked up. Default none.
    """

    mode: Literal["auto", "emulated", "off"] = "auto"
    warmup_steps: int = 2
    max_graphs: int = 8
    memory_cap_gb: float | None = None
    gradients: Literal["accumulate", "overwrite"] = "accumulate"
    weight_gradients: Literal["in_line", "beside"] = "in_line"
    zero_in_graph: bool = False
    check_finite: Literal["loss", "gradients", "off"] = "loss"
    max_norm: float | None = None
    compile: bool = False
    packed_rows: int = 256
    hooks: Literal["refuse", "allow"] = "refuse"
    buckets: BucketPlan | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("mode", self.mode, {"auto", "emulated", "off"}),
            ("gradients", self.gradients, {"accumulate", "overwrite"}),
            ("weight_gradients", self.weight_gradients, {"in_line", "beside"}),
            ("hooks", self.hooks, {"refuse", "allow"}),
            ("check_finite", self.check_finite, {"loss", "gradients", "off"}),
        ):
            if value not in allowed:
                message = f"{name} is {value!r}, allowed: {', '.join(sorted(allowed))}"
                raise ValueError(message)
        if self.warmup_steps < 1:
            message = f"warmup_steps is {self.warmup_steps}; at least 1 eager run must come before a capture"
            raise ValueError(message)
        if self.max_graphs < 1:
            message = f"max_graphs is {self.max_graphs}; use at least 1, or mode='off'"
            raise ValueError(message)
        if self.packed_rows < 0:
            message = (
                f"packed_rows is {self.packed_rows}; give a positive number of rows, or 0 for eager passes"
            )
            raise ValueError(message)
        if self.memory_cap_gb is not None and self.memory_cap_gb <= 0:
            message = f"memory_cap_gb is {self.memory_cap_gb}; it must be positive, or None for no bound"
            raise ValueError(message)
        if self.max_norm is not None and self.max_norm <= 0:
            message = f"max_norm is {self.max_norm}; it must be positive, or None for no clipping"
            raise ValueError(message)
