"""One of two processes with two CPU devices each: prints digests and the result of `differing`.
Arguments: its index, and a port."""

import json
import sys

import jax
import numpy as np

from mesh_lm.state.digest import digests, host_digest
from mesh_lm.training.replicas import differing

VALUES = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def array(mesh: jax.sharding.Mesh, spec: jax.P, sick: int | None = None) -> jax.Array:
    """Returns VALUES as an array; with `sick`, one bit is flipped in the shard of that device of
    the mesh."""
    where = jax.NamedSharding(mesh, spec)
    blocks = []
    for device, index in where.addressable_devices_indices_map(VALUES.shape).items():
        block = VALUES[index].copy()
        if sick is not None and device == mesh.devices.flat[sick]:
            block.view(np.uint32)[0, 0] ^= 1
        blocks.append(jax.device_put(block, device))
    return jax.make_array_from_single_device_arrays(VALUES.shape, where, blocks)


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"copied": jax.P(), "parts": jax.P("fsdp"), "cut": jax.P(("data", "fsdp"))}
    well = {name: array(mesh, spec) for name, spec in specs.items()}
    sick = {
        "copied": array(mesh, jax.P(), sick=3),
        "parts": array(mesh, jax.P("fsdp"), sick=2),
        "cut": well["cut"],
    }
    found = {
        "host": host_digest(VALUES),
        "digests": digests(well),
        "well": differing(well),
        "sick": differing(sick),
    }
    print("RESULT", json.dumps(found), flush=True)
