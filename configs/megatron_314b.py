"""Megatron-LM's scaling table (README of its repository): 314 B (313.62 B parameters), 3072 H100s, 1536 sequences a step.

Tensor 8 x pipeline 8 as published; their data 48 is data 24 x fsdp 2 here, because 48 does not divide d_model, which zero2 would cut.
Each microbatch of a stage gathers its weights again, so there are 8 of 4 sequences, whose activations fit with remat=full only. Predicted
to be slower than FSDP over 16 without stages (docs/configs.md).
"""

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=131_072, seq_len=4096, n_layers=96, d_model=16_384, n_heads=128, tied=False, remat="full"),
        output="runs/megatron_314b",
        mesh=MeshConfig(pipeline=8, data=24, fsdp=2, tensor=8),
        rules=preset("hsdp+megatron_sp"),
        train=TrainLoop(steps=48_000, global_batch=1536, microbatches=8, eval_every=1000),
        pipeline=PipelineConfig(chunks=12, stash="residuals"),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
    )
