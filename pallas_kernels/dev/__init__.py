"""Tools for kernel development.

There are an interpreter for CPUs, the resources of compiled kernels, and a search for tile sizes.
"""
