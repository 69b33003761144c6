"""Which passes share a recording, and how many recordings there are."""

import pytest
import torch
from loongforge_fuse import FusionConfig, GraphRunner, MicroBatchFuser
from loongforge_fuse.graphs.backend import EmulatedBackend
from loongforge_fuse.graphs.buckets import BucketPlan
from loongforge_fuse.graphs.ledger import ShapeLedger
from loongforge_fuse.graphs.reasons import GraphReason
from loongforge_fuse.testing import TinyVLA


def test_another_shape_never_reuses_a_graph_and_keeps_the_first_fault_f06(place):
    ours, theirs = place.pair()
    runner = place.runner(ours)
    sizes = [8, 8, 8, 3, 8, 3, 3]
    for step, samples in enumerate(sizes):
        ours.zero_grad()
        theirs.zero_grad()
        batch = place.drawn(ours, step, samples=samples)
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(place.plain(theirs, batch), rel=1e-5)
        place.same_gradients(ours, theirs)
    assert runner.stats().captures == 2
    assert runner.stats().recaptures == 0


def test_dtype_and_constants_are_part_of_the_key_fault_f06(place):
    model, _ = place.pair()
    runner = place.runner(model)
    batch = place.drawn(model, 0)
    runner.run(batch)
    assert runner.run(batch).graph
    assert runner.run({**batch, "flag": None}).reason == "warm_up"
    assert runner.run({**batch, "flag": 1}).reason == "warm_up"
    assert runner.run({**batch, "action_mask": batch["action_mask"].float()}).reason == "warm_up"


def test_forty_lengths_stay_within_eight_graphs_fault_f09(place):
    model, _ = place.pair()
    runner = place.runner(model, max_graphs=8)
    for length in range(1, 41):
        for _ in range(2):
            runner.run(place.drawn(model, length, text=length))
            assert runner.stats().graphs <= 8
    stats = runner.stats()
    assert stats.graphs == 8
    assert stats.evictions == 32


def test_memory_cap_evicts_the_least_recently_used(place):
    model, _ = place.pair()
    probe = place.runner(model)
    for _ in range(2):
        probe.run(place.drawn(model, 0))
    one = probe.stats().graph_bytes
    probe.release()
    runner = place.runner(model, memory_cap_gb=2.5 * one / 2**30)
    for length in (6, 5, 4):
        for _ in range(2):
            runner.run(place.drawn(model, 0, text=length))
        assert runner.stats().graph_bytes <= 2.5 * one
    tight = place.runner(model, memory_cap_gb=0.5 * one / 2**30)
    for _ in range(2):
        result = tight.run(place.drawn(model, 0))
    assert result.reason == "memory_cap"
    assert tight.run(place.drawn(model, 0)).reason == "memory_cap"
    assert "memory_cap_gb is" in next(iter(tight.stats().failures.values()))


def test_buckets_bound_the_number_of_graphs(place):
    ours, theirs = place.pair()
    plan = BucketPlan(
        dims={("text", 1): "text", ("text_mask", 1): "text"}, sizes={"text": (4, 8, 16)}, rules=ours.pad_rules
    )
    runner = place.runner(ours, buckets=plan)
    for step in range(40):
        batch = place.drawn(ours, step, text=1 + step % 16)
        ours.zero_grad()
        theirs.zero_grad()
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(place.plain(theirs, batch), rel=1e-5)
        place.same_gradients(ours, theirs)
    assert runner.stats().captures == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (0.0, -0.0), ([3, 4], [4, 3]), ([3, 4], (3, 4)), ([(1, 2)], [(2, 1)])],
)
def test_equal_looking_constants_are_different_graphs(place, one, other):
    model, _ = place.pair()
    runner = place.runner(model)
    batch = place.drawn(model, 0)
    for _ in range(2):
        result = runner.run({**batch, "constant": one})
    assert result.graph
    assert runner.run({**batch, "constant": other}).reason == "warm_up"


def test_a_constant_that_is_no_number_is_the_same_graph_each_time(place):
    model, _ = place.pair()
    runner = place.runner(model)
    for seed in range(3):
        result = runner.run({**place.drawn(model, seed), "constant": float("nan")})
    assert result.graph


@pytest.mark.parametrize("how", ["get", "in", "item", "nested"])
def test_a_model_that_asks_for_a_text_stays_eager_instead_of_taking_another_branch(place, how):
    class Asks(TinyVLA):
        def forward(self, batch):
            if how == "get":
                known = batch.get("task") is not None
            elif how == "in":
                known = "task" in batch
            elif how == "item":
                known = bool(batch["task"])
            else:
                known = batch["extra"].get("task") is not None
            out = super().forward(batch)
            return {k: 2 * v if known and k != "loss_count" else v for k, v in out.items()}

    ours, theirs = place.pair(Asks)
    runner = place.runner(ours)
    for seed in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        batch = {**place.drawn(ours, seed), "extra": {"task": [f"text {seed}"]}}
        result = runner.run(batch)
        assert result.total.item() == pytest.approx(place.plain(theirs, batch), rel=1e-5)
        place.same_gradients(ours, theirs)
    assert result.reason == "capture_failed"
    assert "batch['task']" in next(iter(runner.stats().failures.values()))


