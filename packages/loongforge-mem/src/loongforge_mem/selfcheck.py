"""Checks of our allocator on a real GPU, each meant for a process of its own.

``loongforge-mem selfcheck`` runs them all; the GPU tests and the GPU benchmark use the same functions. Every
check returns a flat dictionary with the figures it saw; ``ours`` chooses our allocator or torch's, for
comparison.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from loongforge_mem.config import GIB, MemoryConfig
from loongforge_mem.graph_checks import Outcome, check_capture_pool, check_graph, orchestrator_of
from loongforge_mem.orchestrator import MemoryOrchestrator

if TYPE_CHECKING:
    import torch


def check_streams(*, ours: bool, quick: bool) -> Outcome:
    """Read on a second stream what the first freed and poisoned; record_stream must protect it."""
    return _poisoned_frees(1000 if quick else 10_000, ours=ours, record=True)


def check_control(*, ours: bool, quick: bool) -> Outcome:
    """Do the same without record_stream: it must show corruption, or :func:`check_streams` proves nothing."""
    return _poisoned_frees(1000, ours=ours, record=False)


def _poisoned_frees(rounds: int, *, ours: bool, record: bool) -> Outcome:
    import torch

    orchestrator = orchestrator_of(ours=ours)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    results = torch.zeros(rounds, device="cuda")
    wanted = torch.arange(rounds, device="cuda", dtype=torch.float32) % 97
    draw = random.Random(3)
    for index in range(rounds):
        size = draw.choice((200, 5_000, 60_000, 300_000, 1_500_000))
        x = torch.full((size,), float(index % 97), device="cuda")
        view = x[size // 2 :]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(draw.randint(1_000, 60_000))  # type: ignore[no-untyped-call]  # noqa: SLF001
            # One kernel that reads x and allocates nothing on this stream.
            results[index : index + 1].copy_(x[size - 1 :])
        if record:
            (view if index % 2 else x).record_stream(side)
        del view
        if index % 3 == 0:
            x.untyped_storage().resize_(0)
        del x
        poison = torch.full((size,), float("nan"), device="cuda")
        del poison
        if index % 500 == 0:
            side.synchronize()
    torch.cuda.synchronize()
    bad = int((results != wanted).sum())
    out: Outcome = {"rounds": rounds, "corrupted": bad, "nan": int(results.isnan().sum())}
    if orchestrator is not None:
        stats = orchestrator.stats()
        for key in ("deferred_frees", "waiting_blocks", "streams", "stream_transfers"):
            out[key] = stats[key]
    return out


def check_oom(*, ours: bool, quick: bool) -> Outcome:
    """Ask for too much: an error with a useful text, and everything works afterwards."""
    import torch

    orchestrator = orchestrator_of(ours=ours)
    first = torch.ones(1 << 20, device="cuda")
    out: Outcome = {"raised": False}
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        text = str(error)
        out = {"raised": True, "starts_well": text.startswith("CUDA out of memory."), "text": text[:900]}
        out["is_torch_error"] = isinstance(error, torch.OutOfMemoryError)
    out["usable_after"] = float(first.sum()) == float(1 << 20)
    out["memory_allocated"] = torch.cuda.memory_allocated()
    out["max_memory_reserved"] = torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    parameter = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    for _ in range(20):
        (parameter @ parameter).square().mean().backward()  # type: ignore[no-untyped-call]
    out["backward_finite"] = parameter.grad is not None and bool(parameter.grad.isfinite().all())
    if orchestrator is not None:
        out["ooms"] = orchestrator.stats()["ooms"]
    return out


def check_pool(*, ours: bool, quick: bool) -> Outcome:
    """Mode pool: persistent tensors in a memory pool of ours while torch's statistics keep working."""
    import torch

    torch.zeros(1, device="cuda")
    orchestrator = MemoryOrchestrator(MemoryConfig(mode="pool", pool_gb=0.5))
    sizes = (1, 3, 7, 20)
    with orchestrator.label("persistent"):
        kept = [torch.full((n << 18,), float(n), device="cuda") for n in sizes]
    other = torch.full((1 << 20,), 5.0, device="cuda")
    stats = orchestrator.stats()
    out: Outcome = {
        "good": all(bool((t == float(n)).all()) for t, n in zip(kept, sizes, strict=True)),
        "other": float(other.mean()) == 5.0,
        "allocated": torch.cuda.memory_allocated(),
        "pool_requested_bytes": stats.get("requested_bytes.current"),
        "pool_reserved_bytes": stats.get("reserved_bytes.current"),
    }
    del kept
    torch.cuda.empty_cache()
    out["allocated_after"] = torch.cuda.memory_allocated()
    return out


