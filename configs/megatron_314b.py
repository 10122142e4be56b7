"""Megatron-LM's scaling table (README of its repository): 314 B (313.62 B parameters), 3072 H100s,
1536 sequences a step.

Tensor 8 x pipeline 8 x data 48 as published, and zero3: stages gather their weights while the
pipeline fills, and sum their gradients while it drains. Each has four chunks of 3 layers. 32
microbatches of one sequence; stages save the activations of save_names, so that no layer recomputes
its matmuls. Two sequences would not fit.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=131_072,
            seq_len=4096,
            n_layers=96,
            d_model=16_384,
            n_heads=128,
            tied=False,
            remat="save_names",
        ),
        output="runs/megatron_314b",
        mesh=MeshConfig(pipeline=8, data=48, tensor=8),
        rules=preset("zero3+megatron_sp"),
        train=TrainLoop(steps=48_000, global_batch=1536, microbatches=32, eval_every=1000),
        pipeline=PipelineConfig(chunks=4, stash="residuals"),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
