"""The costs of kernels: exact counts of visible pairs, and the metadata in a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import BlockMask
from pallas_kernels.attention.cost import cost_metadata, visible_pairs

COMPILE_BUDGET = 0


@settings(deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.booleans(),
    st.none() | st.integers(1, 200),
    st.none() | st.integers(-99, 99),
    st.booleans(),
)
def test_pairs_are_those_of_the_mask(S: int, T: int, causal: bool, window: int | None, q_offset: int | None, sparse: bool) -> None:
    window = window if causal else None
    shape = (2, -(-S // 64), -(-T // 64))
    mask = BlockMask(np.random.default_rng(S).random(shape) < 0.5, 64) if sparse else None
    row, key = (T - S if q_offset is None else q_offset) + np.arange(S)[:, None], np.arange(T)
    visible = np.ones((2, S, T), bool) if mask is None else mask.dense(S, T).copy()
    if causal:
        visible &= row >= key
    if window is not None:
        visible &= row - key < window
    assert visible_pairs(S, T, causal=causal, window=window, q_offset=q_offset, block_mask=mask) == visible.sum() / 2


def test_the_numbers_are_attributes_of_the_program() -> None:
    def f(x):
        with cost_metadata("attention forward", flops=12, bytes_accessed=34):
            x = jnp.sin(x)
        with cost_metadata("attention backward", flops=12, bytes_accessed=34, occupancy=0.24651):
            return jnp.cos(x)

    text = jax.jit(f).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).as_text()
    assert 'kernel = "attention forward", kernel_bytes = "34", kernel_flops = "12"}' in text
    assert 'kernel = "attention backward", kernel_bytes = "34", kernel_flops = "12", kernel_occupancy = "0.247"}' in text
