"""Llama 3 70B (arXiv 2407.21783): 70.6 B parameters; grouped queries, rotary positions, RMSNorm,
SwiGLU; 64 nodes of eight.

By zero3 over all devices, with tensor parallelism in pairs. A pair computes one sequence at a time
and gathers each layer's weights while the layer before computes; 72 of the 80 layers recompute no
matmul. Single devices with a sequence each would have to recompute 52 of them. On 1,024 H100s a
pair has two sequences in a step. On 512 it has four: set --train.microbatches=4 there.
"""

from mesh_lm.config import DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=128_256,
            seq_len=8192,
            n_layers=80,
            d_model=8192,
            n_heads=64,
            n_kv_heads=8,
            d_ff=28_672,
            positions="rotary",
            rope_theta=500_000.0,
            norm="rmsnorm",
            activation="swiglu",
            biases=False,
            tied=False,
            remat="full",
            remat_layers=8,
        ),
        output="runs/llama3_70b",
        mesh=MeshConfig(data=-1, tensor=2),
        rules=preset("zero3+megatron_sp"),
        train=TrainLoop(steps=200_000, global_batch=1024, microbatches=2, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=2000),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(xla_flags="layers"),
    )
