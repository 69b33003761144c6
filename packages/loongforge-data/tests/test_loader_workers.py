"""Worker processes: order at any number and start method, death, hangs, bad samples, random streams,
resources."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from loongforge_data.errors import DataError
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.pipeline import RingPipeline
from loongforge_data.testing import Faults, ToyDataset, indices_of
from loongforge_data.workers import server
from loongforge_data.workers.crew import WorkerError


def flat(batches):
    return [i for batch in indices_of(batches) for i in batch]


def pids(loader):
    assert isinstance(loader.pipeline, RingPipeline)
    return loader.pipeline.pids


def children():
    """Processes below this one that live, without the server that stays for the next loader."""
    known = server._server
    kept = set() if known is None else {known.process.pid}
    alive = {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}
    return alive - kept


@pytest.mark.parametrize("shuffle", [False, "full", "block"])
def test_order_is_the_same_at_any_number_of_workers(shuffle):
    """Fault D50: no shard is shuffled twice, every sample once; D52: few samples and many workers."""
    orders = []
    for workers in (0, 1, 2, 4):
        with ADFEDataLoader(
            ToyDataset(53), 4, workers, shuffle=shuffle, seed=1, persistent_workers=True
        ) as loader:
            orders.append([indices_of(loader) for _ in range(2)])
    assert all(order == orders[0] for order in orders)
    assert sorted(i for batch in orders[0][1] for i in batch) == list(range(53))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("method", ["server", "fork", "spawn", "forkserver"])
def test_order_is_the_same_for_every_start_method(method, workers):
    want = indices_of(ADFEDataLoader(ToyDataset(21), 4, shuffle=True, seed=2))
    with ADFEDataLoader(
        ToyDataset(21),
        4,
        workers,
        shuffle=True,
        seed=2,
        multiprocessing_context=method,
        persistent_workers=True,
    ) as loader:
        assert indices_of(loader) == want
        assert loader.stats()["start_method"] == method


def test_what_cannot_be_sent_is_forked_with_a_reason():
    class Local(ToyDataset):
        pass

    with ADFEDataLoader(Local(6), 3, 1, persistent_workers=True) as loader:
        assert flat(loader) == list(range(6))
        assert loader.stats()["start_method"] == "fork"
        assert "does not pickle" in loader.stats()["start_method_reason"]
    with pytest.raises(ValueError, match="does not pickle"):
        list(ADFEDataLoader(Local(6), 3, 1, multiprocessing_context="server"))


def test_forked_workers_never_touch_garbage_of_the_trainer():
    """Garbage that must not be collected in a copy of the process: decoders with threads, here a tripwire."""

    class Tripwire:
        def __init__(self):
            self.me, self.pid = self, os.getpid()

        def __del__(self):
            if os.getpid() != self.pid:
                os.kill(os.getpid(), signal.SIGSEGV)

    gc.collect()
    gc.disable()
    try:
        for _ in range(1000):
            Tripwire()
        with ADFEDataLoader(
            ToyDataset(200), 2, 2, multiprocessing_context="fork", persistent_workers=True
        ) as loader:
            assert flat(loader) == list(range(200))
            assert loader.stats()["worker_restarts"] == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("length, workers", [(1, 4), (2, 5), (5, 4), (46, 3)])
def test_fewer_samples_than_workers_and_odd_sizes_are_all_delivered(length, workers):
    """Faults D52 and pytorch's per-worker drop_last: the tail policy is global."""
    for drop_last, count in ((False, length), (True, length // 2 * 2)):
        with ADFEDataLoader(ToyDataset(length), 2, workers, drop_last=drop_last) as loader:
            batches = indices_of(loader)
            assert len(batches) == len(loader)
            assert sum(map(len, batches)) == count


@pytest.mark.parametrize("length", [1, 2, 5, 46])
@pytest.mark.parametrize("tail", ["short", "pad", "drop"])
@pytest.mark.parametrize("shuffle", [False, "full", "block"])
def test_ranks_get_equally_many_batches_of_equal_size(length, tail, shuffle):
    """Fault: a rank with fewer batches hangs the others."""
    world, batch = 3, 2
    ranks = [
        indices_of(
            ADFEDataLoader(ToyDataset(length), batch, shuffle=shuffle, tail=tail, rank=r, world_size=world)
        )
        for r in range(world)
    ]
    assert len({tuple(len(b) for b in rank) for rank in ranks}) == 1
    everything = [i for rank in ranks for b in rank for i in b]
    if tail == "drop":
        assert len(everything) == len(set(everything)) == length // 6 * 6
    else:
        assert set(everything) == set(range(length))
        padded = len(everything) - length
        assert padded == (-length % world if tail == "short" else -length % (world * batch))


def test_an_empty_data_set_yields_nothing():
    loader = ADFEDataLoader(ToyDataset(0), 4, 2, shuffle=True)
    assert len(loader) == 0
    assert list(loader) == []


@pytest.mark.timeout(60)
def test_killed_worker_is_replaced_and_no_sample_is_lost_or_doubled(tmp_path):
    """Fault D48, first case: SIGKILL in the middle of a sample."""
    faults = Faults(kill=(5, 20, 33), once=tmp_path)
    with ADFEDataLoader(ToyDataset(60, faults=faults), 4, 4, persistent_workers=True) as loader:
        assert flat(loader) == list(range(60))
        assert loader.stats()["worker_restarts"] == 3
        assert loader.stats()["requeued_jobs"] == 3


@pytest.mark.timeout(60)
def test_worker_killed_while_the_queue_is_full_loses_nothing():
    """Fault D48, third case."""
    with ADFEDataLoader(ToyDataset(40), 4, 2, persistent_workers=True) as loader:
        iterator = iter(loader)
        got = list(indices_of([next(iterator)])[0])
        deadline = time.monotonic() + 20
        while loader.stats()["queue_queued_jobs"]:
            assert time.monotonic() < deadline
            os.sched_yield()
        for pid in pids(loader).values():
            os.kill(pid, signal.SIGKILL)
        got += flat(iterator)
        assert got == list(range(40))


@pytest.mark.timeout(60)
def test_hung_worker_is_replaced_after_the_timeout(tmp_path):
    """Fault D48, second case: a sample that sleeps for ever, once."""
    faults = Faults(hang=(7,), once=tmp_path)
    with ADFEDataLoader(ToyDataset(20, faults=faults), 2, 2, timeout=1.0, persistent_workers=True) as loader:
        assert flat(loader) == list(range(20))
        assert loader.stats()["worker_restarts"] == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_sample_that_always_costs_its_worker_is_named_and_all_processes_go(kind):
    before = children()
    faults = Faults(**{kind: (6,)})
    loader = ADFEDataLoader(ToyDataset(20, faults=faults), 2, 2, timeout=0.7)
    with pytest.raises(WorkerError, match=r"worker \d .*samples \[6, 7\]"):
        list(loader)
    assert children() <= before


@pytest.mark.timeout(60)
def test_loss_of_every_helper_process_is_an_error_not_a_hang():
    """The out-of-memory killer may take the process that workers come from, too."""
    loader = ADFEDataLoader(ToyDataset(2000, delay_s=0.002), 2, 2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    parents = {psutil.Process(pid).ppid() for pid in pids(loader).values()}
    for pid in parents:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="process that starts workers"):
        list(iterator)
    assert flat(ADFEDataLoader(ToyDataset(6), 2, 1)) == list(range(6))


@pytest.mark.timeout(60)
def test_dead_trainer_takes_its_workers_along():
    """No process is left behind when the trainer is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        loader = ADFEDataLoader(ToyDataset(1000, delay_s=0.01), 2, 2)
        iterator = iter(loader)
        next(iterator)
        os.write(writer, repr(list(pids(loader).values())).encode())
        signal.pause()
    workers = eval(os.read(reader, 1000))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    _, alive = psutil.wait_procs([psutil.Process(p) for p in workers if psutil.pid_exists(p)], timeout=20)
    assert not alive


def test_closing_in_the_middle_leaves_no_process():
    before = children()
    loader = ADFEDataLoader(ToyDataset(1000), 2, 3)
    next(iter(loader))
    loader.close()
    assert children() <= before
    loader = ADFEDataLoader(ToyDataset(1000), 2, 3)
    next(iter(loader))
    del loader
    gc.collect()
    assert children() <= before


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_sample_raises_with_its_number_and_the_cause(workers):
    iterator = iter(ADFEDataLoader(ToyDataset(20, faults=Faults(bad=(6,))), 4, workers))
    assert indices_of([next(iterator)]) == [[0, 1, 2, 3]]
    with pytest.raises(DataError, match=r"sample 6 .*ValueError: sample 6 is meant to be bad"):
        next(iterator)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_left_out_counted_and_listed(workers):
    """Fault D32's policy at the loader: never a substitute."""
    dataset = ToyDataset(20, faults=Faults(bad=(6, 13)))
    with ADFEDataLoader(dataset, 4, workers, on_error="skip", error_budget=2) as loader:
        assert indices_of(loader) == [[0, 1, 2, 3], [4, 5, 7], [8, 9, 10, 11], [12, 14, 15], [16, 17, 18, 19]]
        assert [s.index for s in loader.skipped] == [6, 13]
        assert "meant to be bad" in loader.skipped[0].message
        assert loader.stats()["skipped_samples"] == 2


@pytest.mark.parametrize("budget", [1, 0.01])
def test_error_budget_is_a_count_or_a_share(budget):
    dataset = ToyDataset(40, faults=Faults(bad=(6, 13)))
    loader = ADFEDataLoader(dataset, 4, on_error="skip", error_budget=budget)
    with pytest.raises(DataError, match="error_budget"):
        list(loader)


def test_batch_without_a_good_sample_ends_the_run_on_several_ranks():
    dataset = ToyDataset(12, faults=Faults(bad=(0, 1)))
    one = ADFEDataLoader(dataset, 2, on_error="skip", error_budget=5)
    assert flat(one) == list(range(2, 12))
    two = ADFEDataLoader(dataset, 2, on_error="skip", error_budget=5, rank=0, world_size=2)
    with pytest.raises(DataError, match="fewer batches"):
        list(two)


def test_random_streams_differ_by_sample_and_epoch_and_do_not_depend_on_workers():
    """Fault D53; fault D51: the trainer's own generators are neither read nor moved."""
    draws = {}
    for workers in (0, 1, 4):
        with ADFEDataLoader(ToyDataset(12), 3, workers, shuffle=True, persistent_workers=True) as loader:
            epochs = []
            for _ in range(3):
                epoch = {}
                for batch in loader:
                    np.random.rand(5)  # noqa: NPY002
                    epoch.update(zip(indices_of([batch])[0], (float(d) for d in batch["draw"]), strict=True))
                epochs.append(epoch)
        draws[workers] = epochs
    assert draws[0] == draws[1] == draws[4]
    values = [value for epoch in draws[0] for value in epoch.values()]
    assert len(set(values)) == len(values) == 36


def test_inline_loading_does_not_move_the_global_generators():
    np.random.seed(3)  # noqa: NPY002
    want = np.random.rand(4)  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    list(ADFEDataLoader(ToyDataset(4), 2))
    np.testing.assert_array_equal(np.random.rand(4), want)  # noqa: NPY002


def test_no_thread_is_started_in_the_trainer_and_descriptors_stay_bounded():
    before = threading.active_count()
    with ADFEDataLoader(ToyDataset(64), 4, 2, persistent_workers=True) as loader:
        list(loader)
        assert threading.active_count() == before
        descriptors = psutil.Process().num_fds()
        for _ in range(5):
            list(loader)
        assert psutil.Process().num_fds() == descriptors
    for _ in range(5):
        list(ADFEDataLoader(ToyDataset(8), 4, 2))
    assert psutil.Process().num_fds() <= descriptors


def test_forked_child_of_the_trainer_cannot_take_slots_or_workers_away():
    with ADFEDataLoader(ToyDataset(40), 4, 2, persistent_workers=True) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        child = os.fork()
        if child == 0:
            del batch
            loader.close()
            os._exit(0)
        os.waitpid(child, 0)
        np.testing.assert_array_equal(np.asarray(batch["values"])[:, 0], [0, 1, 2, 3])
        assert flat(iterator) == list(range(4, 40))


def test_slow_consumer_never_waits_and_the_first_wait_is_the_only_one():
    with ADFEDataLoader(ToyDataset(40), 4, 2, persistent_workers=True) as loader:
        iterator = iter(loader)
        next(iterator)
        waits = []
        for _ in iterator:
            waits.append(loader.stats()["last_data_wait_ms"])
            time.sleep(0.02)
        assert np.median(waits) < 5


def test_statistics_have_stable_names():
    names = {
        "batches",
        "samples",
        "data_wait_ms",
        "last_data_wait_ms",
        "decoded_frames",
        "used_frames",
        "decode_waste",
        "decode_ms",
        "convert_ms",
        "worker_busy",
        "worker_busy_ms",
        "worker_idle_ms",
        "worker_jobs",
        "table_bytes",
        "readahead_bytes",
        "gpu_frames",
        "gpu_refused_frames",
        "decode",
        "decode_reason",
        "cache_hits",
        "cache_misses",
        "cache_hit_rate",
        "copied_batches",
        "worker_restarts",
        "requeued_jobs",
        "skipped_samples",
        "padded_samples",
        "fill_ms_mean",
        "step_ms_p95",
        "epoch",
        "batch",
        "workers",
        "start_method",
        "start_method_reason",
        "pinned_bytes",
        "pin_reason",
        "slot_bytes",
        "slots_reason",
        "queue_ready_batches",
        "queue_filling_batches",
        "queue_slots",
        "queue_slots_in_use",
        "queue_queued_jobs",
    }
    with ADFEDataLoader(ToyDataset(8), 4, 1, persistent_workers=True) as loader:
        list(loader)
        assert set(loader.stats()) == names


@pytest.mark.parametrize(
    "arguments, word",
    [
        ({"batch_size": 0}, "batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"rank": 2, "world_size": 2}, "rank"),
        ({"shuffle": "random"}, "shuffle"),
        ({"tail": "wrap"}, "tail"),
        ({"on_error": "ignore"}, "on_error"),
        ({"multiprocessing_context": "thread"}, "multiprocessing_context"),
        ({"timeout": 0}, "timeout"),
        ({"slots": 1}, "slots"),
        ({"readahead": "mmap"}, "readahead"),
        ({"niceness": -1}, "niceness"),
        ({"decode": "gpu"}, "decode"),
    ],
)
def test_bad_arguments_are_named(arguments, word):
    with pytest.raises(ValueError, match=word):
        ADFEDataLoader(ToyDataset(4), **arguments)


def test_batch_too_large_for_its_slot_says_how_to_go_on():
    with (
        ADFEDataLoader(ToyDataset(4, width=1 << 20), 2, 1, slot_mb=1) as loader,
        pytest.raises(DataError, match="slot_mb"),
    ):
        list(loader)


def test_batches_of_thousands_of_samples_fit_the_board():
    """The list of a batch's samples travels in its job."""
    with ADFEDataLoader(ToyDataset(6000), 2500, 2, shuffle=True, seed=3, slot_mb=1) as loader:
        batches = indices_of(loader)
    assert [len(batch) for batch in batches] == [2500, 2500, 1000]
    assert sorted(i for batch in batches for i in batch) == list(range(6000))


@pytest.mark.parametrize("niceness", [0, 5])
def test_workers_give_way_to_the_trainer_unless_told_not_to(niceness):
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    with ADFEDataLoader(ToyDataset(40), 2, 2, niceness=niceness, persistent_workers=True) as loader:
        next(iter(loader))
        for pid in pids(loader).values():
            assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, mine + niceness)
            assert os.sched_getscheduler(pid) == (os.SCHED_BATCH if niceness else os.sched_getscheduler(0))
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine


@pytest.mark.timeout(60)
def test_dead_worker_is_replaced_while_batches_are_still_ready():
    """Its absence must not be noticed only when the ring has run empty."""
    with ADFEDataLoader(ToyDataset(400), 2, 2, prefetch_factor=20, persistent_workers=True) as loader:
        iterator = iter(loader)
        next(iterator)
        deadline = time.monotonic() + 20
        while loader.stats()["queue_ready_batches"] < 30:
            assert time.monotonic() < deadline
            os.sched_yield()
        victim = pids(loader)[1]
        ended = os.pidfd_open(victim)
        os.kill(victim, signal.SIGKILL)
        assert select.select([ended], [], [], 20)[0]
        os.close(ended)
        loader.pipeline._supervisor._checked = 0.0  # its look at the workers is due
        next(iterator)
        assert loader.stats()["queue_ready_batches"] > 20
        assert loader.stats()["worker_restarts"] == 1


BROKEN_THREAD = """
import sys, threading
from loongforge_data.workers.loop import _run_or_die

class Broken:
    def run(self):
        if "mute" in sys.argv:
            sys.stderr = None
            sys.excepthook = None
        raise RuntimeError("not a job's fault")

thread = threading.Thread(target=_run_or_die, args=(Broken(),))
thread.start()
thread.join()
"""


@pytest.mark.parametrize("report", ["told", "mute"])
def test_error_that_a_job_cannot_report_ends_the_worker_process(report):
    """A thread that vanished alone would keep its job until the time limit; also where nobody can be told."""
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_THREAD, report],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert report == "mute" or "not a job's fault" in done.stderr


def test_slots_that_retuning_leaves_unused_give_their_memory_back():
    with ADFEDataLoader(
        ToyDataset(64, width=5000), 2, 1, slots=8, slot_mb=1, persistent_workers=True, lookahead=False
    ) as loader:
        assert flat(loader) == list(range(64))
        pipeline = loader.pipeline
        assert isinstance(pipeline, RingPipeline)
        assert all(pipeline.ring.reserved(slot) > 0 for slot in range(8))
        pipeline.set_active(3)
        assert [pipeline.ring.reserved(slot) > 0 for slot in range(8)] == [True] * 3 + [False] * 5
        assert flat(loader) == list(range(64))
