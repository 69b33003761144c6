"""Planned memory for PyTorch: a profiled step becomes a placement plan that later steps replay.

Importing this package opens no driver, touches no GPU and does not import torch.
"""

from loongforge_mem.addresses import AddressBook, CapturePool
from loongforge_mem.allocator import Installed, install_global_allocator, installed
from loongforge_mem.budget import BudgetPlan, plan_memory, profile_step
from loongforge_mem.config import Label, MemoryConfig, Mode
from loongforge_mem.offload import Migratable, OptimizerOffload, offload_activations
from loongforge_mem.orchestrator import MemoryOrchestrator
from loongforge_mem.pinned import PinnedArena, arena_bytes
from loongforge_mem.planning import Plan, plan_trace
from loongforge_mem.recompute import apply_recompute, find_blocks
from loongforge_mem.report import analyse
from loongforge_mem.snapshot import load_snapshot
from loongforge_mem.statistics import get_mla_stats
from loongforge_mem.trace import Trace, load_trace, policies, simulate

__all__ = [
    "AddressBook",
    "BudgetPlan",
    "CapturePool",
    "Installed",
    "Label",
    "MemoryConfig",
    "MemoryOrchestrator",
    "Migratable",
    "Mode",
    "OptimizerOffload",
    "PinnedArena",
    "Plan",
    "Trace",
    "analyse",
    "apply_recompute",
    "arena_bytes",
    "find_blocks",
    "get_mla_stats",
    "install_global_allocator",
    "installed",
    "load_snapshot",
    "load_trace",
    "offload_activations",
    "plan_memory",
    "plan_trace",
    "policies",
    "profile_step",
    "simulate",
]
