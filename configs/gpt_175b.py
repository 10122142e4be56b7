"""GPT-3 (Brown et al., arXiv 2005.14165): 174.6 B parameters. Tensor parallel inside a node, 8
stages.

Stages as in Megatron-LM's 175 B (Korthikanti et al., arXiv 2205.05198), each with six chunks of two
layers. They gather their weights while the pipeline fills, sum their gradients while it drains, and
save the activations of save_names, so that no layer recomputes its matmuls. On 1,024 H100s, 24
microbatches of four sequences are predicted to be faster than 48 of two (--plan), which accumulate
weight gradients twice as often.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=50257,
            seq_len=2048,
            n_layers=96,
            d_model=12_288,
            n_heads=96,
            remat="save_names",
            vocab_multiple=1024,
        ),
        output="runs/gpt_175b",
        mesh=MeshConfig(pipeline=8, data=-1, tensor=8),
        rules=preset("zero3+megatron_sp"),
        train=TrainLoop(steps=95_000, global_batch=1536, microbatches=24, eval_every=1000),
        pipeline=PipelineConfig(chunks=6, stash="residuals"),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=120),
        data=DataConfig(tokenizer_vocab=16_384),
    )
