"""Llama 3 8B at 131,072 tokens, as the last stage of its training (arXiv 2407.21783, section
3.4.2); 8 nodes of eight GPUs or more.

A node has a sequence, and each of its GPUs 16,384 tokens of it and, in attention, 4 of the 32 heads
(Ulysses). Rotary positions are scaled as in Llama 3.1. Start from a model of short sequences with
--init_from; docs/context.md has longer sequences, too.
"""

from mesh_lm.config import DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=128_256,
            seq_len=131_072,
            n_layers=32,
            d_model=4096,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14_336,
            positions="rotary",
            rope_theta=500_000.0,
            rope_scaling=8.0,
            rope_original_seq_len=8192,
            norm="rmsnorm",
            activation="swiglu",
            biases=False,
            tied=False,
            remat="save_names",
        ),
        output="runs/llama3_8b_128k",
        mesh=MeshConfig(data=-1, sequence=8),
        rules=preset("zero3+ulysses"),
        train=TrainLoop(steps=5000, global_batch=8),
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=100),
        data=DataConfig(tokenizer_vocab=16_384, documents="separate"),
        launch=LaunchConfig(xla_flags="layers"),
    )
