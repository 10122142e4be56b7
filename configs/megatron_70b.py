"""Megatron-LM's scaling table (README of its repository): 70 B (69.84 B parameters), 768 H100s, 384 sequences a step.

Tensor 8 x pipeline 2 as published; their data 48 is data 24 x fsdp 2 here, because 48 does not divide d_model, which zero2 would cut.
Each microbatch of a stage gathers its weights again, so there are 2 of 4 sequences: predicted to be faster than 8 of one, and than
4 of two with remat=save_names.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=84, d_model=8192, n_heads=64, tied=False, remat="full"),
        output="runs/megatron_70b",
        mesh=MeshConfig(pipeline=2, data=24, fsdp=2, tensor=8),
        rules=preset("hsdp+megatron_sp"),
        train=TrainLoop(steps=191_000, global_batch=384, microbatches=2, eval_every=1000),
        pipeline=PipelineConfig(chunks=14, stash="residuals"),
        optimizer=OptimizerConfig(learning_rate=8e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
