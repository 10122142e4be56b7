"""Megatron-LM's scaling table (README of its repository): 177 B (177.23 B parameters), 2304 H100s,
1152 sequences a step.

Tensor 8 x pipeline 6 x data 48 as published, and zero3: stages gather their weights while the
pipeline fills, and sum their gradients while it drains. Each has eight chunks of 2 layers. 12
microbatches of two sequences; stages save the activations of save_names, so that no layer
recomputes its matmuls.
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
            d_model=12_288,
            n_heads=96,
            tied=False,
            remat="save_names",
        ),
        output="runs/megatron_177b",
        mesh=MeshConfig(pipeline=6, data=48, tensor=8),
        rules=preset("zero3+megatron_sp"),
        train=TrainLoop(steps=64_000, global_batch=1152, microbatches=12, eval_every=1000),
        pipeline=PipelineConfig(chunks=8, stash="residuals"),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
