"""Megatron-LM's scaling table (README of its repository): 16 B (16.13 B parameters), 192 H100s, 192
sequences a step.

By zero3 over all devices, one sequence each, where Megatron-LM has tensor 4 x data 48: predicted to
be faster, because each layer's weights are gathered while the layer before computes. The
activations of one microbatch fit, so that nothing is recomputed, and unrolled layers copy nothing
into stacks.
"""

from mesh_lm.config import DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=131_072,
            seq_len=4096,
            n_layers=32,
            d_model=6144,
            n_heads=48,
            tied=False,
            remat="none",
            unroll=True,
        ),
        output="runs/megatron_16b",
        mesh=MeshConfig(data=192),
        rules=preset("zero3"),
        train=TrainLoop(steps=381_000, global_batch=192, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(xla_flags="layers"),
    )
