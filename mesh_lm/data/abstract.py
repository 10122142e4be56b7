"""A batch as shapes: what is compiled for, where nothing that reads data is needed or installed."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm.config import TrainConfig


def abstract_batch(config: TrainConfig, sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the leaves of one global batch; no data is read. `sharding` is that of a [M, B, S] leaf."""
    train = config.train
    shape = (train.microbatches, train.global_batch // train.microbatches, config.model.seq_len)
    dtypes = {"tokens": np.int32, "labels": np.int32, "weights": np.float32, "sample_ids": np.uint32}
    if config.data.documents != "joined":
        dtypes |= {"segment_ids": np.int32, "positions": np.int32}

    def leaf(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: len(shape)])))

    return {name: leaf(shape[:2] if name == "sample_ids" else shape, dtype) for name, dtype in dtypes.items()}
