"""Implementations of `grouped_matmul`.

They are a loop in XLA (`xla.py`, and `blocks.py` for CPUs), and kernels for Hopper (`hopper.py`)
with their plans (`plan.py`).
"""
