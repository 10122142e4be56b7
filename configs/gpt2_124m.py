"""GPT-2 small (Radford et al. 2019): 124 M parameters, on one GPU or more.

The layers are unrolled and the microbatches are large: a loop over layers this small would spend
its time on stacking activations.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=50257, seq_len=1024, n_layers=12, d_model=768, n_heads=12, unroll=True
        ),
        output="runs/gpt2_124m",
        train=TrainLoop(steps=20_000, global_batch=480, microbatches=3, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=700),
        data=DataConfig(tokenizer_vocab=16_384),
    )
