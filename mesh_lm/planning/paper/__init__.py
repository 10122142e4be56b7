"""A training step on paper: its time and memory by formulas, for many layouts at once.

NumPy only: no JAX, and nothing of the compiler. The formulas choose which layouts are worth
compiling; what a plan reports is always compiled.
"""
