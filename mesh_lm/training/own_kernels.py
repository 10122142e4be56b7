"""Our own kernels in a run: tested before JAX uses a device, one choice for all processes, and the
log's lines about attention.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mesh_lm import distributed
from mesh_lm.config import TrainConfig
from mesh_lm.distributed import gpu
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.model.context import Call, calls
from mesh_lm.network.process_slot import ProcessSlot
from pallas_kernels import AttentionProblem, Choice, choose_attention, describe_attention
from pallas_kernels.trust import VARIABLE, Kind, Store, Verdict, assess, policy, settle, worst
from pallas_kernels.trust.verdict import warning
from sharding_rules import axes_of
from sharding_rules.rules import Exchange

Examined = list[tuple[Kind, Verdict]]
HOPPER = (9, 0)


def attention_problems(
    config: TrainConfig, platform: str, capability: tuple[int, int] | None
) -> list[AttentionProblem]:
    """The attention of each kind of layer on one device, with a batch of one sequence; empty for a
    model that is not a decoder.
    """
    model = config.model
    if not isinstance(model, DecoderConfig):
        return []
    sizes, S = config.mesh.sizes(), model.seq_len
    row = config.rules.activations.get("heads")
    heads = model.n_heads // max(1, math.prod(sizes.get(axis, 1) for axis in axes_of(row)))
    # Where there are more devices than kv heads, each device has those of its own query heads.
    kv_heads = max(1, heads * model.kv_heads // max(1, model.n_heads))
    # a config that does not divide is refused elsewhere
    heads = max(1, heads // kv_heads) * kv_heads
    along = [
        axis
        for axis in axes_of(config.rules.activations.get("seq"))
        if axis in config.rules.context and sizes.get(axis, 1) > 1
    ]
    exchanges: list[tuple[int, Exchange]] = [
        (sizes[axis], config.rules.context[axis]) for axis in along
    ]
    S //= math.prod(size for size, _ in exchanges)
    on: Any = {"platform": platform, "capability": capability, "softcap": model.softcap or None}

    def problems(call: Call, window: int | None) -> list[AttentionProblem]:
        q, k = (
            jax.ShapeDtypeStruct((1, *dims, model.d_head), jnp.dtype(model.dtype))
            for dims in ((call.S, call.N), (call.T, call.K))
        )
        if config.data.documents != "joined":
            on.update(
                {
                    name: jax.ShapeDtypeStruct(x.shape[:2], jnp.int32)
                    for name, x in (("segment_ids", q), ("kv_segment_ids", k))
                }
            )
        sinks = (
            jax.ShapeDtypeStruct(q.shape[2:3], jnp.float32) if model.sinks and call.sinks else None
        )
        made = describe_attention(
            q,
            k,
            k,
            window=window if call.causal else None,
            causal=call.causal,
            sinks=sinks,
            return_lse=call.lse,
            **on,
        )
        if call.offset:
            made = dataclasses.replace(made, q_offset=None)
        # A ring calls the backward pass by itself, and sums what it returns.
        return [made, dataclasses.replace(made, unrounded=True)] if call.lse else [made]

    windows = dict.fromkeys(model.windows())
    return [
        one
        for window in windows
        for call in calls(exchanges, S, heads, kv_heads, window)
        for one in problems(call, window)
    ]


def examine(config: TrainConfig, judge: Callable[[Kind], Verdict] = assess) -> Examined:
    """The verdicts on the kernels of ours that a run on this machine's GPUs would use; empty
    without a Hopper GPU.

    Call it after `distributed.start`, which sets XLA's flags, and before the first use of a device,
    so that a self-test finds the GPU's memory free. judge: gives the verdict on a kind.

    Raises ConfigError for a wrong value of the environment variable.
    """
    name = gpu.visible(os.environ)
    if not name or gpu.capability(name) != HOPPER or not isinstance(config.model, DecoderConfig):
        return []
    if config.model.attention not in ("auto", "mosaic"):
        return []
    # here, so that no other platform loads Mosaic
    from pallas_kernels.attention.self_test import kind_of

    try:
        testing = policy() == "test"
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        problems = [
            (problem, choose_attention(problem))
            for problem in attention_problems(config, "gpu", HOPPER)
        ]
    except ValueError:
        return []  # the config cannot run, which its check reports in the config's words
    # then an error of its own reports what the kernel cannot serve
    by_name = config.model.attention == "mosaic"
    ours = [
        problem
        for problem, choice in problems
        if choice.name == "mosaic" or (by_name and "mosaic" not in choice.rejected)
    ]
    kinds = list(dict.fromkeys(kind_of(problem, name) for problem in ours))
    slot = ProcessSlot.of(config.launch)
    if (
        testing
        and (slot is None or slot.index == 0)
        and any(Store().get(kind) is None for kind in kinds)
    ):
        print(
            (
                f"testing our attention kernel on {name} before its first use; this takes a few "
                "minutes at most, once"
            ),
            flush=True,
        )
    return [(kind, judge(kind)) for kind in kinds]


def agree(config: TrainConfig, examined: Examined) -> None:
    """Makes all processes use the worst of their verdicts on each kind, and prints a warning about
    a kernel that is not used. A collective.

    Raises ConfigError if the config names a kernel that may not be used.
    """
    rows = distributed.gather_from_all([dataclasses.asdict(verdict) for _, verdict in examined])
    everywhere = min(len(row) for row in rows)
    for n, (kind, _) in enumerate(examined):
        verdict = Verdict("untested", "another process of this run has another GPU")
        if n < everywhere:
            verdict = worst([Verdict(**row[n]) for row in rows])
        settle([(kind, verdict)])
        if verdict.passed:
            continue
        if getattr(config.model, "attention", "") == "mosaic":
            fix = f"set model.attention=auto, or {VARIABLE}=always to use it all the same"
            raise ConfigError(
                f"model.attention=mosaic: {warning(kind, verdict) or verdict.reason}; {fix}"
            )
        if text := warning(kind, verdict):
            distributed.print_on_process0(f"warning: {text}")


def described(
    config: TrainConfig, choices: list[Choice], capability: tuple[int, int] | None
) -> list[str]:
    """The lines about attention at the start of a run: what serves it, on a GPU why nothing better
    does, and a warning for XLA on Hopper.

    choices: those of the model's kinds of layers; empty if the config names the implementation.
    """
    if not (wanted := getattr(config.model, "attention", "")):
        return []
    names = sorted({choice.name for choice in choices}) or [wanted]
    line = f"attention: {' and '.join(names)} (model.attention={wanted})"
    if capability is None:
        return [line]
    better = list(
        dict.fromkeys(
            f"not {name}, because {reason}"
            for choice in choices
            for name, reason in _passed_over(choice)
        )
    )
    lines = ["; ".join([line, *better])]
    if capability == HOPPER and "xla" in names:
        why = (
            "see above"
            if better
            else f"model.attention={wanted}; auto takes a kernel where one can serve the model"
        )
        lines.append(
            f"warning: attention runs in plain XLA on this Hopper GPU, without a kernel ({why})"
        )
    return lines


def _passed_over(choice: Choice) -> list[tuple[str, str]]:
    """The implementations that were preferred to the chosen one, with the reasons against them."""
    before = ("mosaic", "cudnn")[: ("mosaic", "cudnn", "xla").index(choice.name)]
    return [(name, choice.rejected[name]) for name in before if name in choice.rejected]
