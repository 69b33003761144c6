"""Configuration of the membership."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MembershipConfig:
    """Settings of :class:`loongforge_comm.Membership`; every rank must use equal values."""

    check_every: int = 100
    """Steps between two looks at who wants to join. Costs a few store round trips each, and two heartbeat
    intervals once for each new request."""
    heartbeat_interval_s: float = 1.0
    """Seconds between heartbeats of the background thread."""
    heartbeat_timeout_s: float = 10.0
    """Seconds without a heartbeat after which a rank is taken out. A C call that holds the interpreter lock
    for longer looks like a stopped rank."""
    agree_timeout_s: float = 120.0
    """Longest wait for a rank that is alive to come to an agreement; then it is taken out as well. Also the
    longest wait for an answer of the store."""
    timeout_s: float = 600.0
    """Limit of the collectives of the process groups that are made, and of the wait for the device in
    ``commit``. Groups of a lost rank keep their connections so long; give schedulers no longer limit."""
    min_ranks: int = 1
    """Fewest ranks that go on; with fewer the run ends with an error."""

    def __post_init__(self) -> None:
        for name in ("check_every", "min_ranks"):
            if getattr(self, name) < 1:
                msg = f"{name} is {getattr(self, name)}, allowed are whole numbers >= 1"
                raise ValueError(msg)
        for name in ("heartbeat_interval_s", "heartbeat_timeout_s", "agree_timeout_s", "timeout_s"):
            if not getattr(self, name) > 0:
                msg = f"{name} is {getattr(self, name)}, allowed are values > 0"
                raise ValueError(msg)
        if self.agree_timeout_s < self.heartbeat_timeout_s:
            msg = (
                f"agree_timeout_s is {self.agree_timeout_s} with heartbeat_timeout_s "
                f"{self.heartbeat_timeout_s}, allowed is the heartbeat's timeout or more; raise it"
            )
            raise ValueError(msg)
        if self.heartbeat_interval_s * 2 > self.heartbeat_timeout_s:
            msg = (
                f"heartbeat_interval_s is {self.heartbeat_interval_s} with heartbeat_timeout_s "
                f"{self.heartbeat_timeout_s}, allowed is up to half the timeout; raise the timeout"
            )
            raise ValueError(msg)
