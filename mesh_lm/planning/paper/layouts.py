"""Layouts as columns of numbers, and all those that a number of devices allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mesh_lm.planning.paper.sizes import AXES, ModelSizes, why_no_formulas

NONE, SAVE_NAMES, FULL, SAVE_ATTENTION = 0, 1, 2, 3
REMAT = ("none", "save_names", "full", "save_attention")
"""The words of model.remat, by number."""
LIGHTER = np.array([NONE, NONE, SAVE_NAMES, SAVE_NAMES])
"""For each policy the one of the layers that remat_layers leaves out, as
`mesh_lm.schedules.segments.LIGHTER` has it."""
DDP, ZERO1, DISTRIBUTED, ZERO3 = 0, 1, 2, 3
REPLICAS = ("ddp", "zero1", "distributed", "zero3")
"""The presets that say what is sharded over `data`, by number."""
PRESETS = {*REPLICAS, "fsdp", "hsdp", "megatron", "megatron_sp"}
"""The presets of the formulas."""
_MOST_STAGES = 32
_MOST_PADDED = 1.1
"""Layers that stages would run if all chunks were as long as the longest, over the model's."""
MOST_UNROLLED = 48
"""Layers up to which unrolling is tried: XLA needs more time for each, at every start of a run."""


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Candidates: each field is an array with an element for each, float64 so that products of
    sizes cannot overflow.
    """

    pipeline: np.ndarray
    data: np.ndarray
    fsdp: np.ndarray
    tensor: np.ndarray
    microbatches: np.ndarray
    chunks: np.ndarray
    """Virtual stages of a stage; 1 without a pipeline."""
    replicas: np.ndarray
    """What is sharded over `data`: DDP, ZERO1, DISTRIBUTED or ZERO3."""
    sequence_parallel: np.ndarray
    """Whether the residual stream is sharded over `tensor` (megatron_sp)."""
    remat: np.ndarray
    """NONE, SAVE_NAMES, FULL or SAVE_ATTENTION."""
    remat_share: np.ndarray
    """Share of the layers with this policy; the others have the next lighter one."""
    kept_share: np.ndarray
    """Share of the layers that keep the weights they have gathered (zero3)."""
    keeps_residuals: np.ndarray
    """Whether a stage stores what its backward pass needs, not its inputs."""
    unroll: np.ndarray

    def __len__(self) -> int:
        return len(self.pipeline)

    def row(self, i: int) -> dict[str, float]:
        """Returns one layout by the names of its fields."""
        return {field.name: float(getattr(self, field.name)[i]) for field in _FIELDS}

    def take(self, at: np.ndarray) -> Layouts:
        """Returns some of the layouts, by numbers or by a mask."""
        return Layouts(*(getattr(self, field.name)[at] for field in _FIELDS))

    @staticmethod
    def names() -> list[str]:
        """Returns the names of the fields."""
        return [field.name for field in _FIELDS]

    @staticmethod
    def of(rows: list[dict[str, float]]) -> Layouts:
        """Returns layouts from rows such as `row` returns."""
        return Layouts(
            *(np.array([row[field.name] for row in rows], np.float64) for field in _FIELDS)
        )

    @property
    def sequences(self) -> np.ndarray:
        """Devices among which the sequences of a batch are divided."""
        return self.data * self.fsdp


_FIELDS = dataclasses.fields(Layouts)


def enumerated(sizes: ModelSizes, n_devices: int, node: int, most_tensor: int = 0) -> Layouts:
    """Returns every layout over pipeline, data, fsdp and tensor that divides the model and the
    batch.

    node: GPUs of a node, beyond which tensor parallelism is not tried. most_tensor: a smaller
    limit; 0: none.
    """
    blocks = []
    for tensor in _divisors(n_devices):
        if tensor > min(node, most_tensor or node) or not _divides_heads(sizes, tensor):
            continue
        for pipeline in _divisors(n_devices // tensor):
            if pipeline > min(_MOST_STAGES, sizes.layers):
                continue
            n_shards = n_devices // tensor // pipeline
            if sizes.global_batch % n_shards:
                continue
            for fsdp in _divisors(n_shards):
                if sizes.d_model % fsdp == 0:
                    axes = {"pipeline": pipeline, "fsdp": fsdp, "tensor": tensor}
                    axes["data"] = n_shards // fsdp
                    blocks += _of_mesh(sizes, axes)
    if not blocks:
        return Layouts(*(np.zeros(0) for _ in _FIELDS))
    return Layouts(*np.concatenate(blocks, axis=1))


def _of_mesh(sizes: ModelSizes, axes: Mapping[str, int]) -> Iterator[np.ndarray]:
    """Yields [field, layout] of one mesh, in the order of the fields."""
    n_sequences = sizes.global_batch // (axes["data"] * axes["fsdp"])
    has_stages = axes["pipeline"] > 1
    choices: dict[str, Any] = {name: (size,) for name, size in axes.items()}
    choices["microbatches"] = [
        m for m in _divisors(n_sequences) if not has_stages or m >= axes["pipeline"]
    ]
    choices["chunks"] = _chunks(sizes.layers, axes["pipeline"]) if has_stages else (1,)
    choices["replicas"] = (DDP,)
    if axes["data"] > 1 and axes["fsdp"] == 1:
        # In stages zero3 sends no more than the others, and needs less memory.
        choices["replicas"] = (ZERO3,) if has_stages else (DDP, ZERO1, DISTRIBUTED, ZERO3)
    choices["sequence_parallel"] = (0, 1) if axes["tensor"] > 1 else (0,)
    choices["remat"] = (NONE, SAVE_NAMES, FULL, SAVE_ATTENTION)
    choices["remat_share"] = (1.0,) if has_stages else (0.125, 0.25, 0.5, 0.75, 0.875, 1.0)
    choices["kept_share"] = (0.0,) if has_stages else (0.0, 0.25, 0.5, 0.75, 1.0)
    choices["keeps_residuals"] = (0, 1) if has_stages else (1,)
    can_unroll = not has_stages and sizes.layers <= MOST_UNROLLED
    choices["unroll"] = (0, 1) if can_unroll else (0,)
    names = [field.name for field in _FIELDS]
    grid = np.meshgrid(*(np.asarray(choices[name], np.float64) for name in names), indexing="ij")
    block = np.stack([column.reshape(-1) for column in grid])
    column = dict(zip(names, block, strict=True))
    allowed = (column["chunks"] == 1) | (column["microbatches"] % axes["pipeline"] == 0)
    # Only layers that gather their own weights can keep them, and what is kept in each of several
    # microbatches is gathered in each.
    allowed &= (column["kept_share"] == 0) | (column["replicas"] == ZERO3)
    allowed &= (column["remat_share"] == 1) | (column["remat"] != NONE)
    yield block[:, allowed]


def _chunks(n_layers: int, pipeline: int) -> list[int]:
    """Returns the numbers of chunks on a stage that divide the layers, or waste little where all
    chunks run as long as the longest.
    """
    chunks = []
    for n in range(1, n_layers // pipeline + 1):
        longest = -(-n_layers // (pipeline * n))
        if longest * pipeline * n <= _MOST_PADDED * n_layers:
            chunks.append(n)
    return chunks


def _divides_heads(sizes: ModelSizes, tensor: int) -> bool:
    divided = (sizes.heads, sizes.kv_heads, sizes.d_ff, sizes.vocab)
    return all(size % tensor == 0 for size in divided)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def layout_of(config: Any, n_devices: int) -> dict[str, float] | None:
    """Returns the layout of a run (a `TrainConfig`) as a row; None for rules or policies without
    formulas.
    """
    sizes = config.mesh.sizes()
    fixed = 1
    for size in sizes.values():
        fixed *= 1 if size == -1 else size
    sizes = {axis: n_devices // fixed if size == -1 else size for axis, size in sizes.items()}
    presets = {word for word in config.rules.name.split("+") if not word.startswith("reduce_")}
    model = config.model
    if why_no_formulas(config) or not presets <= PRESETS or model.remat not in REMAT:
        return None
    replicas = DDP
    if "zero3" in presets:
        replicas = ZERO3
    elif "distributed" in presets:
        replicas = DISTRIBUTED
    elif "zero1" in presets:
        replicas = ZERO1
    n_layers = model.n_layers
    with_policy = n_layers if model.remat_layers is None else model.remat_layers
    has_stages = sizes["pipeline"] > 1
    return {
        **{axis: float(sizes[axis]) for axis in AXES},
        "microbatches": float(config.train.microbatches),
        "chunks": float(config.pipeline.chunks if has_stages else 1),
        "replicas": float(replicas),
        "sequence_parallel": float("megatron_sp" in presets),
        "remat": float(REMAT.index(model.remat)),
        "remat_share": with_policy / n_layers if model.remat != "none" else 1.0,
        "kept_share": model.kept_layers / n_layers,
        "keeps_residuals": float(not has_stages or config.pipeline.stash == "residuals"),
        "unroll": float(model.unroll and not has_stages),
    }
