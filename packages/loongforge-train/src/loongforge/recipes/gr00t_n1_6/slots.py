"""Live embodiment slots: communicate and step only what training can change, where that is exact."""

from __future__ import annotations

from dataclasses import dataclass

from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.model import GrootModel

DECAY_BOUND = 2.0**-25
"""Largest learning rate times weight decay for which ``1 - lr * decay`` is exactly 1 in float32."""


@dataclass(frozen=True, kw_only=True)
class SlotDecision:
    """Whether unused slots may be left out.

    Attributes:
        live: True when only the used slot is communicated and stepped.
        reason: Why, in a few words (``exact``, ``off``, ``decay``, ``moments``, ``several_embodiments``).
    """

    live: bool
    reason: str


def decide_slots(
    *,
    embodiments: int,
    learning_rate: float,
    weight_decay: float,
    fresh_moments: bool = True,
    enabled: bool = True,
) -> SlotDecision:
    """Tell whether leaving the unused slots out of the optimizer changes nothing.

    A slot without samples has a zero gradient. AdamW moves it only by weight decay, which multiplies by
    ``1 - lr * decay``, and by what its moments remember. With fresh moments and a product that rounds away,
    it never changes.

    Args:
        embodiments: Number of different slots in the training data.
        learning_rate: Highest learning rate of the run.
        weight_decay: Weight decay of AdamW.
        fresh_moments: False when an optimizer state with all slots is resumed.
        enabled: The user's switch.
    """
    if not enabled:
        return SlotDecision(live=False, reason="off")
    if embodiments != 1:
        return SlotDecision(live=False, reason="several_embodiments")
    if learning_rate * weight_decay > DECAY_BOUND:
        return SlotDecision(live=False, reason="decay")
    if not fresh_moments:
        return SlotDecision(live=False, reason="moments")
    return SlotDecision(live=True, reason="exact")


def use_single_slot(model: GrootModel, slot: int, *, live_only: bool) -> None:
    """Bind the model to one embodiment: no look-up per sample, and with ``live_only`` no other parameters.

    ``state_dict`` keeps all slots under the published names either way.
    """
    layers = model.action_head.category_layers()
    count = model.config.head.max_embodiments
    if not 0 <= slot < count:
        msg = f"slot {slot} is outside the model's slots 0..{count - 1}"
        raise ConfigError(msg)
    model.single_slot = slot
    if live_only:
        for _, layer in layers:
            layer.keep_only(slot, 1)


def has_live_slots_only(model: GrootModel) -> bool:
    """Tell whether the parameters hold one slot only."""
    return all(layer.W.shape[0] == 1 for _, layer in model.action_head.category_layers())
