"""How many slots a ring gets."""

from __future__ import annotations

import pytest
from loongforge_data.sizing import MAX_SLOTS, available_bytes, ring_size, slots_needed

MIB = 1 << 20


def test_known_batches_share_the_budget_and_unknown_ones_get_whole_slots():
    big = {"slots": None, "slot_mb": 128, "available": 1 << 40}
    assert ring_size(batch_bytes=32 * MIB, least=4, **big).slots == 32
    assert ring_size(batch_bytes=MIB, least=4, **big).slots == MAX_SLOTS
    assert ring_size(batch_bytes=600 * MIB, least=7, **big).slots == 7
    unknown = ring_size(batch_bytes=None, least=7, **big)
    assert (unknown.slots, unknown.slot_bytes) == (7, 128 * MIB)
    assert ring_size(batch_bytes=MIB, least=4, **{**big, "slots": 5}).slots == 5


def test_ring_takes_at_most_a_quarter_of_free_memory():
    size = ring_size(batch_bytes=32 * MIB, slots=None, slot_mb=128, least=4, available=1024 * MIB)
    assert size.slots == 8
    assert "quarter" in size.reason
    with pytest.raises(ValueError, match="do not fit"):
        ring_size(batch_bytes=512 * MIB, slots=None, slot_mb=128, least=4, available=1024 * MIB)
    assert available_bytes() > 0


def test_slots_needed_is_the_formula():
    assert slots_needed(step_ms_p95=100, fill_ms=100, workers=4, target=0.95) == 4
    assert slots_needed(step_ms_p95=100, fill_ms=20, workers=1, target=1.0) == 5
    assert slots_needed(step_ms_p95=0, fill_ms=20, workers=1) == 2
    with pytest.raises(ValueError, match="target"):
        slots_needed(step_ms_p95=1, fill_ms=1, workers=1, target=0)
