"""Moving tensors: exact results, exact host memory, and no buffer written while a copy still reads it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from loongforge_mem.copies import DirectCopies, StagingRing, keep_until_done  # noqa: E402
from loongforge_mem.offload import Migratable, OptimizerOffload, offload_activations  # noqa: E402
from loongforge_mem.pinned import PinnedArena, arena_bytes  # noqa: E402

MIB = 1 << 20


class LateCopies:
    """Copies only when somebody waits, or when the test says so: what a busy copy engine looks like."""

    def __init__(self) -> None:
        self.jobs = []

    def copy(self, target, source):
        job = _LateTicket(target, source)
        self.jobs.append(job)
        return job

    def finish(self, count=None):
        for job in self.jobs[:count]:
            job.block()
        del self.jobs[:count]


class _LateTicket:
    def __init__(self, target, source) -> None:
        self._pair = (target, source)
        self._finished = False

    def done(self):
        return self._finished

    def wait(self):
        self.block()

    def block(self):
        if not self._finished:
            target, source = self._pair
            target.copy_(source)
            self._finished = True


class _Event:
    finished = False

    def query(self):
        return self.finished


def test_host_memory_is_kept_until_the_copy_that_uses_it_is_done():
    arena, first, second = PinnedArena(MIB, pin=False), _Event(), _Event()
    keep_until_done(arena.empty((1000,), torch.float32), first)
    assert arena.requested_bytes == 4000, "nobody but the copy needs it"
    keep_until_done(arena.empty((500,), torch.float32), second)
    assert arena.requested_bytes == 6000
    first.finished = True
    keep_until_done(torch.empty(1), second)
    assert arena.requested_bytes == 2000
    second.finished = True
    keep_until_done(torch.empty(1), second)
    assert arena.requested_bytes == 0


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))


def _train(offload: bool, steps: int = 5):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mover = OptimizerOffload(optimizer) if offload else None
    away = []
    for _ in range(steps):
        loss = model(torch.full((8, 64), 0.5)).square().mean()
        if mover is not None:
            mover.prefetch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if mover is not None:
            away.append(mover.state.away_bytes)
    return model, optimizer, mover, away


def test_training_with_offloaded_optimizer_state_is_bit_equal():
    stock, *_ = _train(offload=False)
    moved, optimizer, mover, away = _train(offload=True)
    for a, b in zip(stock.parameters(), moved.parameters(), strict=True):
        assert torch.equal(a, b)
    assert min(away) > 2 * 4 * 64 * 128
    assert all(
        s["exp_avg"].untyped_storage().nbytes() == 0
        for s in optimizer.state.values()
        if s["exp_avg"].dim() == 2
    )
    mover.close()
    assert mover.state.away_bytes == 0
    assert all(s["exp_avg"].isfinite().all() for s in optimizer.state.values())


def test_the_host_arena_holds_what_was_asked_for_and_hardly_more():
    shapes = [(1536, 384), (151, 2048), (1536,), (3, 7)]
    sizes = [4 * torch.Size(s).numel() for s in shapes] * 8
    arena = PinnedArena(arena_bytes(sizes), pin=False)
    kept = [arena.empty(s, torch.float32).fill_(i) for i, s in enumerate(shapes * 8)]
    assert arena.nbytes / sum(sizes) <= 1.02
    assert all(float(t.flatten()[0]) == i for i, t in enumerate(kept))
    with pytest.raises(RuntimeError, match="32 blocks of the host arena are still in use"):
        arena.close()
    kept.clear()
    arena.close()


# M09
def test_a_staging_slot_is_written_again_only_after_its_copy():
    arena = PinnedArena(MIB, pin=False)
    queue = LateCopies()
    ring = StagingRing(arena, slots=1, nbytes=4096, queue=queue)
    targets = []
    for value in range(500):
        target = torch.zeros(1024)
        ring.send(lambda host, value=value: host.fill_(float(value)), target)
        targets.append(target)
    queue.finish()
    assert all(bool((t == float(i)).all()) for i, t in enumerate(targets)), "a batch mixed two values"
    assert ring.waits == 499
    with pytest.raises(ValueError, match="make the ring with larger slots"):
        ring.send(lambda host: None, torch.zeros(4096))


def test_moved_tensors_keep_their_identity_and_their_values():
    tensor = torch.arange(10_000, dtype=torch.float32)
    view = tensor[:10]
    moving = Migratable(lambda: [tensor])
    for _ in range(3):
        assert moving.offload() == 40_000
        assert tensor.untyped_storage().nbytes() == 0
        assert moving.prefetch() == 40_000
        moving.wait()
        assert torch.equal(tensor, torch.arange(10_000, dtype=torch.float32))
    assert view.data_ptr() == tensor.data_ptr()
    assert Migratable(lambda: [view]).offload() == 0, "a view of shared storage stays"


@pytest.mark.parametrize("in_flight", [0, 2])
def test_offloaded_activations_give_the_same_gradients(in_flight):
    x = torch.randn(256, 64)
    wanted = [p.grad.clone() for p in _backward(_model(), x)]
    arena = PinnedArena(4 * MIB, pin=False)
    model = _model()
    queue = DirectCopies()
    with offload_activations(arena, min_bytes=4096, max_in_flight=in_flight, queue=queue) as counters:
        loss = model(x).square().mean()
    assert counters.packed >= 2
    assert arena.requested_bytes > 0
    loss.backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))
    del loss
    assert arena.requested_bytes == 0, "the host memory came back"


def test_a_full_arena_leaves_activations_where_they_are():
    x = torch.randn(256, 64)
    wanted = [p.grad.clone() for p in _backward(_model(), x)]
    model = _model()
    with offload_activations(PinnedArena(8192, pin=False), min_bytes=4096) as counters:
        loss = model(x).square().mean()
    loss.backward()
    assert counters.arena_full >= 1
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))


def _backward(model, x):
    model(x).square().mean().backward()
    return list(model.parameters())
