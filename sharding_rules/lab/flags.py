"""XLA's flags as data.

They are few, because a process ends at a flag that its XLA does not know, and XLA renames them.

Every flag here exists in jax 0.10.2 and 0.11.2 and was compiled with, in both, for GPUs that you do
not have. What each does to a training step is in benchmarks/results (xla_flags): how the schedule
changes, not how fast it runs, which only a GPU can tell.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sharding_rules.lab.report import LabError
from sharding_rules.rules import did_you_mean


@dataclasses.dataclass(frozen=True)
class Flag:
    """The value of an XLA flag, and why it is set."""

    value: bool | int | str
    reason: str


@dataclasses.dataclass(frozen=True)
class FlagSet:
    """Flags that belong together, by their names."""

    description: str
    flags: dict[str, Flag]


_SCHEDULER = Flag(
    True,
    "Off where XLA's SoL estimator does not support the GPU (an A100) or the program: none of "
    "gpt_175b's bytes then go beside a matmul, 29 % with it. On an H100 the estimator turns it on "
    "anyway, and the program stays the same.",
)

FLAG_SETS: dict[str, FlagSet] = {
    "default": FlagSet(description="XLA as it comes", flags={}),
    "overlap": FlagSet(
        description="Collectives beside matmuls",
        flags={"xla_gpu_enable_latency_hiding_scheduler": _SCHEDULER},
    ),
    "overlap_two": FlagSet(
        description=(
            "Two collectives at once, for a mesh that uses NVLink (tensor) and the network (fsdp) "
            "in the same layer; not vetted on a GPU"
        ),
        flags={
            "xla_gpu_enable_latency_hiding_scheduler": _SCHEDULER,
            "xla_gpu_experimental_parallel_collective_overlap_limit": Flag(
                2,
                "A gather over the network does not keep NVLink idle. 47 % of gpt_175b's bytes go "
                "beside a matmul, else 28 % (H100).",
            ),
        },
    ),
    "layers": FlagSet(
        description=(
            "Two collectives at once where layers gather their own weights (zero3); not vetted on "
            "a GPU"
        ),
        flags={
            "xla_gpu_enable_latency_hiding_scheduler": _SCHEDULER,
            "xla_gpu_experimental_parallel_collective_overlap_limit": Flag(
                2, "A layer's gather and its sums go beside it together."
            ),
            "xla_gpu_memory_limit_slop_factor": Flag(
                110,
                "As in the set pipeline. Where layers keep their weights (megatron_70b, 64 of 80 "
                "GiB), XLA's own 95 makes the predicted step 3.0 s instead of 1.6.",
            ),
            "xla_gpu_reduce_scatter_combine_threshold_bytes": Flag(
                1,
                "XLA would combine the gradients of the head, known first, with those of the "
                "embedding, known last, and send both at the end.",
            ),
        },
    ),
    "pipeline": FlagSet(
        description=(
            "Sends from stage to stage beside the stages' work (mesh.pipeline > 1); not vetted on "
            "a GPU"
        ),
        flags={
            "xla_gpu_enable_latency_hiding_scheduler": _SCHEDULER,
            "xla_gpu_experimental_parallel_collective_overlap_limit": Flag(
                8,
                "Both sends of a tick go beside a slot. With 1, XLA's own, neither does; nor with "
                "4 where stages gather and scatter.",
            ),
            "xla_gpu_memory_limit_slop_factor": Flag(
                110,
                "XLA's own 95 has the scheduler save memory above 61 of an H100's 80 GiB, and the "
                "sends wait: 462B's predicted step is 19.5 s with it, 18.3 s with this, for 0.1 "
                "GiB. From 114 on it is more than a GPU has.",
            ),
        },
    ),
}
"""By name."""

FLAG_SETS["layers_bfloat16"] = FlagSet(
    description=(
        "The same where the rules sum gradients in bf16 (zero3+reduce_bfloat16); not vetted on a "
        "GPU"
    ),
    flags={
        **FLAG_SETS["layers"].flags,
        "xla_gpu_experimental_parallel_collective_overlap_limit": Flag(
            3,
            "A layer's gather and its sums are then as long as each other, and tensor "
            "parallelism's collectives need a place beside both. With 2, XLA lets neither begin "
            "before the last of these: megatron_462b's predicted step is 13.9 s, 11.1 s with 3.",
        ),
    },
)
FLAG_SETS["pipeline_pairs"] = FlagSet(
    description=(
        "Stages that run a layer of each pass side by side (pipeline.pair_layers); not vetted on a "
        "GPU"
    ),
    flags={
        **FLAG_SETS["pipeline"].flags,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": Flag(
            1,
            "XLA's own 30 MiB combines the scatter of one layer with that of the other, and "
            "nothing hides the two: gpt_175b with 48 microbatches is predicted to take 6.62 s with "
            "it, 6.37 s with this. Larger arrays stay apart anyway (24 microbatches).",
        ),
    },
)

VETTED = {"ampere": "overlap", "hopper": "overlap", "blackwell": "overlap"}
"""The set for each generation of GPUs."""

# By the major number of the compute capability.
_GENERATIONS = {8: "ampere", 9: "hopper", 10: "blackwell"}


def options(name: str) -> dict[str, Any]:
    """Returns a set as compiler options: `compile_report(options=options("overlap"))`.

    Raises LabError for a set that does not exist.
    """
    if name not in FLAG_SETS:
        raise LabError(
            f"no set of XLA flags {name!r}{did_you_mean(name, list(FLAG_SETS))}; there are "
            f"{', '.join(FLAG_SETS)}"
        )
    return {name: flag.value for name, flag in FLAG_SETS[name].flags.items()}


def auto(capability: tuple[int, int], pipeline: bool = False, pairs: bool = False) -> str:
    """Returns the name of the set for a GPU; "default" where none is vetted for it.

    Args:
      capability: (9, 0) is an H100.
      pipeline: the mesh has stages.
      pairs: the stages run layers of both passes side by side.
    """
    generation = _GENERATIONS.get(capability[0], "")
    if generation not in VETTED:
        return "default"
    if not pipeline:
        return VETTED[generation]
    return "pipeline_pairs" if pairs else "pipeline"


def xla_flags(
    name: str, capability: tuple[int, int], pipeline: bool = False, pairs: bool = False
) -> str:
    """Returns a set as text for the variable XLA_FLAGS.

    XLA reads it when JAX first looks for devices. "auto" is the set that `auto` returns.
    """
    return written(options(auto(capability, pipeline, pairs) if name == "auto" else name))


def written(flags: Mapping[str, Any]) -> str:
    """Returns flags as XLA_FLAGS spells them: --xla_a=true --xla_b=2"""
    words = []
    for name, value in flags.items():
        text = str(value).lower() if isinstance(value, bool) else value
        words.append(f"--{name}={text}")
    return " ".join(words)
