"""The C functions behind torch's hooks, over a stand-in CUDA driver and a caller with torch's C++ types."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MIB = 1 << 20


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    if shutil.which("gcc") is None or shutil.which("g++") is None:
        pytest.skip("needs gcc and g++ to build the stand-in driver")
    folder = tmp_path_factory.mktemp("native")
    fake, caller = folder / "libfake_cuda.so", folder / "libtorch_like.so"
    for compiler, source, out in (("gcc", "fake_cuda.c", fake), ("g++", "torch_like.cpp", caller)):
        subprocess.run(
            [compiler, "-O1", "-shared", "-fPIC", "-o", out, HERE / source], check=True, timeout=120
        )
    return str(fake), str(caller)


def _run(libraries, scenario, *more):
    environment = {**os.environ, "LOONGFORGE_CUDA_DRIVER": libraries[0]}
    done = subprocess.run(
        [sys.executable, str(HERE / "native_script.py"), scenario, *libraries, *more],
        capture_output=True, text=True, timeout=150, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_one_driver_block_serves_everything_after_the_first_allocation(libraries):
    out = _run(libraries, "blocks")
    assert out["before"] == 0, "configuring touches no device"
    assert out["first"] == 1
    assert out["steady"] == 1
    assert out["zero"] is None
    assert out["reused"]
    assert out["inside"]
    assert out["block"] == 64 * MIB
    assert out["unknown"] == 1


def test_virtual_memory_is_committed_once_and_given_back_on_reset(libraries):
    out = _run(libraries, "vmm")
    assert out["creates"] == 4, "100 MiB in chunks of 32 MiB"
    assert out["steady"] == 4
    assert out["reserved"] == 128 * MIB
    assert out["after_reset"] == 0
    assert out["releases"] == 4


def test_a_recorded_block_is_held_back_until_the_other_stream_is_done(libraries):
    out = _run(libraries, "streams")
    assert out["held_back"]
    assert out["waiting"] == 1
    assert out["waiting_after"] == 0
    assert out["records"] == 1


def test_graph_memory_stays_apart_until_its_pool_is_released(libraries):
    out = _run(libraries, "graphs")
    assert out["same"], "inside the capture memory is reused"
    assert out["apart"]
    assert out["bad_calls"] == 0, "no forbidden driver call while a stream captures"
    assert out["pools"] == 1
    assert out["held"] == out["after_reset"] > 0, "empty_cache leaves graph memory alone"
    assert out["safe"]
    assert out["released"] == 0
    assert out["stale"] == 1
    assert out["next"]
    assert out["pools_after"] == 1


def test_out_of_memory_is_an_error_that_names_label_phase_and_hole(libraries):
    pytest.importorskip("torch")
    out = _run(libraries, "oom")
    assert out["without"] is None
    assert out["pool"] is None, "a pool returns null, so torch frees its caches and tries again"
    if not out["connected"]:
        pytest.skip("this libc10 exports no error function")
    text = out["text"]
    assert text.startswith(
        "CUDA out of memory. Tried to allocate 200.00 MiB for label ephemeral in phase backward"
    )
    assert "largest hole" in text
    assert "in use 20.00 MiB" in text
    assert out["fits"], "the pool still works after the error"


def test_torch_raises_its_own_out_of_memory_error(tmp_path):
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("this torch is built without CUDA")
    if torch.cuda.is_available():
        pytest.skip("the stand-in runtime is for machines without a GPU; the GPU tests raise the real one")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc to build the stand-in runtime")
    runtime = tmp_path / "libfake_runtime.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", runtime, HERE / "fake_runtime.c"], check=True, timeout=120
    )
    done = subprocess.run(
        [sys.executable, str(HERE / "torch_script.py")], capture_output=True, text=True, timeout=150,
        env={**os.environ, "LD_PRELOAD": str(runtime)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert out["expected"] == "torch.OutOfMemoryError"
    assert out["kind"] == "torch.OutOfMemoryError"
    assert out["text"].startswith("CUDA out of memory. Tried to allocate 1.00 GiB")
    for part in ("limit 64.00 MiB", "free ", "largest hole", "Ways out: ", "plan_memory"):
        assert part in out["text"]
    assert out["ooms"] == 1001, "a thousand errors in a row, and memory served in between"


def test_a_forked_child_neither_hangs_nor_frees(libraries):
    out = _run(libraries, "forked")
    assert out["codes"] == [7] * 8
    assert out["live"] == 0
    assert out["unknown"] == 0


def test_errors_and_blocks_outlive_the_thread_that_made_them(libraries):
    pytest.importorskip("torch")
    out = _run(libraries, "leaving")
    assert out["good"] == 20
    assert out["live"] == 0
    assert out["unknown"] == 20, "a second free is counted and does nothing"


def test_a_capture_on_the_stream_of_a_step_is_not_part_of_it(libraries):
    out = _run(libraries, "captured_in_step")
    assert out["allocations"] == 1
    assert out["survivors"] == 1, "the eager block lives on; the graph's free does not end it"
    assert out["apart"]


def test_an_event_that_a_stream_refuses_is_used_again(libraries):
    out = _run(libraries, "refused")
    assert out["waiting"] == 1
    assert out["after"] == 0
    assert out["events"] == 1, "one event, asked for two hundred times"


COLLECTING = """
import gc, weakref
from loongforge_mem import _core
heap = _core.Heap("fake", initial_bytes=1 << 30, grow_bytes=0)
class Node: pass
def leave_garbage():
    node = Node()
    node.me = node
    weakref.finalize(node, heap.free, heap.alloc(1 << 20))
for _ in range(20):
    gc.disable()
    leave_garbage()
    held = [{} for _ in range(200)]  # the interpreter keeps 80 dictionaries ready: use them up
    gc.set_threshold(1, 1, 1)
    gc.enable()
    heap.stats()
gc.disable()
gc.collect()
print(heap.stats()["requested_bytes.current"])
"""


def test_statistics_do_not_hang_when_garbage_is_collected_meanwhile():
    done = subprocess.run(
        [sys.executable, "-c", COLLECTING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["0"]


def test_page_locks_end_with_their_mapping(libraries):
    pytest.importorskip("torch")
    out = _run(libraries, "pinned")
    assert out["seen"] == [1, 0, 1, 1, 0], "closed; dropped, but kept by its tensor; gone with the tensor"


def test_eight_threads_never_share_a_block(libraries):
    out = _run(libraries, "threads")
    assert out["wrong"] == 0
    assert out["live"] == 0
    assert out["allocs"] == 16000


def test_calls_through_the_c_functions_take_less_than_ten_microseconds(libraries):
    data = os.environ.get("LOONGFORGE_TEST_DATA")
    roots = [Path(data)] if data else [p / "shared" / "data" for p in HERE.parents]
    found = [r / "traces" / "gr00t_n1_6_step_16_samples.json" for r in roots]
    trace = next((f for f in found if f.exists()), None)
    if trace is None:
        pytest.skip("needs the recorded trace: set LOONGFORGE_TEST_DATA")
    out = _run(libraries, "speed", str(trace))
    assert out["device_allocs"] == 1
    assert out["planned_hits"] > 0.9 * out["alloc.calls"], "19 of 20 steps are replayed"
    assert out["alloc.within_10us"] >= 0.99
    assert out["free.within_10us"] >= 0.99
