"""Gradient communication for PyTorch, planned from the model graph and the measured link."""

from loongforge_comm.config import SchedulerConfig
from loongforge_comm.errors import (
    CompiledModelError,
    DivergentGradientError,
    PlanMismatchError,
    RankFailureError,
)
from loongforge_comm.gradients import GradientSpec, gradient_specs
from loongforge_comm.interleave import branch_loads, order_branches
from loongforge_comm.link import Curve, LinkModel
from loongforge_comm.mdg import ModuleDependencyGraph, build_mdg
from loongforge_comm.measure import measure_link
from loongforge_comm.members import Generation, Membership, MembershipConfig, RemovedError
from loongforge_comm.plan import Bucket, CommPlan, Piece
from loongforge_comm.planner import plan_buckets
from loongforge_comm.scheduler import GradientScheduler

__all__ = [
    "Bucket",
    "CommPlan",
    "CompiledModelError",
    "Curve",
    "DivergentGradientError",
    "Generation",
    "GradientScheduler",
    "GradientSpec",
    "LinkModel",
    "Membership",
    "MembershipConfig",
    "ModuleDependencyGraph",
    "Piece",
    "PlanMismatchError",
    "RankFailureError",
    "RemovedError",
    "SchedulerConfig",
    "branch_loads",
    "build_mdg",
    "gradient_specs",
    "measure_link",
    "order_branches",
    "plan_buckets",
]
