"""Megatron-LM's scaling table (README of its repository): 462 B (461.54 B parameters), 6144 H100s, 3072 sequences a step.

Tensor 8 as published; their data 48 x pipeline 16 is data 24 x fsdp 32 here, which fits, with each weight
gathered for one microbatch of 4 sequences.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=112, d_model=18_432, n_heads=144, tied=False, remat="full"),
        output="runs/megatron_462b",
        mesh=MeshConfig(data=24, fsdp=32, tensor=8),
        rules=preset("hsdp+megatron_sp"),
        train=TrainLoop(steps=24_000, global_batch=3072, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
