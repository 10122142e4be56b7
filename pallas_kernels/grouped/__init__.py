"""Implementations of `grouped_matmul`.

They are a loop in XLA (`xla.py`), and kernels for Hopper (`hopper.py`) with their plans
(`plan.py`).
"""
