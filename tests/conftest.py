"""Eight CPU devices for numerics, and a budget of compilations per test file, because XLA compiles are what a test run waits for."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

# What one test has compiled, another of this run, or a process that it starts, takes from here.
os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="mesh_lm-tests-")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_compiles: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **kwargs: _compiles.append(event) if event == _COMPILE_EVENT else None
)


@pytest.fixture(scope="module", autouse=True)
def compile_budget(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a file that compiles more XLA programs than its COMPILE_BUDGET (default 0). Cached programs do not count."""
    before = len(_compiles)
    yield
    budget, used = getattr(request.module, "COMPILE_BUDGET", 0), len(_compiles) - before
    assert used <= budget, f"{request.module.__name__} compiled {used} programs, over its COMPILE_BUDGET of {budget}"
