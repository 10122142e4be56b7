"""NVIDIA's fused attention, by `jax.nn.dot_product_attention(implementation="cudnn")`.

The limits are from the sources of jax 0.10.2, 0.11.2 and 0.12.0.1 and from cuDNN's support matrix
(docs.nvidia.com, cuDNN 9.18):
- jax rounds its log-sum-exp to the input dtype and drops the gradient, so it cannot serve ring
  attention;
- jax requires value heads as wide as the query's, and takes lengths per batch row, not documents
  within a row;
- cuDNN aligns the causal mask at the top left, which is `q_offset` 0.
"""

import jax
from jax import Array

from pallas_kernels.attention.problem import AttentionProblem


def unsupported_reason(problem: AttentionProblem) -> str | None:
    """Every reason why cuDNN cannot serve this problem, in one line; None if it can."""
    _, S, _, H = problem.q_shape
    T = problem.k_shape[1]
    Hv = problem.v_shape[3]
    major, minor = problem.capability
    widest_head = 256 if problem.capability >= (9, 0) else 128

    reasons = []
    if problem.platform != "gpu":
        reasons.append(f"it needs an NVIDIA GPU, and the platform is {problem.platform}")
    if problem.capability < (8, 0):
        reasons.append(f"it needs compute capability 8.0, and this GPU has {major}.{minor}")
    if problem.dtype not in ("bfloat16", "float16"):
        reasons.append(f"it takes bfloat16 and float16, not {problem.dtype}")
    if H % 8 != 0 or widest_head < H:
        reasons.append(
            f"its head dim is a multiple of 8 up to {widest_head} (256 from Hopper on), not {H}"
        )
    if Hv != H:
        reasons.append(f"jax takes only values as wide as the keys for it: {Hv} is not {H}")
    if problem.softcap is not None:
        reasons.append("it has no soft cap")
    if problem.sinks:
        reasons.append("jax has no sinks for it")
    if problem.segments:
        reasons.append(
            "jax has no packed documents for it (only a length per row), so no segment_ids"
        )
    if problem.causal and problem.q_offset != 0:
        reasons.append("its causal mask starts at query 0 and key 0, so q_offset must be 0")
    if problem.window is not None and S != T:
        reasons.append(f"its window needs as many queries as keys, and there are {S} and {T}")
    if problem.block_mask is not None:
        reasons.append("jax has no sparse patterns for it, so no block_mask")
    if problem.return_lse:
        reasons.append(
            "jax rounds its log-sum-exp to the input dtype and drops the gradient, so no return_lse"
        )
    return "; ".join(reasons) or None


def attend(
    q: Array, k: Array, v: Array, problem: AttentionProblem, **_: object
) -> tuple[Array, None]:
    """Serves a problem for which `unsupported_reason` is None. Arrays as in `flash_attention`.

    Returns out [B, S, N, H], and None in place of the log-sum-exp.
    """
    # jax counts the keys on the left of a query's own; our window includes that one.
    window = None if problem.window is None else (problem.window - 1, 0)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=problem.scale,
        is_causal=problem.causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return out, None
