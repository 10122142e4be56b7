"""Features that were never together: one training step of any combination must equal one device, or
be refused by `check`.

`FACTORS` are the features, `array` is a covering array of them (`covering.array`): every two values
of two features meet in a row. `python tests/feature_rows.py ROW` runs one row, a JSON object;
without an argument, one for each line of its input. The answer is a line of JSON: [verdict, what
was said].

Islands are not among the rules: they train apart, so that no step of theirs equals one device.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import traceback
import zlib
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":  # as tests/conftest.py does for a test run
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    )

import dataclasses
import math

import covering
import jax
import numpy as np
from covering import Constraint, Row
from flat_layout import flattened, unflattened
from support import (
    BATCH,
    SEQ,
    VOCAB,
    assert_same_gradients,
    host_batch,
    in_memory_order,
    on_devices,
    shard_on,
)

from mesh_lm.config import DataConfig, OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.model.config import SegmentConfig
from mesh_lm.optim import Optimizer, Params, Rule, make_rule
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Slots
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.schedules.segments import LIGHTER
from mesh_lm.state import MASTER, State, abstract_state, initial_statistics
from mesh_lm.training.check import check
from mesh_lm.training.step import train_step
from sharding_rules import MeshConfig, Shard, ShardingRuleError, make_mesh, preset

FACTORS: dict[str, tuple[Any, ...]] = {
    "replicas": (
        "ddp",
        "zero1",
        "zero2",
        "distributed",
        "zero3",
        "fsdp",
        "hsdp",
        "by_node",
        "zero3+fsdp",
    ),
    "tensor": ("", "megatron", "megatron_sp", "megatron_2d"),
    "context": ("", "context_gather", "ulysses", "ring", "usp"),
    "stages": (1, 2),
    "segments": ("one", "two", "mixed"),
    "chunks": (1, 2),
    "schedule": ("1f1b", "gpipe", "classic_1f1b"),
    "stash": ("input", "residuals"),
    "remat": ("none", "full", "save_attention", "save_names", "offload"),
    "remat_layers": (None, 2),
    "kept_layers": (0, 2),
    "unroll": (False, True),
    "halves": (False, True),
    "pairs": (False, True),
    "tied": (True, False),
    "kv_heads": (0, 4),
    "window": ((), (4, 0)),
    "documents": ("joined", "packed"),
    "optimizer": ("adamw", "muon", "lion", "adafactor"),
    "reduction": ("auto", "float32", "bfloat16", "int8"),
    "dtype": ("float32", "bfloat16"),
    "microbatches": (2, 4),
}
"""The replicas, tensor and context are parts of the rules, and the mesh is what they need. mixed:
segments of unequal lengths, of which the second recomputes everything."""

N_DEVICES = 16
_MESHES = {
    "ddp": {"data": 2}, "zero1": {"data": 2}, "zero2": {"data": 2}, "distributed": {"data": 2},
    "zero3": {"data": 2}, "fsdp": {"fsdp": 2},
    "hsdp": {"data": 2, "fsdp": 2}, "by_node": {"data": 2, "node": 2},
    "zero3+fsdp": {"data": 2, "fsdp": 2},
    "megatron": {"tensor": 2}, "megatron_sp": {"tensor": 2},
    "megatron_2d": {"tensor": 2, "tensor_y": 2},
    "context_gather": {"sequence": 2}, "ulysses": {"sequence": 2}, "ring": {"sequence": 2},
    "usp": {"sequence": 2, "ulysses": 2},
}  # fmt: skip
_FLAT = ("distributed", "zero3", "zero3+fsdp")
"""Rules that keep matrices as flat vectors."""
_GATHERED = ("zero3", "zero3+fsdp")
"""Rules by which layers gather them."""


def _mesh(replicas: str, tensor: str, context: str, stages: int) -> dict[str, int]:
    sizes = {"pipeline": stages}
    for part in (replicas, tensor, context):
        sizes |= _MESHES.get(part, {})
    return sizes


def _sequences(replicas: str, microbatches: int) -> int:
    """The sequences of a microbatch on a device."""
    return BATCH // microbatches // math.prod(_MESHES[replicas].values())


def _within(n_devices: int) -> tuple[Constraint, ...]:
    """The meshes of at most so many devices, known by some of their parts, too."""
    parts = {"replicas": "ddp", "tensor": "", "context": "", "stages": 1}  # the least of each
    found: list[Constraint] = []
    for n in range(1, len(parts) + 1):
        for names in itertools.combinations(parts, n):

            def fits(*values: Any, names: tuple[str, ...] = names) -> bool:
                return (
                    math.prod(_mesh(**(parts | dict(zip(names, values, strict=True)))).values())
                    <= n_devices
                )

            found.append((names, fits))
    return tuple(found)


_CONSTRAINTS: tuple[Constraint, ...] = (
    # Without stages these say nothing.
    (("stages", "chunks"), lambda stages, chunks: stages > 1 or chunks == 1),
    (("stages", "schedule"), lambda stages, schedule: stages > 1 or schedule == "1f1b"),
    (("stages", "stash"), lambda stages, stash: stages > 1 or stash == "input"),
    # What `check` refuses.
    (("chunks", "schedule"), lambda chunks, schedule: chunks == 1 or schedule != "classic_1f1b"),
    (("stages", "pairs"), lambda stages, pairs: stages > 1 or not pairs),
    (("stash", "pairs"), lambda stash, pairs: stash == "residuals" or not pairs),
    (("stages", "kept_layers"), lambda stages, kept: stages == 1 or not kept),
    (("replicas", "kept_layers"), lambda replicas, kept: replicas in _GATHERED or not kept),
    (("stages", "remat_layers"), lambda stages, layers: stages == 1 or layers is None),
    (("remat", "remat_layers"), lambda remat, layers: remat in LIGHTER or layers is None),
    (
        ("replicas", "remat"),
        lambda replicas, remat: replicas not in _GATHERED or remat != "offload",
    ),
    (("stash", "remat"), lambda stash, remat: stash == "input" or remat != "offload"),
    (
        ("tensor", "context", "halves"),
        lambda tensor, context, halves: bool(tensor or context) or not halves,
    ),
    (("pairs", "halves"), lambda pairs, halves: not (pairs and halves)),
    (
        ("replicas", "microbatches", "halves"),
        lambda replicas, n, halves: _sequences(replicas, n) % 2 == 0 or not halves,
    ),
    (
        ("replicas", "optimizer"),
        lambda replicas, name: replicas not in _FLAT or name in ("adamw", "lion"),
    ),
    (
        ("replicas", "reduction"),
        lambda replicas, kind: (
            kind != "int8" or replicas in ("ddp", "zero1", "distributed", "hsdp")
        ),
    ),
)
"""What keeps features apart."""


@functools.cache
def array() -> tuple[list[Row], list[Row]]:
    """Rows that `check` accepts, and rows for pairs that it refuses.

    The first need eight devices or fewer, and only what does not fit on these has more.
    """
    *fitting, others = covering.array(FACTORS, *(_within(n) + _CONSTRAINTS for n in (8, N_DEVICES)))
    return list(itertools.chain(*fitting)), others


OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant", clip_norm=1e9)


def model_of(row: Row) -> DecoderConfig:
    """The model of a row. With windows it has twice the layers, because a stage holds complete
    periods of them."""
    period = len(row["window"]) or 1
    n_layers = 4 * period
    shares = {"one": (4,), "two": (2, 2), "mixed": (1, 3)}[row["segments"]]
    segments: tuple[SegmentConfig, ...] = ()
    if len(shares) > 1:
        late = "full" if row["segments"] == "mixed" else None
        segments = (
            SegmentConfig("early", shares[0] * period),
            SegmentConfig("late", shares[1] * period, remat=late),
        )
    return DecoderConfig(
        vocab_size=VOCAB, vocab_multiple=16, seq_len=SEQ, n_layers=n_layers, segments=segments,
        d_model=32, n_heads=8, loss_chunk=24,
        dropout=0.1, n_kv_heads=row["kv_heads"], tied=row["tied"], window=row["window"],
        dtype=row["dtype"], remat=row["remat"],
        remat_layers=row["remat_layers"] and row["remat_layers"] * period,
        kept_layers=row["kept_layers"] * period, unroll=row["unroll"],
        batch_halves=row["halves"],
    )  # fmt: skip


def config_of(row: Row) -> TrainConfig:
    """The config of a row."""
    rules = [
        row["replicas"],
        row["tensor"],
        row["context"],
        "" if row["reduction"] == "auto" else f"reduce_{row['reduction']}",
    ]
    return TrainConfig(
        model=model_of(row),
        output="nowhere",
        mesh=MeshConfig.of(_mesh(row["replicas"], row["tensor"], row["context"], row["stages"])),
        rules=preset("+".join(filter(None, rules))),
        train=TrainLoop(steps=10, global_batch=BATCH, microbatches=row["microbatches"]),
        optimizer=dataclasses.replace(OPTIMIZER, rule=make_rule(row["optimizer"])),
        data=DataConfig(tokenizer_vocab=64, documents=row["documents"]),
        pipeline=PipelineConfig(
            schedule=row["schedule"],
            chunks=row["chunks"],
            stash=row["stash"],
            pair_layers=row["pairs"],
        ),
    )


def verdict(row: Row) -> tuple[str, str]:
    """("same", ""), ("refused", message), or a failure: ("wrong" or "crashed", details)."""
    try:
        config = config_of(row)
        config = check(config, min(_n_devices(config), N_DEVICES))
    except (ConfigError, ShardingRuleError) as error:
        return "refused", str(error)
    except Exception:
        return "crashed", traceback.format_exc()[-3000:]
    try:
        found = stepped(config, row["documents"] == "packed")
    except Exception:
        return "crashed", traceback.format_exc()[-3000:]
    try:
        _assert_equals_one_device(row, config, found)
    except AssertionError as error:
        return "wrong", str(error)
    return "same", ""


def _n_devices(config: TrainConfig) -> int:
    return math.prod(config.mesh.sizes().values())


@dataclasses.dataclass(frozen=True)
class Stepped:
    """The outcome of one step, on the host, with layers in model order and segments joined."""

    loss: float
    grad_norm: float
    labels: float
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    """The weights after the update."""


class Recorded:
    """The rule of an optimizer, with the gradients that it was given as one more slot."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.elementwise = rule.elementwise  # pyright: ignore[reportAttributeAccessIssue]

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        return self._rule.slots(leaves) | {"gradient": dict(leaves)}

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        own = {name: slot for name, slot in slots.items() if name != "gradient"}
        directions, after = self._rule.direction(grads, own, params, count=count, leaves=leaves)
        return directions, after | {"gradient": grads}


