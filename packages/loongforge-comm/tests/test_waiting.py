"""Waiting for one bucket, without other ranks: slices, late completion, failures; times of a device."""

import threading
import time
from datetime import timedelta

import pytest
from loongforge_comm import GradientSpec, LinkModel, plan_buckets
from loongforge_comm.channels import Flight
from loongforge_comm.records import BackwardRecord, DeviceTimes
from loongforge_comm.telemetry import PENDING, Telemetry


class Work:
    """A backend's work object that completes when told to."""

    def __init__(self, *, completes_in_timeout: bool = False, error: str = "") -> None:
        self.done = threading.Event()
        self.completes_in_timeout = completes_in_timeout
        self.error = error

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout: timedelta = timedelta(seconds=30)) -> bool:
        if not self.done.wait(timeout.total_seconds()):
            if self.completes_in_timeout:
                self.done.set()
            message = "Operation timed out!"
            raise RuntimeError(message)
        if self.error:
            raise RuntimeError(self.error)
        return True


def flight(work: Work) -> Flight:
    return Flight(launched=time.perf_counter(), work=work)  # type: ignore[arg-type]


def test_a_slice_that_runs_out_is_not_a_failure() -> None:
    work = Work()
    bucket = flight(work)
    assert bucket.wait(0.02) is False
    work.done.set()
    assert bucket.wait(0.02) is True
    assert bucket.landed > 0.0


def test_a_bucket_that_lands_at_the_very_end_of_a_slice_has_landed() -> None:
    assert flight(Work(completes_in_timeout=True)).wait(0.02) is True


def test_a_transfer_that_fails_at_the_very_end_of_a_slice_says_why() -> None:
    with pytest.raises(RuntimeError, match="connection reset"):
        flight(Work(completes_in_timeout=True, error="connection reset")).wait(0.02)
    broken = Work(error="connection closed")
    broken.done.set()
    with pytest.raises(RuntimeError, match="connection closed"):
        flight(broken).wait(5.0)


class Moment:
    """An event of a device that has, or has not yet, passed it."""

    def __init__(self, ms: float, clock: list[float]) -> None:
        self.ms, self.clock = ms, clock

    def query(self) -> bool:
        return self.clock[0] >= self.ms

    def elapsed_time(self, end_event: "Moment") -> float:
        assert end_event.query(), "read before the device had passed it"
        return end_event.ms - self.ms


def timed(clock: list[float], start: float) -> BackwardRecord:
    """Backward of 100 ms, buckets in flight 20 to 60 and 80 to 130 ms; queued by the host in 5 ms."""

    def at(ms: float) -> Moment:
        return Moment(start + ms, clock)

    device = DeviceTimes(
        begin=at(0), end=at(100), finish=at(131), spans={0: (at(20), at(60)), 1: (at(80), at(130))}
    )
    return BackwardRecord(
        begin=1.0, end=1.004, finish=1.005, first_ready=1.001, on_device=True, device=device
    )


def two_buckets() -> Telemetry:
    specs = [
        GradientSpec(name=n, shape=(2**20,), stride=(1,), dtype="float32", device="cuda", ready_ms=ready)
        for n, ready in (("late", 80.0), ("early", 20.0))
    ]
    return Telemetry(plan_buckets(specs, LinkModel.from_alpha_beta(0.1, 0.1)))


def test_times_of_a_device_are_taken_over_when_it_has_passed_them_and_not_before() -> None:
    clock = [0.0]
    telemetry = two_buckets()
    telemetry.add(timed(clock, 0.0))
    clock[0] = 125.0
    assert telemetry.summary()["overlap"] is None
    assert telemetry.summary()["synced_backwards"] == 1
    clock[0] = 131.0
    summary = telemetry.summary()
    assert summary["overlap"] == pytest.approx(1 - 30 / 90)
    assert summary["exposed_ms"] == pytest.approx(31.0)
    assert summary["backward_ms_mean"] == pytest.approx(100.0)
    assert summary["first_gradient_share"] == pytest.approx(0.25)
    assert telemetry.bucket_ms() == pytest.approx({0: 40.0, 1: 50.0})
    assert telemetry.ran_alone() == {0, 1}


def test_host_times_of_queued_work_are_never_reported_as_times_of_the_work() -> None:
    telemetry = two_buckets()
    telemetry.add(BackwardRecord(begin=1.0, end=1.004, finish=1.005, on_device=True))
    assert telemetry.summary()["exposed_ms"] is None
    assert telemetry.summary()["backward_ms_mean"] is None


def test_a_device_far_behind_costs_no_memory() -> None:
    clock = [0.0]
    telemetry = two_buckets()
    for k in range(100):
        telemetry.add(timed(clock, 1000.0 * k))
    clock[0] = 1e9
    assert telemetry.summary()["overlap"] is not None
    assert len(telemetry._exposed) == PENDING
