"""Failures that other allocators are known for, each made on purpose: on a fake device with logical time
where streams or device memory are needed.
"""

from __future__ import annotations

import pytest
from loongforge_mem import MemoryConfig, MemoryOrchestrator, _core, get_mla_stats

MIB = 1 << 20


def fake(**settings) -> _core.Heap:
    """A heap on a device whose work completes only when somebody waits for it."""
    return _core.Heap("fake", **settings)


# M01
def test_a_request_is_served_whenever_a_free_run_holds_it():
    heap = fake(initial_bytes=64 * MIB, grow_bytes=0)
    blocks = [heap.alloc(n * MIB) for n in (1, 8, 2, 16, 4, 32)]
    for index in (1, 3):
        heap.free(blocks[index])
    heap.alloc(9 * MIB)  # the run of 8 MiB is the nearest bin, only the one of 16 MiB fits
    with pytest.raises(MemoryError, match=r"largest hole 8\.00 MiB"):
        heap.alloc(9 * MIB)


# M03
def test_memory_that_another_stream_reads_is_not_reused_before_it_is_done():
    heap = fake(initial_bytes=64 * MIB, grow_bytes=0)
    heap.alloc(MIB, stream=0)
    for _ in range(200):
        source = heap.alloc(4 * MIB, stream=0)
        heap.use(source, 7)
        heap.record_stream(source, 7)
        heap.free(source)
        other = heap.alloc(4 * MIB, stream=0)
        assert other != source, "stream 7 has not finished"
        heap.free(other)
        heap.complete(7)
        again = heap.alloc(4 * MIB, stream=0)
        heap.free(again)
    assert heap.stats()["waiting_blocks"] == 0


# M04
def test_every_reservation_goes_back_on_trim_except_the_first_block():
    heap = fake(initial_bytes=16 * MIB, grow_bytes=32 * MIB)
    blocks = [heap.alloc(20 * MIB) for _ in range(3)]
    for block in blocks:
        heap.free(block)
    before = heap.stats()
    heap.trim()
    after = heap.stats()
    assert before["device_allocs"] == 4
    assert after["device_frees"] == 3
    assert after["reserved_bytes.current"] == 16 * MIB


# M06
def test_a_full_device_is_trimmed_and_tried_again_before_failing():
    heap = fake(grow_bytes=2 * MIB, budget_bytes=100 * MIB)
    heap.free(heap.alloc(60 * MIB))
    heap.free(heap.alloc(70 * MIB))
    assert heap.stats()["ooms"] == 0
    with pytest.raises(MemoryError, match=r"CUDA out of memory\. Tried to allocate 100\.00 MiB"):
        heap.alloc(100 * MIB + 1)
    heap.free(heap.alloc(100 * MIB))


# M07
def test_a_step_that_frees_in_another_order_never_gets_overlapping_blocks():
    heap = fake(initial_bytes=256 * MIB, grow_bytes=0)

    def step(order, sizes) -> list[tuple[int, int]]:
        heap.begin_step(0)
        live = {}
        seen = []
        for index, size in enumerate(sizes):
            if index in order:
                heap.free(live.pop(order[index])[0])
            address = heap.alloc(size)
            for start, length in live.values():
                assert address + size <= start or start + length <= address, "overlap"
            live[index] = (address, size)
            seen.append((address, size))
        for address, _ in live.values():
            heap.free(address)
        return seen

    sizes = [3 * MIB, 5 * MIB, 2 * MIB, 4 * MIB, MIB]
    step({2: 0, 3: 1, 4: 2}, sizes)
    assert heap.end_step()["planned"]
    step({3: 1, 4: 0}, [*sizes[:4], 9 * MIB])
    report = heap.end_step()
    assert report["source"] == "replayed"
    assert sum(report["misses"].values()) >= 1, "what does not fit the plan is served elsewhere"


# M08
def test_the_owner_of_a_block_is_looked_up_not_guessed_from_the_mode():
    torch = pytest.importorskip("torch")
    orchestrator = MemoryOrchestrator(MemoryConfig(mode="global", backend="host"))
    heap = _core.Heap("host", grow_bytes=4 * MIB)
    ours = heap.alloc(1000)
    foreign = torch.zeros(4)
    with (
        pytest.raises(RuntimeError, match="inside"),
        orchestrator.label("persistent"),
        orchestrator.label("migratable"),
    ):
        _fail_inside()
    assert _core.global_label() == 0, "labels unwind on errors"
    orchestrator.close()
    assert not heap.owns(foreign.data_ptr())
    with pytest.raises(KeyError, match="not the start of a live block"):
        heap.free(foreign.data_ptr())
    heap.free(ours)
    with pytest.raises(KeyError):
        heap.free(ours)
    assert heap.stats()["unknown_frees"] == 2
    assert foreign.sum() == 0