def check_pinned(*, ours: bool, quick: bool) -> Outcome:
    """Host memory per requested byte: tensors shaped like optimizer state in our arena and in torch's."""
    import torch

    from loongforge_mem.pinned import PinnedArena, arena_bytes

    device = torch.ones((1536, 1536), device="cuda") * 2
    shapes = (
        [(1536, 1536)] * 40 + [(6144, 1536)] * 24 + [(2048, 6144)] * 6 + [(151, 2048)] * 20 + [(1536,)] * 100
    )
    sizes = [4 * torch.Size(s).numel() for s in shapes]
    requested = sum(sizes)
    before = _resident_bytes()
    arena = PinnedArena(arena_bytes(sizes), pin=True)
    mine = [arena.empty(s, torch.float32).fill_(1.0) for s in shapes]
    ours_ratio = (_resident_bytes() - before) / requested
    mine[0].copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    copied = bool((mine[0] == 2).all())
    target = torch.empty(shapes[40], device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        target.copy_(mine[40], non_blocking=True)
    enqueue_s = time.perf_counter() - begin
    torch.cuda.synchronize()
    whole_s = time.perf_counter() - begin
    is_pinned = mine[0].is_pinned()
    del mine
    before = _resident_bytes()
    theirs = [torch.empty(s, dtype=torch.float32, pin_memory=True).fill_(1.0) for s in shapes]
    torch_ratio = (_resident_bytes() - before) / requested
    return {
        "requested_gb": requested / GIB,
        "ours_ratio": ours_ratio,
        "torch_ratio": torch_ratio,
        "torch_tensors": len(theirs),
        "copied": copied,
        "is_pinned": is_pinned,
        "h2d_gb_per_s": 20 * sizes[40] / whole_s / 1e9,
        "enqueue_share": enqueue_s / whole_s,
    }


def check_staging(*, ours: bool, quick: bool) -> Outcome:
    """Send batches through one pinned slot as fast as it goes: none may mix the values of two."""
    import torch

    from loongforge_mem.copies import StagingRing
    from loongforge_mem.pinned import PinnedArena

    orchestrator_of(ours=ours)
    torch.zeros(1, device="cuda")
    arena = PinnedArena(64 << 20, pin=True)
    ring = StagingRing(arena, slots=1, nbytes=32 << 20)
    targets = [torch.empty(8 << 20, device="cuda") for _ in range(4)]
    rounds, mixed = (100 if quick else 500), 0
    for index in range(rounds):
        target = targets[index % 4]
        ticket = ring.send(lambda host, value=float(index): host.fill_(value), target)  # type: ignore[misc]
        ticket.wait()
        if index % 4 == 3:
            wanted = range(index - 3, index + 1)
            mixed += sum(bool((t != float(v)).any()) for t, v in zip(targets, wanted, strict=True))
    return {"rounds": rounds, "mixed": mixed, "waits": ring.waits}


def _resident_bytes() -> int:
    """Resident bytes of the process, page-locked device mappings included (VmRSS)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def check_offload(*, ours: bool, quick: bool) -> Outcome:
    """Train with optimizer state and activations on the host; the weights must be those of a plain run."""
    import torch

    orchestrator = orchestrator_of(ours=ours)
    steps = 4 if quick else 12
    plain, plain_bytes, _ = _train_wide(steps, offload=False)
    moved, moved_bytes, packed = _train_wide(steps, offload=True)
    same = all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    out: Outcome = {
        "bit_equal": same,
        "bytes_after_step_plain": plain_bytes,
        "bytes_after_step_offloaded": moved_bytes,
        "activations_packed": packed,
    }
    if orchestrator is not None:
        out["deferred_frees"] = orchestrator.stats()["deferred_frees"]
    return out


def _train_wide(steps: int, *, offload: bool) -> tuple[list[torch.Tensor], int, int]:
    import torch

    from loongforge_mem.offload import OptimizerOffload, offload_activations
    from loongforge_mem.pinned import PinnedArena

    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(1024, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 1024)
    ).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    mover = OptimizerOffload(optimizer) if offload else None
    arena = PinnedArena(256 << 20, pin=True) if offload else None
    packed = 0
    for index in range(steps):
        x = torch.full((2048, 1024), 0.01 * (index + 1), device="cuda")
        if arena is None:
            loss = net(x).square().mean()
        else:
            with offload_activations(arena, max_in_flight=1) as counters:
                loss = net(x).square().mean()
            packed += counters.packed
        if mover is not None:
            mover.prefetch()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.zeros(1, device="cuda")  # An allocation collects what other streams have released.
    held = torch.cuda.memory_allocated()
    weights = [p.detach().clone() for p in net.parameters()]
    if mover is not None:
        mover.close()
    return weights, held, packed


CHECKS: dict[str, Callable[..., Outcome]] = {
    "graph": check_graph,
    "capture_pool": check_capture_pool,
    "stress": check_streams,
    "control": check_control,
    "oom": check_oom,
    "pool": check_pool,
    "pinned": check_pinned,
    "staging": check_staging,
    "offload": check_offload,
}


def passed(name: str, out: Outcome) -> bool:
    """Whether the figures of check ``name`` are as they must be for our allocator."""
    match name:
        case "graph":
            return bool(out["bit_equal"] and out["capture_after_failure"])
        case "capture_pool":
            return bool(out["bit_equal"] and out["move_refused"] and out["released"])
        case "stress":
            return out["corrupted"] == 0
        case "control":
            return out["corrupted"] > 0
        case "oom":
            raised = out["raised"] and out["starts_well"] and out["is_torch_error"]
            return bool(raised and out["usable_after"] and out["backward_finite"])
        case "pool":
            return bool(out["good"] and out["other"])
        case "staging":
            return out["mixed"] == 0
        case "offload":
            less = out["bytes_after_step_offloaded"] < out["bytes_after_step_plain"]
            return bool(out["bit_equal"] and less and out["activations_packed"] > 0)
        case "pinned":
            return bool(out["copied"] and out["is_pinned"] and out["ours_ratio"] <= 1.02)
    msg = f"check {name!r} is unknown; allowed: {sorted(CHECKS)}"
    raise ValueError(msg)
