"""The lowered programs of 24 configurations, from DDP to ZeRO-3 with stages, int8 and bf16 sums,
islands and buffers.

`python tests/lowered_programs.py DIRECTORY NAME...` writes the StableHLO of the training step and
of the evaluation of each, without source lines, to DIRECTORY/NAME.step and NAME.evaluation. Nothing
is compiled.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # as tests/conftest.py does for a test run
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import dataclasses

import balanced_toy
import experts_toy
import jax
from support import GPT, LLAMA, host_batch, shard_on

from mesh_lm.config import DilocoConfig, ModelConfig, OptimizerConfig, PipelineConfig
from mesh_lm.optim import Muon, Optimizer
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import abstract_state, weights_of
from mesh_lm.training.step import train_step
from sharding_rules import Rules


class Configuration(NamedTuple):
    """What decides on a lowered program."""

    model: ModelConfig
    rules: Rules | str
    mesh: dict[str, Any]
    microbatches: int = 2
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    diloco: DilocoConfig = DilocoConfig()
    outlier: float = 0.0


def _deeper(model: Any, n_layers: int, **changes: Any) -> ModelConfig:
    return dataclasses.replace(model, n_layers=n_layers, **changes)


_RESIDUALS = PipelineConfig(stash="residuals")
_PAIRED = PipelineConfig(stash="residuals", pair_layers=True)
_STAGES = {"pipeline": 2, "data": 2}

CONFIGURATIONS = {
    "ddp": Configuration(GPT, "ddp", {"data": 2}, microbatches=1),
    "ddp-outlier": Configuration(GPT, "ddp", {"data": 2}, outlier=4.0),
    "fsdp-tensor": Configuration(GPT, "fsdp+megatron_sp", {"fsdp": 2, "tensor": 2}),
    "hsdp-bfloat16": Configuration(
        dataclasses.replace(GPT, dtype="bfloat16"), "hsdp+reduce_bfloat16", {"data": 2, "fsdp": 2}
    ),
    "by_node": Configuration(GPT, "by_node", {"data": 2, "extra": ("node=4",)}),
    "int8": Configuration(GPT, "ddp+reduce_int8", {"data": 2}, outlier=4.0),
    "distributed": Configuration(
        GPT, "distributed+megatron", {"data": 2, "tensor": 2}, outlier=4.0
    ),
    "distributed-int8": Configuration(GPT, "distributed+reduce_int8", {"data": 2}),
    "distributed-int8-stages": Configuration(GPT, "distributed+reduce_int8", _STAGES),
    "stages": Configuration(GPT, "ddp", _STAGES, microbatches=4),
    "stages-residuals": Configuration(GPT, "zero2", _STAGES, 4, _RESIDUALS),
    "zero3": Configuration(
        dataclasses.replace(GPT, remat="full"), "zero3", {"data": 4}, microbatches=1, outlier=4.0
    ),
    "zero3-megatron_sp": Configuration(
        _deeper(GPT, 3, remat="save_names"), "zero3+megatron_sp", {"data": 2, "tensor": 2}
    ),
    "zero3-partly-kept": Configuration(
        _deeper(GPT, 4, remat="full", remat_layers=1, kept_layers=2), "zero3", {"data": 4}
    ),
    "zero3-unrolled": Configuration(
        _deeper(GPT, 3, remat="save_names", kept_layers=3, unroll=True), "zero3", {"data": 4}, 1
    ),
    "zero3-fsdp": Configuration(
        _deeper(LLAMA, 4), "zero3+fsdp+reduce_float32", {"data": 2, "fsdp": 2}
    ),
    "zero3-lighter": Configuration(
        _deeper(LLAMA, 4, remat_layers=2, kept_layers=4), "zero3", {"data": 4}
    ),
    "zero3-stages": Configuration(_deeper(GPT, 4), "zero3", _STAGES, microbatches=4),
    "paired": Configuration(
        _deeper(GPT, 4, remat="save_names"), "megatron_sp", {"pipeline": 2, "tensor": 2}, 4, _PAIRED
    ),
    "islands": Configuration(
        GPT, "ddp", {"data": 2, "island": 2}, diloco=DilocoConfig(outer_steps=3), outlier=4.0
    ),
    "buffers": Configuration(balanced_toy.MODEL, experts_toy.rules("ddp"), {"data": 2}),
    "buffers-distributed-stages": Configuration(
        balanced_toy.MODEL,
        experts_toy.rules("distributed"),
        _STAGES,
        2,
        PipelineConfig(chunks=2, layers=(1, 2, 2, 1)),
        outlier=4.0,
    ),
    "experts-zero3": Configuration(experts_toy.MODEL, experts_toy.rules("zero3"), {"data": 4}),
    "muon": Configuration(
        GPT, "fsdp", {"fsdp": 2}, microbatches=1, optimizer=OptimizerConfig(Muon())
    ),
}


def lowered(configuration: Configuration) -> dict[str, str]:
    """The texts of the programs: "step" and, without islands, "evaluation"."""
    model, rules, mesh, microbatches, pipeline, optimizer_config, diloco, outlier = configuration
    layout = ModelLayout.of(model, shard_on(rules, **mesh), pipeline)
    optimizer = Optimizer(optimizer_config, 10, diloco)
    state = abstract_state(layout, optimizer)
    spec = engine.batch_sharding(layout).spec
    batch = {}
    for name, x in host_batch(microbatches).items():
        sharding = jax.NamedSharding(layout.shard.mesh, engine.leaf_spec(spec, x.shape))
        batch[name] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    texts = {"step": train_step(layout, optimizer, 0, outlier).lower(state, batch).as_text()}
    if not diloco.outer_steps:
        evaluation = jax.jit(engine.evaluate(layout, layout.flat))
        texts["evaluation"] = evaluation.lower(weights_of(layout, state), batch).as_text()
    return texts


def main(directory: Path, names: list[str]) -> None:
    """Writes the programs of these configurations."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        for program, text in lowered(CONFIGURATIONS[name]).items():
            (directory / f"{name}.{program}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
