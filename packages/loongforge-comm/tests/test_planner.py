"""The dynamic programme against brute force, its speed, and the plan's text form."""

import itertools
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_comm import CommPlan, Curve, GradientSpec, LinkModel, plan_buckets
from loongforge_comm.link import Correction
from loongforge_comm.planner import calm_cuts, cost_curve, segment


def brute_force(ready: list[float], sizes: list[float], curve: Curve, extra: float = 0.0) -> float:
    """Finish time of the best of all 2^(n-1) segmentations."""
    best = float("inf")
    count = len(sizes)
    for cut in itertools.product((False, True), repeat=count - 1):
        finish, start = 0.0, 0
        for stop in [i + 1 for i, c in enumerate(cut) if c] + [count]:
            cost = float(curve.predict(np.asarray([sum(sizes[start:stop])]))[0])
            finish = max(finish, ready[stop - 1]) + cost + extra
            start = stop
        best = min(best, finish)
    return best


def gradient(index: int, numel: int, ready: float, **changes: object) -> GradientSpec:
    base = {"shape": (numel,), "stride": (1,), "dtype": "float32", "device": "cpu", "ready_ms": ready}
    return GradientSpec(name=f"p{index}", **{**base, **changes})


tensors = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 10**7)), min_size=1, max_size=12)
curves = st.builds(
    lambda alpha, rate, bend: Curve(
        nbytes=(0.0, 1e5, 1e7),
        ms=(alpha, alpha + 1e5 * rate * bend, alpha + 1e5 * rate * bend + 9.9e6 * rate),
    ),
    st.floats(0, 3),
    st.floats(1e-8, 1e-5),
    st.floats(0.1, 3.0),
)


