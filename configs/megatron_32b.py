"""Megatron-LM's scaling table (README of its repository): 32 B (31.51 B parameters), 384 H100s, 192 sequences a step.

Tensor 8 x data 48 as published, with its distributed optimizer. One microbatch: the activations of save_names for its four
sequences fit.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=48, d_model=7168, n_heads=56, tied=False, remat="save_names"),
        output="runs/megatron_32b",
        mesh=MeshConfig(data=48, tensor=8),
        rules=preset("distributed+megatron_sp"),
        train=TrainLoop(steps=381_000, global_batch=192, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
