"""The shape of GPT-3 XL (Brown et al., arXiv 2005.14165, table 2.1, with 16 heads of 128): 1.3 B
parameters, on one node of eight GPUs.

The layers are unrolled, so that no activation is stacked for the backward pass.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=50257,
            seq_len=2048,
            n_layers=24,
            d_model=2048,
            n_heads=16,
            remat="save_names",
            unroll=True,
        ),
        output="runs/gpt_1_3b",
        mesh=MeshConfig(fsdp=-1),
        rules=preset("fsdp"),
        train=TrainLoop(steps=100_000, global_batch=512, microbatches=8, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=750),
        data=DataConfig(tokenizer_vocab=16_384),
    )
