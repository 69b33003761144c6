"""Frozen features come back exactly, within bounds, and never where reuse would be wrong."""

import pytest
import torch
from loongforge_fuse import FrozenCacheConfig, FrozenFeatureCache, FrozenReuseError
from loongforge_fuse.frozen.cache import weights_hash
from torch import nn


def tower():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16)).requires_grad_(False).eval()


class Calls:
    """Computes rows of a batch and counts them."""

    def __init__(self, module, inputs):
        self.module, self.inputs, self.rows = module, inputs, []

    def __call__(self, rows):
        self.rows.extend(rows)
        return self.module(self.inputs[rows])


def enabled(**kwargs):
    return FrozenCacheConfig(enabled=True, **kwargs)


def test_it_is_off_by_default_and_then_computes_everything():
    module = tower()
    cache = FrozenFeatureCache(module)
    calls = Calls(module, torch.randn(3, 8))
    for _ in range(2):
        cache([0, 1, 2], calls)
    assert len(calls.rows) == 6


def test_features_are_equal_and_computed_once_per_sample():
    module = tower()
    cache = FrozenFeatureCache(module, enabled())
    inputs = torch.randn(4, 8)
    calls = Calls(module, inputs)
    first = cache([10, 11, 12, 13], calls)
    assert torch.equal(first, module(inputs))
    mixed = cache([13, 99, 10, 11], Calls(module, inputs[[3, 2, 0, 1]]))
    assert torch.equal(mixed[[0, 2, 3]], first[[3, 0, 1]])
    assert calls.rows == [0, 1, 2, 3]
    stats = cache.stats()
    assert stats.hits["host"] == 3
    assert stats.misses == 5
    assert not first.requires_grad


def test_memory_is_bounded_and_the_least_recent_goes_first():
    module = tower()
    cache = FrozenFeatureCache(module, enabled(host_bytes=3 * 64))
    inputs = torch.randn(1, 8)
    for sample in (0, 1, 2, 0, 3):
        cache([sample], Calls(module, inputs))
        assert cache.stats().bytes["host"] <= 3 * 64
    again = Calls(module, inputs)
    cache([0], again)
    assert not again.rows
    cache([1], again)
    assert again.rows == [0]
    assert cache.stats().evictions["host"] == 2


def test_device_tier_is_filled_first_and_bounded():
    module = tower()
    cache = FrozenFeatureCache(module, enabled(device_bytes=2 * 64))
    for sample in range(4):
        cache([sample], Calls(module, torch.randn(1, 8)))
    held = cache.stats().bytes
    assert held["device"] == 2 * 64
    assert held["host"] == 2 * 64


def test_disk_takes_what_leaves_memory_and_survives_the_process(tmp_path):
    module = tower()
    config = enabled(host_bytes=64, disk_bytes=10 * 64, folder=tmp_path)
    cache = FrozenFeatureCache(module, config)
    inputs = torch.randn(3, 8)
    for sample in range(3):
        cache([sample], Calls(module, inputs[[sample]]))
    assert len(list(tmp_path.glob("*.pt"))) == 2
    fresh = FrozenFeatureCache(tower(), config)
    calls = Calls(module, inputs)
    got = fresh([0, 1, 2], calls)
    torch.testing.assert_close(got, module(inputs))
    assert calls.rows == [2]
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:20])
    damaged = FrozenFeatureCache(tower(), config)
    calls = Calls(module, inputs)
    torch.testing.assert_close(damaged([0, 1, 2], calls), module(inputs))
    assert sorted(calls.rows) == [0, 1, 2]


@pytest.mark.parametrize("how", ["in_place", "load", "replace"])
def test_changed_weights_drop_everything(how):
    module = tower()
    cache = FrozenFeatureCache(module, enabled())
    inputs = torch.randn(1, 8)
    cache([0], Calls(module, inputs))
    if how == "in_place":
        module[0].weight.mul_(2)
    elif how == "load":
        module.load_state_dict({k: v * 2 for k, v in module.state_dict().items()})
    else:
        module[0].weight.data = module[0].weight.data * 2
    calls = Calls(module, inputs)
    assert torch.equal(cache([0], calls), module(inputs))
    assert calls.rows == [0]
    assert cache.stats().invalidated == 1


