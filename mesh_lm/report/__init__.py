"""What the user sees of a run: a line or a live bar, TensorBoard and metrics.jsonl, a plot. Nothing here touches the training state.

Nothing is imported here, so that `flops` and `memory` work where rich, tensorboardX and matplotlib are not installed.
"""
