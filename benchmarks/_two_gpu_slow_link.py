"""A loopback of its own with a limited rate, for NCCL over sockets: network namespace and token bucket."""

from __future__ import annotations

import os
import shutil
import subprocess

RATES = {"nccl": "16gbit", "gloo": "1gbit"}
"""Both directions share the loopback, so an all-reduce of two ranks sees half of it."""
SETUP = (
    'ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst {burst} latency 50ms && exec "$@"'
)


def limited_loopback(rate: str) -> tuple[list[str], str]:
    """Command prefix that runs a program behind a limited loopback, and why not where there is none.

    Tried with the rights of root, then with those of a user namespace.

    Returns:
        (prefix, ""), or ([], reason) with the answer of each attempt.
    """
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return [], f"not installed: {', '.join(missing)}"
    script = SETUP.format(rate=rate, burst="8mb" if "gbit" in rate and rate != "1gbit" else "256kb")
    ways = {"user namespace": ["unshare", "--user", "--map-root-user", "--net"]}
    if os.geteuid() == 0:
        ways = {"root": ["unshare", "--net"]} | ways
    reasons = []
    for way, start in ways.items():
        prefix = [*start, "sh", "-c", script, "sh"]
        done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False, timeout=20)
        if done.returncode == 0:
            return prefix, ""
        reasons.append(f"as {way}: {done.stderr.strip()[:200]}")
    return [], "; ".join(reasons)