def _fail_inside() -> None:
    assert _core.global_label() == 2
    msg = "inside"
    raise RuntimeError(msg)


# M10
def test_varying_lengths_do_not_eat_the_pool():
    heap = fake(initial_bytes=0, grow_bytes=8 * MIB, budget_bytes=150 * MIB)
    peak = 64 * MIB + 24 * MIB + 37 * 512 * 1024
    for step in range(1000):
        heap.begin_step(0)
        length = (step % 37 + 1) * 512 * 1024
        parts = [heap.alloc(length), heap.alloc(24 * MIB)]
        big = heap.alloc(64 * MIB)
        for address in (*parts, big):
            heap.free(address)
        heap.end_step()
    stats = heap.stats()
    assert stats["ooms"] == 0
    assert stats["reserved_bytes.peak"] <= 1.45 * peak
    assert 0.0 <= stats["external_fragmentation"] < 1.0


# M11
@pytest.mark.parametrize("contiguous", [False, True])
def test_memory_grown_in_small_pieces_serves_a_large_block_later(contiguous):
    heap = fake(initial_bytes=64 * MIB, grow_bytes=16 * MIB, budget_bytes=256 * MIB, contiguous=contiguous)
    blocks = [heap.alloc(MIB) for _ in range(250)]
    for block in blocks:
        heap.free(block)
    heap.free(heap.alloc(128 * MIB))
    assert heap.stats()["ooms"] == 0


# M12
def test_a_capture_that_fails_gives_its_memory_back_and_the_next_one_works():
    heap = fake(initial_bytes=64 * MIB, grow_bytes=0)
    heap.alloc(MIB, stream=0)
    for attempt in range(20):
        heap.begin_capture(attempt, 0)
        heap.set_capture(5, attempt + 1)
        inside = heap.alloc(8 * MIB, stream=5)
        heap.free(inside)
        heap.set_capture(5, None)  # it failed: nobody calls end_capture or release_pool
    heap.trim()
    assert heap.stats()["graph_bytes"] == 0
    assert heap.stats()["stale_captures"] == 20
    heap.begin_capture(99, 0)
    heap.set_capture(5, 1000)
    kept = heap.alloc(8 * MIB, stream=5)
    heap.set_capture(5, None)
    heap.end_capture(99, 0)
    assert heap.stats()["graph_bytes"] >= 8 * MIB
    heap.free(kept)
    heap.release_pool(99, 0)
    assert heap.stats()["graph_bytes"] == 0


# M13
def test_allocator_settings_without_effect_are_named(monkeypatch):
    from loongforge_mem.allocator import warn_about_alloc_conf

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    with pytest.warns(
        UserWarning, match=r"PYTORCH_CUDA_ALLOC_CONF sets expandable_segments:True, which has no effect"
    ):
        warn_about_alloc_conf("the global allocator")


# M14
def test_tensors_of_an_arena_are_saved_at_their_own_size(tmp_path):
    torch = pytest.importorskip("torch")
    from loongforge_mem.pinned import PinnedArena

    arena = PinnedArena(8 * MIB, pin=False)
    small = arena.empty((10,), torch.float32).fill_(3.0)
    arena.empty((1 << 20,), torch.float32)
    torch.save({"x": small}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 4096
    back = torch.load(tmp_path / "x.pt")["x"]
    back.fill_(1.0)
    assert float(small.sum()) == 30.0, "loading makes no hidden sharing"


# M15
def test_host_memory_is_flat_over_epochs():
    torch = pytest.importorskip("torch")
    from loongforge_mem.pinned import PinnedArena

    arena = PinnedArena(4 * MIB, pin=False)
    for _ in range(5):
        for _ in range(200):
            frame = arena.empty((320, 240, 3), torch.uint8)
            frame[0, 0, 0] = 1
            del frame
        assert arena.requested_bytes == 0
    with pytest.raises(MemoryError, match=r"the largest free run is \d+ bytes"):
        arena.empty((5 * MIB,), torch.uint8)
    arena.close()


def test_statistics_without_an_orchestrator_are_zeros():
    import gc

    gc.collect()
    stats = get_mla_stats()
    assert {"global_pool_used_gb", "freelist_fragmentation", "alloc_ms", "planned_hit_rate"} <= stats.keys()
