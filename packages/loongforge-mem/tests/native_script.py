"""Run in a process of its own by test_mem_native.py: the C functions over a CUDA driver without a GPU."""

import ctypes
import json
import sys
from pathlib import Path

from loongforge_mem import _core


class Driver:
    """The stand-in driver and the caller that behaves like torch."""

    def __init__(self, fake: str, caller: str) -> None:
        self.fake = ctypes.CDLL(fake)
        self.caller = ctypes.CDLL(caller)
        self.fake.fake_budget.argtypes = [ctypes.c_size_t]
        self.fake.fake_busy.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self.fake.fake_capture.argtypes = [ctypes.c_uint64, ctypes.c_int]
        self.table = _core.c_abi()
        u64 = ctypes.c_uint64
        self.caller.call_alloc.argtypes = [
            ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_char_p, ctypes.c_size_t,
        ]  # fmt: skip
        for name in ("call_begin", "call_end"):
            getattr(self.caller, name).argtypes = [ctypes.c_size_t, ctypes.c_int, u64, u64]
        free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self.free_ = free(self.table["free"])
        record = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        self.record_ = record(self.table["set_record_stream_fn"])
        self.reset = ctypes.CFUNCTYPE(None)(self.table["set_reset_fn"])
        base = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))
        self.base_ = base(self.table["set_base_alloc_fn"])

    def alloc(self, size: int, stream: int = 0, name: str = "alloc"):
        out, text = ctypes.c_void_p(), ctypes.create_string_buffer(2000)
        kind = self.caller.call_alloc(self.table[name], size, 0, stream, ctypes.byref(out), text, 2000)
        return out.value if kind == 0 else (None if kind == 1 else text.value.decode())

    def free(self, address: int, stream: int = 0) -> None:
        self.free_(address, 0, 0, stream)

    def begin(self, a: int, b: int) -> None:
        self.caller.call_begin(self.table["set_begin_allocate_to_pool"], 0, a, b)

    def end(self, a: int, b: int) -> None:
        self.caller.call_end(self.table["set_end_allocate_to_pool_fn"], 0, a, b)

    def release(self, a: int, b: int) -> None:
        self.caller.call_end(self.table["set_release_pool"], 0, a, b)

    def count(self, name: str) -> int:
        return self.fake.fake_count(name.encode())

    def stats(self) -> dict:
        return _core.global_stats(0)


MIB = 1 << 20


def blocks(d: Driver) -> dict:
    _core.configure("cuda", initial_bytes=64 * MIB, grow_bytes=32 * MIB)
    before = d.count("mallocs")
    a, b = d.alloc(3 * MIB), d.alloc(1000)
    ctypes.memset(a, 7, 3 * MIB)
    size = ctypes.c_size_t()
    base = d.base_(a, ctypes.byref(size))
    inside = base <= a < base + size.value
    after_first = d.count("mallocs") - before
    for _ in range(1000):
        d.free(d.alloc(5 * MIB))
    steady = d.count("mallocs") - before
    zero = d.alloc(0)
    d.free(a)
    again = d.alloc(3 * MIB)
    d.free(b)
    d.free(12345 << 20)
    return {"before": before, "first": after_first, "steady": steady, "zero": zero, "reused": again == a,
            "inside": inside, "block": size.value, "unknown": d.stats()["unknown_frees"]}  # fmt: skip


def vmm(d: Driver) -> dict:
    d.fake.fake_budget(1 << 30)
    _core.configure("vmm", initial_bytes=0, grow_bytes=32 * MIB)
    a = d.alloc(100 * MIB)
    ctypes.memset(a, 1, 100 * MIB)
    creates = d.count("creates")
    d.free(a)
    for _ in range(100):
        d.free(d.alloc(90 * MIB))
    steady = d.count("creates")
    reserved = d.stats()["reserved_bytes.current"]
    d.reset()
    after = d.stats()["reserved_bytes.current"]
    b = d.alloc(40 * MIB)
    ctypes.memset(b, 2, 40 * MIB)
    return {"creates": creates, "steady": steady, "reserved": reserved, "after_reset": after,
            "releases": d.count("releases")}  # fmt: skip


def streams(d: Driver) -> dict:
    _core.configure("cuda", initial_bytes=64 * MIB, grow_bytes=0)
    d.alloc(MIB, 0)
    x = d.alloc(8 * MIB, 0)
    d.record_(x, 5)
    d.fake.fake_busy(5, 1)
    d.free(x)
    while_busy = d.alloc(8 * MIB, 0)
    waiting = d.stats()["waiting_blocks"]
    d.fake.fake_busy(5, 0)
    d.free(while_busy)
    d.alloc(512, 0)
    return {"held_back": while_busy != x, "waiting": waiting, "waiting_after": d.stats()["waiting_blocks"],
            "records": d.count("records")}  # fmt: skip


