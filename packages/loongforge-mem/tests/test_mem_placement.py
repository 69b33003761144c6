"""Who serves a step: run fit while it wastes little, a plan otherwise, on a device without memory."""

from __future__ import annotations

import pytest
from loongforge_mem import _core

MIB = 1 << 20


def step(heap: _core.Heap, sizes: list[int], keep: int = 3) -> dict:
    """Temporaries of growing size, a block that stays after each: no hole holds the next temporary."""
    heap.begin_step(0)
    kept = []
    for size in sizes:
        temporary = heap.alloc(size * MIB)
        kept.append(heap.alloc(keep * MIB))
        heap.free(temporary)
    for block in kept:
        heap.free(block)
    return heap.end_step()


WASTEFUL = list(range(40, 80, 2))
FRUGAL = [40] * 20


def test_a_plan_takes_over_when_run_fit_wastes_more_than_the_share():
    heap = _core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0)
    heap.set_plan_rule("above", 0.03)
    first = step(heap, WASTEFUL)
    assert first["source"] == "profiled"
    assert first["planned"]
    stats = heap.stats()
    assert stats["placement"] == "plan"
    assert stats["placement_reason"].startswith("the plan needs ")
    assert stats["placement_spare_bytes"] > 0.03 * stats["placement_held_bytes"]
    assert step(heap, WASTEFUL)["source"] == "replayed"
    assert step(heap, WASTEFUL)["planned_hits"] == 2 * len(WASTEFUL)
    assert step(heap, [size + 9 for size in WASTEFUL])["planned"], "larger shapes are learned"
    assert heap.stats()["placement_reason"] == stats["placement_reason"], "and the reason stays"


def test_a_share_that_the_plan_cannot_save_leaves_run_fit():
    heap = _core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0)
    heap.set_plan_rule("above", 0.6)
    for expected in ("profiled", "run_fit", "run_fit"):
        report = step(heap, WASTEFUL)
        assert report["source"] == expected
        assert report["placement"] == "run_fit"
    assert heap.stats()["plans"] == 0
    assert heap.stats()["placement_reason"].startswith("28.1 % of what run fit holds is more than")


def test_a_saving_below_one_piece_of_device_memory_is_no_saving():
    heap = _core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0, commits=True)
    heap.set_plan_rule("above", 0.0)
    for _ in range(3):
        heap.begin_step(0)
        blocks = [heap.alloc(n * MIB) for n in (3, 5, 9)]
        for block in blocks:
            heap.free(block)
        heap.end_step()
    assert heap.stats()["placement"] == "run_fit"


def test_a_step_that_wastes_nothing_is_not_planned():
    heap = _core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0)
    heap.set_plan_rule("above", 0.03)
    for _ in range(3):
        report = step(heap, FRUGAL)
    assert report["source"] == "run_fit"
    assert "is more than the steps need" in heap.stats()["placement_reason"]


def test_shapes_that_begin_to_waste_later_are_planned_then():
    heap = _core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0)
    heap.set_plan_rule("above", 0.03)
    assert not step(heap, FRUGAL)["planned"]
    assert step(heap, WASTEFUL)["planned"]
    assert step(heap, WASTEFUL)["source"] == "replayed"


def test_tight_memory_is_planned_for_less():
    roomy = _core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0)
    roomy.set_plan_rule("above", 0.6)
    step(roomy, WASTEFUL)
    assert roomy.stats()["placement"] == "run_fit"
    tight = _core.Heap("fake", initial_bytes=roomy.stats()["touched_bytes.peak"], grow_bytes=0)
    tight.set_plan_rule("above", 0.6)
    step(tight, WASTEFUL)
    assert tight.stats()["placement"] == "plan"
    assert tight.stats()["placement_reason"].startswith("memory is tight and the plan needs ")


def test_steps_on_another_stream_are_not_planned_and_say_why():
    heap = _core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0)
    heap.set_plan_rule("above", 0.03)
    heap.alloc(MIB, stream=0)
    for _ in range(3):
        heap.begin_step(5)
        kept = []
        for size in WASTEFUL:
            temporary = heap.alloc(size * MIB, stream=5)
            kept.append(heap.alloc(3 * MIB, stream=5))
            heap.free(temporary)
        for block in kept:
            heap.free(block)
        report = heap.end_step()
    assert report["source"] == "run_fit"
    assert report["placement"] == "run_fit"
    assert "make the model on the stream that trains it" in heap.stats()["placement_reason"]


def test_always_and_never_are_what_they_say():
    always, never = (_core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0) for _ in range(2))
    always.set_plan_rule("always")
    never.set_plan_rule("never")
    assert step(always, FRUGAL)["planned"]
    assert step(always, FRUGAL)["source"] == "replayed"
    assert step(never, WASTEFUL)["source"] == "run_fit"
    assert step(never, WASTEFUL)["source"] == "run_fit"
    assert never.stats()["placement_reason"] == "the settings or a loaded plan ask for it"


@pytest.mark.parametrize(("rule", "share"), [("sometimes", 0.0), ("above", 1.0), ("above", float("nan"))])
def test_an_unknown_rule_says_what_is_allowed(rule, share):
    with pytest.raises(ValueError, match="allowed: 'always', 'never', 'above'"):
        _core.Heap("fake").set_plan_rule(rule, share)


def test_blocks_that_stay_lie_together_within_a_step():
    """Temporaries between blocks that stay leave no holes behind them: long-lived sizes take the far end."""
    heap = _core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0)
    for _ in range(2):
        heap.begin_step(0)
        activations = [heap.alloc(8 * MIB) for _ in range(32)]
        gradients = []
        for activation in reversed(activations):
            temporary = heap.alloc(5 * MIB)
            gradients.append(heap.alloc(6 * MIB))
            heap.free(temporary)
            heap.free(activation)
        for gradient in gradients:
            heap.free(gradient)
        report = heap.end_step()
    waste = heap.stats()["touched_bytes.peak"] / report["peak_requested_bytes"]
    assert waste < 1.06


def test_growing_and_trimming_for_ever_does_not_widen_the_index():
    heap = _core.Heap("fake", grow_bytes=64 * MIB)
    keep = heap.alloc(MIB)
    for turn in range(300):
        block = heap.alloc((100 + turn % 7) * MIB)
        heap.free(block)
        heap.trim()
    assert heap.state()[3] * 64 * 1024 < 1 << 30, "unit numbers of segments that are gone are used again"
    assert heap.stats()["device_frees"] == 300
    heap.free(keep)