def stepped(config: TrainConfig, separate: bool) -> Stepped:
    """The outcome of a step from the same weights for any config. separate: documents do not attend
    to each other."""
    devices = jax.devices()[: _n_devices(config)]
    layout = ModelLayout.of(
        config.model, Shard(config.rules, make_mesh(config.mesh, devices)), config.pipeline
    )
    recorded: Any = Recorded(config.optimizer.rule)
    section = dataclasses.replace(config.optimizer, rule=recorded)
    optimizer = Optimizer(section, config.train.steps, config.diloco)
    batch = on_devices(host_batch(config.train.microbatches, separate=separate), layout)
    after, metrics = train_step(layout, optimizer, seed=3)(_state(layout, optimizer), batch)

    held = jax.tree.map(np.asarray, after)
    params = {
        name: x for name, x in held["params"].items() if name not in layout.flat.names
    } | held.get(MASTER, {})
    return Stepped(
        *(float(metrics[name]) for name in ("loss", "grad_norm", "labels")),
        gradients=_joined(unflattened(layout, held["gradient"])),
        params=_joined(unflattened(layout, params)),
    )


def _state(layout: ModelLayout, optimizer: Optimizer) -> State:
    """The state before the step, made with NumPy, without a program to compile."""
    abstract = abstract_state(layout, optimizer)
    weights = {name: weight(name, shape.shape, layout) for name, shape in layout.shapes.items()}
    in_memory = {name: in_memory_order(layout, name, x) for name, x in weights.items()}
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
    state["params"] = {
        name: in_memory[name].astype(like.dtype) for name, like in abstract["params"].items()
    }
    if MASTER in abstract:
        state[MASTER] = {
            vector.name: flattened(vector, in_memory, layout) for vector in layout.flat.vectors
        }
    state["recent"] = initial_statistics()
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, abstract)


