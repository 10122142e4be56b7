"""A small model with a mixture of experts."""

from __future__ import annotations

from support import SEQ, VOCAB

from mesh_lm.model import DecoderConfig
from mesh_lm.model.experts_config import ExpertsConfig

EXPERTS = ExpertsConfig(
    number=8, active=2, d_ff=24, shared=16, score="sigmoid", groups=4, active_groups=2, scale=2.5,
    bias=True, bias_rate=0.01, z_loss=1e-2, balance_loss=1e-2,
)  # fmt: skip
MODEL = DecoderConfig(
    vocab_size=VOCAB, vocab_multiple=16, seq_len=SEQ, n_layers=2, d_model=32, n_heads=4,
    n_kv_heads=2, positions="rotary", norm="rmsnorm", activation="swiglu", biases=False, tied=False,
    init_std=0.1, dtype="float32", loss_chunk=24, remat="full", block="moe", experts=EXPERTS,
)  # fmt: skip
"""A model with all that a router can have."""
