"""Megatron-LM's scaling table (README of its repository): 1.7 B (1.75 B parameters), 48 H100s, 192
sequences a step.

Data 48 as published, by zero3. One microbatch: all activations of its four sequences fit. The
layers are unrolled, so that no activation is stacked for the backward pass.
"""

from mesh_lm.config import DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=131_072,
            seq_len=4096,
            n_layers=24,
            d_model=2048,
            n_heads=16,
            tied=False,
            unroll=True,
        ),
        output="runs/megatron_1_7b",
        mesh=MeshConfig(data=48),
        rules=preset("zero3"),
        train=TrainLoop(steps=381_000, global_batch=192, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(xla_flags="layers"),
    )
