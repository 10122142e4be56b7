"""The prefix of a process's log lines."""

import jax


def log_prefix() -> str:
    """Returns the prefix of this process's log lines; empty on process 0."""
    index = jax.process_index() if jax.distributed.is_initialized() else 0
    return f"[process {index}] " if index else ""
