"""One of two processes with two CPU devices each and flat optimizer vectors: saves a state and
restores it.

Arguments: its number, a port, and the output.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import sys

import jax
import numpy as np
from fixtures import make_checkpoint as fixture
from processes import PATIENCE

from mesh_lm.checkpoint import Checkpoints
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State
from mesh_lm.state.disk_form import to_disk
from mesh_lm.state.initial import init_state
from sharding_rules import MeshConfig, Shard, make_mesh, preset

MODEL = {"d_model": 64, "dtype": "bfloat16"}


def own(state: State) -> dict[str, list[bytes]]:
    """Returns the shards of this process's devices."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {
        jax.tree_util.keystr(path): [
            np.asarray(shard.data).tobytes() for shard in x.addressable_shards
        ]
        for path, x in leaves
    }


def written(tree: State) -> int:
    """Returns the bytes of flat parameters that this process must write: the first replica of a
    shard is written."""
    parts = (x for x in tree["params"].values() if x.sharding.memory_kind == "pinned_host")
    return sum(
        shard.data.nbytes for x in parts for shard in x.addressable_shards if shard.replica_id == 0
    )


if __name__ == "__main__":
    faulthandler.dump_traceback_later(PATIENCE / 2)  # prints stacks if it hangs
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
    config = dataclasses.replace(
        fixture.CONFIG, model=dataclasses.replace(fixture.CONFIG.model, **MODEL), output=sys.argv[3]
    )
    mesh = make_mesh(MeshConfig(data=4), jax.devices())
    layout = ModelLayout.of(config.model, Shard(preset("distributed"), mesh))
    state = init_state(layout, fixture.OPTIMIZER, seed=0)
    before = own(state)
    tree, digests = to_disk(
        layout, fixture.OPTIMIZER, init_state(layout, fixture.OPTIMIZER, seed=0)
    )
    with Checkpoints(config) as checkpoints:
        state = checkpoints.save(1, state, {"position": 1}, layout, fixture.OPTIMIZER)
        same = own(state) == before
    with Checkpoints(config) as checkpoints:
        _, found = checkpoints.restore(layout, fixture.OPTIMIZER)
    assert found is not None
    same &= own(found) == before
    print(
        "RESULT",
        json.dumps({"same": same, "mine": written(tree), "digests": digests, "model": MODEL}),
        flush=True,
    )
