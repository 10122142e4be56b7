"""A small Llama for two CPU cores, which learns Python from the source of the standard library in a
few minutes.
"""

from mesh_lm.config import CheckpointConfig, DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=4096,
            seq_len=256,
            n_layers=4,
            d_model=128,
            d_ff=352,
            n_heads=4,
            dtype="float32",
            loss_chunk=512,
            positions="rotary",
            norm="rmsnorm",
            activation="swiglu",
            biases=False,
            tied=False,
            # about 1 / sqrt(d_model); with 0.02 so narrow a model begins to learn slowly
            init_std=0.08,
        ),
        output="runs/gpt_tiny",
        train=TrainLoop(steps=600, global_batch=16, eval_every=200),
        optimizer=OptimizerConfig(learning_rate=8e-3, warmup_steps=30, final_fraction=0.0),
        data=DataConfig(path="stdlib", tokenizer_vocab=4096),
        checkpoint=CheckpointConfig(every=50),
    )
