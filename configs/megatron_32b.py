"""Megatron-LM's scaling table (README of its repository): 32 B (31.51 B parameters), 384 H100s, 192
sequences a step.

Tensor 2 x data 192 by zero3, where Megatron-LM has tensor 8 x data 48: predicted to be faster,
because a layer's weights are gathered while the layer before computes. Layers keep them until their
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
            n_layers=48,
            d_model=7168,
            n_heads=56,
            tied=False,
            remat="save_names",
            kept_layers=48,
            unroll=True,
        ),
        output="runs/megatron_32b",
        mesh=MeshConfig(data=192, tensor=2),
        rules=preset("zero3+megatron_sp"),
        train=TrainLoop(steps=381_000, global_batch=192, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(xla_flags="layers"),
    )
