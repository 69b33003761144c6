"""Hosts on one machine: network namespaces with a rate-limited link each, and programs that run in them.

Needs root, ip and tc with the token-bucket filter. Each namespace gets one end of a veth pair whose egress is
limited; a bridge in a third namespace joins them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

TCP = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_slow_start_after_idle=0")
"""In the namespaces: connections wait seconds for their turn here, which never happens in training; BBR would
answer with 200 ms of probing, others with a slow start."""


class MissingSupport(RuntimeError):
    """The kernel, the tools or the rights for network namespaces are not there."""


def ip(*arguments: str, namespace: str | None = None, tool: str = "ip") -> None:
    """Run ip or tc, in a namespace if given."""
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    done = subprocess.run([*prefix, tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"{' '.join([tool, *arguments])}: {done.stderr.strip() or done.stdout.strip()}"
        raise MissingSupport(msg)


@contextmanager
def hosts(
    count: int, rate: str, burst: str = "256kb", latency: str = "50ms"
) -> Iterator[list[tuple[str, str, str]]]:
    """Namespaces with a limited link each: yields (namespace, interface, address); removes all at the end."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            msg = f"{tool} is not installed"
            raise MissingSupport(msg)
    if os.geteuid() != 0:
        msg = "network namespaces need root"
        raise MissingSupport(msg)
    mark = f"lf{os.getpid() % 100000}"
    bridge = f"{mark}b"
    names = [f"{mark}h{i}" for i in range(count)]
    made: list[str] = []
    try:
        ip("netns", "add", bridge)
        made.append(bridge)
        ip("link", "add", "br0", "type", "bridge", namespace=bridge)
        ip("link", "set", "br0", "up", namespace=bridge)
        result = []
        for i, name in enumerate(names):
            ip("netns", "add", name)
            made.append(name)
            ip("link", "add", f"v{i}", "netns", name, "type", "veth", "peer", f"p{i}", "netns", bridge)
            ip("link", "set", f"p{i}", "master", "br0", namespace=bridge)
            ip("link", "set", f"p{i}", "up", namespace=bridge)
            ip("addr", "add", f"10.77.0.{i + 1}/24", "dev", f"v{i}", namespace=name)
            ip("link", "set", f"v{i}", "up", namespace=name)
            ip("link", "set", "lo", "up", namespace=name)
            limit = ("rate", rate, "burst", burst, "latency", latency)
            ip("qdisc", "add", "dev", f"v{i}", "root", "tbf", *limit, namespace=name, tool="tc")
            for setting in TCP:
                with suppress(MissingSupport):
                    ip("-q", "-w", setting, namespace=name, tool="sysctl")
            result.append((name, f"v{i}", f"10.77.0.{i + 1}"))
        yield result
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run_on(
    places: list[tuple[str, str, str]], script: str, options: Mapping[str, object], *, limit_s: float
) -> dict[str, object]:
    """Run ``script --worker`` as one rank per place; return the JSON that rank 0 wrote.

    Every process ends within the limit, and its exit code is checked.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        common = {**options, "world": len(places), "address": places[0][2], "out": out}
        processes = []
        for rank, (name, interface, _) in enumerate(places):
            given = [f"--{key}={value}" for key, value in {**common, "rank": rank}.items()]
            command = ["ip", "netns", "exec", name, sys.executable, script, "--worker", *given]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, env=environment))
        deadline = time.monotonic() + limit_s
        try:
            codes = [p.wait(max(0.1, deadline - time.monotonic())) for p in processes]
        finally:
            for p in processes:
                p.kill()
        if any(codes):
            msg = f"{Path(script).name} {dict(options)}: exit codes {codes}"
            raise RuntimeError(msg)
        return json.loads(out.read_text())
