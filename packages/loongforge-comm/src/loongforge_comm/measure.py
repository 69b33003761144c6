"""Measures the collectives of a process group and fits the cost model."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from loongforge_comm.agreement import Agreement, group_store
from loongforge_comm.algorithms import ALGORITHMS
from loongforge_comm.channels import Channels
from loongforge_comm.link import Curve, LinkModel
from loongforge_comm.topology import describe_topology

SIZES = tuple(2**k for k in (10, 12, 14, 16, 18, 20, 21, 22, 23, 24, 25, 26))
"""Payload bytes tried, ascending; large ones are left out when the time budget does not allow them."""
REPEATS = 9
_measured: Counter[tuple[int, ...]] = Counter()


def fingerprint(agreement: Agreement, device: torch.device, backend: str) -> str:
    """Digest of hosts, devices, backend, versions and network settings of all ranks; equal on all ranks."""
    mine = {
        "host": socket.gethostname(),
        "device": device.type,
        "backend": backend,
        "torch": torch.__version__,
        "topology": describe_topology(device),
        "net": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "GLOO_"))},
    }
    parts = agreement.exchange("fingerprint", mine)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def measure_link(
    process_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
    budget_s: float = 1.5,
    cache: Path | None = None,
    timeout_s: float = 60.0,
) -> LinkModel:
    """Measure the collectives of a process group (collective call; every rank returns the same model).

    Args:
        process_group: the ranks; ``None`` for all.
        device: device of the payload.
        budget_s: seconds for all collectives together; at least three sizes of each are measured.
        cache: folder with earlier results by topology fingerprint.
        timeout_s: seconds to wait for the other ranks.
    """
    ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    _measured[ranks] += 1
    store = group_store(ranks, f"link-{_measured[ranks]}")
    agreement = Agreement(store, ranks, dist.get_rank(), timeout_s)
    channels = Channels(ranks, timeout_s=timeout_s)
    try:
        return measure_channels(channels, agreement, torch.device(device), budget_s=budget_s, cache=cache)
    finally:
        channels.close()


def measure_channels(
    channels: Channels,
    agreement: Agreement,
    device: torch.device,
    *,
    budget_s: float = 1.0,
    strategies: Sequence[str] = ("ring", "tree", "direct", "all_gather"),
    cache: Path | None = None,
) -> LinkModel:
    """Time each strategy over payload sizes on the real groups (collective call).

    The time of a size is the lower quartile over repetitions of the minimum over ranks, so that a rank that
    enters late does not count as slow link. Repetitions follow each other without a pause, as buckets do: a
    link that gives a burst after a rest would otherwise look faster than it stays. The ring gets 60 % of the
    budget because it is always needed. All ranks return rank 0's table.

    Args:
        channels: the groups to measure.
        agreement: for the exchange of timings.
        device: device of the payload.
        budget_s: seconds for everything; at least the three smallest sizes are measured.
        strategies: which to measure.
        cache: folder of earlier results by topology fingerprint; the folder of the first rank decides for
            all.
    """
    backend = str(dist.get_backend(channels.ring))
    digest = fingerprint(agreement, device, backend)
    path = cache / f"link-{digest}.json" if cache is not None else None
    first = agreement.ranks[0] == dist.get_rank()
    kept = path.read_text() if first and path is not None and path.is_file() else None
    text = agreement.exchange("link-cache", kept)[0]
    if isinstance(text, str):
        return _with_source(LinkModel.from_json(text), "cache")
    curves = {}
    for name in strategies:
        share = budget_s * (0.6 if name == "ring" else 0.4 / max(1, len(strategies) - 1))
        group = channels.ring if name == "ring" else channels.peers
        curves[name] = _measure(name, group, agreement, device, share)
    link = LinkModel(
        world_size=len(channels.ranks),
        backend=backend,
        curves=curves,
        fingerprint=digest,
        source="measured",
        launch_ms=_launch_ms(channels, device),
    )
    link = LinkModel.from_json(str(agreement.exchange("link", link.to_json())[0]))
    if first and path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(link.to_json())
        temporary.replace(path)
    return link


def _measure(
    name: str, group: dist.ProcessGroup, agreement: Agreement, device: torch.device, budget_s: float
) -> Curve:
    """One curve. Every decision comes from exchanged values, so all ranks run the same number of
    collectives.
    """
    begin = time.perf_counter()
    sizes: list[float] = []
    quartiles: list[float] = []
    spreads: list[float] = []
    repeats = REPEATS
    for position, size in enumerate(SIZES):
        payload = torch.zeros(size // 4, dtype=torch.float32, device=device)
        dist.barrier(group)
        _time(name, payload, group)  # also spends what the link had saved up: token buckets, empty queues
        own = [_time(name, payload, group) for _ in range(repeats)]
        parts = agreement.exchange(f"times/{name}", [own, time.perf_counter() - begin])
        table = np.asarray([part[0] for part in parts])  # type: ignore[index]
        elapsed = max(float(part[1]) for part in parts)  # type: ignore[index]
        fastest = table.min(axis=0) * 1e3
        sizes.append(float(size))
        quartiles.append(float(np.percentile(fastest, 25)))
        spreads.append(float(np.subtract(*np.percentile(fastest, [75, 25]))))
        step = SIZES[min(position + 1, len(SIZES) - 1)] / size
        expected_s = quartiles[-1] * 1e-3 * step
        left = budget_s - elapsed
        repeats = int(min(REPEATS, max(3, left / 2 / max(expected_s, 1e-6) - 1)))
        if position >= 2 and expected_s * (repeats + 1) > left:
            break
    return Curve.fit(sizes, quartiles, spreads)


def _launch_ms(channels: Channels, device: torch.device) -> float:
    """Host time of one bucket: twice the launch of a small asynchronous collective (packing costs about as
    much).
    """
    payload = torch.zeros(256, device=device)
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        flight = channels.launch(payload, "ring")
        times.append(time.perf_counter() - begin)
        flight.wait(60.0)
    return 2e3 * float(np.median(times))


def _time(name: str, payload: torch.Tensor, group: dist.ProcessGroup) -> float:
    begin = time.perf_counter()
    ALGORITHMS[name](payload, group)
    if payload.is_cuda:
        torch.cuda.synchronize(payload.device)
    return time.perf_counter() - begin


def _with_source(link: LinkModel, source: str) -> LinkModel:
    return replace(link, source=source)
