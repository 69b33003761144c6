"""A global batch that changes inside an epoch: the rest of the epoch is dealt out anew, each sample once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.order import BegunEpoch, EpochPlan, OrderConfig, epoch_order, group_batches
from loongforge_data.resume import Position, find_position, read_state, state_of
from loongforge_data.testing import ToyDataset, indices_of

LENGTH = 61
TAILS = ["short", "pad", "drop"]


def expected_batches(order, taken, batch_size, world, tail):
    """The global batches of ``order[taken:]`` by slicing lists: the oracle of everything here."""
    order = [int(index) for index in order]
    rest = order[taken:]
    size = batch_size * world
    batches = [rest[first : first + size] for first in range(0, len(rest), size)]
    if batches and len(batches[-1]) < size:
        last = batches.pop()
        wanted = {"short": -(-len(last) // world) * world, "pad": size, "drop": 0}[tail]
        if wanted:
            source = last + order * (1 + wanted // len(order))
            batches.append(source[:wanted])
    return batches


def joined(parts):
    """One global batch from the equal batches of all ranks."""
    parts = [[int(index) for index in part] for part in parts]
    assert len({len(part) for part in parts}) == 1
    return [index for part in parts for index in part]


# -- plans -----------------------------------------------------------------------------------------


@st.composite
def runs(draw):
    """A data set and the stages (configuration, steps) in which an epoch of it is delivered."""
    length = draw(st.integers(0, 200))
    starts = {0} | set(draw(st.lists(st.integers(1, max(1, length - 1)), max_size=12)))
    common = {
        "length": length,
        "shuffle": draw(st.sampled_from(["none", "full", "block"])),
        "seed": draw(st.integers(-3, 99)),
        "tail": draw(st.sampled_from(TAILS)),
        "block_starts": tuple(sorted(s for s in starts if s < max(1, length))),
    }
    stages = []
    groups = {}
    for _ in range(draw(st.integers(2, 4))):
        batch, world = draw(st.integers(1, 6)), draw(st.integers(1, 5))
        # The same global batch asks for the same shuffle, as it always did.
        group = groups.setdefault(batch * world, draw(st.integers(1, 64)))
        config = OrderConfig(batch_size=batch, world_size=world, lanes=world, group=group, **common)
        stages.append((config, draw(st.integers(0, 6))))
    return stages


def resumed(position, built):
    """The position on other ranks, over a state that went through JSON."""
    saved = state_of(
        position.order,
        epoch=position.epoch,
        batch=position.batch,
        begun=position.begun,
        fingerprint="data",
    )
    state = json.loads(json.dumps(saved.to_dict()))
    return find_position(read_state(state), built, "data", reshard=True)


def plans_at(position):
    return [
        EpochPlan(position.order, epoch=position.epoch, rank=rank, begun=position.begun)
        for rank in range(position.order.world_size)
    ]


def deliver(position, steps):
    """Deliver global batches from a position on; also returns the position after them."""
    plans = plans_at(position)
    assert len({plan.num_batches for plan in plans}) == 1
    stop = min(position.batch + steps, plans[0].num_batches)
    batches = [joined([plan.batch(step) for plan in plans]) for step in range(position.batch, stop)]
    after = Position(order=position.order, epoch=position.epoch, batch=stop, begun=position.begun)
    return batches, after


@settings(max_examples=400, deadline=None)
@given(runs(), st.integers(0, 3))
def test_an_epoch_over_changing_ranks_is_one_walk_through_its_order(stages, epoch):
    first = stages[0][0]
    position = Position(order=first, epoch=epoch, batch=0, begun=None)
    order, taken, kept = epoch_order(first, epoch).tolist(), 0, first
    delivered, repeats = [], 0
    for number, (config, steps) in enumerate(stages):
        if number:
            position = resumed(position, config)
            if config.global_batch != kept.global_batch:
                kept = config
                if taken == 0:  # nothing was delivered: a whole epoch of the new ranks
                    order = epoch_order(config, epoch).tolist()
        if number == len(stages) - 1:
            steps = config.length + 1
        wanted = expected_batches(order, taken, config.batch_size, config.world_size, config.tail)
        batches, position = deliver(position, steps)
        assert batches == wanted[:steps]
        delivered += [index for batch in batches for index in batch]
        samples = sum(map(len, batches))
        repeats += max(0, taken + samples - config.length)
        taken = min(config.length, taken + samples)
    assert delivered[:taken] == order[:taken]
    assert delivered[taken:] == (order * 30)[:repeats]  # what the tail repeats is the epoch's start
    last = stages[-1][0]
    if last.tail != "drop":
        assert sorted(delivered[:taken]) == list(range(last.length))
    else:
        assert last.length - taken < last.global_batch
    # The next epoch is a regular one. Its lanes are those of the ranks that made its global batch.
    follow = Position(order=position.order, epoch=epoch + 1, batch=0, begun=None)
    regular = epoch_order(kept, epoch + 1)
    wanted = expected_batches(regular, 0, last.batch_size, last.world_size, last.tail)
    assert deliver(follow, last.length + 1)[0] == wanted


@settings(max_examples=200, deadline=None)
@given(runs(), st.data())
def test_padding_is_counted_and_batches_of_a_group_are_planned_together(stages, data):
    origin, config = stages[0][0], stages[1][0]
    taken = data.draw(st.integers(0, config.length))
    begun = BegunEpoch(origin=origin.pooled(), taken=taken)
    plans = [EpochPlan(config, epoch=1, rank=rank, begun=begun) for rank in range(config.world_size)]
    batches = [joined([plan.batch(step) for plan in plans]) for step in range(plans[0].num_batches)]
    if config.tail != "drop":
        assert plans[0].padded == sum(map(len, batches)) - (config.length - taken)
    batches_of_group = group_batches(origin)
    span = batches_of_group * origin.global_batch
    step = 0
    while step < plans[0].num_batches:
        count = plans[0].left_in_group(step)
        assert count >= 1
        if batches_of_group == 1:
            assert count == plans[0].num_batches - step
        else:
            begins = [(taken + (step + i) * config.global_batch) // span for i in range(count + 1)]
            assert len(set(begins[:-1])) == 1
            assert begins[-1] != begins[0] or step + count == plans[0].num_batches
        step += count


def test_bad_beginnings_are_named():
    config = OrderConfig(length=10, batch_size=2, shuffle="full")
    with pytest.raises(ValueError, match="taken is 11"):
        BegunEpoch(origin=config, taken=11)
    with pytest.raises(ValueError, match="taken is -1"):
        BegunEpoch(origin=config, taken=-1)
    other = OrderConfig(length=10, batch_size=3, shuffle="full", seed=2)
    with pytest.raises(ValueError, match="seed of a begun epoch is 2"):
        EpochPlan(config, epoch=0, rank=0, begun=BegunEpoch(origin=other, taken=3))


# -- loaders ---------------------------------------------------------------------------------------


def make(rank=0, world=1, **changes):
    arguments = {"batch_size": 2, "shuffle": "full", "seed": 4, "persistent_workers": True}
    return ADFEDataLoader(ToyDataset(LENGTH), rank=rank, world_size=world, **{**arguments, **changes})


def ranks(world, **changes):
    return [make(rank, world, **changes) for rank in range(world)]


def take(loaders, count):
    """The next global batches of running loaders."""
    iterators = [iter(loader) for loader in loaders]
    return [joined(indices_of([next(it)])[0] for it in iterators) for _ in range(count)]


def rest_of_epoch(loaders):
    return [joined(parts) for parts in zip(*map(indices_of, loaders), strict=True)]


def whole(world, epoch, **changes):
    loaders = ranks(world, **changes)
    for loader in loaders:
        loader.set_epoch(epoch)
    return rest_of_epoch(loaders)


def flat(batches):
    return [index for batch in batches for index in batch]


def close(*loaders):
    for loader in loaders:
        loader.close()


def saved_by(loaders):
    """The state of all ranks, which is one."""
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert all(state == states[0] for state in states)
    return states[0]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("shuffle", [False, "full", "block"])
def test_three_ranks_become_two_and_four_inside_an_epoch(shuffle, tail):
    changes = {"shuffle": shuffle, "tail": tail}
    order = flat(whole(3, 0, shuffle=shuffle))[:LENGTH]
    three, two, four = (ranks(world, **changes) for world in (3, 2, 4))
    delivered = take(three, 2)
    for loaders, before in ((two, three), (four, two)):
        state = saved_by(before)
        for loader in loaders:
            loader.load_state_dict(state, reshard=True)
        left = expected_batches(order, len(flat(delivered)), 2, len(loaders), tail)
        assert [len(loader) for loader in loaders] == [len(left)] * len(loaders)
        assert (loaders[0].epoch, loaders[0].batch) == (0, 0)
        delivered += take(loaders, 3)
    assert flat(delivered) == order[: 12 + 12 + 24]
    assert rest_of_epoch(four) == expected_batches(order, 48, 2, 4, tail)
    assert (four[0].epoch, four[0].batch, four[0].state_dict()["begun"]) == (1, 0, None)
    assert rest_of_epoch(four) == whole(4, 1, **changes)
    assert len(four[0]) == len(make(0, 4, **changes))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_fresh_and_running_loaders_go_on_with_the_rest(workers, shuffle):
    """Slots that were filled for whole epochs or for another rest are never delivered."""
    changes = {"shuffle": shuffle, "num_workers": workers}
    three = ranks(3, shuffle=shuffle)
    fresh, running = ranks(2, **changes), ranks(2, **changes)
    for epoch in range(2):
        order = flat(whole(3, epoch, shuffle=shuffle))[:LENGTH]
        for loader in three:
            loader.set_epoch(epoch)
        assert flat(take(three, 2)) == order[:12]
        state = saved_by(three)
        # In epoch 0 it stands inside that epoch, in epoch 1 its slots hold that epoch's first whole batches.
        if epoch == 0:
            take(running, 3)
        for loaders in (fresh, running):
            for loader in loaders:
                loader.load_state_dict(state, reshard=True)
            assert rest_of_epoch(loaders) == expected_batches(order, 12, 2, 2, "short")
    following = whole(2, 2, shuffle=shuffle)
    assert rest_of_epoch(fresh) == rest_of_epoch(running) == following
    close(*fresh, *running)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_whole_epoch_after_a_begun_one_of_the_same_number_is_whole(workers):
    two = ranks(2, num_workers=workers)
    three = ranks(3)
    take(three, 2)
    begun = saved_by(three)
    regular = ranks(2)
    take(regular, 1)
    for loader in two:
        loader.load_state_dict(begun, reshard=True)
    take(two, 1)  # slots hold batches 1, 2, ... of the rest
    for loader in two:
        loader.load_state_dict(saved_by(regular))
    assert rest_of_epoch(two) == whole(2, 0)[1:]
    for loader in two:
        loader.load_state_dict(begun, reshard=True)
        loader.set_epoch(0)  # the epoch of the position: keeps it
        assert loader.state_dict()["begun"]["taken"] == 12
        assert len(loader) == 13
        loader.set_epoch(1)
        loader.set_epoch(0)
        assert loader.state_dict()["begun"] is None
    assert rest_of_epoch(two) == whole(2, 0)
    close(*two)


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_a_position_in_a_begun_epoch_is_loaded_on_the_same_and_other_ranks(shuffle):
    """With the same global batch without being asked to deal out anew, and with the same batches."""
    three, two = ranks(3, shuffle=shuffle), ranks(2, shuffle=shuffle)
    take(three, 2)
    state = saved_by(three)
    for loader in two:
        loader.load_state_dict(state, reshard=True)
    take(two, 3)
    state = saved_by(two)
    assert state["batch"] == 3
    left = rest_of_epoch(two)
    following = whole(2, 1, shuffle=shuffle)
    for world, batch_size in ((2, 2), (4, 1), (1, 4)):
        for reshard in (False, True):
            again = ranks(world, batch_size=batch_size, shuffle=shuffle)
            for loader in again:
                loader.load_state_dict(state, reshard=reshard)
                assert loader.batch == 3
            assert rest_of_epoch(again)[:-1] == left[:-1]
            assert rest_of_epoch(again)[:-1] == following[:-1]


def test_the_same_global_batch_with_reshard_is_the_plain_position():
    running = ranks(4, batch_size=1, shuffle="block")
    take(running, 5)
    plain, asked = (ranks(2, shuffle="block") for _ in range(2))
    for one, other in zip(plain, asked, strict=True):
        one.load_state_dict(saved_by(running))
        other.load_state_dict(saved_by(running), reshard=True)
        assert one.state_dict() == other.state_dict() == saved_by(running)
    assert rest_of_epoch(plain) == rest_of_epoch(asked)


def test_lanes_taken_over_earlier_are_given_up_with_another_global_batch():
    """Ranks that were there before and ranks that are new agree on the following epochs."""
    four, three = ranks(4, batch_size=1, shuffle="block"), ranks(3, shuffle="block")
    take(three, 2)
    old, new = make(0, 2, shuffle="block"), make(1, 2, shuffle="block")
    old.load_state_dict(saved_by(four))
    assert old.state_dict()["lanes"] == 4
    for loader in (old, new):
        loader.load_state_dict(saved_by(three), reshard=True)
    assert saved_by([old, new])["lanes"] == 2
    rest_of_epoch([old, new])
    assert rest_of_epoch([old, new]) == whole(2, 1, shuffle="block")


def test_nothing_left_is_the_end_of_the_epoch_and_nothing_delivered_its_start():
    three = ranks(3)
    iterators = [iter(loader) for loader in three]
    for _ in range(len(three[0])):
        for iterator in iterators:
            next(iterator)
    state = saved_by(three)
    assert (state["epoch"], state["batch"]) == (0, 11)
    two = ranks(2)
    for loader in two:
        loader.load_state_dict(state, reshard=True)
        assert len(loader) == 0
    assert rest_of_epoch(two) == []
    assert (two[0].epoch, two[0].batch) == (1, 0)
    assert rest_of_epoch(two) == whole(2, 1)
    endless = make(0, 2, infinite=True)
    endless.load_state_dict(state, reshard=True)
    other = make(0, 2)
    other.set_epoch(1)
    assert indices_of([next(iter(endless))])[0] == indices_of([next(iter(other))])[0]
    # At an epoch's start there is nothing to keep: lanes are those of the new ranks.
    for loader in three:
        loader.set_epoch(5)
    two = ranks(2)
    for loader in two:
        loader.load_state_dict(saved_by(three), reshard=True)
    assert saved_by(two)["begun"] is None
    assert rest_of_epoch(two) == whole(2, 5)


def test_infinite_loaders_go_on_from_the_rest_to_whole_epochs():
    three = ranks(3)
    take(three, 9)
    loader = make(0, 1, infinite=True, num_workers=2)
    loader.load_state_dict(saved_by(three), reshard=True)
    wanted = expected_batches(flat(whole(3, 0))[:LENGTH], 54, 2, 1, "short") + whole(1, 1)
    iterator = iter(loader)
    assert [indices_of([next(iterator)])[0] for _ in range(20)] == wanted[:20]
    assert (loader.epoch, loader.batch) == (1, 16)
    loader.close()


def test_what_drop_left_out_on_the_old_ranks_belongs_to_the_rest():
    many = ranks(6, batch_size=5, drop_last=True)
    batches = take(many, 2)
    two = ranks(2, batch_size=1, drop_last=True)
    for loader in two:
        loader.load_state_dict(saved_by(many), reshard=True)
    assert len(many[0]) == 2
    assert len(two[0]) == 0  # one sample is left, a global batch are two
    one = make(batch_size=1, drop_last=True)
    one.load_state_dict(saved_by(many), reshard=True)
    assert sorted(flat(batches) + flat(indices_of(one))) == list(range(LENGTH))


# -- what is refused -------------------------------------------------------------------------------


def old_format(state):
    return {**{k: v for k, v in state.items() if k not in ("group", "begun")}, "format": 1}


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_states_of_the_first_format_are_read(shuffle):
    three = ranks(3, shuffle=shuffle)
    take(three, 2)
    state = old_format(saved_by(three))
    assert set(state) == {
        *("epoch", "batch", "order", "length", "global_batch", "seed", "shuffle", "tail", "lanes"),
        *("fingerprint", "format"),
    }
    again, two = ranks(3, shuffle=shuffle), ranks(2, shuffle=shuffle)
    for loader in again:
        loader.load_state_dict(state)
    for loader in two:
        loader.load_state_dict(state, reshard=True)
    assert rest_of_epoch(again) == whole(3, 0, shuffle=shuffle)[2:]
    order = flat(whole(3, 0, shuffle=shuffle))[:LENGTH]
    assert rest_of_epoch(two) == expected_batches(order, 12, 2, 2, "short")


@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_another_global_batch_is_refused_with_the_way_out(shuffle):
    three, loader = ranks(3, shuffle=shuffle), make(1, 2, shuffle=shuffle)
    take(three, 2)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(ValueError, match=r"global batch .* is 4 here and 6 in the state; .*reshard=True"):
        loader.load_state_dict(saved_by(three))
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    "other, words",
    [
        ({"seed": 5}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"drop_last": True}, "tail"),
    ],
)
def test_everything_but_the_global_batch_is_still_checked(other, words):
    state = make(0, 3).state_dict()
    with pytest.raises(ValueError, match=words):
        make(0, 2, **other).load_state_dict(state, reshard=True)
    with pytest.raises(ValueError, match="number of samples"):
        ADFEDataLoader(ToyDataset(11), 2, shuffle=True, seed=4).load_state_dict(state, reshard=True)
    with pytest.raises(ValueError, match="fingerprint"):
        make(0, 2).load_state_dict({**state, "fingerprint": "other"}, reshard=True)


def test_the_blocks_of_the_old_order_must_be_known():
    state = make(0, 3, shuffle="block", group=12).state_dict()
    other = make(0, 2, shuffle="block", group=24)
    other.load_state_dict(state, reshard=True)
    with pytest.raises(ValueError, match="group is 24 here and not known in the state"):
        other.load_state_dict(old_format(state), reshard=True)
    with pytest.raises(ValueError, match="block structure"):
        other.load_state_dict({**state, "lanes": 2}, reshard=True)


@pytest.mark.parametrize("begun, words", [(3, "begun"), ({"taken": 3}, "keys"), (None, "keys")])
def test_damaged_beginnings_are_refused(begun, words):
    state = make(0, 2).state_dict()
    damaged = (
        {**state, "begun": begun} if begun is not None else {k: v for k, v in state.items() if k != "begun"}
    )
    with pytest.raises(ValueError, match=words):
        make(0, 2).load_state_dict(damaged)
    place = {"global_batch": 6, "lanes": 3, "group": 512, "taken": 62}
    with pytest.raises(ValueError, match="taken is 62"):
        make(0, 2).load_state_dict({**state, "begun": place})


def test_the_device_prefetcher_passes_the_change_on():
    pytest.importorskip("torch")
    from loongforge_data.device import DevicePrefetcher

    three = ranks(3)
    take(three, 2)
    state = saved_by(three)
    two = [DevicePrefetcher(loader, "cpu") for loader in ranks(2)]
    for prefetcher in two:
        with pytest.raises(ValueError, match="reshard=True"):
            prefetcher.load_state_dict(state)
        prefetcher.load_state_dict(state, reshard=True)
    order = flat(whole(3, 0))[:LENGTH]
    assert rest_of_epoch(two) == expected_batches(order, 12, 2, 2, "short")