def weight(name: str, shape: tuple[int, ...], layout: ModelLayout) -> np.ndarray:
    """A parameter before the step: the same layers, however they are divided into segments."""
    segment, _, rest = name.partition(".")
    if name not in layout.stacked:
        return _random(name, shape)
    stack = layout.config.stack()
    first = stack.start(segment)
    return _random(rest, (stack.n_layers, *shape[1:]))[first : first + shape[0]]


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    return (draw.normal(0, 0.05, shape) + name.endswith("scale")).astype(np.float32)


def _joined(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by name, with those of the segments early and late joined to that of one segment."""
    found = {
        name: x for name, x in arrays.items() if name.partition(".")[0] not in ("early", "late")
    }
    for name, x in arrays.items():
        segment, _, rest = name.partition(".")
        if segment == "early":
            found[f"blocks.{rest}"] = np.concatenate((x, arrays[f"late.{rest}"]))
    return found


PLAIN: Row = {name: values[0] for name, values in FACTORS.items()} | {"microbatches": 1}
"""The row of one device."""
_OF_MODEL = ("tied", "kv_heads", "window", "documents", "optimizer")


def reference(row: Row) -> Stepped:
    """The outcome of a row's model on one device, in float32 and in one microbatch."""
    return _reference(*(row[name] for name in _OF_MODEL[:-1]))


@functools.cache
def _reference(*model: Any) -> Stepped:
    row = PLAIN | dict(zip(_OF_MODEL, model, strict=False))
    return stepped(
        dataclasses.replace(config_of(row), rules=preset("ddp"), mesh=MeshConfig()),
        row["documents"] == "packed",
    )


@functools.cache
def _update(*model: Any) -> Any:
    """A jitted function from the gradients to the weights after the update, on one device."""
    row = PLAIN | dict(zip(_OF_MODEL, model, strict=True))
    config = config_of(row)
    layout = ModelLayout.of(config.model, shard_on("ddp"))
    optimizer = Optimizer(config.optimizer, config.train.steps, config.diloco)
    weights = {name: weight(name, shape.shape, layout) for name, shape in layout.shapes.items()}
    slots = {
        slot: {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        for slot, leaves in optimizer.slots(layout.leaves).items()
    }

    def update(gradients: Params) -> Params:
        norm = jax.numpy.float32(1)  # which the clipping does not reach
        return optimizer.update(
            gradients, norm, slots, weights, np.int32(0), np.int32(0), leaves=layout.leaves
        )[0]

    return jax.jit(update)


def _assert_equals_one_device(row: Row, config: TrainConfig, found: Stepped) -> None:
    wanted = reference(row)
    assert found.labels == wanted.labels
    exact = row["dtype"] == "float32" and row["reduction"] in ("auto", "float32")
    if exact:
        assert_same_gradients(found.gradients, wanted.gradients)
        assert abs(found.loss - wanted.loss) <= 1e-5 * wanted.loss, (
            f"loss {found.loss}, not {wanted.loss}"
        )
        assert abs(found.grad_norm - wanted.grad_norm) <= 1e-5 * wanted.grad_norm, (
            f"norm {found.grad_norm}, not {wanted.grad_norm}"
        )
    else:
        _assert_close(
            found.gradients, wanted.gradients, _LEAST_INT8 if row["reduction"] == "int8" else _LEAST
        )
        assert abs(found.loss - wanted.loss) <= 5e-3 * wanted.loss, (
            f"loss {found.loss}, not {wanted.loss}"
        )
        assert abs(found.grad_norm - wanted.grad_norm) <= 2e-2 * wanted.grad_norm, (
            f"norm {found.grad_norm}, not {wanted.grad_norm}"
        )
    # From the gradients of this step, because a sign or an orthogonal matrix would amplify the
    # differences to those of one device.
    updated = _update(*(row[name] for name in _OF_MODEL))(found.gradients)
    for name, new in updated.items():
        error = np.abs(found.params[name] - new).max()
        assert error <= _UPDATE_TOLERANCE[row["optimizer"]] * OPTIMIZER.learning_rate, (
            f"{name}: the update differs by {error:.2e}"
        )


_UPDATE_TOLERANCE = {"adamw": 1e-3, "lion": 1e-3, "adafactor": 1e-3, "muon": 2e-2}
"""Of the learning rate, the largest step of an element. Muon's matrix products are in the order of
the mesh."""
_ROUNDING = 0.05
"""Relative error of a gradient whose parts were rounded to eight bits. A microbatch that is missing
is a multiple of that."""
_LEAST = 0.02
"""Of the largest norm: an array with a smaller one is compared with that."""
_LEAST_INT8 = 0.04
"""As _LEAST. In a flat vector over eight shards a matrix of these models has fewer elements a shard
than the 256 that share a scale, so it is rounded as coarsely as its neighbour: queries by 10 %,
whose norm is 0.018 of the largest; by 0.75 % with blocks of 64."""


def _assert_close(
    found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray], least: float
) -> None:
    """Asserts |g - ref| <= 0.05 max(|ref|, least x the largest |ref|), where |.| is the norm of an
    array."""
    assert found.keys() == wanted.keys()
    norms = {name: float(np.linalg.norm(w)) for name, w in wanted.items()}
    largest = max(norms.values())
    for name, w in wanted.items():
        error = float(np.linalg.norm(found[name] - w)) / max(norms[name], least * largest)
        assert error <= _ROUNDING, f"{name}: relative error {error:.2e}"


def from_json(text: str) -> Row:
    """A row from a JSON object, which has lists for tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in json.loads(text).items()
    }


def main() -> None:
    for line in sys.argv[1:] or sys.stdin:
        print("\0" + json.dumps(verdict(PLAIN | from_json(line))), flush=True)


if __name__ == "__main__":
    main()
