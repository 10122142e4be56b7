"""Megatron-LM's scaling table (README of its repository): 462 B (461.54 B parameters), 6144 H100s,
3072 sequences a step.

Tensor 8 x data 768 by zero3, where Megatron-LM has tensor 8 x pipeline 16 x data 48: predicted to
be faster than stages of any kind that were compiled, although most layers are recomputed. The last
32 keep the weights they gathered until their backward passes.
"""

from mesh_lm.config import DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=131_072,
            seq_len=4096,
            n_layers=112,
            d_model=18_432,
            n_heads=144,
            tied=False,
            remat="full",
            remat_layers=92,
            kept_layers=32,
        ),
        output="runs/megatron_462b",
        mesh=MeshConfig(data=768, tensor=8),
        rules=preset("zero3+megatron_sp"),
        train=TrainLoop(steps=24_000, global_batch=3072, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=500),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(xla_flags="layers"),
    )
