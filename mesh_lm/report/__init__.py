"""The output of a run: a line or a live bar, TensorBoard and metrics.jsonl, a plot. Nothing here
changes the training state.

Nothing is imported here, so that `flops` and `memory` work without rich, tensorboardX and
matplotlib.
"""
