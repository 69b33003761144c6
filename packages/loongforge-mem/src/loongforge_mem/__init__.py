"""Planned memory for PyTorch: a profiled step becomes a placement plan that later steps replay.

Importing this package opens no driver, touches no GPU and does not import torch.
"""

from loongforge_mem.allocator import Installed, install_global_allocator, installed
from loongforge_mem.config import Label, MemoryConfig, Mode
from loongforge_mem.orchestrator import MemoryOrchestrator
from loongforge_mem.planning import Plan, plan_trace
from loongforge_mem.statistics import get_mla_stats
from loongforge_mem.trace import Trace, load_trace, policies, simulate

__all__ = [
    "Installed",
    "Label",
    "MemoryConfig",
    "MemoryOrchestrator",
    "Mode",
    "Plan",
    "Trace",
    "get_mla_stats",
    "install_global_allocator",
    "installed",
    "load_trace",
    "plan_trace",
    "policies",
    "simulate",
]
