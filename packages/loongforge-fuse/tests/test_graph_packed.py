"""Packed windows as graphs: one recording for windows of other lengths, each sequence still on its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_fuse import FusionConfig, MicroBatchFuser, PackedLayout, PackRule, packed_attention
from loongforge_fuse.fusion.packing import fill_packed, unpack_rows
from torch import nn


class Packed(nn.Module):
    """Causal attention over packed tokens with positions, and over a second, unpacked input."""

    def __init__(self, width=16):
        super().__init__()
        self.pack_rules = {"tokens": PackRule(lengths="lengths"), "target": PackRule(lengths="lengths")}
        self.position = nn.Embedding(64, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def loss_count(self, batch):
        return torch.tensor([float(n) for n in batch["lengths"]], device=self.out.weight.device)

    def forward(self, batch):
        layout = batch["packed"] if "packed" in batch else PackedLayout.of(batch["lengths"])
        if "packed" in batch:
            tokens, target = batch["tokens"], batch["target"]
        else:
            # One micro-batch alone: the same computation over its own layout.
            device = self.out.weight.device
            layout = PackedLayout.of(batch["lengths"], device)
            tokens, target = (
                torch.cat([row[:n] for row, n in zip(batch[k], batch["lengths"], strict=True)])
                for k in ("tokens", "target")
            )
        x = tokens + self.position(layout.positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(-3)
        y = self.out(packed_attention(q, k, v, layout, causal=True).flatten(1))
        sums = layout.sums((y - target).square().sum(dim=-1)) * batch["weight"]
        counts = layout.sizes.float()
        return {"loss": sums.sum() / counts.sum(), "loss_sum": sums, "loss_count": counts}


def sequence_batch(place, lengths, seed, width=16):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths), width)
    batch = {
        "tokens": torch.randn(shape, generator=generator),
        "target": torch.randn(shape, generator=generator),
        "weight": torch.rand(len(lengths), generator=generator) + 0.5,
        "lengths": list(lengths),
    }
    return place.to(batch)


def window_of(place, seed):
    """Four micro-batches of two sequences whose lengths differ from window to window."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (4, 2), generator=generator).tolist()
    return [sequence_batch(place, n, 10 * seed + i) for i, n in enumerate(sizes)]


def test_windows_of_other_lengths_replay_one_recording_with_their_own_numbers(place):
    ours, theirs = place.pair(Packed)
    runner = place.runner(ours, packed_rows=64)
    fuser = MicroBatchFuser(ours, FusionConfig(layout="pack", data_dependent="allow"), executor=runner)
    plain = MicroBatchFuser(theirs, FusionConfig(fusion_batch_size=1))
    for seed in range(8):
        window = window_of(place, seed)
        ours.zero_grad()
        theirs.zero_grad()
        outcome = fuser.run(window)
        expected = plain.run(window)
        assert outcome.fused, outcome.detail
        torch.testing.assert_close(torch.stack(outcome.micro_losses), torch.stack(expected.micro_losses))
        torch.testing.assert_close(torch.stack(outcome.micro_counts), torch.stack(expected.micro_counts))
        place.same_gradients(ours, theirs)
    assert outcome.graph, runner.stats().failures
    stats = runner.stats()
    assert stats.captures <= 2
    assert stats.replays >= 5


def test_packed_rows_zero_leaves_packed_passes_eager_with_the_reason(place):
    model, _ = place.pair(Packed)
    runner = place.runner(model, packed_rows=0)
    fuser = MicroBatchFuser(model, FusionConfig(layout="pack", data_dependent="allow"), executor=runner)
    for seed in range(3):
        outcome = fuser.run(window_of(place, seed))
    assert outcome.graph_reason == "packed"
    assert outcome.fused


@pytest.mark.parametrize("what", ["list", "lengths"])
def test_a_model_that_reads_lengths_on_the_host_stays_eager_and_is_told_what_to_use(place, what):
    class Reads(Packed):
        def forward(self, batch):
            if "packed" in batch:
                _ = batch["lengths"] if what == "list" else batch["packed"].lengths
            return super().forward(batch)

    model, _ = place.pair(Reads)
    runner = place.runner(model, packed_rows=64)
    fuser = MicroBatchFuser(model, FusionConfig(layout="pack", data_dependent="allow"), executor=runner)
    for seed in range(4):
        outcome = fuser.run(window_of(place, seed))
    assert outcome.graph_reason == "capture_failed"
    why = next(iter(runner.stats().failures.values()))
    assert ("batch['lengths']" if what == "list" else "use the layout's sizes") in why


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_fill_is_a_sequence_of_its_own_that_changes_nothing(lengths, multiple):
    torch.manual_seed(0)
    rows = sum(lengths)
    layout = PackedLayout.of(lengths, keys=("x",))
    x = torch.randn(rows, 2, 4)
    filled = fill_packed({"x": x, "packed": layout, "other": 1}, multiple)
    grown = filled["packed"]
    assert grown.total % multiple == 0
    assert grown.total == filled["x"].shape[0] > rows
    assert grown.longest >= max(*lengths, grown.filled)
    assert grown.lengths == tuple(lengths)
    assert torch.equal(grown.sizes.long(), torch.tensor(lengths))
    on_device = grown.on_device(grown.offsets, grown.segments, grown.positions)
    for causal in (False, True):
        expected = packed_attention(x, x, x, layout, causal=causal)
        for each in (grown, on_device):
            seen = packed_attention(filled["x"], filled["x"], filled["x"], each, causal=causal)
            torch.testing.assert_close(seen[:rows], expected)
            assert torch.isfinite(seen).all()
    torch.testing.assert_close(grown.sums(filled["x"]), layout.sums(x))
    assert torch.equal(unpack_rows(filled["x"], grown), unpack_rows(x, layout))
    # Filling up twice adds nothing.
    assert fill_packed(filled, multiple)["packed"] is grown


def test_fill_in_one_of_two_layouts_is_refused():
    layout = PackedLayout.of([3, 2])
    grown = layout.filled_up(8)
    q, k = torch.randn(8, 1, 4), torch.randn(5, 1, 4)
    with pytest.raises(ValueError, match="fill up both layouts or none"):
        packed_attention(q, k, k, grown, layout)
