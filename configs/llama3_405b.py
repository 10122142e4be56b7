"""Llama 3 405B (arXiv 2407.21783): 405.9 B parameters; grouped queries, rotary positions, RMSNorm,
SwiGLU; 64 nodes of eight or more.

Eight stages of eight chunks, most of two layers. On 16,384 H100s a replica has eight sequences;
FSDP and zero3 without stages are predicted to be slower, because they send all weights over the
network for one sequence of each tensor group.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=128_256,
            seq_len=8192,
            n_layers=126,
            d_model=16_384,
            n_heads=128,
            n_kv_heads=8,
            d_ff=53_248,
            positions="rotary",
            rope_theta=500_000.0,
            norm="rmsnorm",
            activation="swiglu",
            biases=False,
            tied=False,
            remat="save_attention",
        ),
        output="runs/llama3_405b",
        mesh=MeshConfig(pipeline=8, data=-1, tensor=8),
        rules=preset("zero3+megatron_sp"),
        train=TrainLoop(steps=200_000, global_batch=2048, microbatches=8, eval_every=1000),
        pipeline=PipelineConfig(chunks=8, stash="residuals", balance="flops"),
        optimizer=OptimizerConfig(learning_rate=8e-5, warmup_steps=2000),
        data=DataConfig(tokenizer_vocab=16_384),
    )
