"""Our own kernels in a run: tested before JAX uses a device, with one choice for all processes, and
the log's lines about attention.
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
from mesh_lm.training.expert_kernels import grouped_problems
from pallas_kernels import AttentionProblem, Choice, choose_attention, describe_attention
from pallas_kernels.grouped_matmul import choose_grouped_matmul
from pallas_kernels.trust import VARIABLE, Kind, Store, Verdict, assess, policy, settle, worst
from pallas_kernels.trust.verdict import warning
from sharding_rules import axes_of
from sharding_rules.rules import Exchange

Examined = list[tuple[Kind, Verdict]]
HOPPER = (9, 0)
"""The compute capability of an H100."""


def attention_problems(
    config: TrainConfig, platform: str, capability: tuple[int, int] | None
) -> list[AttentionProblem]:
    """Returns the attention of each kind of layer on one device, with a batch of one sequence;
    empty for a model that is not a decoder.
    """
    model = config.model
    if not isinstance(model, DecoderConfig):
        return []
    sizes = config.mesh.sizes()
    head_axes = axes_of(config.rules.activations.get("heads"))
    heads = model.n_heads // max(1, math.prod(sizes.get(axis, 1) for axis in head_axes))
    # Where there are more devices than kv heads, each device has those of its own query heads.
    kv_heads = max(1, heads * model.kv_heads // max(1, model.n_heads))
    # A config that does not divide is refused elsewhere.
    heads = max(1, heads // kv_heads) * kv_heads
    exchanges: list[tuple[int, Exchange]] = []
    for axis in axes_of(config.rules.activations.get("seq")):
        if axis in config.rules.context and sizes.get(axis, 1) > 1:
            exchanges.append((sizes[axis], config.rules.context[axis]))
    S = model.seq_len // math.prod(size for size, _ in exchanges)

    problems = []
    for window in dict.fromkeys(model.windows()):
        for call in calls(exchanges, S, heads, kv_heads, window):
            problem = _attention_problem(config, model, call, window, platform, capability)
            problems.append(problem)
            if call.lse:
                # A ring calls the backward pass by itself, and sums what it returns.
                problems.append(dataclasses.replace(problem, unrounded=True))
    return problems


def _attention_problem(
    config: TrainConfig,
    model: DecoderConfig,
    call: Call,
    window: int | None,
    platform: str,
    capability: tuple[int, int] | None,
) -> AttentionProblem:
    dtype = jnp.dtype(model.dtype)
    q = jax.ShapeDtypeStruct((1, call.S, call.N, model.d_head), dtype)
    k = jax.ShapeDtypeStruct((1, call.T, call.K, model.d_head), dtype)
    ids: dict[str, Any] = {}
    if config.data.documents != "joined":
        ids["segment_ids"] = jax.ShapeDtypeStruct((1, call.S), jnp.int32)
        ids["kv_segment_ids"] = jax.ShapeDtypeStruct((1, call.T), jnp.int32)
    sinks: Any = None
    if model.sinks and call.sinks:
        sinks = jax.ShapeDtypeStruct((call.N,), jnp.float32)
    problem = describe_attention(
        q,
        k,
        k,
        window=window if call.causal else None,
        causal=call.causal,
        sinks=sinks,
        return_lse=call.lse,
        softcap=model.softcap or None,
        platform=platform,
        capability=capability,
        **ids,
    )
    if call.offset:
        problem = dataclasses.replace(problem, q_offset=None)
    return problem


def examine(config: TrainConfig, judge: Callable[[Kind], Verdict] = assess) -> Examined:
    """Returns the verdicts on the kernels of ours that a run on this machine's GPUs would use;
    empty without a Hopper GPU.

    Call it after `distributed.start`, which sets XLA's flags, and before the first use of a device,
    so that a self-test finds the GPU's memory free. judge: gives the verdict on a kind.

    Raises ConfigError for a wrong value of the environment variable.
    """
    gpu_name = gpu.visible(os.environ)
    if not gpu_name or gpu.capability(gpu_name) != HOPPER:
        return []
    if not isinstance(config.model, DecoderConfig):
        return []
    kinds = _attention_kinds(config, gpu_name) + _grouped_kinds(config)
    if not kinds:
        return []
    try:
        is_tested = policy() == "test"
    except ValueError as error:
        raise ConfigError(str(error)) from error
    slot = ProcessSlot.of(config.launch)
    is_first = slot is None or slot.index == 0
    if is_tested and is_first:
        untested = [kind.family for kind in kinds if Store().get(kind) is None]
        for family in dict.fromkeys(untested):
            print(
                f"testing our {family} kernel on {gpu_name} before its first use; this takes a few "
                "minutes at most, once",
                flush=True,
            )
    return [(kind, judge(kind)) for kind in kinds]


def _attention_kinds(config: TrainConfig, gpu_name: str) -> list[Kind]:
    """Returns the kinds of attention that our kernel serves."""
    attention = getattr(config.model, "attention", "")
    if attention not in ("auto", "mosaic"):
        return []
    # Imported here, so that no other platform loads Mosaic.
    from pallas_kernels.attention.self_test import kind_of

    served = []
    try:
        for problem in attention_problems(config, "gpu", HOPPER):
            choice = choose_attention(problem)
            # If the config names our kernel, an error of its own reports what it cannot serve.
            is_named = attention == "mosaic" and "mosaic" not in choice.rejected
            if choice.name == "mosaic" or is_named:
                served.append(problem)
    except ValueError:
        return []  # the config cannot run, which its check reports in the config's words
    return list(dict.fromkeys(kind_of(problem, gpu_name) for problem in served))


def _grouped_kinds(config: TrainConfig) -> list[Kind]:
    """Returns the kinds of grouped matmul that our kernel serves."""
    try:
        problems = grouped_problems(_with_mesh(config), "gpu", HOPPER)
    except (ValueError, ArithmeticError):
        return []  # as above
    if not problems:
        return []
    from pallas_kernels.grouped.self_test import kind_of

    served = [problem for problem in problems if choose_grouped_matmul(problem).name == "mosaic"]
    return list(dict.fromkeys(kind_of(problem) for problem in served))


def _with_mesh(config: TrainConfig) -> TrainConfig:
    """Returns the config with a mesh without -1, if the number of devices is known before JAX finds
    them: that of several processes that have been given their GPUs.
    """
    slot = ProcessSlot.of(config.launch)
    if slot is None or slot.local_devices is None:
        return config
    mesh = config.mesh.resolve(slot.count * len(slot.local_devices))
    return dataclasses.replace(config, mesh=mesh)


def agree(config: TrainConfig, examined: Examined) -> None:
    """Makes all processes use the worst of their verdicts on each kind, and prints a warning about
    a kernel that is not used. A collective.

    Raises ConfigError if the config names a kernel that may not be used.
    """
    verdicts = distributed.gather_from_all([dataclasses.asdict(verdict) for _, verdict in examined])
    n_everywhere = min(len(process_verdicts) for process_verdicts in verdicts)
    for n, (kind, _) in enumerate(examined):
        verdict = Verdict("untested", "another process of this run has another GPU")
        if n < n_everywhere:
            verdict = worst([Verdict(**process_verdicts[n]) for process_verdicts in verdicts])
        settle([(kind, verdict)])
        if verdict.passed:
            continue
        text = warning(kind, verdict)
        is_named = getattr(config.model, "attention", "") == "mosaic"
        if is_named and kind.family == "attention":
            raise ConfigError(
                f"model.attention=mosaic: {text or verdict.reason}; set model.attention=auto, or "
                f"{VARIABLE}=always to use it all the same"
            )
        if text:
            distributed.print_on_process0(f"warning: {text}")


def described(
    config: TrainConfig, choices: list[Choice], capability: tuple[int, int] | None
) -> list[str]:
    """Returns the lines about attention at the start of a run: the implementation, on a GPU why
    nothing better serves, and a warning for XLA on Hopper.

    choices: of the model's kinds of layers; empty if the config names the implementation.
    """
    attention = getattr(config.model, "attention", "")
    if not attention:
        return []
    names = sorted({choice.name for choice in choices}) or [attention]
    line = f"attention: {' and '.join(names)} (model.attention={attention})"
    if capability is None:
        return [line]
    reasons = dict.fromkeys(reason for choice in choices for reason in _rejections(choice))
    lines = ["; ".join([line, *reasons])]
    if capability == HOPPER and "xla" in names:
        cause = "see above"
        if not reasons:
            cause = (
                f"model.attention={attention}; auto takes a kernel where one can serve the model"
            )
        lines.append(
            f"warning: attention runs in plain XLA on this Hopper GPU, without a kernel ({cause})"
        )
    return lines


def _rejections(choice: Choice) -> list[str]:
    """Returns why the implementations that are preferred to the chosen one do not serve."""
    order = ("mosaic", "cudnn", "xla")
    preferred = order[: order.index(choice.name)]
    return [
        f"not {name}, because {choice.rejected[name]}"
        for name in preferred
        if name in choice.rejected
    ]