@settings(max_examples=150, deadline=None)
@given(tensors, curves, st.floats(0, 0.5))
def test_finish_time_equals_brute_force_on_random_instances(
    items: list[tuple[float, int]], curve: Curve, extra: float
) -> None:
    ready = sorted(r for r, _ in items)
    sizes = [float(s) for _, s in items]
    cuts, finish = segment(np.asarray(ready), np.asarray(sizes), [curve], extra_ms=extra)
    assert cuts[-1] == len(items)
    assert cuts == sorted(set(cuts))
    assert finish == pytest.approx(brute_force(ready, sizes, curve, extra), rel=1e-9, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(tensors, curves, st.floats(0, 0.5))
def test_plans_with_few_buckets_end_within_half_a_percent_of_the_optimum(
    items: list[tuple[float, int]], curve: Curve, extra: float
) -> None:
    ready = np.asarray(sorted(r for r, _ in items))
    sizes = np.asarray([float(s) for _, s in items])
    cuts = calm_cuts(ready, sizes, [curve], extra_ms=extra)
    end = start = 0
    for stop in cuts:
        cost = float(curve.predict(np.asarray([sizes[start:stop].sum()]))[0]) + extra
        end, start = max(end, ready[stop - 1]) + cost, stop
    best_cuts, best = segment(ready, sizes, [curve], extra_ms=extra)
    assert start == len(items)
    assert end <= best * 1.005 + 1e-9
    assert len(cuts) <= len(best_cuts) or end <= best * 1.005


@settings(max_examples=100, deadline=None)
@given(tensors, curves, st.sampled_from([(1.25, 1.0), (1.0, 1.3)]))
def test_a_later_backward_or_a_slower_link_costs_no_more_than_the_best_plan_for_it_or_the_exact_one(
    items: list[tuple[float, int]], curve: Curve, case: tuple[float, float]
) -> None:
    late, slow = case
    ready = np.asarray(sorted(r for r, _ in items))
    sizes = np.asarray([float(s) for _, s in items])

    def end_of(cuts: list[int]) -> float:
        end = start = 0
        for stop in cuts:
            cost = slow * float(curve.predict(np.asarray([sizes[start:stop].sum()]))[0])
            end, start = max(end, late * ready[stop - 1]) + cost, stop
        return end

    best = segment(late * ready, sizes, [curve.scaled(slow)])[1]
    exact = end_of(segment(ready, sizes, [curve])[0])
    assert end_of(calm_cuts(ready, sizes, [curve])) <= max(best * 1.005, exact) + 1e-9


def test_the_last_bucket_of_a_busy_link_leaves_room_for_a_longer_backward() -> None:
    """A link that is busy to the end must have work when the backward takes a fifth longer than expected."""
    specs = [gradient(i, 2**18, 10.0 * i) for i in range(60)]
    link = LinkModel.from_alpha_beta(0.3, 0.06)  # 17.5 ms a MiB: communication takes 1.75 times the backward
    plan = plan_buckets(specs, link)
    end = 0.0
    for bucket in plan.buckets:
        end = max(end, 1.2 * bucket.ready_ms) + link.predict_ms("ring", bucket.nbytes)
    assert end <= 60 * 17.5 * 1.02


def test_hidden_communication_uses_few_buckets() -> None:
    specs = [gradient(i, 2**18, float(i)) for i in range(200)]
    plan = plan_buckets(specs, LinkModel.from_alpha_beta(0.05, 20.0))
    assert len(plan.buckets) <= 6
    assert plan.exposed_ms < 0.5


def test_two_thousand_gradients_are_planned_in_under_100_ms() -> None:
    """From specs to the finished plan; benchmarks/comm_plan.py has the times on other links."""
    generator = np.random.default_rng(0)
    sizes = generator.choice([256, 1024, 2**18, 2**20], 2000)
    ready = np.sort(generator.uniform(0, 250, 2000))
    specs = [gradient(i, int(n), float(r)) for i, (n, r) in enumerate(zip(sizes, ready, strict=True))]
    link = LinkModel.from_alpha_beta(0.2, 5.0)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        plan = plan_buckets(specs, link)
        times.append((time.perf_counter() - begin) * 1e3)
    assert len(plan.gradients) == 2000
    assert min(times) < 100.0, times


def test_a_gradient_is_never_charged_before_it_is_ready_and_groups_never_mix() -> None:
    specs = [
        gradient(0, 1000, 1.0, group="vision", strategy="tree"),
        gradient(1, 1000, 2.0, group="vision", strategy="tree"),
        gradient(2, 1000, 3.0),
        gradient(3, 1000, 4.0, dtype="bfloat16"),
        gradient(4, 0, 5.0),
    ]
    plan = plan_buckets(specs, LinkModel.from_alpha_beta(5.0, 1.0))
    groups = [{p.name for p in b.pieces} for b in plan.buckets]
    assert groups == [{"p0", "p1"}, {"p3"}, {"p2", "p4"}]
    assert [b.group for b in plan.buckets] == ["vision", "low", "low"]
    assert plan.buckets[0].strategy == "tree"
    assert all(b.start_ms >= b.ready_ms for b in plan.buckets)
    assert "exposed" in plan.explain()


def test_large_tensors_are_split_at_the_limit() -> None:
    plan = plan_buckets(
        [gradient(0, 10, 0.0), gradient(1, 10**6, 1.0)],
        LinkModel.from_alpha_beta(0.1, 1.0),
        max_bucket_mib=1.0,
    )
    parts = [p for b in plan.buckets for p in b.pieces if p.name == "p1"]
    assert len(parts) == 4
    assert all(b.nbytes <= 2**20 for b in plan.buckets)
    assert parts[0].start == 0
    assert parts[-1].stop == 10**6


def test_another_strategy_needs_a_clear_lead_over_the_ring() -> None:
    ring = Curve.linear(1.0, 1.0)
    link = LinkModel(
        world_size=2,
        backend="model",
        curves={"ring": ring, "direct": Curve.linear(0.97, 1.0), "tree": Curve.linear(0.5, 4.0)},
    )
    assert link.choose(1024.0) == "tree"
    assert link.choose(2.0**23) == "ring"


def test_a_strategy_is_not_trusted_beyond_the_sizes_it_was_measured_at() -> None:
    link = LinkModel(
        world_size=2,
        backend="model",
        curves={
            "ring": Curve.fit([1024, 2.0**22], [1.0, 32.0]),
            "tree": Curve.fit([1024, 2.0**20], [0.1, 2.0]),
        },
    )
    assert link.choose(2.0**20) == "tree"
    assert link.choose(2.0**21) == "ring"
    envelope = cost_curve(link)
    sizes = np.asarray([1024.0, 2.0**19, 2.0**21, 2.0**24, 2.0**34])
    cheapest = [
        link.predict_ms(link.choose(s), s) / (1.0 if link.choose(s) == "ring" else 0.95) for s in sizes
    ]
    assert envelope.predict(sizes).tolist() == pytest.approx(cheapest)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.integers(0, 10**6), st.sampled_from(["float32", "bfloat16"])),
        min_size=1,
        max_size=30,
    )
)
def test_every_element_is_sent_once_and_the_text_form_is_exact(items: list[tuple[float, int, str]]) -> None:
    specs = [gradient(i, n, r, dtype=d) for i, (r, n, d) in enumerate(items)]
    plan = plan_buckets(specs, LinkModel.from_alpha_beta(0.2, 2.0), max_bucket_mib=0.5)
    plan.validate()
    again = CommPlan.from_json(plan.to_json())
    assert again == plan
    assert again.hash == plan.hash
    sent = {}
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            sent[piece.name] = sent.get(piece.name, 0) + piece.stop - piece.start
    assert sent == {spec.name: spec.numel for spec in specs}
    assert sum(plan.bucket_cap_mb_list()) == pytest.approx(plan.nbytes / 2**20)


