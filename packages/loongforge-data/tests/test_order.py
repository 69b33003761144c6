"""The order: pure functions with golden values, and how well the block shuffle mixes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_data.order import EpochPlan, OrderConfig, epoch_order, mixing_quality, permutation


@st.composite
def configs(draw):
    length = draw(st.integers(0, 300))
    starts = {0} | set(draw(st.lists(st.integers(1, max(1, length - 1)), max_size=20))) if length > 1 else {0}
    world = draw(st.integers(1, 5))
    return OrderConfig(
        length=length,
        batch_size=draw(st.integers(1, 9)),
        world_size=world,
        lanes=world,
        shuffle=draw(st.sampled_from(["none", "full", "block"])),
        seed=draw(st.integers(-3, 99)),
        tail=draw(st.sampled_from(["short", "pad", "drop"])),
        block_starts=tuple(sorted(s for s in starts if s < max(1, length))),
        group=draw(st.integers(1, 64)),
    )


@settings(max_examples=200, deadline=None)
@given(configs(), st.integers(0, 3))
def test_every_sample_once_plus_declared_padding_on_equal_ranks(config, epoch):
    order = epoch_order(config, epoch)
    assert sorted(order.tolist()) == list(range(config.length))
    plans = [EpochPlan(config, epoch=epoch, rank=r) for r in range(config.world_size)]
    assert len({len(p) for p in plans}) == 1
    batches = [[p.batch(t) for p in plans] for t in range(len(plans[0]))]
    for row in batches:
        assert len({len(b) for b in row}) == 1
    flat = [int(i) for row in batches for b in row for i in b]
    counts = np.bincount(flat, minlength=config.length)
    if config.tail == "drop":
        assert len(flat) == config.length // config.global_batch * config.global_batch
        assert (counts <= 1).all()
    else:
        assert len(flat) == config.length + plans[0].padded
        assert config.length == 0 or (counts >= 1).all()


def test_orders_are_pinned():
    """Checkpoints rely on these orders; a change here breaks every saved position."""
    assert permutation(10, "full", 0, 0).tolist() == GOLDEN_PERMUTATION
    block = OrderConfig(
        length=100, batch_size=4, shuffle="block", block_starts=tuple(range(0, 100, 10)), group=20
    )
    digest = hashlib.sha256(epoch_order(block, 3).tobytes()).hexdigest()[:16]
    assert digest == GOLDEN_BLOCK


GOLDEN_PERMUTATION = [3, 0, 1, 7, 4, 6, 9, 8, 5, 2]
GOLDEN_BLOCK = "9c6f3256590037d6"


def test_block_shuffle_needs_each_block_in_one_group_and_mixes_well():
    starts = tuple(range(0, 4000, 30))
    config = OrderConfig(length=4000, batch_size=16, shuffle="block", block_starts=starts, group=512)
    order = epoch_order(config, 0)
    block = np.searchsorted(starts, order, side="right")
    groups = [set(block[i : i + 512]) for i in range(0, 4000 // 16 * 16, 512)]
    twice = sum(len(g) for g in groups) - len(set().union(*groups))
    assert twice <= len(groups)
    full = OrderConfig(length=4000, batch_size=16, shuffle="full")
    assert mixing_quality(epoch_order(full, 0), 16, starts) == pytest.approx(1.0, abs=0.03)
    assert 0.6 < mixing_quality(order, 16, starts) < 1.0
    assert mixing_quality(np.arange(4000), 16, starts) < 0.2


def test_epochs_and_seeds_differ_and_global_state_does_not_matter():
    """Fault D51."""
    config = OrderConfig(length=50, batch_size=2, shuffle="full")
    first = epoch_order(config, 0)
    np.random.seed(0)  # noqa: NPY002
    np.random.rand(7)  # noqa: NPY002
    np.testing.assert_array_equal(first, epoch_order(config, 0))
    assert not np.array_equal(first, epoch_order(config, 1))


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"length": -1}, "length"),
        ({"group": 0}, "group"),
        ({"shuffle": "block", "lanes": 3, "block_starts": (0,)}, "lanes"),
        ({"shuffle": "block", "block_starts": (3, 1)}, "block_starts"),
    ],
)
def test_bad_configurations_are_named(changes, word):
    with pytest.raises(ValueError, match=word):
        OrderConfig(**{"length": 10, "batch_size": 2, **changes})
    plan = OrderConfig(length=10, batch_size=2)
    with pytest.raises(ValueError, match="rank"):
        EpochPlan(plan, epoch=0, rank=1)
    with pytest.raises(ValueError, match="step"):
        EpochPlan(plan, epoch=0, rank=0).batch(5)
