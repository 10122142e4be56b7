"""Tools for those who change the kernels: an interpreter for CPUs, what a compiled kernel uses, and the search for tiles."""
