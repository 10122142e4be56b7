"""How a blueprint divides its layers; tests/mesh_lm/pipeline has where they then lie."""

import pytest

from mesh_lm.blueprint import divided
from mesh_lm.config import PipelineConfig
from mesh_lm.model import DecoderConfig


@pytest.mark.parametrize(("stash", "counts"), [("residuals", (5, 3)), ("input", (4, 4))])
def test_stages_are_balanced_for_what_they_compute(stash, counts: tuple[int, int]) -> None:
    """A head of two layers: 5 and 3 + 2. Where a backward repeats the forward, a layer is 4/3, and of the head 4/3 are free: 16/3 and
    18/3 are less than 20/3 and 14/3."""
    config = DecoderConfig(n_layers=8, d_model=64, n_heads=4, seq_len=16)
    layer = (config.flops_per_token() - 6 * config.vocab_size * config.d_model) / config.n_layers
    config = DecoderConfig(n_layers=8, d_model=64, n_heads=4, seq_len=16, vocab_size=round(2 * layer / (6 * config.d_model)))
    assert divided(config, PipelineConfig(stash=stash, balance="flops"), 2).counts == counts
