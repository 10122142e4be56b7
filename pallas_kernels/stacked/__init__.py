"""Implementations of `stacked_matmul`.

They are XLA's form (`xla.py`), and kernels for Hopper (`hopper.py`) with their plans (`plan.py`).
"""
