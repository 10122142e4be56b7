"""GPT-3 (Brown et al., arXiv 2005.14165): 174.6 B parameters. Tensor parallel inside a node, FSDP over 16 nodes, replicas of that.

Each microbatch gathers the weights again over the network: on 1,024 H100s two of six sequences are predicted 3 times as fast as twelve of
one (--plan). Fewer GPUs may need more: --plan --max_microbatch says how many.
"""

from mesh_lm.config import DataConfig, OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig, preset


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=50257, seq_len=2048, n_layers=96, d_model=12_288, n_heads=96, remat="full", vocab_multiple=1024),
        output="runs/gpt_175b",
        mesh=MeshConfig(data=-1, fsdp=16, tensor=8),
        rules=preset("hsdp+megatron_sp"),
        train=TrainLoop(steps=95_000, global_batch=1536, microbatches=2, eval_every=1000),
        optimizer=OptimizerConfig(learning_rate=6e-5, warmup_steps=120),
        data=DataConfig(tokenizer_vocab=16_384),
    )
