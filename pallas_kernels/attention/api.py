"""The public attention function, and the choice of an implementation for a call.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads, H head dim (Hv that
of v).
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

# In order of preference, but see `preferred`. The last one serves every valid problem.
IMPLEMENTATIONS = {"mosaic": mosaic, "cudnn": cudnn, "xla": xla}


def preferred(problem: AttentionProblem) -> tuple[str, ...]:
    """The names of IMPLEMENTATIONS, best first: `mosaic` before `cudnn`, unless it has to pad the
    heads.
    """
    return ("cudnn", "mosaic", "xla") if mosaic.pads(problem) else ("mosaic", "cudnn", "xla")


def choose_attention(
    problem: AttentionProblem, *, without: Mapping[str, str] | None = None
) -> Choice:
    """The first `preferred` implementation that can serve `problem`, with the reasons against those
    that cannot. Pure.

    Without arrays: `choose_attention(describe_attention(q, k, v, window=1024, platform="gpu"))`
    with `jax.ShapeDtypeStruct`s. without: implementations that must not serve it, with reasons;
    `xla` cannot be among them.
    """
    reasons = {
        name: implementation.unsupported_reason(problem)
        for name, implementation in IMPLEMENTATIONS.items()
    } | dict(without or {})
    name = next(name for name in preferred(problem) if reasons[name] is None)
    return Choice(name, {name: reason for name, reason in reasons.items() if reason is not None})


def choose_trusted_attention(problem: AttentionProblem) -> Choice:
    """The implementation that serves `problem` on this process's GPUs: as `choose_attention`, but
    `mosaic` only if it passed its self-test.

    The first call for a kind of problem may run that self-test (`pallas_kernels.trust`), which
    takes about a minute.
    """

    def verdict() -> Verdict:
        # here, so that no other platform loads Mosaic
        from pallas_kernels.attention.self_test import kind_of

        return trusted(kind_of(problem))

    return trusted_choice(
        choose_attention(problem),
        verdict,
        lambda reason: choose_attention(problem, without={"mosaic": reason}),
    )


class Static(TypedDict, total=False):
    """The keywords of `flash_attention` that are no arrays, except `implementation` and
    `return_lse`, for type checkers.
    """

    causal: bool
    scale: float | None
    window: int | None
    softcap: float | None
    block_mask: BlockMask | None
    deterministic: bool | None
    platform: str | None
    capability: tuple[int, int] | None


class Features(Static, Sides, total=False):
    """All of them except `return_lse`."""

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
    """Softmax attention with O(S) memory: softmax(scale * q k^T) v over the visible keys of each
    query.

    Args:
      q, k, v: [B, S, N, H], [B, T, K, H], [B, T, K, Hv], one floating dtype; any S and T. N is a
      multiple of K: query
        head n reads kv head n // (N/K) (grouped-query attention, arXiv 2305.13245).
      causal: query i sees the keys 0 ... i + q_offset. scale: factor of the logits; None means
      1/sqrt(H). window: query i sees only the last `window` of those keys, its own included
      (Mistral, arXiv 2310.06825). softcap: logits become softcap * tanh(logits / softcap) (Gemma 2,
      arXiv 2408.00118). segment_ids: integers [B, S]; only keys with the id of the query are seen
      (packed documents). kv_segment_ids: integers [B, T], where the keys are not those of the
      queries; None means segment_ids. q_offset: position of query 0 counted from key 0; may be
      negative or traced. Without `causal` it has no effect. sinks: floats [N], a learned logit of
      each head that takes part in the softmax but has no value (gpt-oss,
        arXiv 2508.10925). Pass it to only one of the calls that `merge` combines.
      block_mask: a static pattern of blocks of queries and keys that see each other; the masks
      above apply as well. return_lse: return the log-sum-exp too. deterministic: the gradients have
      the same bits in every run on the same device. `mosaic` then adds in a fixed order,
        with seven matmuls in its backward pass instead of five; `xla` always does; `cudnn` does
        what XLA's flag says. None: whether XLA_FLAGS has --xla_gpu_deterministic_ops=true.
      implementation: None lets `choose_attention` decide, and `choose_trusted_attention` on this
      process's own GPUs. platform, capability: as in `describe_attention`. If both are None, the
      call is for this process's own devices.

    Returns:
      out [B, S, N, Hv] in q's dtype; with `return_lse` also the log-sum-exp of all logits of a
      query, its sink included, [B, S, N] in fp32. Both are differentiable. A query that sees no key
      has out 0, log-sum-exp -inf (with a sink: the sink) and zero gradients.

    Shapes are those of one device: under a mesh, call it inside `jax.shard_map`.

    Raises ValueError with every fault of the arguments, `Unsupported` if `implementation` cannot
    serve the call.
    """
    problem = describe_attention(
        q, k, v, causal=causal, scale=scale, window=window, softcap=softcap,
        segment_ids=segment_ids, kv_segment_ids=kv_segment_ids,
        q_offset=q_offset, sinks=sinks, block_mask=block_mask, return_lse=return_lse,
        deterministic=deterministic, platform=platform,
        capability=capability,
    )  # fmt: skip
    serves = _chosen(
        "flash_attention", problem, implementation, here=platform is None and capability is None
    )
    kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
    out, lse = serves.attend(
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
    """The gradients (dq, dk, dv, dsinks) that these keys contribute to an attention over these and
    other keys.

    The softmax of a query is over all keys, so its gradients are sums over sets of keys, given the
    output and the log-sum-exp of all of them. Context parallelism has one set of keys at a time.

    Args:
      q, k, v, segment_ids, kv_segment_ids, q_offset, sinks and the features: as of the
      `flash_attention` of these keys. out [B, S, N, Hv], lse [B, S, N]: of all keys, as `merge`
      makes them from the parts. dout: gradient of out, [B, S, N, Hv]. unrounded: return dq, dk and
      dv in fp32 (fp64 for fp64), for a sum over many sets: a part that is rounded to 16 bits adds
      an error
        as large as that of the whole. False: in the dtype of q, k and v.

    Returns:
      dq [B, S, N, H]: to be summed over the sets. dk, dv: like k and v, for this dout. dsinks [N],
      None without sinks: pass the sinks in the same call as to `flash_attention`.

    Raises as `flash_attention` does. `cudnn` cannot serve it.
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
    serves = _chosen(
        "attention_gradients",
        problem,
        implementation,
        here=features.get("platform") is None is features.get("capability"),
    )
    sides: Sides = {
        "segment_ids": segment_ids,
        "kv_segment_ids": segment_ids if kv_segment_ids is None else kv_segment_ids,
        "q_offset": q_offset, "sinks": sinks,
    }  # fmt: skip
    return serves.gradients(q, k, v, out, lse, dout, problem, **sides)


def _chosen(
    function: str, problem: AttentionProblem, implementation: str | None, *, here: bool
) -> Any:
    """The module that serves a call. here: it is for this process's own devices. Raises as
    `flash_attention` does.
    """
    name = serving(
        function, implementation, IMPLEMENTATIONS,
        choose=lambda: (choose_trusted_attention if here else choose_attention)(problem),
        reason=lambda name: IMPLEMENTATIONS[name].unsupported_reason(problem),
    )  # fmt: skip
    return IMPLEMENTATIONS[name]
