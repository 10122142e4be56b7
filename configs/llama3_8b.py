"""Llama 3 8B (arXiv 2407.21783): grouped queries, rotary positions, RMSNorm, SwiGLU; 8 nodes of
eight GPUs or more.

The layers are unrolled, so that no activation is stacked for the backward pass.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=128_256,
            seq_len=8192,
            n_layers=32,
            d_model=4096,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14_336,
            positions="rotary",
            rope_theta=500_000.0,
            norm="rmsnorm",
            activation="swiglu",
            biases=False,
            tied=False,
            remat="save_names",
            unroll=True,
        ),
        output="runs/llama3_8b",
        mesh=MeshConfig(data=-1, fsdp=8),
        rules=preset("hsdp"),
        train=TrainLoop(steps=200_000, global_batch=512, eval_every=1000, microbatches=8),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000),
        data=DataConfig(tokenizer_vocab=16_384),
    )
