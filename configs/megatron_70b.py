"""Megatron-LM's scaling table (README of its repository): 70 B (69.84 B parameters), 768 H100s, 384
sequences a step.

Tensor 4 x data 192 by zero3, where Megatron-LM has tensor 8 x pipeline 2 x data 48: predicted to be
faster than stages of any kind that were compiled. Layers keep the weights they gathered until their
backward passes, so that the network is busy for less time than the matmuls.
"""

from mesh_lm.config import DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=131_072,
            seq_len=4096,
            n_layers=84,
            d_model=8192,
            n_heads=64,
            tied=False,
            remat="save_names",
            kept_layers=84,
        ),
        output="runs/megatron_70b",
        mesh=MeshConfig(data=192, tensor=4),
        rules=preset("zero3+megatron_sp"),
        train=TrainLoop(steps=191_000, global_batch=384, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=8e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(xla_flags="layers"),
    )
