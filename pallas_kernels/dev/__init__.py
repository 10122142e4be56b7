"""Tools for kernel development: an interpreter for CPUs, the resources of compiled kernels, and the
search for tile sizes.
"""
