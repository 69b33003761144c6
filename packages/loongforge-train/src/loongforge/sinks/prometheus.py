"""Prometheus sink (extra ``prometheus``): gauges of the last step on an HTTP port."""

from __future__ import annotations

import os

from loongforge.errors import require
from loongforge.records import StepRecord
from loongforge.sinks.base import SCALARS, scalars

PORT_VARIABLE = "LOONGFORGE_PROMETHEUS_PORT"
DEFAULT_PORT = 9400


class PrometheusSink:
    """Serves the last step's scalars as gauges ``loongforge_<name>{rank="R"}``.

    Args:
        rank: This rank; its port is the base port plus the rank.
        port: Base port; 0 picks a free one. By default ``LOONGFORGE_PROMETHEUS_PORT`` or 9400.
    """

    def __init__(self, *, rank: int, port: int | None = None) -> None:
        client = require("prometheus_client", "loongforge-train[prometheus]", "drop prometheus from sinks")
        base = int(os.environ.get(PORT_VARIABLE, DEFAULT_PORT)) if port is None else port
        self._registry = client.CollectorRegistry()  # type: ignore[attr-defined]
        self._rank = str(rank)
        self._gauges = {
            name: client.Gauge(f"loongforge_{name}", name, ["rank"], registry=self._registry)  # type: ignore[attr-defined]
            for name in (*SCALARS, "step")
        }
        self._server, self._thread = client.start_http_server(  # type: ignore[attr-defined]
            base + rank if base else 0, addr="127.0.0.1", registry=self._registry
        )
        self.port = int(self._server.server_port)

    def write(self, record: StepRecord) -> None:
        """Set the gauges."""
        for name, value in {**scalars(record), "step": float(record.step)}.items():
            self._gauges[name].labels(rank=self._rank).set(value)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
