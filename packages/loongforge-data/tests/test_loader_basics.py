"""The loader over plain map-style data sets: order, state, tail."""

from __future__ import annotations

import pytest
from loongforge_data.loader import ADFEDataLoader


class Squares:
    """Sample i is {"i": i, "square": i * i}."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {"i": index, "square": index * index}


def ids(loader: ADFEDataLoader[dict[str, object]]) -> list[list[int]]:
    return [[int(v) for v in batch["i"]] for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [i for batch in batches for i in batch]


def test_every_sample_comes_once_per_epoch_and_epochs_differ():
    loader = ADFEDataLoader(Squares(23), batch_size=4, shuffle=True, seed=3)
    first, second = ids(loader), ids(loader)
    assert sorted(flat(first)) == list(range(23))
    assert sorted(flat(second)) == list(range(23))
    assert first != second
    assert ids(ADFEDataLoader(Squares(23), batch_size=4, shuffle=True, seed=3)) == first


@pytest.mark.parametrize("shuffle", [False, "full", "block"])
def test_union_of_ranks_is_the_batch_of_one_rank(shuffle):
    whole = ids(ADFEDataLoader(Squares(46), batch_size=8, shuffle=shuffle, drop_last=True))
    parts = [
        ids(ADFEDataLoader(Squares(46), batch_size=4, shuffle=shuffle, drop_last=True, rank=r, world_size=2))
        for r in (0, 1)
    ]
    joined = [a + b for a, b in zip(*parts, strict=True)]
    if shuffle != "block":
        assert joined == whole
    assert len({i for row in joined for i in row}) == 40


def test_state_from_another_dataset_is_refused():
    state = ADFEDataLoader(Squares(10), batch_size=2).state_dict()
    with pytest.raises(ValueError, match="number of samples"):
        ADFEDataLoader(Squares(12), batch_size=2).load_state_dict(state)
