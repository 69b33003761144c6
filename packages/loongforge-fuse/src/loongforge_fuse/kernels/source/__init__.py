"""Sources of the CUDA kernels, written for Numba.

Importing a module of this package imports numba.cuda. Only the compiler does so; launching a kernel that was
compiled before needs none of it.
"""