def graphs(d: Driver) -> dict:
    _core.configure("cuda", initial_bytes=256 * MIB, grow_bytes=32 * MIB)
    d.alloc(MIB, 0)
    d.begin(7, 9)
    d.fake.fake_capture(3, 1)
    inside = d.alloc(16 * MIB, 3)
    d.free(inside, 3)
    same = d.alloc(16 * MIB, 3) == inside
    d.free(inside, 3)
    eager = d.alloc(16 * MIB, 0)
    recorded = d.alloc(4 * MIB, 0)
    d.record_(recorded, 3)
    d.free(recorded)
    grown = d.alloc(400 * MIB, 3)
    bad_calls = d.count("calls_in_capture")
    d.fake.fake_capture(3, 0)
    d.end(7, 9)
    held = d.stats()["graph_bytes"]
    pools = d.stats()["graph_pools"]
    d.reset()
    after_reset = d.stats()["graph_bytes"]
    outside = [d.alloc(16 * MIB, 0) for _ in range(20)]
    safe = inside not in outside
    d.free(grown, 3)
    d.release(7, 9)
    released = d.stats()["graph_bytes"]
    # A capture that fails without telling us, and the next one.
    d.begin(8, 1)
    d.fake.fake_capture(3, 1)
    lost = d.alloc(8 * MIB, 3)
    d.fake.fake_capture(3, 0)
    d.free(lost, 3)
    d.begin(8, 2)
    d.fake.fake_capture(3, 1)
    next_one = d.alloc(8 * MIB, 3)
    d.fake.fake_capture(3, 0)
    d.end(8, 2)
    s = d.stats()
    return {"same": same, "apart": eager != inside, "bad_calls": bad_calls, "held": held, "pools": pools,
            "after_reset": after_reset, "safe": safe, "released": released, "stale": s["stale_captures"],
            "next": isinstance(next_one, int), "pools_after": s["graph_pools"]}  # fmt: skip


def oom(d: Driver) -> dict:
    from loongforge_mem.allocator import connect_errors

    d.fake.fake_budget(64 * MIB)
    _core.configure("cuda", initial_bytes=0, grow_bytes=16 * MIB)
    without = d.alloc(200 * MIB)
    pool = d.alloc(200 * MIB, 0, "pool_alloc")
    import torch

    connected = connect_errors(torch)
    kept = d.alloc(20 * MIB)
    _core.global_begin_step(0, 0)
    _core.global_phase(0, "backward")
    text = d.alloc(200 * MIB)
    _core.global_end_step(0)
    fits = d.alloc(30 * MIB)
    return {"without": without, "pool": pool, "connected": connected, "text": text,
            "fits": isinstance(fits, int) and isinstance(kept, int)}  # fmt: skip


def speed(d: Driver) -> dict:
    _core.configure("cuda", initial_bytes=8 << 30, grow_bytes=0)
    _core.set_timing(True)
    events = json.loads(Path(sys.argv[4]).read_text())["events"]
    for _ in range(20):
        live = {}
        _core.global_begin_step(0, 0)
        for event in events:
            if event[0] == "a":
                live[event[1]] = d.alloc(event[2])
            else:
                d.free(live.pop(event[1]))
        _core.global_end_step(0)
        for address in live.values():
            d.free(address)
    s = d.stats()
    keys = (
        "alloc.p99_ns",
        "alloc.within_10us",
        "free.within_10us",
        "planned_hits",
        "alloc.calls",
        "device_allocs",
    )
    return {k: s[k] for k in keys}


def threads(d: Driver) -> dict:
    import threading

    _core.configure("cuda", initial_bytes=512 * MIB, grow_bytes=64 * MIB)
    wrong = []

    def work(seed: int) -> None:
        live = []
        for index in range(2000):
            size = 512 * (1 + (index * 37 + seed * 101) % 900)
            address = d.alloc(size, seed % 3)
            ctypes.memset(address, seed, size)
            live.append((address, size))
            if len(live) > 20:
                old, n = live.pop((index * 7) % 20)
                if ctypes.string_at(old, n).strip(bytes([seed])):
                    wrong.append(old)
                d.free(old, seed % 3)
        for address, _ in live:
            d.free(address, seed % 3)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    s = d.stats()
    return {"wrong": len(wrong), "live": s["requested_bytes.current"], "allocs": s["allocations.allocated"]}


