"""Megatron-LM's scaling table (README of its repository): 177 B (177.23 B parameters), 2304 H100s, 1152 sequences a step.

Tensor 8 as published; their data 48 x pipeline 6 is data 24 x fsdp 12 here, which fits, with each weight
gathered for one microbatch of 4 sequences.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=96, d_model=12_288, n_heads=96, tied=False, remat="full"),
        output="runs/megatron_177b",
        mesh=MeshConfig(data=24, fsdp=12, tensor=8),
        rules=preset("hsdp+megatron_sp"),
        train=TrainLoop(steps=64_000, global_batch=1152, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
