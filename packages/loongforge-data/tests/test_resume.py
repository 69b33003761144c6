"""A saved position continues exactly: at every batch, on other workers and ranks, and only where it
belongs."""

from __future__ import annotations

import json

import pytest
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.testing import ToyDataset, indices_of


def make(**changes):
    arguments = {"batch_size": 2, "num_workers": 0, "shuffle": True, "seed": 4, "persistent_workers": True}
    return ADFEDataLoader(ToyDataset(11), **{**arguments, **changes})


def epochs(loader, count):
    return [indices_of(loader) for _ in range(count)]


@pytest.mark.parametrize("shuffle", [False, "full", "block"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resume_at_every_batch_of_three_epochs(workers, shuffle):
    """Faults D54 and the end-of-epoch state: nothing repeated, nothing lost, no empty epoch."""
    whole = epochs(make(shuffle=shuffle), 3)
    loader = make(shuffle=shuffle)
    fresh = make(shuffle=shuffle, num_workers=workers)
    used = make(shuffle=shuffle, num_workers=workers)
    next(iter(used))
    for epoch in range(3):
        for number, batch in enumerate(loader):
            assert indices_of([batch]) == [whole[epoch][number]]
            state = json.loads(json.dumps(loader.state_dict()))
            for target in (fresh, used):
                target.load_state_dict(state)
                assert indices_of(target) == whole[epoch][number + 1 :]
                assert (target.epoch, target.batch) == (epoch + 1, 0)
        fresh.load_state_dict(loader.state_dict())
        assert indices_of(fresh) == (whole[epoch + 1] if epoch < 2 else epochs(make(shuffle=shuffle), 4)[3])
    fresh.close()
    used.close()


def test_prefetched_batches_are_not_lost():
    loader = make(num_workers=3)
    iterator = iter(loader)
    first = indices_of([next(iterator)])
    state = loader.state_dict()
    rest = indices_of(iterator)
    again = make(num_workers=1)
    again.load_state_dict(state)
    assert indices_of(again) == rest
    assert first + rest == epochs(make(), 1)[0]
    loader.close()
    again.close()


def test_iterator_made_before_loading_ends_and_the_next_one_is_right():
    loader = make(num_workers=2)
    whole = epochs(make(), 1)[0]
    old = iter(loader)
    next(old)
    other = make()
    iterator = iter(other)
    next(iterator), next(iterator), next(iterator)
    loader.load_state_dict(other.state_dict())
    assert list(old) == []
    assert indices_of(loader) == whole[3:]
    loader.close()


@pytest.mark.parametrize("shuffle", [False, "full", "block"])
@pytest.mark.parametrize("old, new", [((4, 2), (2, 4)), ((2, 4), (8, 1)), ((8, 1), (1, 8))])
def test_other_world_size_with_the_same_global_batch_continues_the_same_order(shuffle, old, new):
    """Faults: multi-process resume must keep the epoch's permutation and the padding of uneven ends."""

    def ranks(batch, world, state=None):
        result = []
        for rank in range(world):
            loader = ADFEDataLoader(
                ToyDataset(61), batch, shuffle=shuffle, seed=1, rank=rank, world_size=world, drop_last=True
            )
            if state is not None:
                loader.load_state_dict(state)
            result.append(loader)
        return result

    def global_batches(loaders):
        return [
            sorted(i for part in parts for i in part) for parts in zip(*map(indices_of, loaders), strict=True)
        ]

    whole = global_batches(ranks(*old))
    loader = ranks(*old)[0]
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    assert global_batches(ranks(*new, state=loader.state_dict())) == whole[3:]


def test_uneven_end_after_resume_pads_as_before():
    """Fault: 10 samples, batch 2, 2 ranks, resume after step 1; rank 1 must see the same padded end."""

    def loader(rank):
        return ADFEDataLoader(ToyDataset(10), 2, rank=rank, world_size=2, tail="pad")

    whole = [indices_of(loader(rank)) for rank in (0, 1)]
    assert whole[1] == [[2, 3], [6, 7], [0, 1]]
    for rank in (0, 1):
        running = loader(rank)
        next(iter(running))
        resumed = loader(rank)
        resumed.load_state_dict(running.state_dict())
        assert indices_of(resumed) == whole[rank][1:]


@pytest.mark.parametrize(
    "other, words",
    [
        ({"seed": 5}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"batch_size": 3}, "global batch"),
        ({"drop_last": True}, "tail"),
    ],
)
def test_state_of_another_order_is_refused_by_name(other, words):
    with pytest.raises(ValueError, match=words):
        make(**other).load_state_dict(make().state_dict())


def test_state_of_another_data_set_or_version_is_refused():
    class Named(ToyDataset):
        fingerprint = "a"

    state = ADFEDataLoader(Named(11), 2).state_dict()
    with pytest.raises(ValueError, match="fingerprint"):
        ADFEDataLoader(ToyDataset(11), 2).load_state_dict(state)
    with pytest.raises(ValueError, match="number of samples"):
        ADFEDataLoader(Named(12), 2).load_state_dict(state)
    with pytest.raises(ValueError, match="format"):
        ADFEDataLoader(Named(11), 2).load_state_dict({**state, "format": 99})
    with pytest.raises(ValueError, match="keys"):
        ADFEDataLoader(Named(11), 2).load_state_dict({k: v for k, v in state.items() if k != "epoch"})


def test_set_epoch_keeps_a_position_inside_the_epoch_and_moves_otherwise():
    loader = make()
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert (loader.epoch, loader.batch) == (0, 1)
    loader.set_epoch(2)
    assert (loader.epoch, loader.batch) == (2, 0)
    assert indices_of(loader) == epochs(make(), 3)[2]
    with pytest.raises(ValueError, match="epoch"):
        loader.set_epoch(-1)


def test_infinite_mode_goes_on_with_the_next_epoch():
    loader = make(infinite=True)
    iterator = iter(loader)
    got = [indices_of([next(iterator)])[0] for _ in range(14)]
    whole = epochs(make(), 3)
    assert got == (whole[0] + whole[1] + whole[2])[:14]
    assert (loader.epoch, loader.batch) == (2, 2)


def test_look_ahead_into_the_next_epoch_is_used_or_thrown_away():
    """Slots are filled over the border of epochs; another epoch or a loaded state starts where it says."""
    whole = epochs(make(), 4)
    with make(num_workers=2) as loader:
        assert indices_of(loader) == whole[0]
        assert (loader.epoch, loader.batch) == (1, 0)
        loader.set_epoch(1)
        assert indices_of(loader) == whole[1]
        loader.set_epoch(3)
        assert indices_of(loader) == whole[3]
        loader.set_epoch(2)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        assert indices_of(iterator) == whole[2][1:]
        loader.load_state_dict(state)
        assert indices_of(loader) == whole[2][1:]
        assert indices_of(loader) == whole[3]
    with make(num_workers=2, lookahead=False) as loader:
        assert [indices_of(loader) for _ in range(2)] == whole[:2]
