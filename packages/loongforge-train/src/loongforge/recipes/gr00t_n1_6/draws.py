"""Random numbers of a training step, drawn outside the forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.processing.images import ImageOptions, draw_augmentation

Generators = torch.Generator | Sequence[torch.Generator] | None


def beta_sample(
    rows: int, a: float, b: float, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw ``rows`` numbers from Beta(a, b) without leaving the device.

    With one parameter equal to 1 the inverse of the cumulative distribution is a power: one kernel. Otherwise
    two Gamma draws, which need the global generator of the device.
    """
    if b == 1.0:
        return torch.rand(rows, generator=generator, device=device) ** (1.0 / a)
    if a == 1.0:
        return 1 - torch.rand(rows, generator=generator, device=device) ** (1.0 / b)
    if generator is not None:
        msg = (
            f"Beta({a}, {b}) with both parameters different from 1 cannot use a torch.Generator (there is "
            "no Gamma draw that takes one); pass generator=None or set one parameter to 1"
        )
        raise ValueError(msg)
    x, y = (torch._standard_gamma(torch.full((rows,), p, device=device)) for p in (a, b))  # noqa: SLF001
    return x / (x + y)


def draw_flow(
    batch: Mapping[str, object],
    config: GrootConfig,
    generator: Generators = None,
    *,
    augment: ImageOptions | None = None,
) -> dict[str, object]:
    """Return the batch with its random numbers; entries that are already there stay.

    Adds ``noise`` (B, T, A), ``time`` (B,), with ``augment`` also ``augmentation`` (B, 6), and where
    configured ``state_drop`` (B,) and ``state_noise`` (B, 1, D).

    Args:
        batch: Model batch with ``action``.
        config: The model's configuration.
        generator: None draws on the batch's device with its global generator; one generator draws on its
            own device; a sequence of B generators draws sample ``i`` from generator ``i``, so that the
            numbers of a sample do not depend on the batch it is in. Results are moved to the batch's device.
        augment: Image settings when the images of this batch are to be augmented.
    """
    action = batch.get("action")
    if not isinstance(action, Tensor):
        msg = f"draw needs the batch's 'action' (B, T, A); the batch has {sorted(batch)}"
        raise ConfigError(msg)
    count, shape = action.shape[0], tuple(action.shape[1:])
    if generator is None or isinstance(generator, torch.Generator):
        device = action.device if generator is None else generator.device
        drawn = _draw(count, shape, config, generator, device, augment)
    else:
        if len(generator) != count:
            msg = f"draw got {len(generator)} generators for a batch of {count} samples"
            raise ValueError(msg)
        parts = [_draw(1, shape, config, one, one.device, augment) for one in generator]
        drawn = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    fresh = {n: v for n, v in drawn.items() if n not in batch}
    if action.device.type == "cpu" and action.is_pinned():
        # A copy from pageable memory would wait for the device; the batch's other tensors do not.
        return {**batch, **{n: v.pin_memory() for n, v in fresh.items()}}
    return {**batch, **{n: v.to(action.device, non_blocking=True) for n, v in fresh.items()}}


def _draw(
    count: int,
    shape: tuple[int, ...],
    config: GrootConfig,
    generator: torch.Generator | None,
    device: torch.device,
    augment: ImageOptions | None,
) -> dict[str, Tensor]:
    head = config.head
    result: dict[str, Tensor] = {}
    if head.state_dropout > 0:
        result["state_drop"] = torch.rand(count, generator=generator, device=device) < head.state_dropout
    if head.state_noise > 0:
        result["state_noise"] = torch.randn((count, 1, config.dit.width), generator=generator, device=device)
    result["noise"] = torch.randn((count, *shape), generator=generator, device=device)
    s = beta_sample(count, head.beta_alpha, head.beta_beta, device, generator)
    result["time"] = head.time_scale * (1 - s)
    if augment is not None:
        result["augmentation"] = draw_augmentation(count, augment, device, generator)
    return result
