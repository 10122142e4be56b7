"""One training step under random rules: it must equal one device, or be refused with a message.

`python tests/random_rules.py '{"model": "gpt", "mesh": {"tensor": 2}, "rules": {"params": {"mlp":
["tensor"]}}}'` runs one example; without an argument, one for each line of its input. The answer is
a line of JSON: [verdict, what was said].
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import traceback
from typing import Any

if __name__ == "__main__":  # as tests/conftest.py does for a test run
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    )

import dataclasses

import jax
import numpy as np
from experts_model import MODEL as MOE
from flat_layout import unflattened
from support import (
    GPT,
    LLAMA,
    assert_same_gradients,
    by_stage,
    host_batch,
    initial,
    on_devices,
    shard_on,
)

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.errors import ConfigError
from mesh_lm.optim import AdamW, Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import MASTER, abstract_state, initial_statistics
from mesh_lm.state.initial import fresh_state
from mesh_lm.training.check import check
from mesh_lm.training.step import train_step
from sharding_rules import MeshConfig, ShardingRuleError, preset

MODELS = {"gpt": GPT, "llama": dataclasses.replace(LLAMA, window=()), "moe": MOE}
BASE = "hsdp+megatron"
"""The rules that an example changes, if it names no others."""
OPTIMIZER = OptimizerConfig(
    AdamW(eps=1.0), learning_rate=1e-2, warmup_steps=0, schedule="constant", clip_norm=1e9
)
"""A config in which an update is nearly linear in the gradient, and does not amplify its noise."""
Example = dict[str, Any]


def config_of(example: Example) -> TrainConfig:
    """The config of {"model", "mesh", "base", "rules" (column -> row -> mesh axes), "exchange",
    "microbatches", "pipeline"}."""
    changes: dict[str, Any] = {
        kind: {row: tuple(axes) or None for row, axes in rows.items()}
        for kind, rows in example["rules"].items()
    }
    return TrainConfig(
        model=MODELS[example["model"]],
        output="nowhere",
        mesh=MeshConfig(**example["mesh"]),
        rules=preset(example.get("base", BASE)).replace(
            "random", exchange=example.get("exchange"), **changes
        ),
        train=TrainLoop(steps=10, global_batch=16, microbatches=example.get("microbatches", 1)),
        optimizer=OPTIMIZER,
        data=DataConfig(tokenizer_vocab=64),
        pipeline=PipelineConfig(**example.get("pipeline", {})),
    )


def verdict(example: Example) -> tuple[str, str]:
    """("same", ""), ("refused", message), or a failure: ("wrong" or "crashed", details)."""
    config = config_of(example)
    try:
        config = check(config, math.prod(config.mesh.sizes().values()))
        found = stepped(config)
    except (ConfigError, ShardingRuleError) as error:
        return "refused", str(error)
    except Exception:
        return "crashed", traceback.format_exc()[-3000:]
    try:
        for wanted, got in zip(reference(example["model"]), found, strict=True):
            assert_same_gradients(got, wanted)
    except AssertionError as error:
        return "wrong", str(error)
    return "same", ""


Found = tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]


def stepped(config: TrainConfig) -> Found:
    """Metrics, first moments (a tenth of the gradients) and new parameters after a step from seed
    0, layers in model order."""
    sizes = {axis: size for axis, size in config.mesh.sizes().items() if size > 1}
    shard = shard_on(config.rules, **sizes)
    layout, optimizer = (
        ModelLayout.of(config.model, shard, config.pipeline),
        Optimizer(config.optimizer, config.train.steps, config.diloco),
    )
    whole = initial(ModelLayout.of(config.model, shard_on("ddp")))
    if layout.flat.vectors:
        everywhere = jax.NamedSharding(shard.mesh, jax.P())
        state = fresh_state(
            layout, optimizer, {name: jax.device_put(x, everywhere) for name, x in whole.items()}
        )
    else:  # with NumPy, without a program to compile
        abstract = abstract_state(layout, optimizer)
        zeros = jax.tree.map(
            lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract
        )
        state = zeros | {
            "params": by_stage(layout, whole),
            "recent": jax.device_put(initial_statistics(), abstract["recent"].sharding),
        }
    batch = on_devices(host_batch(config.train.microbatches), layout)
    after, metrics = train_step(layout, optimizer, seed=3)(state, batch)

    held = jax.tree.map(np.asarray, after)
    params = {
        name: x for name, x in held["params"].items() if name not in layout.flat.names
    } | held.get(MASTER, {})
    return {name: np.asarray(x) for name, x in metrics.items()}, *(
        unflattened(layout, part) for part in (held["mu"], params)
    )


@functools.cache
def reference(model: str) -> Found:
    return stepped(config_of({"model": model, "mesh": {}, "rules": {}}))


def main() -> None:
    for line in sys.argv[1:] or sys.stdin:
        print("\0" + json.dumps(verdict(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