def test_moved_but_equal_weights_keep_everything():
    module = tower()
    cache = FrozenFeatureCache(module, enabled())
    cache([0], Calls(module, torch.randn(1, 8)))
    module[0].weight.data = module[0].weight.data.clone()
    calls = Calls(module, torch.randn(1, 8))
    cache([0], calls)
    assert not calls.rows


def test_the_transform_is_part_of_the_key():
    module = tower()
    cache = FrozenFeatureCache(module, enabled(augmentation="keyed"))
    cache([0], Calls(module, torch.randn(1, 8)), transform="crop 3")
    calls = Calls(module, torch.randn(1, 8))
    cache([0], calls, transform="crop 4")
    assert calls.rows == [0]
    with pytest.raises(FrozenReuseError, match="transform"):
        cache([0], calls)


def trains(module):
    module[2].requires_grad_(True)


def drops(module):
    module.append(nn.Dropout(0.1))
    module.train()


def normalises(module):
    module.append(nn.BatchNorm1d(16).requires_grad_(False))
    module.train()


@pytest.mark.parametrize(("change", "match"), [(trains, "trains"), (drops, "10%"), (normalises, "batch")])
def test_it_refuses_what_makes_reuse_wrong_also_later(change, match):
    module = tower()
    cache = FrozenFeatureCache(module, enabled())
    change(module)
    with pytest.raises(FrozenReuseError, match=match):
        cache([0], Calls(module, torch.randn(1, 8)))
    with pytest.raises(FrozenReuseError, match=match):
        FrozenFeatureCache(module, enabled())


def test_random_augmentation_is_refused_and_settings_are_checked(tmp_path):
    with pytest.raises(FrozenReuseError, match="random"):
        FrozenFeatureCache(tower(), enabled(augmentation="random"))
    with pytest.raises(ValueError, match="folder"):
        FrozenCacheConfig(disk_bytes=1)
    with pytest.raises(ValueError, match="host_bytes"):
        FrozenCacheConfig(host_bytes=-1)
    with pytest.raises(ValueError, match="augmentation"):
        FrozenCacheConfig(augmentation="some")


def test_the_weights_hash_sees_values_order_and_names():
    module = tower()
    before = weights_hash(module)
    assert before == weights_hash(tower())
    flipped = tower()
    flipped[0].weight.data = flipped[0].weight.data.flip(0)
    assert weights_hash(flipped) != before
    half = tower().to(torch.bfloat16)
    assert weights_hash(half) != before


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_sample_that_stands_in_a_batch_twice_is_computed_once_and_kept(tier, tmp_path):
    module = tower()
    settings = {} if tier == "host" else {"host_bytes": 0, "disk_bytes": 1000, "folder": tmp_path}
    cache = FrozenFeatureCache(module, enabled(**settings))
    inputs = torch.randn(2, 8)[[0, 1, 0]]
    calls = Calls(module, inputs)
    first = cache([5, 6, 5], calls)
    assert calls.rows == [0, 1]
    assert torch.equal(first, module(inputs[:2])[[0, 1, 0]])
    again = Calls(module, inputs)
    assert torch.equal(cache([5, 6, 5], again), first)
    assert again.rows == []
    assert cache.stats().bytes[tier] == 2 * 64


def test_writing_a_sample_anew_keeps_its_file(tmp_path):
    module = tower()
    cache = FrozenFeatureCache(module, enabled(host_bytes=0, disk_bytes=1000, folder=tmp_path))
    inputs = torch.randn(1, 8)
    features = cache([1], Calls(module, inputs))
    key = next(iter(cache._tiers["disk"]))
    cache._put(key, features[0])
    again = Calls(module, inputs)
    assert torch.equal(cache([1], again), features)
    assert again.rows == []
    assert cache.stats().bytes["disk"] == 64
