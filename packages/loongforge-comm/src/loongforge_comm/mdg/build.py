"""Builds the graph: symbolic trace for edges, one run on meta tensors for shapes, work and gradient order."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from loongforge_comm.errors import CompiledModelError
from loongforge_comm.gradients import GradientSpec, gradient_specs, refuse_compiled
from loongforge_comm.mdg.graph import ControlFlow, Edge, ModuleDependencyGraph, Node, TensorInfo
from loongforge_comm.mdg.observe import Observation, is_leaf, observe
from loongforge_comm.mdg.symbolic import scan_source, trace_edges


def build_mdg(
    model: nn.Module,
    example_args: Sequence[object] = (),
    example_kwargs: Mapping[str, object] | None = None,
    *,
    concrete_args: Mapping[str, object] | None = None,
    allow_eager: bool = True,
) -> ModuleDependencyGraph:
    """Describe a model before it trains; it must not be compiled as a whole.

    Edges come from ``torch.fx`` where it can follow the model; absent optional inputs are fixed to their
    example value, so that the trace takes the branch of the example. Otherwise they come from observed calls.
    Shapes, FLOPs and the true gradient-ready order come from one forward and backward on meta tensors, which
    needs no memory and no device. Where an operation has no meta version, or a tensor's value decides the
    path, a copy of the model is run on its own device instead.

    Args:
        model: the module. It is copied, never changed or run itself.
        example_args: positional example inputs (real or meta tensors, containers, plain values).
        example_kwargs: keyword example inputs.
        concrete_args: further arguments fixed in the symbolic trace.
        allow_eager: permit the run of a real copy (costs the model's memory twice) when meta tensors do not
            do.

    Returns:
        The graph. Optional inputs (default ``None``, or keys of a dictionary argument) are left out one at a
        time to find the modules that belong to them.

    Raises:
        CompiledModelError: the model is compiled as a whole.
        ValueError: it can neither be run on meta tensors nor eagerly; both reasons are given.
    """
    refuse_compiled(model)
    if getattr(model, "_compiled_call_impl", None) is not None:
        msg = (
            f"model {type(model).__name__} is compiled as a whole (model.compile()); build the graph first "
            "and compile "
            "the repeated blocks afterwards (for block in model.blocks: block.compile())"
        )
        raise CompiledModelError(msg)
    kwargs = dict(example_kwargs or {})
    names = _input_names(model)
    seen, run, notes = _observe(model, example_args, kwargs, names, allow_eager=allow_eager)
    control = scan_source(model)
    absent = _absent(model, example_args, kwargs)
    try:
        edges, opaque = trace_edges(model, {**absent, **(concrete_args or {})})
        control += [ControlFlow(module=m, kind="data-dependent", detail=why) for m, why in opaque.items()]
        source = "fx" if not opaque else "hooks"
        if opaque:
            notes.append(f"torch.fx cannot follow {sorted(opaque)}: edges from observed calls")
    except Exception as error:
        source = "hooks"
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        notes.append(f"torch.fx cannot follow the model ({reason}): edges from observed calls")
        if "inputs to control flow" in reason:
            control.append(ControlFlow(module="", kind="data-dependent", detail=reason))
    if source == "hooks":
        edges = seen.edges
    else:
        # fx names a dictionary input once, the run names its keys: keep what was seen for inputs.
        edges = {e for e in edges if not e[0].startswith("input:")} | {
            e for e in seen.edges if e[0].startswith("input:")
        }
        edges = {(a, b) for a, b in edges if b in seen.calls}
    branch = _branches(model, example_args, kwargs, seen, meta=run == "meta")
    device = next((p.device.type for p in model.parameters()), "cpu")
    return ModuleDependencyGraph(
        model=type(model).__name__,
        source=source,
        run=run,
        nodes=_nodes(model, seen, branch, edges, device),
        edges=tuple(Edge(source=a, target=b) for a, b in sorted(edges, key=lambda e: (e[1], e[0]))),
        gradients=_gradients(model, seen),
        control_flow=tuple(control),
        notes=tuple(notes),
    )


def _observe(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    names: Mapping[int, str],
    *,
    allow_eager: bool,
) -> tuple[Observation, str, list[str]]:
    try:
        return observe(model, args, kwargs, meta=True, names=names), "meta", []
    except Exception as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    if not allow_eager:
        msg = (
            f"{type(model).__name__} cannot run on meta tensors ({reason}); pass allow_eager=True to run a "
            "real copy"
        )
        raise ValueError(msg)
    note = f"no run on meta tensors ({reason}): a copy of the model was run on its device"
    try:
        return observe(model, args, kwargs, meta=False, names=names), "eager", [note]
    except Exception as error:
        msg = (
            f"{type(model).__name__} runs neither on meta tensors ({reason}) nor eagerly ({error}); check "
            "that example_args and example_kwargs are what its forward takes"
        )
        raise ValueError(msg) from error


def _input_names(model: nn.Module) -> dict[int, str]:
    return dict(enumerate(inspect.signature(model.forward).parameters))


def _absent(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Arguments of forward that the example leaves at a default or passes as something that is no tensor."""
    fixed: dict[str, object] = {}
    for position, (name, parameter) in enumerate(inspect.signature(model.forward).parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = args[position] if position < len(args) else kwargs.get(name, parameter.default)
        if not isinstance(value, (Tensor, Mapping, list, tuple)) and value is not parameter.empty:
            fixed[name] = value
    return fixed


def _branches(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], full: Observation, *, meta: bool
) -> dict[str, str]:
    """Leave out each optional input in turn; what no longer runs belongs to it."""
    if not meta:
        return {}
    signature = inspect.signature(model.forward).parameters
    trials: dict[str, tuple[list[object], dict[str, object]]] = {}
    for position, (name, parameter) in enumerate(signature.items()):
        if position < len(args):
            value: object = args[position]
        else:
            value = kwargs.get(name)
        if isinstance(value, Mapping):
            for key in value:
                smaller = {k: v for k, v in value.items() if k != key}
                trials[f"{name}.{key}"] = _with(args, kwargs, position, name, smaller)
        elif parameter.default is None and isinstance(value, Tensor):
            trials[name] = _with(args, kwargs, position, name, None)
    result: dict[str, str] = {}
    for label, (trial_args, trial_kwargs) in trials.items():
        try:
            seen = observe(model, trial_args, trial_kwargs, meta=True, backward=False)
        except Exception:
            continue
        for node in full.calls:
            if node not in seen.calls:
                result.setdefault(node, label)
    return result


def _with(
    args: Sequence[object], kwargs: Mapping[str, object], position: int, name: str, value: object
) -> tuple[list[object], dict[str, object]]:
    if position < len(args):
        return [*args[:position], value, *args[position + 1 :]], dict(kwargs)
    return list(args), {**kwargs, name: value}


def _nodes(
    model: nn.Module,
    seen: Observation,
    branch: Mapping[str, str],
    edges: set[tuple[str, str]],
    device: str,
) -> tuple[Node, ...]:
    owners: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    types = {path: type(module).__name__ for path, module in model.named_modules()}
    leaves = [path for path, module in model.named_modules() if is_leaf(module)]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        path, _, short = name.rpartition(".")
        owner = next(
            (leaf for leaf in leaves if name == leaf or name.startswith(f"{leaf}.")), f"{path}#{short}"
        )
        owners.setdefault(owner, []).append(name)
        sizes[owner] = sizes.get(owner, 0) + parameter.numel() * parameter.element_size()
    order = list(dict.fromkeys([*seen.order, *owners, *(source for source, _ in sorted(edges))]))
    nodes = []
    for name in order:
        kind = "input" if name.startswith("input:") else "parameter" if "#" in name else "module"
        nodes.append(
            Node(
                name=name,
                kind=kind,
                type=seen.types.get(name) or types.get(name, "Parameter"),
                inputs=_on(seen.inputs.get(name, ()), device),
                outputs=_on(seen.outputs.get(name, ()), device),
                parameters=tuple(owners.get(name, ())),
                gradient_bytes=sizes.get(name, 0),
                flops=seen.flops.get(name, 0),
                calls=seen.calls.get(name, 0),
                branch=branch.get(name, ""),
            )
        )
    return tuple(nodes)


def _on(described: Sequence[TensorInfo], device: str) -> tuple[TensorInfo, ...]:
    """Meta tensors stand for tensors on the model's device."""
    return tuple(
        TensorInfo(shape=t.shape, dtype=t.dtype, device=device if t.device == "meta" else t.device)
        for t in described
    )


def _gradients(model: nn.Module, seen: Observation) -> tuple[GradientSpec, ...]:
    """Seen gradients in their order; those without one come last, as they complete only at the end of
    backward.
    """
    times = {name: seen.ready.get(name, 1.0) for name, _ in model.named_parameters()}
    place = {name: index for index, name in enumerate(seen.ready)}
    specs = gradient_specs(model, ready_ms=times)
    specs = tuple(sorted(specs, key=lambda s: (s.ready_ms, place.get(s.name, len(place)))))
    return tuple(
        GradientSpec(**{**s.__dict__, "fires": seen.fires.get(s.name, 1)})
        if seen.fires.get(s.name, 1) > 1
        else s
        for s in specs
    )
