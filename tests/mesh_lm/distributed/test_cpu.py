"""A process with several CPU devices has threads for all collectives that they may wait in at the
same time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mesh_lm.distributed import cpu

_COLLECTIVES = """
import jax, jax.numpy as jnp
from mesh_lm.distributed import cpu
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
cpu.set_threads(1)
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharded, replicated = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
gathered = jax.jit(lambda xs: sum(jax.lax.with_sharding_constraint(jnp.sin(x), replicated)[::2].sum() for x in xs))
arrays = [jax.device_put(jnp.zeros(8 * (500 + i)), sharded) for i in range(24)]
for _ in range(2):
    total = gathered(arrays)
print("total", float(total))
"""


@pytest.mark.slow
def test_independent_collectives_do_not_wait_for_one_another() -> None:
    """With a thread for each device, which is XLA's default, this program waits forever."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")
    }
    done = subprocess.run(
        [sys.executable, "-c", _COLLECTIVES],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert "total 0.0" in done.stdout, done.stderr[-2000:]


def test_a_device_has_threads_of_its_own() -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=96"}
    cpu.set_threads(1, environment)
    assert environment["PJRT_NPROC"] == str(96 * cpu.THREADS)


def test_one_device_keeps_the_threads_of_the_cores() -> None:
    environment: dict[str, str] = {}
    cpu.set_threads(1, environment)
    assert not environment
    cpu.set_threads(2, environment)  # which exchange values with each other
    assert int(environment["PJRT_NPROC"]) >= cpu.THREADS


def test_a_users_choice_is_kept() -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PJRT_NPROC": "5"}
    cpu.set_threads(1, environment)
    assert environment["PJRT_NPROC"] == "5"
