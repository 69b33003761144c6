"""Mixed shapes: padding with masks, packing with isolation, and the cost model that chooses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_fuse import (
    CostModel,
    FusionConfig,
    MicroBatchFuser,
    PackedLayout,
    PackRule,
    PadRule,
    RefusalReason,
    packed_attention,
)
from loongforge_fuse.fusion.batch import JoinError, join, pad_to
from loongforge_fuse.fusion.packing import first_fit, pack_rows, unpack_rows
from loongforge_fuse.testing import TinyVLA, tiny_batch
from torch import nn
from torch.nn import functional


class Sequences(nn.Module):
    """Self-attention over tokens with positions; runs padded (key mask) and packed."""

    def __init__(self, width=16):
        super().__init__()
        self.pad_rules = {"tokens": PadRule(), "target": PadRule()}
        self.pack_rules = {"tokens": PackRule(lengths="lengths"), "target": PackRule(lengths="lengths")}
        self.position = nn.Embedding(64, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def loss_count(self, batch):
        return torch.tensor([float(n) for n in batch["lengths"]])

    def forward(self, batch):
        tokens, lengths = batch["tokens"], batch["lengths"]
        if "packed" in batch:
            layout = batch["packed"]
            x = tokens + self.position(layout.positions)
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).unbind(-3)
            y = self.out(packed_attention(q, k, v, layout, causal=True).flatten(1))
            sums = layout.sums((y - batch["target"]).square().sum(dim=-1))
        else:
            steps = torch.arange(tokens.shape[1])
            valid = steps[None, :] < torch.tensor(lengths)[:, None]
            x = tokens + self.position(steps)
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            mask = valid[:, None, None, :] & (steps[:, None] >= steps[None, :])
            y = self.out(
                functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
            )
            sums = ((y - batch["target"]).square().sum(dim=-1) * valid).sum(dim=1)
        counts = torch.tensor([float(n) for n in lengths])
        return {"loss": sums.sum() / counts.sum(), "loss_sum": sums, "loss_count": counts}


def sequence_batch(lengths, seed, width=16):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths), width)
    return {
        "tokens": torch.randn(shape, generator=generator),
        "target": torch.randn(shape, generator=generator),
        "lengths": list(lengths),
    }


def grads(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("layout", ["pad", "pack"])
@pytest.mark.parametrize("normalize", ["elements", "mean_of_means"])
def test_mixed_lengths_padded_or_packed_equal_separate(layout, normalize):
    torch.manual_seed(0)
    model = Sequences()
    window = [sequence_batch(n, i) for i, n in enumerate([(3, 5), (9, 1), (2,), (7, 7, 4)])]
    plain = MicroBatchFuser(model, FusionConfig(fusion_batch_size=1, normalize=normalize)).run(window)
    expected = grads(model)
    model.zero_grad()
    config = FusionConfig(layout=layout, normalize=normalize)
    outcome = (fuser := MicroBatchFuser(model, config)).run(window)
    assert outcome.fused
    assert fuser.trace.records()[-1].layout == layout
    torch.testing.assert_close(torch.stack(outcome.micro_losses), torch.stack(plain.micro_losses))
    assert (grads(model) - expected).norm() <= 1e-5 * expected.norm()


def test_packed_samples_do_not_see_each_other_and_positions_restart_fault_f12():
    torch.manual_seed(0)
    model = Sequences()
    a, b = sequence_batch((6,), 1), sequence_batch((9,), 2)

    def losses(first, second):
        config = FusionConfig(fusion_batch_size=2, layout="pack", probe="off")
        return MicroBatchFuser(model, config).run([first, second])

    together = losses(a, b)
    moved = losses({**a, "tokens": a["tokens"] + 100}, b)
    assert abs(together.micro_losses[1] - moved.micro_losses[1]) <= 1e-6
    assert together.micro_losses[0] != moved.micro_losses[0]
    alone = [model(x) for x in (a, b)]
    tokens = sum(out["loss_sum"].sum() for out in alone) / 15
    torch.testing.assert_close(together.loss, tokens.detach())
    assert PackedLayout.of([6, 9]).positions.tolist() == [*range(6), *range(9)]


def test_packed_cross_attention_stays_inside_its_sample():
    torch.manual_seed(0)
    queries, keys = PackedLayout.of([3, 2, 4]), PackedLayout.of([5, 1, 2])
    q, k, v = torch.randn(9, 2, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    packed = packed_attention(q, k, v, queries, keys)
    mask = queries.may_see(keys)
    dense = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask
    ).transpose(0, 1)
    torch.testing.assert_close(packed, dense)
    with pytest.raises(ValueError, match="3 sequences, keys 2"):
        packed_attention(q, k, v, queries, PackedLayout.of([4, 4]))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_packing_round_trips_and_isolates(lengths):
    layout = PackedLayout.of(lengths)
    rows = torch.randn(len(lengths), max(lengths), 3)
    packed = pack_rows(rows, lengths)
    assert packed.shape[0] == layout.total
    back = unpack_rows(packed, layout)
    for i, n in enumerate(lengths):
        assert torch.equal(back[i, :n], rows[i, :n])
        assert not back[i, n:].any()
    mask = layout.may_see(causal=True)
    assert mask.sum() == sum(n * (n + 1) // 2 for n in lengths)
    assert layout.offsets.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120))
def test_first_fit_places_everything_once_within_capacity(lengths, capacity):
    packs = first_fit(lengths, capacity)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= capacity for pack in packs)
    # First fit is never more than twice the ideal: no two packs are half empty.
    assert sum(2 * sum(lengths[i] for i in pack) <= capacity for pack in packs) <= 1


def test_first_fit_names_a_sequence_that_is_too_long():
    with pytest.raises(ValueError, match="sequence of 9 rows"):
        first_fit([3, 9], 8)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=5),
    st.sampled_from(["left", "right"]),
)
@settings(deadline=None)
def test_joined_batches_hold_every_row_in_order(shapes, side):
    batches = [
        {
            "x": torch.randn(b, t, 2),
            "mask": torch.ones(b, t, dtype=torch.bool),
            "name": [f"{i}.{j}" for j in range(b)],
        }
        for i, (b, t) in enumerate(shapes)
    ]
    joined = join(batches, pad_rules={"x": PadRule(side=side), "mask": PadRule(side=side)})
    longest = max(t for _, t in shapes)
    row = 0
    for (b, t), batch in zip(shapes, batches, strict=True):
        place = slice(longest - t, longest) if side == "left" else slice(0, t)
        assert torch.equal(joined.batch["x"][row : row + b, place], batch["x"])
        row += b
    assert joined.batch["mask"].sum() == sum(b * t for b, t in shapes)
    assert joined.batch["name"] == [n for batch in batches for n in batch["name"]]
    assert joined.sizes == tuple(b for b, _ in shapes)


def test_rows_that_are_multiples_of_the_samples_stay_with_their_sample():
    batches = [
        {"action": torch.zeros(2, 1), "views": torch.arange(4.0).reshape(4, 1) + 10 * i} for i in range(2)
    ]
    assert join(batches).batch["views"].flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    with pytest.raises(JoinError, match="3 rows for 2 samples"):
        join([{**b, "views": torch.zeros(3, 1)} for b in batches])


def test_fully_padded_rows_never_make_nan():
    model = TinyVLA()
    batches = [tiny_batch(2, seed=0, text=2), tiny_batch(2, seed=1, text=7)]
    batches[0]["text_mask"][:] = False
    outcome = MicroBatchFuser(model, FusionConfig(fusion_batch_size=2)).run(batches)
    assert outcome.fused
    assert outcome.padded_share > 0
    assert torch.isfinite(outcome.loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_the_cost_model_pads_little_packs_much_and_leaves_apart_what_fusing_would_slow():
    cheap_launch = CostModel(launch_ms=1.0, token_ms=0.01, pair_ms=0.0, pack_overhead=1.05)
    even = [[100, 100], [101, 101]]
    skewed = [[10] * 8, [1000]]
    assert cheap_launch.choose(even, ["pad", "pack", "separate"])[0] == "pad"
    assert cheap_launch.choose(skewed, ["pad", "pack", "separate"])[0] == "pack"
    assert cheap_launch.choose(skewed, ["pad", "separate"])[0] == "separate"
    assert CostModel(launch_ms=1000.0).choose(skewed, ["pad", "separate"])[0] == "pad"


def test_a_group_that_padding_would_slow_is_left_apart():
    model = Sequences()
    model.pack_rules = {}
    window = [sequence_batch((2,) * 8, 0), sequence_batch((60,), 1)]
    config = FusionConfig(fusion_batch_size=2, cost=CostModel(launch_ms=0.01))
    outcome = MicroBatchFuser(model, config).run(window)
    assert outcome.reason == RefusalReason.NOT_CHEAPER


def test_the_cost_model_is_fitted_from_measured_passes():
    true = CostModel(launch_ms=7.0, token_ms=0.02, pair_ms=3e-6)
    passes = [
        (t, p, true._pass(t, p)) for t, p in [(100, 10_000), (1000, 10**6), (500, 10**4), (2000, 4 * 10**6)]
    ]
    fitted = CostModel.fit(passes)
    assert math.isclose(fitted.launch_ms, 7.0, rel_tol=1e-6)
    assert math.isclose(fitted.pair_ms, 3e-6, rel_tol=1e-6)
    with pytest.raises(ValueError, match="three passes"):
        CostModel.fit(passes[:2])
    with pytest.raises(ValueError, match="negative"):
        CostModel(token_ms=-1.0)


def test_pad_rules_are_checked():
    with pytest.raises(ValueError, match="side"):
        PadRule(side="up")
    with pytest.raises(ValueError, match="dims"):
        PadRule(dims=(0,))
    padded = pad_to(torch.ones(1, 2, 3), (4, 5), PadRule(value=7, dims=(1, 2)))
    assert padded.sum() == 6 + 7 * 14
