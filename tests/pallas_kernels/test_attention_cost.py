"""The costs of kernels: exact counts of visible pairs, and the metadata in a compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import BlockMask, flash_attention
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
def test_pairs_are_those_of_the_mask(
    S: int, T: int, causal: bool, window: int | None, q_offset: int | None, sparse: bool
) -> None:
    window = window if causal else None
    shape = (2, -(-S // 64), -(-T // 64))
    mask = BlockMask(np.random.default_rng(S).random(shape) < 0.5, 64) if sparse else None

    def pairs(offset: int) -> float:
        row = offset + np.arange(S)[:, None]
        key = np.arange(T)
        visible = np.ones((2, S, T), bool) if mask is None else mask.dense(S, T).copy()
        if causal:
            visible &= row >= key
        if window is not None:
            visible &= row - key < window
        return visible.sum() / 2

    expected = (pairs(0) + pairs(T - S)) / 2 if q_offset is None else pairs(q_offset)
    masks = {"causal": causal, "window": window, "block_mask": mask}
    assert visible_pairs(S, T, q_offset=q_offset, **masks) == expected


def test_the_numbers_are_attributes_of_the_program() -> None:
    def f(x):
        with cost_metadata("attention forward", flops=12, bytes_accessed=34):
            x = jnp.sin(x)
        with cost_metadata("attention backward", flops=12, bytes_accessed=34, occupancy=0.24651):
            return jnp.cos(x)

    text = jax.jit(f).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).as_text()
    assert 'kernel = "attention forward", kernel_bytes = "34", kernel_flops = "12"}' in text
    assert (
        'kernel = "attention backward", kernel_bytes = "34", kernel_flops = "12", kernel_occupancy '
        '= "0.247"}'
    ) in text


def test_each_kernel_says_how_much_of_the_gpu_its_grid_fills() -> None:
    """A Llama 3 70B's attention on one of eight tensor-parallel devices: one kv head, and all grids
    go by query head."""
    q = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 8192, 1, 128), jnp.bfloat16)

    def loss(q, k, v):
        out = flash_attention(q, k, v, implementation="mosaic", platform="gpu", capability=(9, 0))
        return out.astype(jnp.float32).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    text = gradients.trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    attributes = r'kernel = "flash_attention_(\w+)",.*?kernel_occupancy = "([\d.]+)"'
    shares = {kernel: float(share) for kernel, share in re.findall(attributes, text)}
    assert set(shares) == {"forward", "bwd"}
    assert all(share > 0.99 for share in shares.values()), shares
