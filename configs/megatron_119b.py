"""Megatron-LM's scaling table (README of its repository): 119 B (118.50 B parameters), 1536 H100s, 768 sequences a step.

Tensor 8 x pipeline 4 as published; their data 48 is data 24 x fsdp 2 here, because 48 does not divide d_model, which zero2 would cut.
Each microbatch of a stage gathers its weights again, so there are 8 of 2 sequences. 23 layers a stage, a prime: a chunk has one.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=92, d_model=10_240, n_heads=80, tied=False, remat="save_names"),
        output="runs/megatron_119b",
        mesh=MeshConfig(pipeline=4, data=24, fsdp=2, tensor=8),
        rules=preset("hsdp+megatron_sp"),
        train=TrainLoop(steps=95_000, global_batch=768, microbatches=8, eval_every=1000),
        pipeline=PipelineConfig(chunks=23, stash="residuals"),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
