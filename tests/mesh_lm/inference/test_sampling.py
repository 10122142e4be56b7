"""Tests of sampling from known logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_lm.errors import ConfigError
from mesh_lm.inference import Sampling

COMPILE_BUDGET = 30
N = 20_000
P = np.array([0.05, 0.3, 0.02, 0.25, 0.2, 0.1, 0.08], np.float64)


def softened(p: np.ndarray, temperature: float) -> np.ndarray:
    return p ** (1 / temperature) / (p ** (1 / temperature)).sum()


@pytest.mark.parametrize(
    ("sampling", "kept", "wanted"),
    [
        (Sampling(1, 0, 1), range(7), P),
        (Sampling(2.0, 0, 1), range(7), softened(P, 2)),
        (Sampling(0.5, 7, 1), range(7), softened(P, 0.5)),
        (Sampling(1, 3, 1), [1, 3, 4], P),
        (Sampling(1, 0, 0.6), [1, 3, 4], P),  # 0.3 + 0.25 is not yet 0.6
        (Sampling(1, 0, 0.54), [1, 3], P),
        (Sampling(1, 0, 0.01), [1], P),
        (Sampling(1, 2, 0.54), [1], P),  # of the two, 0.3 / 0.55 is enough
        (Sampling(0.5, 3, 0.75), [1, 3], softened(P, 0.5)),  # 9 and 6.25 of 19.25 are enough
        (Sampling(1, 100, 1), range(7), P),
        (Sampling(0, 3, 0.5), [1], P),
    ],
    ids=str,
)
def test_frequencies(sampling: Sampling, kept, wanted: np.ndarray) -> None:
    logits = jnp.tile(jnp.log(jnp.asarray(P, jnp.float32)) + 3, (N, 1))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(N))
    counts = np.bincount(np.asarray(jax.jit(sampling.choose)(logits, keys)), minlength=len(P))
    wanted = np.where(np.isin(np.arange(len(P)), list(kept)), wanted, 0)
    wanted = N * wanted / wanted.sum()
    assert (counts[wanted == 0] == 0).all() and counts.sum() == N
    # five standard deviations
    np.testing.assert_array_less(np.abs(counts - wanted), 5 * np.sqrt(wanted) + 1)


def test_equal_logits() -> None:
    """Exactly k tokens are drawn, and greedy takes the first one."""
    logits = jnp.zeros((N, 6))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(N))
    assert len(set(np.asarray(jax.jit(Sampling(1, 2, 1).choose)(logits, keys)).tolist())) == 2
    assert set(np.asarray(jax.jit(Sampling(0).choose)(logits, keys)).tolist()) == {0}


def test_fields_out_of_range() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(-1, -2, 0)
    assert str(caught.value) == (
        "temperature=-1 must be at least 0 (0: always the likeliest token); top_k=-2 must be at "
        "least 0 (0: all tokens); top_p=0 must be in (0, 1] (1: all tokens)"
    )
    with pytest.raises(ConfigError, match="temperature=nan"):
        Sampling(float("nan"))
