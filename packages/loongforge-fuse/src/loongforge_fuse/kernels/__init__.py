"""Kernels written for Numba-CUDA, compiled ahead of time, launched through the driver."""
