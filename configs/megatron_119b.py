"""Megatron-LM's scaling table (README of its repository): 119 B (118.50 B parameters), 1536 H100s,
768 sequences a step.

Tensor 8 x data 192 by zero3, where Megatron-LM has tensor 8 x pipeline 4 x data 48: predicted to be
faster than stages of any kind that were compiled. With tensor 8 a GPU has room for all the weights
that it gathered until the backward pass, so that the network is busy for less time than the
matmuls; waiting for NVLink costs less than that saves.
"""

from mesh_lm.config import DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=131_072,
            seq_len=4096,
            n_layers=92,
            d_model=10_240,
            n_heads=80,
            tied=False,
            remat="save_names",
            kept_layers=92,
        ),
        output="runs/megatron_119b",
        mesh=MeshConfig(data=192, tensor=8),
        rules=preset("zero3+megatron_sp"),
        train=TrainLoop(steps=95_000, global_batch=768, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(xla_flags="layers"),
    )