def forked(d: Driver) -> dict:
    """Children of a fork, made while another thread is inside the allocator all the time."""
    import os
    import threading
    import time

    _core.configure("cuda", initial_bytes=64 * MIB, grow_bytes=0)
    mine, stop, codes = d.alloc(MIB), threading.Event(), []

    def hammer() -> None:
        while not stop.is_set():
            d.free(d.alloc(MIB))

    busy = threading.Thread(target=hammer)
    busy.start()
    for _ in range(8):
        child = os.fork()
        if child == 0:
            d.free(mine)
            os._exit(7 if d.alloc(MIB) is None and d.stats() is None else 1)
        end = time.monotonic() + 20
        while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.001)
        if done[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        codes.append(os.waitstatus_to_exitcode(done[1]) if done[0] else "hangs")
    stop.set()
    busy.join(20)
    d.free(mine)
    s = d.stats()
    return {"codes": codes, "live": s["requested_bytes.current"], "unknown": s["unknown_frees"]}


def leaving(d: Driver) -> dict:
    """A request that fails in a thread that ends at once, and blocks that outlive their thread."""
    import threading

    from loongforge_mem.allocator import connect_errors

    d.fake.fake_budget(64 * MIB)
    _core.configure("cuda", initial_bytes=0, grow_bytes=16 * MIB)
    import torch

    connect_errors(torch)
    _core.set_oom_thrower(None)
    kept, texts = [], []

    def work() -> None:
        kept.append(d.alloc(MIB))
        texts.append(d.alloc(1 << 30))

    for _ in range(20):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join(20)
    for address in kept:
        d.free(address)
        d.free(address)
    s = d.stats()
    good = sum(isinstance(t, str) and t.startswith("CUDA out of memory.") for t in texts)
    return {"good": good, "live": s["requested_bytes.current"], "unknown": s["unknown_frees"]}


def captured_in_step(d: Driver) -> dict:
    """A capture on the very stream of an open step: its blocks belong to the graph, not to the step."""
    _core.configure("cuda", initial_bytes=256 * MIB, grow_bytes=32 * MIB)
    _core.global_begin_step(0, 3)
    d.begin(7, 9)
    d.fake.fake_capture(3, 1)
    first = d.alloc(16 * MIB, 3)
    d.free(first, 3)
    d.fake.fake_capture(3, 0)
    d.end(7, 9)
    eager = d.alloc(4 * MIB, 3)
    d.fake.fake_capture(3, 1)
    d.begin(7, 9)
    d.fake.fake_capture(3, 1)
    second = d.alloc(16 * MIB, 3)
    d.free(second, 3)
    d.fake.fake_capture(3, 0)
    d.end(7, 9)
    report = _core.global_end_step(0)
    d.free(eager, 3)
    return {"allocations": report["allocations"], "survivors": report["survivors"], "apart": first != eager}


def pinned(d: Driver) -> dict:
    """Page locks of arenas that are closed, dropped, or dropped while a tensor of theirs lives."""
    import gc

    import torch
    from loongforge_mem.pinned import PinnedArena

    seen = []
    closed = PinnedArena(8 * MIB, pin=True)
    seen.append(d.count("pinned"))
    closed.close()
    seen.append(d.count("pinned"))
    dropped = PinnedArena(8 * MIB, pin=True)
    seen.append(d.count("pinned"))
    tensor = dropped.empty((1000,), torch.float32)
    del dropped
    gc.collect()
    seen.append(d.count("pinned"))
    tensor.fill_(1.0)
    del tensor
    gc.collect()
    seen.append(d.count("pinned"))
    return {"seen": seen}


def refused(d: Driver) -> dict:
    """A stream that refuses events, because somebody else's capture runs, asked at every allocation."""
    _core.configure("cuda", initial_bytes=64 * MIB, grow_bytes=0)
    d.alloc(MIB)
    shared = d.alloc(MIB)
    d.record_(shared, 5)
    d.fake.fake_capture(9, 1)
    d.free(shared)
    for _ in range(200):
        d.free(d.alloc(MIB))
    waiting = d.stats()["waiting_blocks"]
    d.fake.fake_capture(9, 0)
    d.free(d.alloc(MIB))
    return {"events": d.count("events"), "waiting": waiting, "after": d.stats()["waiting_blocks"]}


if __name__ == "__main__":
    scenarios = (
        refused,
        pinned,
        blocks,
        vmm,
        streams,
        graphs,
        oom,
        speed,
        threads,
        forked,
        leaving,
        captured_in_step,
    )
    scenario = {f.__name__: f for f in scenarios}[sys.argv[1]]
    sys.stdout.write(json.dumps(scenario(Driver(sys.argv[2], sys.argv[3]))) + "\n")