def test_damaged_plans_are_refused_with_the_reason() -> None:
    plan = plan_buckets([gradient(0, 10, 0.0)], LinkModel.from_alpha_beta(0.1, 1.0))
    data = json.loads(plan.to_json())
    with pytest.raises(ValueError, match="version 7, allowed is 1"):
        CommPlan.from_json(json.dumps({**data, "version": 7}))
    data["buckets"][0]["pieces"][0]["stop"] = 9
    with pytest.raises(ValueError, match="the file was changed"):
        CommPlan.from_json(json.dumps(data))
    with pytest.raises(ValueError, match="not a communication plan"):
        CommPlan.from_json("[]")


def test_noisy_measurements_become_monotone() -> None:
    curve = Curve.fit([1, 2, 3, 4], [1.0, 3.0, 2.0, 4.0])
    assert curve.ms == (1.0, 2.5, 2.5, 4.0)
    assert curve.valid_to == 4.0
    assert curve.predict(np.asarray([0.0, 8.0])).tolist() == pytest.approx([1.0, 7.0])
    again = LinkModel.from_json(LinkModel(world_size=2, backend="gloo", curves={"ring": curve}).to_json())
    assert again.curves["ring"] == curve


def test_correction_learns_the_extra_time_of_buckets_that_ran_alone_despite_outliers() -> None:
    idle = [0.3, 5.0, 9.0, 18.0, 36.0]
    seen = [1.5 * v + 2.0 for v in idle]
    seen[2] += 4.0
    fitted = Correction.fit(idle, seen, [True] * 5)
    assert (fitted.offset_ms, fitted.factor) == pytest.approx((2.0, 1.5), rel=0.1)
    link = LinkModel.from_alpha_beta(1.0, 1.0).corrected({"ring": Correction(offset_ms=3.0, factor=2.0)})
    assert link.curves["ring"].alpha_ms == pytest.approx(5.0)
    assert Correction.fit([1.0], [1.0]) == Correction()
    assert Correction.fit([0.0], [1.0]) == Correction()


def test_buckets_that_shared_the_link_are_no_sign_of_a_start_up_time() -> None:
    """Two in flight land together: the first seems slow, the second free; only the sum means something."""
    idle = [10.0, 1.0, 20.0, 2.0, 40.0, 4.0]
    seen = [5.0, 7.1, 10.0, 14.2, 20.0, 28.4]
    fitted = Correction.fit(idle, seen, [False] * 6)
    assert fitted.offset_ms == 0.0
    assert fitted.factor == pytest.approx(1.1)
