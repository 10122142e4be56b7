"""The devices of a run, before anything asks JAX for them; and the signal that ends it."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType, TracebackType

import jax

from mesh_lm.config import ConfigError, LaunchConfig

EXIT_PREEMPTED = 99
"""Status of a run that SIGTERM ended: it saved, and the same command continues it."""


def start(config: LaunchConfig) -> None:
    """Sets up JAX. Must run before the first use of a device; raises ConfigError where it comes too late."""
    if config.cpu_devices:
        try:
            jax.config.update("jax_num_cpu_devices", config.cpu_devices)
        except RuntimeError as error:
            raise ConfigError(f"launch.cpu_devices={config.cpu_devices} must be set before JAX uses a device: {error}") from error
    if config.compile_cache:
        jax.config.update("jax_compilation_cache_dir", str(Path(config.compile_cache).expanduser()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def say(text: str) -> None:
    """Prints on process 0 only."""
    if jax.process_index() == 0:
        print(text, flush=True)


class StopOnSigterm:
    """A context in which SIGTERM only sets `requested`, so that the loop can save and leave at the end of a step."""

    requested = False

    def __enter__(self) -> StopOnSigterm:
        self._before = signal.signal(signal.SIGTERM, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, self._before)
