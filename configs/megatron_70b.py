"""Megatron-LM's scaling table (README of its repository): 70 B (69.84 B parameters), 768 H100s, 384 sequences a step.

Tensor 8 x pipeline 2 x data 48 as published, with its distributed optimizer. 4 microbatches of two sequences; each
stage has seven chunks of 6 layers and saves the activations of save_names, so that no layer recomputes its matmuls.
Predicted to be faster than 8 microbatches of one sequence, and as fast as 2 of four, which need 13 GiB more.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=84, d_model=8192, n_heads=64, tied=False, remat="save_names"),
        output="runs/megatron_70b",
        mesh=MeshConfig(pipeline=2, data=48, tensor=8),
        rules=preset("distributed+megatron_sp"),
        train=TrainLoop(steps=191_000, global_batch=384, microbatches=4, eval_every=1000),
        pipeline=PipelineConfig(chunks=7, stash="residuals"),
        optimizer=OptimizerConfig(learning_rate=8e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
