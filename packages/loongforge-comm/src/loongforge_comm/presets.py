"""Links of known machines for the simulator. Nominal rates are stated as such; nothing here was measured by
us.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One level of the network.

    Attributes:
        step_us: time of one message step in microseconds (software and wire).
        gbytes_per_s: rate one rank can send and receive at the same time, in 1e9 bytes per second.
    """

    step_us: float
    gbytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks in nodes.

    Attributes:
        name: label.
        ranks_per_node: ranks that share the inner tier.
        intra: link inside a node.
        inter: link between nodes, per rank.
        base_us: fixed cost of one collective in microseconds.
        source: where the figures come from.
    """

    name: str
    ranks_per_node: int
    intra: Tier
    inter: Tier
    base_us: float
    source: str


_NCCL = (
    "step and base times: constants in NCCL's tuning source 2.30.7, Simple protocol "
    "(NVLink 3.4, network 14, base 8.4 us)"
)

PRESETS: dict[str, Topology] = {
    preset.name: preset
    for preset in (
        Topology(
            name="a800-ib200",
            ranks_per_node=8,
            intra=Tier(step_us=3.4, gbytes_per_s=160.0),
            inter=Tier(step_us=14.0, gbytes_per_s=20.0),
            base_us=8.4,
            source=f"80 % of nominal: NVLink 400 GB/s both ways, 200 Gb/s InfiniBand per GPU; {_NCCL}",
        ),
        Topology(
            name="h100-ib400",
            ranks_per_node=8,
            intra=Tier(step_us=3.4, gbytes_per_s=360.0),
            inter=Tier(step_us=14.0, gbytes_per_s=40.0),
            base_us=8.4,
            source=f"80 % of nominal: NVLink 900 GB/s both ways, 400 Gb/s InfiniBand per GPU; {_NCCL}",
        ),
        Topology(
            name="10gbe",
            ranks_per_node=1,
            intra=Tier(step_us=30.3, gbytes_per_s=2.53),
            inter=Tier(step_us=30.3, gbytes_per_s=2.53),
            base_us=0.0,
            source="fit of 16 nodes in the MG-WFBP repository: alpha 0.908 ms, beta 0.740 ns/B for the whole "
            "all-reduce, divided by its 30 steps and 30/16 volume",
        ),
        Topology(
            name="56gb-ib",
            ranks_per_node=1,
            intra=Tier(step_us=7.87, gbytes_per_s=4.62),
            inter=Tier(step_us=7.87, gbytes_per_s=4.62),
            base_us=0.0,
            source="fit of 16 nodes in the MG-WFBP repository: alpha 0.236 ms, beta 0.406 ns/B, likewise",
        ),
        Topology(
            name="25gbe",
            ranks_per_node=1,
            intra=Tier(step_us=30.0, gbytes_per_s=2.8),
            inter=Tier(step_us=30.0, gbytes_per_s=2.8),
            base_us=0.0,
            source="25 Gb/s at 90 % of nominal, step time of the 10 GbE fit",
        ),
        Topology(
            name="100gbe",
            ranks_per_node=1,
            intra=Tier(step_us=14.0, gbytes_per_s=11.2),
            inter=Tier(step_us=14.0, gbytes_per_s=11.2),
            base_us=8.4,
            source=f"100 Gb/s at 90 % of nominal; {_NCCL}",
        ),
        Topology(
            name="1gbit",
            ranks_per_node=1,
            intra=Tier(step_us=100.0, gbytes_per_s=0.119),
            inter=Tier(step_us=100.0, gbytes_per_s=0.119),
            base_us=0.0,
            source="token bucket of 1 Gb/s between namespaces at 0.95 Gb/s (benchmarks/comm_netns.py)",
        ),
    )
}
