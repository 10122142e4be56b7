"""The launcher, `python -m mesh_lm.launch`: starts the processes of a run, monitors them and
restarts them. Needs no JAX.

The processes' side is `mesh_lm.distributed`. What both sides share is in `mesh_lm.network`.
"""
