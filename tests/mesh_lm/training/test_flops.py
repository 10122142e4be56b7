"""FLOPs per token, by counting."""

import dataclasses

import pytest
from support import GPT, LLAMA

from mesh_lm.model import DecoderConfig


@pytest.mark.parametrize(
    "config",
    [GPT, LLAMA, dataclasses.replace(LLAMA, window=(3, 40, 1, 0), n_layers=8)],
    ids=["gpt", "llama", "windows"],
)
def test_flops_are_those_of_each_matmul_and_each_pair_of_tokens(config: DecoderConfig) -> None:
    """The forward, and twice that for the backward: two FLOPs per weight and token, and four per
    pair, head and head dimension."""
    c, S = config, config.seq_len
    gated = 3 if c.activation == "swiglu" else 2
    weights = (
        c.n_layers * c.d_model * (c.d_head * (2 * c.n_heads + 2 * c.kv_heads) + gated * c.d_mlp)
        + c.vocab_size * c.d_model
    )
    pairs = 0
    for layer in range(c.n_layers):
        window = (c.window[layer % len(c.window)] if c.window else 0) or S
        pairs += sum(
            key <= query and query - key < window for query in range(S) for key in range(S)
        )
    forward = 2 * weights * S + 4 * pairs * c.n_heads * c.d_head
    assert c.flops_per_token() == pytest.approx(3 * forward / S, rel=1e-12)
