"""An attention call as plain data: it is checked once, and an implementation is chosen for it.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads, H head dim.
"""

import dataclasses
import math
import os
import re
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.attention.block_mask import BlockMask

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """One call without its arrays. Make it with `describe_attention`, which checks it."""

    platform: str
    """The platform that the program is compiled for: cpu, gpu, ..."""
    capability: tuple[int, int]
    """CUDA compute capability, (9, 0) for Hopper. Used on gpu only."""
    dtype: str
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    q_offset: int | None = 0
    """None: traced, and so unknown when compiling."""
    segments: bool = False
    sinks: bool = False
    return_lse: bool = False
    block_mask: BlockMask | None = None
    deterministic: bool = False
    unrounded: bool = False
    """Whether `attention_gradients` returns its fp32 sums without rounding them to `dtype`."""


class Sides(TypedDict, total=False):
    """The arrays of a call besides q, k and v, as in `flash_attention`.

    If there are segment_ids, there are kv_segment_ids, too.
    """

    segment_ids: Array | None
    kv_segment_ids: Array | None
    q_offset: int | Array
    sinks: Array | None


def describe_attention(
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    v: Array | jax.ShapeDtypeStruct,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    segment_ids: Array | jax.ShapeDtypeStruct | None = None,
    kv_segment_ids: Array | jax.ShapeDtypeStruct | None = None,
    q_offset: int | Array = 0,
    sinks: Array | jax.ShapeDtypeStruct | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    platform: str | None = None,
    capability: tuple[int, int] | None = None,
) -> AttentionProblem:
    """Returns the `AttentionProblem` of a call with these arguments of `flash_attention`.

    Args:
      q, k, v, segment_ids, kv_segment_ids, sinks: arrays, or `jax.ShapeDtypeStruct`s.
      deterministic: None means as XLA: whether XLA_FLAGS has --xla_gpu_deterministic_ops=true.
      platform: None means `jax.default_backend()`; name it when compiling for devices that this
        process does not have.
      capability: None means that of the first local GPU, or (8, 0) without one, as jax itself
        assumes; see `capability_of`.

    Raises:
      ValueError: the arguments have faults; the message has all of them.
    """
    faults = [*_shape_faults(q, k, v), *_feature_faults(causal, scale, window, softcap, q_offset)]
    if not faults:
        # These checks index the shapes, so they come after the checks of the shapes.
        faults = _side_faults(q.shape, k.shape, segment_ids, kv_segment_ids, sinks)
        faults += _block_faults(q.shape, k.shape, block_mask)
    if faults:
        raise ValueError("flash_attention: " + "; ".join(faults))

    platform, capability = target_of(platform, capability)
    return AttentionProblem(
        platform=platform,
        capability=capability,
        dtype=str(q.dtype),
        q_shape=q.shape,
        k_shape=k.shape,
        v_shape=v.shape,
        scale=1 / math.sqrt(q.shape[3]) if scale is None else float(scale),
        causal=bool(causal),
        window=None if window is None else int(window),
        softcap=None if softcap is None else float(softcap),
        q_offset=int(q_offset) if isinstance(q_offset, int | np.integer) else None,
        segments=segment_ids is not None,
        sinks=sinks is not None,
        return_lse=bool(return_lse),
        block_mask=block_mask,
        deterministic=_xla_is_deterministic() if deterministic is None else bool(deterministic),
    )


def capability_of(device: Any) -> tuple[int, int]:
    """CUDA compute capability of a JAX device, or of a compile-only one; (0, 0) if it has none."""
    # For an AMD GPU the attribute is a name, such as gfx942.
    version = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if version is None:
        return (0, 0)
    return (int(version[1]), int(version[2]))


def target_of(
    platform: str | None, capability: tuple[int, int] | None
) -> tuple[str, tuple[int, int]]:
    """(platform, capability) of the target, with the defaults of `describe_attention`."""
    default_platform = jax.default_backend()
    if capability is None:
        on_gpu = default_platform == "gpu"
        capability = capability_of(jax.local_devices()[0]) if on_gpu else (8, 0)
    if platform is None:
        platform = default_platform
    if platform == "cuda":
        platform = "gpu"
    return platform, capability


