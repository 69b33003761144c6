"""Runs the kernels' own source on the CPU, thread by thread, and checks every access.

Neither a GPU nor Numba is needed: a kernel is a Python function, so the source is executed as it stands, with
the intrinsics replaced by their meaning. Shuffles, warp and block barriers wait as on a GPU; every access to
global and shared memory is checked for bounds, alignment, reads of what nobody wrote, and races. It answers
whether a kernel is right, for small shapes; it says nothing about speed.
"""

from loongforge_fuse.kernels.simulator.machine import SimulationError, simulate
from loongforge_fuse.kernels.simulator.memory import Memory

__all__ = ["Memory", "SimulationError", "simulate"]
