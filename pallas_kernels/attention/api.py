"""The public attention function, and the choice of an implementation for a call.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads, H head dim (Hv: of
v).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

from jax import Array

from pallas_kernels.attention import cudnn, mosaic, xla
from pallas_kernels.attention.block_mask import BlockMask
from pallas_kernels.attention.problem import AttentionProblem, Sides, describe_attention
from pallas_kernels.choice import Choice, serving, trusted_choice
from pallas_kernels.trust.verdict import Verdict, trusted

IMPLEMENTATIONS = {"mosaic": mosaic, "cudnn": cudnn, "xla": xla}
"""The implementations by name. `preferred` has their order. `xla` serves every valid problem."""


def preferred(problem: AttentionProblem) -> tuple[str, ...]:
    """Returns the names of IMPLEMENTATIONS, best first.

    `mosaic` comes before `cudnn`, unless it would pad the heads, and so multiply zeros.
    """
    if mosaic.pads(problem):
        return ("cudnn", "mosaic", "xla")
    return ("mosaic", "cudnn", "xla")


def choose_attention(
    problem: AttentionProblem, *, without: Mapping[str, str] | None = None
) -> Choice:
    """Chooses the first `preferred` implementation that can serve `problem`. Pure.

    It needs no arrays: `choose_attention(describe_attention(q, k, v, window=1024, platform="gpu"))`
    takes `jax.ShapeDtypeStruct`s.

    Args:
      without: implementations that must not serve the problem, with reasons; never `xla`.

    Returns:
      The choice, with the reasons against the implementations that cannot serve the problem.
    """
    excluded = without or {}
    rejected: dict[str, str] = {}
    for name, implementation in IMPLEMENTATIONS.items():
        reason = excluded.get(name) or implementation.unsupported_reason(problem)
        if reason is not None:
            rejected[name] = reason
    name = next(name for name in preferred(problem) if name not in rejected)
    return Choice(name, rejected)


def choose_trusted_attention(problem: AttentionProblem) -> Choice:
    """Chooses as `choose_attention` does, but `mosaic` only if it passed its self-test on this GPU.

    The first call for a kind of problem may run that self-test (`pallas_kernels.trust`), which
    takes about a minute.
    """

    def verdict() -> Verdict:
        # Imported here, so that no other platform loads Mosaic.
        from pallas_kernels.attention.self_test import kind_of

        return trusted(kind_of(problem))

    return trusted_choice(
        choose_attention(problem),
        verdict,
        lambda reason: choose_attention(problem, without={"mosaic": reason}),
    )


class Static(TypedDict, total=False):
    """The static keywords of `flash_attention`, without `implementation` and `return_lse`."""

    causal: bool
    scale: float | None
    window: int | None
    softcap: float | None
    block_mask: BlockMask | None
    deterministic: bool | None
    platform: str | None
    capability: tuple[int, int] | None


class Features(Static, Sides, total=False):
    """All keywords of `flash_attention` except `return_lse`."""

    implementation: Literal["mosaic", "cudnn", "xla"] | None


@overload
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = False,
    **features: Unpack[Features],
) -> Array: ...
@overload
def flash_attention(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], **features: Unpack[Features]
) -> tuple[Array, Array]: ...
def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_offset: int | Array = 0,
    sinks: Array | None = None,
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    implementation: Literal["mosaic", "cudnn", "xla"] | None = None,
    platform: str | None = None,
    capability: tuple[int, int] | None = None,
) -> Array | tuple[Array, Array]:
    """Softmax attention with O(S) memory: softmax(scale * q k^T) v over each query's visible keys.

    Shapes are those of one device: under a mesh, call it inside `jax.shard_map`.

    Args:
      q, k, v: [B, S, N, H], [B, T, K, H], [B, T, K, Hv], of one floating dtype, for any S and T.
        N is a multiple of K: query head n reads kv head n // (N/K) (grouped-query attention, arXiv
        2305.13245).
      causal: query i sees the keys 0 ... i + q_offset.
      scale: factor of the logits; None means 1/sqrt(H).
      window: query i sees only the last `window` of those keys, its own included (Mistral, arXiv
        2310.06825).
      softcap: logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118).
      segment_ids: integers [B, S]; a query sees only keys that have its id (packed documents).
      kv_segment_ids: integers [B, T], for keys of another sequence than the queries'; None means
        segment_ids.
      q_offset: position of query 0 counted from key 0; may be negative or traced. Without `causal`
        it has no effect.
      sinks: floats [N], a learned logit of each head that takes part in the softmax but has no
        value (gpt-oss, arXiv 2508.10925). Pass it to only one of the calls that `merge` combines.
      block_mask: a static pattern of blocks of queries and keys that see each other; the masks
        above apply as well.
      return_lse: return the log-sum-exp too.
      deterministic: the gradients have the same bits in every run on the same device. `mosaic` then
        adds in a fixed order, with seven matmuls in its backward pass instead of five; `xla` always
        does; `cudnn` does what XLA's flag says. None: whether XLA_FLAGS has
        --xla_gpu_deterministic_ops=true.
      implementation: None lets `choose_attention` decide, and `choose_trusted_attention` on this
        process's own GPUs.
      platform, capability: the target, as in `describe_attention`. If both are None, it is this
        process's own devices.

    Returns:
      out [B, S, N, Hv] in q's dtype; with `return_lse` also the log-sum-exp of all logits of a
      query, its sink included, [B, S, N] in fp32. Both are differentiable. A query that sees no key
      has out 0, log-sum-exp -inf (with a sink: the sink) and zero gradients.

    Raises:
      ValueError: the arguments have faults; the message has all of them.
      Unsupported: `implementation` cannot serve the call.
    """
    problem = describe_attention(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_offset=q_offset,
        sinks=sinks,
        block_mask=block_mask,
        return_lse=return_lse,
        deterministic=deterministic,
        platform=platform,
        capability=capability,
    )
    on_own_devices = platform is None and capability is None
    module = _implementation("flash_attention", problem, implementation, on_own_devices)
    if kv_segment_ids is None:
        kv_segment_ids = segment_ids
    out, lse = module.attend(
        q,
        k,
        v,
        problem,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_offset=q_offset,
        sinks=sinks,
    )
    return (out, lse) if return_lse else out


def attention_gradients(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    q_offset: int | Array = 0,
    sinks: Array | None = None,
    unrounded: bool = False,
    implementation: Literal["mosaic", "cudnn", "xla"] | None = None,
    **features: Unpack[Static],
) -> tuple[Array, Array, Array, Array | None]:
    """The gradients that these keys contribute to an attention over these and other keys.

    The softmax of a query is over all keys. Given the output and the log-sum-exp of all of them,
    the gradients are sums over sets of keys. Context parallelism has one set of keys at a time.

    Args:
      q, k, v, segment_ids, kv_segment_ids, q_offset, sinks, features: as in the call of
        `flash_attention` for these keys.
      out, lse: [B, S, N, Hv] and [B, S, N], over all keys, as `merge` makes them from the parts.
      dout: gradient of out, [B, S, N, Hv].
      unrounded: return dq, dk and dv in fp32 (fp64 for fp64), for a sum over many sets: a part that
        is rounded to 16 bits adds an error as large as that of the sum. False: in the dtype of q, k
        and v.

    Returns:
      dq [B, S, N, H]: to be summed over the sets of keys.
      dk, dv: like k and v, for this dout.
      dsinks: [N], None without sinks. Pass the sinks in the same call as to `flash_attention`.

    Raises:
      ValueError, Unsupported: as `flash_attention`. `cudnn` cannot serve this function.
    """
    problem = describe_attention(
        q,
        k,
        v,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_offset=q_offset,
        sinks=sinks,
        return_lse=True,
        **features,
    )
    problem = dataclasses.replace(problem, unrounded=unrounded)
    on_own_devices = features.get("platform") is None and features.get("capability") is None
    module = _implementation("attention_gradients", problem, implementation, on_own_devices)
    if kv_segment_ids is None:
        kv_segment_ids = segment_ids
    return module.gradients(
        q,
        k,
        v,
        out,
        lse,
        dout,
        problem,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_offset=q_offset,
        sinks=sinks,
    )


def _implementation(
    function: str, problem: AttentionProblem, implementation: str | None, on_own_devices: bool
) -> Any:
    """Returns the module that serves a call of `function`. Raises as `flash_attention` does.

    `implementation` names it; None: it is chosen, with trust if the call is for this process's own
    devices.
    """
    choose = choose_trusted_attention if on_own_devices else choose_attention
    name = serving(
        function,
        implementation,
        IMPLEMENTATIONS,
        choose=lambda: choose(problem),
        reason=lambda name: IMPLEMENTATIONS[name].unsupported_reason(problem),
    )
    return IMPLEMENTATIONS[name]