def _xla_is_deterministic() -> bool:
    """Whether XLA_FLAGS asks for operations with the same bits in every run.

    As in XLA, the last flag of a name counts, and a flag without a value is true.
    """
    xla_flags = os.environ.get("XLA_FLAGS", "")
    values = re.findall(r"--xla_gpu_deterministic_ops(?:=(\S*))?(?=\s|$)", xla_flags)
    return bool(values) and values[-1].lower() in ("", "true", "1")


def _shape_faults(q: Any, k: Any, v: Any) -> list[str]:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        return [f"q must be [B, S, N, H], k [B, T, K, H] and v [B, T, K, Hv], got {shapes}"]
    faults = []
    if 0 in (*q.shape, *k.shape, *v.shape):
        faults.append(f"every dim must be at least 1, got {shapes}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        faults.append(f"q, k and v must have the same batch size (dim 0), got {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        faults.append(f"k and v must have the same keys and heads (dims 1 and 2), got {shapes}")
    if q.shape[3] != k.shape[3]:
        faults.append(f"q and k must have the same head dim (dim 3), got {shapes}")
    if k.shape[2] and q.shape[2] % k.shape[2]:
        faults.append(f"{q.shape[2]} query heads do not divide over {k.shape[2]} kv heads")
    if not q.dtype == k.dtype == v.dtype or str(q.dtype) not in DTYPES:
        faults.append(
            f"q, k and v must have one dtype of {', '.join(DTYPES)}, got {q.dtype}, {k.dtype}, "
            f"{v.dtype}"
        )
    return faults


def _feature_faults(causal: Any, scale: Any, window: Any, softcap: Any, q_offset: Any) -> list[str]:
    faults = []
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is None:
            continue
        is_number = isinstance(value, int | float | np.number)
        if not (is_number and 0 < value < math.inf):
            faults.append(f"{name} must be a positive Python number, got {value}")
    if window is not None and not (isinstance(window, int | np.integer) and window >= 1):
        faults.append(
            "window must be a whole number of at least 1 (1: a query sees its own key only), got "
            f"{window}"
        )
    if window is not None and not causal:
        faults.append(f"window={window} needs causal=True: it counts back from the query")
    if isinstance(q_offset, int | np.integer):
        return faults
    offset_shape = jnp.shape(q_offset)
    offset_dtype = jnp.result_type(q_offset)
    if offset_shape != () or not jnp.issubdtype(offset_dtype, jnp.integer):
        faults.append(f"q_offset must be one integer, got {offset_dtype}{list(offset_shape)}")
    return faults


def _side_faults(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    segment_ids: Any,
    kv_segment_ids: Any,
    sinks: Any,
) -> list[str]:
    B, S, N, _ = q_shape
    T = k_shape[1]
    faults = []
    for name, ids, length in (
        ("segment_ids", segment_ids, S),
        ("kv_segment_ids", kv_segment_ids, T),
    ):
        if ids is None:
            continue
        if ids.shape != (B, length) or not jnp.issubdtype(ids.dtype, jnp.integer):
            faults.append(
                f"{name} must be integers of shape {(B, length)}, got {ids.dtype} "
                f"{tuple(ids.shape)}"
            )
    if segment_ids is None and kv_segment_ids is not None:
        faults.append("kv_segment_ids needs segment_ids, those of the queries")
    if segment_ids is not None and kv_segment_ids is None and S != T:
        faults.append(
            f"segment_ids alone serve keys and queries of one sequence; with {S} queries and {T} "
            "keys give kv_segment_ids too"
        )
    if sinks is not None and (sinks.shape != (N,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        faults.append(
            f"sinks must be floats of shape {(N,)}, one logit a head, got {sinks.dtype} "
            f"{tuple(sinks.shape)}"
        )
    return faults


def _block_faults(q_shape: tuple[int, ...], k_shape: tuple[int, ...], block_mask: Any) -> list[str]:
    if block_mask is None:
        return []
    if not isinstance(block_mask, BlockMask):
        return [f"block_mask must be a BlockMask, got {type(block_mask).__name__}"]
    return block_mask.faults(q_shape[1], k_shape[1], q_shape[2])
