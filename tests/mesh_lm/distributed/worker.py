"""One process of a run: trains with train.py, then writes digests of initialisation, batches and
dropout masks.

Started by test_processes.py, through `python -m mesh_lm.launch` or through Slurm: worker.py OUTPUT
train.py's arguments ...
"""

import hashlib
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

import train
from mesh_lm.commands import command_line
from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import prepare
from mesh_lm.errors import ConfigError
from mesh_lm.model.dropout import Dropout
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state.initial import init_state
from mesh_lm.training.check import check
from sharding_rules import Shard, make_mesh


def digest(tree: Any) -> dict[str, str]:
    """Returns the SHA-256 of every full leaf."""
    full = multihost_utils.process_allgather(tree, tiled=True)
    leaves, _ = jax.tree_util.tree_flatten_with_path(full)
    digests = {}
    for path, leaf in leaves:
        content = np.ascontiguousarray(leaf).tobytes()
        digests[jax.tree_util.keystr(path)] = hashlib.sha256(content).hexdigest()
    return digests


def bits(argv: list[str]) -> dict[str, Any]:
    config = check(command_line.parse(argv), jax.device_count())
    layout = ModelLayout.of(config.model, Shard(config.rules, make_mesh(config.mesh)))
    optimizer = Optimizer(config.optimizer, config.train.steps, config.diloco)
    state = init_state(layout, optimizer, config.seed)

    corpus = prepare(config.data, vocab=config.data.tokenizer_vocab)
    loader = Batches(config, corpus, batch_sharding(layout)).train()
    batches = [batch for _, batch in islice(loader, 3)]
    loader.close()

    @jax.jit
    def mask(ids: jax.Array) -> jax.Array:
        dropout = Dropout.of(jax.random.key(3), ids, jnp.arange(4)[None])
        return dropout.fold(1)(jnp.ones((*ids.shape, 4, 8)), 0.5)

    ids = batches[-1]["sample_ids"][0]
    return {
        "init": digest(state),
        "batches": [digest(batch) for batch in batches],
        "masks": digest(mask(ids)),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
    }


def main(output: str, *argv: str) -> int:
    words = [*argv, f"--config.output={output}"]
    status = train.main(words)
    if status:
        return status
    digests = bits(words)
    if jax.process_index() == 0:
        (Path(output) / "bits.json").write_text(json.dumps(digests), encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
