"""Megatron-LM's scaling table (README of its repository): 70 B (69.84 B parameters), 768 H100s, 384 sequences a step.

Tensor 8 as published; their data 48 x pipeline 2 is data 24 x fsdp 4 here, which fits, with each weight
gathered for one microbatch of 4 sequences.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=84, d_model=8192, n_heads=64, tied=False, remat="full"),
        output="runs/megatron_70b",
        mesh=MeshConfig(data=24, fsdp=4, tensor=8),
        rules=preset("hsdp+megatron_sp"),
        train=TrainLoop(steps=191_000, global_batch=384, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=8e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
