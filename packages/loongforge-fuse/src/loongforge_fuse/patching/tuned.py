"""The forward of a module under mode "tuned": measure original and fused once per shape, keep the faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from loongforge_fuse.autotune import Autotuner

Forward = Callable[..., object]


def tuned_forward(
    module: nn.Module, name: str, original: Forward, fused: Forward, tuner: Autotuner
) -> Forward:
    """Return a forward that dispatches by the tuner's decision for the shapes of each call.

    A call inside a CUDA graph capture, a compilation or a recomputation cannot measure: it uses the decision
    that exists, or the fused forward. Modules of one configuration share decisions.
    """
    weights = ",".join(f"{tuple(p.shape)}{p.dtype}" for p in module.parameters())
    chosen: dict[tuple[object, ...], bool] = {}

    def forward(*arguments: object, **named: object) -> object:
        tensors = [a for a in (*arguments, *named.values()) if isinstance(a, Tensor)]
        key = (
            *((tuple(t.shape), t.dtype, t.device.type, t.requires_grad) for t in tensors),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(tensors[0].device.type) if tensors else False,
        )
        use = chosen.get(key)
        if use is None:
            text = f"{name}|{weights}|{module.training}|{key}"
            known = tuner.known(text)
            if known is None and _may_measure(tensors):
                known = tuner.decide(text, _alternatives(module, original, fused, arguments, named))
            if known is None:
                return fused(*arguments, **named)
            use = chosen[key] = known.winner == "fused"
        return fused(*arguments, **named) if use else original(*arguments, **named)

    return forward


def _may_measure(tensors: list[Tensor]) -> bool:
    if torch.compiler.is_compiling():
        return False
    # In recomputation the autograd engine is running: a backward inside it would deadlock or corrupt.
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - the only way to ask
        return False
    return not any(t.is_cuda for t in tensors) or not torch.cuda.is_current_stream_capturing()


def _detached(value: object) -> object:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _outputs(value: object) -> Iterator[Tensor]:
    for item in value if isinstance(value, tuple | list) else (value,):
        if isinstance(item, Tensor) and item.requires_grad:
            yield item


def _alternatives(
    module: nn.Module,
    original: Forward,
    fused: Forward,
    arguments: tuple[object, ...],
    named: dict[str, object],
) -> dict[str, Callable[[], object]]:
    """Return both forwards, with a backward when one will follow, on detached inputs; no gradient is kept."""
    inputs = [_detached(a) for a in arguments]
    others = {k: _detached(v) for k, v in named.items()}
    leaves = [t for t in (*inputs, *others.values()) if isinstance(t, Tensor) and t.requires_grad]
    leaves += [p for p in module.parameters() if p.requires_grad]

    def work(forward: Forward) -> Callable[[], object]:
        def run() -> object:
            with torch.random.fork_rng(devices=_devices(leaves)):
                result = forward(*inputs, **others)
            outs = list(_outputs(result))
            if outs and leaves:
                torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs], allow_unused=True)
            return result

        return run

    return {"original": work(original), "fused": work(fused)}


def _devices(tensors: list[Tensor]) -> list[torch.device]:
    return sorted({t.device for t in tensors if t.is_cuda}, key=str)
