"""Abstract batches, to compile a step without reading data or installing the libraries that do."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm.config import TrainConfig


def abstract_batch(config: TrainConfig, sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of one global batch without reading data.

    sharding: that of a [M, B, S] leaf.
    """
    train = config.train
    shape = (train.microbatches, train.global_batch // train.microbatches, config.model.seq_len)
    dtypes = {
        "tokens": np.int32,
        "labels": np.int32,
        "weights": np.float32,
        "sample_ids": np.uint32,
        "indices": np.int32,
    }
    if config.data.documents != "joined":
        dtypes |= {"segment_ids": np.int32, "positions": np.int32}

    def leaf(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        axes = zip(sharding.spec, shape, strict=False)
        spec = PartitionSpec(*(axis if size > 1 else None for axis, size in axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(sharding.mesh, spec))

    shapes = {"sample_ids": shape[:2], "indices": (shape[0], 1, shape[2])}
    return {name: leaf(shapes.get(name, shape), dtype) for name, dtype in dtypes.items()}
