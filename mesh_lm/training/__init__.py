"""The training loop: its step, its checks before the start, and what watches over it."""
