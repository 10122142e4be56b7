"""Pipeline schedules as tables of integers, the division of layers into stages, and what both cost.
Needs NumPy only.
"""
