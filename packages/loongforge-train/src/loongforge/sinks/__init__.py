"""Where step records go: ``metrics.jsonl``, the terminal, and on request TensorBoard, W&B, Prometheus."""

from __future__ import annotations

from loongforge.sinks.base import Sink
from loongforge.sinks.factory import build_sink
from loongforge.sinks.jsonl import JsonlSink
from loongforge.sinks.terminal import TerminalSink

__all__ = ["JsonlSink", "Sink", "TerminalSink", "build_sink"]
