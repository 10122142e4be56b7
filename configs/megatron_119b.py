"""Megatron-LM's scaling table (README of its repository): 119 B (118.50 B parameters), 1536 H100s, 768 sequences a step.

Tensor 8 x pipeline 4 x data 48 as published, with its distributed optimizer. A stage has 23 layers, a prime, so a
chunk has one layer or all. 8 microbatches of two sequences in 23 chunks are predicted to be as fast as 16 of one sequence in one chunk,
which need 10 GiB more.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=92, d_model=10_240, n_heads=80, tied=False, remat="save_names"),
        output="runs/megatron_119b",
        mesh=MeshConfig(pipeline=4, data=48, tensor=8),
        rules=preset("distributed+megatron_sp"),
        train=TrainLoop(steps=95_000, global_batch=768, microbatches=8, eval_every=1000),
        pipeline=PipelineConfig(chunks=23, stash="residuals"),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
