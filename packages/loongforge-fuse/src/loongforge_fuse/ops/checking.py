"""How exact an operator is: its error against float64, next to that of the chain it replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loongforge_fuse.ops._common import op_counters

Chain = Callable[..., Tensor | tuple[Tensor, ...]]


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return the root mean square error relative to the root mean square of the truth."""
    gap = (value.double() - truth).square().mean().sqrt()
    return float(gap / truth.square().mean().sqrt().clamp_min(1e-30))


def errors_beside(ours: Chain, eager: Chain, inputs: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Return (our error, eager's error) against float64 for each output and each input's gradient.

    Both run in the type of the inputs, forward and backward, with the same gradients at the outputs.
    """

    def run(function: Chain, arguments: Sequence[Tensor]) -> list[Tensor]:
        leaves = [a.detach().clone().requires_grad_() for a in arguments]
        out = function(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        generator = torch.Generator(inputs[0].device).manual_seed(1)
        seeds = [torch.randn(o.shape, device=o.device, generator=generator).to(o.dtype) for o in outs]
        grads = torch.autograd.grad(outs, leaves, seeds)
        return [*(o.detach() for o in outs), *grads]

    truth = run(eager, [a.double() for a in inputs])
    pairs = zip(run(ours, inputs), run(eager, inputs), truth, strict=True)
    return [(relative_error(mine, t), relative_error(stock, t)) for mine, stock, t in pairs]


def check_as_exact(ours: Chain, eager: Chain, inputs: Sequence[Tensor], *, slack: float = 1.02) -> None:
    """Check that no result has a larger error against float64 than the eager chain's.

    Raises:
        AssertionError: a result has; the message says which, with both errors.
    """
    for i, (mine, stock) in enumerate(errors_beside(ours, eager, inputs)):
        if not mine <= stock * slack + 1e-7:
            message = f"result {i}: our error {mine:.3e}, eager {stock:.3e}"
            raise AssertionError(message)


def check_no_fallback() -> None:
    """Check that no operator ran as plain torch since the counters were reset.

    Raises:
        AssertionError: one did; the message holds the reasons.
    """
    found = op_counters()["fallbacks"]
    if found:
        message = f"operators fell back to torch: {found}"
        raise AssertionError(message)
