"""Megatron-LM's scaling table (README of its repository): 462 B (461.54 B parameters), 6144 H100s, 3072 sequences a step.

Tensor 8 x pipeline 16 x data 48 as published, with its distributed optimizer. Each stage has seven
chunks of one layer. 64 microbatches of one sequence; stages save the activations of save_names, so that no layer recomputes its matmuls.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=112, d_model=18_432, n_heads=144, tied=False, remat="save_names"),
        output="runs/megatron_462b",
        mesh=MeshConfig(pipeline=16, data=48, tensor=8),
        rules=preset("distributed+megatron_sp"),
        train=TrainLoop(steps=24_000, global_batch=3072, microbatches=64, eval_every=1000),
        pipeline=PipelineConfig(chunks=7, stash="residuals"),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