def test_more_shapes_than_graphs_lead_to_eager_passes_not_to_endless_captures(place):
    model, _ = place.pair()
    runner = place.runner(model, max_graphs=3)
    rounds, shapes = 40, 6
    for _ in range(rounds):
        for length in range(1, shapes + 1):
            runner.run(place.drawn(model, length, text=length))
    stats = runner.stats()
    assert stats.graphs == 3
    # Each eviction doubles the passes before the next capture: a few captures per shape, not one per pass.
    assert stats.captures <= shapes * 6
    assert stats.eager["evicted"] > 100


def test_parameters_that_a_shape_does_not_reach_keep_no_gradient_in_it(place):
    class Branch(TinyVLA):
        def __init__(self):
            super().__init__()
            self.extra = torch.nn.Linear(5, 5)

        def forward(self, batch):
            out = super().forward(batch)
            if batch["text"].shape[1] > 4:
                more = self.extra(batch["action"]).square().flatten(1).sum(1)
                out = {**out, "loss_sum": out["loss_sum"] + more}
                out["loss"] = out["loss_sum"].sum() / out["loss_count"].sum()
            return out

    ours, theirs = place.pair(Branch)
    runner = place.runner(ours)
    for step in range(8):
        ours.zero_grad(set_to_none=True)
        theirs.zero_grad(set_to_none=True)
        batch = place.drawn(ours, step, text=6 if step % 2 else 3)
        result = runner.run(batch)
        place.plain(theirs, batch)
        place.same_gradients(ours, theirs)
    assert result.graph
    assert runner.stats().captures == 2


def test_another_matmul_precision_is_another_graph(place):
    model, _ = place.pair()
    runner = place.runner(model)
    for seed in range(2):
        assert runner.run(place.drawn(model, seed)).graph == bool(seed)
    torch.set_float32_matmul_precision("high")
    assert runner.run(place.drawn(model, 2)).reason == "warm_up"


class SharedPool(EmulatedBackend):
    """A stand-in whose recordings share memory as large as the largest of them ever was."""

    def __init__(self, model, sizes):
        super().__init__(lambda: [p for p in model.parameters() if p.requires_grad])
        self.sizes = sizes
        self.pool = 0

    def capture(self, work, rehearsal):
        recording = super().capture(work, rehearsal)
        self.pool = max(self.pool, self.sizes[len(recording.outputs[0])])
        return recording

    def held(self):
        return self.pool

    def renew(self):
        self.pool = 0


def test_a_shared_pool_that_an_evicted_graph_left_large_is_given_back(place):
    if place.device != "cpu":
        pytest.skip("the stand-in works on the CPU")
    model, _ = place.pair()
    gib = 2**30
    # By the number of micro-batches in a pass: its output vector has two entries for each, and two more.
    backend = SharedPool(model, {4: gib, 6: 5 * gib, 8: 2 * gib})
    runner = GraphRunner(model, place.config(memory_cap_gb=4.0), backend=backend)
    fusers = {
        n: MicroBatchFuser(model, FusionConfig(fusion_batch_size=n, predict_memory=False), executor=runner)
        for n in (1, 2, 3)
    }

    def run(n):
        return fusers[n].run([place.drawn(model, i) for i in range(n)], drawn=True).graph_reason

    assert [run(1) for _ in range(2)] == ["warm_up", None]
    # The second shape lets the pool grow beyond the cap: all goes, and it is tried once more alone.
    assert [run(2) for _ in range(4)] == ["warm_up", "memory_cap", "memory_cap", "memory_cap"]
    assert backend.pool == 0
    assert [run(3) for _ in range(2)] == ["warm_up", None]
    assert runner.stats().graph_bytes < 4 * gib
    assert list(runner.stats().failures.values()) == ["needs 5.00 GiB, memory_cap_gb is 4.0"]


def test_the_ledger_forgets_the_shapes_that_were_not_seen_for_longest():
    ledger = ShapeLedger(warmup_steps=1, limit=10)
    for length in range(100):
        assert ledger.why_eager(("shape", length)) is GraphReason.WARM_UP
        assert len(ledger) <= 10
    assert ledger.why_eager(("shape", 99)) is None
    assert ledger.why_eager(("shape", 0)) is GraphReason.WARM_UP
