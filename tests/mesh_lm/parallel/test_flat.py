"""Flat vectors hold every matrix once, for any shape and number of replicas, and a step with them
equals one without."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import (
    Any,
    cast,
)

import jax
import ml_dtypes
import numpy as np
import pytest
from flat_layout import unflattened
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import (
    GPT,
    assert_same_gradients,
    host_batch,
    in_model_order,
    initial,
    on_devices,
    shard_on,
)

from mesh_lm.config import OptimizerConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.optim import AdamW, ArraySpec, Lion, Optimizer, is_matrix, make_rule
from mesh_lm.parallel import flat
from mesh_lm.parallel.flat import FlatLayout
from mesh_lm.parallel.layout import ModelLayout, segment_of
from mesh_lm.state import MASTER, State
from mesh_lm.state.disk_form import from_disk, to_disk
from mesh_lm.state.initial import fresh_state, init_state
from mesh_lm.state.unflatten import shard_over_replicas
from mesh_lm.training.check import check
from mesh_lm.training.step import train_step
from sharding_rules import MeshConfig, preset

COMPILE_BUDGET = 390

# The layout alone, without devices.


class Device:
    platform, device_kind, process_index = "cpu", "none", 0

    def __init__(self, number: int) -> None:
        self.id = number


@functools.cache
def mesh_of(**sizes: int) -> Mesh:
    devices = np.array([Device(n) for n in range(math.prod(sizes.values()))], dtype=object)
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes))


MESHES = [
    mesh_of(pipeline=pipeline, data=data, fsdp=fsdp, tensor=tensor)
    for pipeline, data, fsdp, tensor in [
        (1, 1, 1, 1),
        (1, 3, 1, 1),
        (2, 5, 1, 2),
        (1, 48, 1, 1),
        (3, 4, 2, 1),
        (1, 6, 2, 2),
        (4, 48, 1, 2),
    ]
]
RULES = [
    preset(name)
    for name in (
        "distributed",
        "distributed+megatron_sp",
        "hsdp+distributed",
        "distributed+hsdp+megatron",
    )
]
WIDTHS = {
    "embed": (2, 4, 20, 36),
    "mlp": (4, 12, 60),
    "heads": (2, 6),
    "vocab": (4, 250),
    "head_dim": (1, 5, 7),
    "fused": (2, 3),
}
WHOLE, CUT = (
    (("embed",), ("embed", "fused"), ("embed", "head_dim"), ("head_dim", "fused")),
    ("mlp", "heads", "vocab"),
)
AXES = [[*each] for whole in WHOLE for cut in CUT for each in itertools.permutations((*whole, cut))]
MATRICES = st.lists(
    st.tuples(st.booleans(), st.sampled_from(AXES), st.data()), min_size=1, max_size=5
)


def leaves_of(drawn: list[tuple[bool, list[str], Any]], rows: int) -> dict[str, ArraySpec]:
    found = {}
    for number, (stacked, axes, data) in enumerate(drawn):
        shape = tuple(data.draw(st.sampled_from(WIDTHS[axis])) for axis in axes)
        name = f"blocks.{number}.weight" if stacked else f"table_{number}"
        found[name] = ArraySpec(
            (rows,) * stacked + shape, np.dtype("float32"), ("layers",) * stacked + tuple(axes)
        )
    found["blocks.norm.scale"] = ArraySpec((rows, 20), np.dtype("float32"), ("layers", "norm"))
    return found


@given(st.sampled_from(MESHES), st.sampled_from(RULES), MATRICES, st.integers(1, 3))
def test_every_matrix_is_in_one_vector(
    mesh: Mesh, rules: Any, drawn: list[Any], height: int
) -> None:
    """`unpack` inverts `pack`; a device's shard has the size that leaf and spec give; padding is
    less than one unit."""
    leaves = leaves_of(drawn, height * mesh.shape["pipeline"])
    where = {
        name: rules.sharding("params", leaf.axes, mesh, leaf.shape, name)
        for name, leaf in leaves.items()
    }
    found = FlatLayout.of(rules, leaves, where, dict.fromkeys(leaves, "bfloat16"), segment_of)
    inside = [matrix.name for vector in found.vectors for matrix in vector.matrices]
    assert sorted(inside) == sorted(
        name for name, leaf in leaves.items() if is_matrix(name, leaf.axes)
    )
    assert len(found.leaves) == len(found.vectors), "two vectors have one name"
    random = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(flat, "jnp", np)  # nothing to compile
        for vector in found.vectors:
            row: Any = {
                m.name: random.normal(size=m.local).astype(np.float32) for m in vector.matrices
            }
            packed = vector.pack(row)
            assert (
                packed.shape == (vector.shard_size * vector.replicas,)
                and vector.shard_size % 128 == 0
            )
            size = sum(x.size for x in row.values())
            assert [m.offset for m in vector.matrices] == [
                0,
                *itertools.accumulate(m.size for m in vector.matrices),
            ][:-1]
            assert not packed[size:].any() and 0 <= packed.size - size < 128 * vector.replicas
            for name, x in vector.unpack(packed).items():
                assert x.tobytes() == row[name].tobytes()
                assert (
                    x.shape
                    == where[name].shard_shape(leaves[name].shape)[int(leaves[name].stacked) :]
                )
            local = vector.sharding.shard_shape(vector.array_spec.shape)
            assert local == (
                (leaves[next(iter(row))].shape[0] // mesh.shape["pipeline"],) if vector.rows else ()
            ) + (vector.shard_size,)
            assert (
                len(vector.spec) == len(vector.array_spec.shape) == len(vector.array_spec.axes)
            ), "a spec that is too short shards another dimension"


def one_layer(dtypes: dict[str, str]) -> FlatLayout:
    """The layout of matrices [1, 4, 4] without replicas, in which layers use the given types."""
    rules, mesh = preset("distributed"), MESHES[0]
    leaves = {
        f"blocks.{name}.weight": ArraySpec(
            (1, 4, 4), np.dtype("float32"), ("layers", "embed", "mlp")
        )
        for name in dtypes
    }
    where = {
        name: rules.sharding("params", leaf.axes, mesh, leaf.shape, name)
        for name, leaf in leaves.items()
    }
    return FlatLayout.of(
        rules,
        leaves,
        where,
        {f"blocks.{name}.weight": dtype for name, dtype in dtypes.items()},
        segment_of,
    )


def test_matrices_of_two_types_are_in_two_vectors() -> None:
    """Such as those of a router, which stay in fp32."""
    found = one_layer({"up": "bfloat16", "router": "float32", "down": "bfloat16"})
    assert {name: str(dtype) for name, dtype in found.compute_dtypes.items()} == {
        "blocks.up.weight": "bfloat16", "blocks.router.weight": "float32",
        "blocks.down.weight": "bfloat16"
    }  # fmt: skip
    assert [len(vector.matrices) for vector in found.vectors] == [2, 1] and len(found.leaves) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sum_has_the_type_that_is_asked_for(dtype: str) -> None:
    """Whatever the layers use. Nothing is compiled."""
    for used in ("bfloat16", "float32"):
        (vector,) = one_layer({"up": used}).vectors
        row = {"blocks.up.weight": jax.ShapeDtypeStruct((4, 4), np.dtype("float32"))}
        program = str(
            jax.make_jaxpr(lambda row, vector=vector: vector.reduce_scatter_row(row, dtype))(row)
        )
        assert ("bf16" in program) == (dtype == "bfloat16"), program


SHAPES = st.lists(st.sampled_from([1, 2, 3, 5, 7, 8, 12, 20, 48, 96]), min_size=1, max_size=4)


@given(
    st.sampled_from(MESHES),
    SHAPES,
    st.booleans(),
    st.sampled_from([("data",), ("pipeline", "data")]),
)
def test_a_matrix_is_spread_as_far_as_it_divides(
    mesh: Mesh, shape: list[int], stacked: bool, over: tuple[str, ...]
) -> None:
    """Each device keeps a part of its shard, each part is on equally many devices, and the order of
    devices is unchanged."""
    if stacked:
        shape, over = [2 * mesh.shape["pipeline"], *shape], ("data",)
    over = tuple(axis for axis in over if mesh.shape[axis] > 1)
    wide = next(
        (dim for dim in range(int(stacked), len(shape)) if shape[dim] % mesh.shape["tensor"] == 0),
        None,
    )
    spec = PartitionSpec(
        *(
            "pipeline" if stacked and not dim else "tensor" if dim == wide else None
            for dim in range(len(shape))
        )
    )
    before = NamedSharding(mesh, spec)
    after = shard_over_replicas(before, shape, over, int(stacked))
    mesh_after: Any = after.mesh
    assert [d.id for d in mesh_after.devices.flat] == [d.id for d in mesh.devices.flat]
    one, other = before.shard_shape(tuple(shape)), after.shard_shape(tuple(shape))
    assert one[: int(stacked)] == other[: int(stacked)], "rows stay where they are"
    if len(over) == 1:
        assert math.prod(one) // math.prod(other) == max(
            math.gcd(mesh.shape[over[0]], size) for size in one[int(stacked) :]
        )
    held, given_ = (where.devices_indices_map(tuple(shape)) for where in (before, after))
    parts: dict[tuple[Any, ...], int] = {}
    for device, box in given_.items():
        inside = [range(size)[s] for s, size in zip(box, shape, strict=True)]
        outside = [range(size)[s] for s, size in zip(held[device], shape, strict=True)]
        assert all(
            a.start >= b.start and a.stop <= b.stop for a, b in zip(inside, outside, strict=True)
        )
        key = tuple((r.start, r.stop) for r in inside)
        parts[key] = parts.get(key, 0) + 1
    assert len(set(parts.values())) == 1 and len(parts) * math.prod(other) == math.prod(shape)


# A step, on eight devices.

SMALL = dataclasses.replace(GPT, n_layers=3)
HALF = dataclasses.replace(SMALL, dtype="bfloat16")
LINEAR = OptimizerConfig(
    AdamW(eps=1.0), learning_rate=1e-2, warmup_steps=0, schedule="constant", clip_norm=1e9
)
"""A config in which an update is nearly linear in the gradient, and does not amplify its noise."""
CASES: dict[str, tuple[str, dict[str, Any], int, PipelineConfig]] = {
    "one device": ("ddp", {}, 1, PipelineConfig()),
    "three replicas": ("distributed", {"data": 3}, 2, PipelineConfig()),
    "tensor": ("distributed+megatron_sp", {"data": 2, "tensor": 2}, 1, PipelineConfig()),
    "uneven stages": ("distributed", {"pipeline": 2, "data": 2}, 2, PipelineConfig(layers=(1, 2))),
    "fsdp": ("distributed+hsdp", {"data": 2, "fsdp": 2}, 1, PipelineConfig()),
    "nodes": ("distributed+by_node", {"data": 3, "extra": ("node=2",)}, 1, PipelineConfig()),
    "nodes that gather": ("zero3+by_node", {"data": 3, "extra": ("node=2",)}, 1, PipelineConfig()),
}
INT8: dict[str, tuple[str, dict[str, Any], int, PipelineConfig]] = {
    "three in int8": ("distributed+reduce_int8", {"data": 3}, 2, PipelineConfig()),
    "stages in int8": (
        "distributed+reduce_int8",
        {"pipeline": 2, "data": 2},
        2,
        PipelineConfig(layers=(1, 2)),
    ),
}
"""No dimension of the model divides by 3."""


def layout_of(case: str, model: DecoderConfig = SMALL) -> ModelLayout:
    rules, mesh, _, pipeline = (CASES | INT8)[case]
    return ModelLayout.of(model, shard_on(rules, **mesh), pipeline)


def batch_of(layout: ModelLayout, microbatches: int, seed: int) -> dict[str, jax.Array]:
    """12 sequences, a multiple of 3."""
    whole = host_batch(1, seed=seed)
    parts = {
        name: x[0, :12].reshape(microbatches, -1, *x.shape[2:])
        for name, x in whole.items()
        if name != "indices"
    }
    indices = np.broadcast_to(whole["indices"], (microbatches, *whole["indices"].shape[1:]))
    return on_devices(parts | {"indices": indices}, layout)


def begun(layout: ModelLayout, optimizer: Optimizer) -> State:
    """At the seed-0 initialisation of one device."""
    params = initial(ModelLayout.of(layout.config, shard_on("ddp")))
    everywhere = NamedSharding(layout.shard.mesh, PartitionSpec())
    return fresh_state(
        layout, optimizer, {name: jax.device_put(x, everywhere) for name, x in params.items()}
    )


Trained = tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]


@functools.cache
def trained(case: str, optimizer: OptimizerConfig = LINEAR) -> Trained:
    """Losses of three steps; gradients, from the first moments after the first step; fp32 weights
    after two steps."""
    layout, made = layout_of(case), Optimizer(optimizer, 9)
    state, step, losses = begun(layout, made), train_step(layout, made, seed=0), []
    grads = params = {}
    for number in range(3):
        state, metrics = step(state, batch_of(layout, (CASES | INT8)[case][2], number))
        losses.append(float(metrics["loss"]))
        held = jax.tree.map(np.asarray, state)
        if number == 0:
            rule = cast(AdamW | Lion, optimizer.rule)
            share = 1 - (rule.beta2 if isinstance(rule, Lion) else rule.beta1)
            grads = {name: x / share for name, x in unflattened(layout, held["mu"]).items()}
        if number == 1:
            plain = {name: x for name, x in held["params"].items() if name not in layout.flat.names}
            params = unflattened(layout, plain | held.get(MASTER, {}))
    return losses, grads, params


FLAT = [case for case in CASES if case != "one device"]


SLOW = dict.fromkeys(("tensor", "fsdp", "nodes"), pytest.mark.slow) | {
    "three replicas": pytest.mark.exhaustive,
    "uneven stages": pytest.mark.exhaustive,
    "nodes that gather": pytest.mark.exhaustive,
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=SLOW.get(case, ())) for case in FLAT])
def test_a_step_equals_one_devices(case: str) -> None:
    """Compares gradients, weights after two steps of AdamW, and losses of three steps."""
    (losses, grads, params), (wanted_losses, wanted, wanted_params) = (
        trained(case),
        trained("one device"),
    )
    assert wanted_losses[2] != wanted_losses[0]
    np.testing.assert_allclose(losses, wanted_losses, rtol=2e-6)
    assert_same_gradients(grads, wanted)
    assert_same_gradients(params, wanted_params)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", INT8)
def test_a_step_in_int8_is_near_one_devices(case: str) -> None:
    """Matrices are wrong by half a scale for each replica at most; what is left out of a step is in
    the next one."""
    (losses, grads, params), (wanted_losses, wanted, wanted_params) = (
        trained(case),
        trained("one device"),
    )
    np.testing.assert_allclose(losses, wanted_losses, rtol=2e-5)
    layout = layout_of(case)
    for name, x in wanted.items():
        error = np.abs(grads[name] - x).max() / np.abs(x).max()
        assert (
            (1e-4 < error < 2e-2)
            if is_matrix(name, layout.axes[name])
            else error < 2e-4 or np.abs(x).max() < 1e-6
        ), name
    assert_same_gradients(params, wanted_params, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("adamw", marks=pytest.mark.exhaustive), "lion"])
def test_adamw_and_lion_do_not_know_that_they_are_flat(name: str) -> None:
    """With two replicas both sums round the same way, so hardly a sign differs. The gradient of a K
    bias is only noise."""
    config = OptimizerConfig(make_rule(name), warmup_steps=0, clip_norm=0)
    (losses, grads, params), (wanted_losses, wanted, wanted_params) = (
        on_two(rules, config) for rules in ("distributed", "ddp")
    )
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)
    assert_same_gradients(grads, wanted, 1e-6)
    for leaf, x in wanted_params.items():
        if leaf.endswith("qkv.bias"):
            continue
        far = np.abs(params[leaf] - x) > 1e-2 * config.learning_rate
        assert far.mean() < 2e-3, f"{far.sum()} of {far.size} elements of {leaf}"


def on_two(rules: str, optimizer: OptimizerConfig) -> Trained:
    CASES[rules] = rules, {"data": 2}, 1, PipelineConfig()
    return trained(rules, optimizer)


def used_are_cast(layout: ModelLayout, state: State) -> None:
    found = {name: in_model_order(layout, name, x) for name, x in state["params"].items()}
    wanted = unflattened(layout, jax.tree.map(np.asarray, state[MASTER]))
    assert wanted.keys() == layout.flat.names and len(wanted) > 5
    for name, x in wanted.items():
        assert found[name].dtype == ml_dtypes.bfloat16 and x.dtype == np.float32 and x.any()
        assert found[name].tobytes() == x.astype(ml_dtypes.bfloat16).tobytes(), name


def bits(state: State) -> dict[str, bytes]:
    return {
        jax.tree_util.keystr(path): np.asarray(x).tobytes()
        for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["tensor", pytest.param("uneven stages", marks=pytest.mark.exhaustive)]
)
def test_layers_use_the_master_cast(case: str) -> None:
    """`params` follow the master initially, after a step, after a skipped step, which changes
    nothing, and after a restore."""
    layout, optimizer = layout_of(case, HALF), Optimizer(OptimizerConfig(warmup_steps=0), 9)
    state, microbatches = init_state(layout, optimizer, seed=0), CASES[case][2]
    used_are_cast(layout, state)
    weights = jax.tree.map(np.asarray, state[MASTER])
    for name, x in unflattened(layout, weights).items():
        assert x.tobytes() == initial(ModelLayout.of(HALF, shard_on("ddp")))[name].tobytes(), (
            f"initial bits of {name}"
        )
    step = train_step(layout, optimizer, seed=0, outlier=5.0)
    state, _ = step(state, batch_of(layout, microbatches, 0))
    used_are_cast(layout, state)
    assert all(np.any(np.asarray(x) != weights[name]) for name, x in state[MASTER].items())
    counters = {"['step']", "['skipped']"}
    before = bits(state)
    poisoned = batch_of(layout, microbatches, 1)
    state, metrics = step(state, poisoned | {"weights": poisoned["weights"] * np.float32(np.nan)})
    after = bits(state)
    assert (
        metrics["skipped"] == 1
        and {name for name in after if after[name] != before[name]} == counters
    )
    lately = np.array([[1000, -100, 1]] * 2, np.float32)  # which every step exceeds by far
    state["recent"] = jax.device_put(lately, state["recent"].sharding)
    before = bits(state)
    state, metrics = step(state, batch_of(layout, microbatches, 1))
    after = bits(state)
    assert metrics["skipped"] == 2 and {
        name for name in after if after[name] != before[name]
    } <= counters | {"['recent']"}
    tree, digests = to_disk(layout, optimizer, state)
    back, wrong = from_disk(layout, optimizer, tree, digests)
    assert not wrong and bits(back) == after
    used_are_cast(layout, back)


# Configs that are refused.


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_of_matrices_are_refused(name: str) -> None:
    config = OptimizerConfig(make_rule(name))
    whole = TrainConfig(
        SMALL,
        "x",
        rules=preset("distributed"),
        train=TrainLoop(global_batch=6),
        optimizer=config,
        mesh=MeshConfig(data=3),
    )
    with pytest.raises(ConfigError) as caught:
        check(whole, 3)
    said = (
        f"optimizer.rule={name} needs full matrices, but rules 'distributed' store its state as "
        "flat vectors (rules.optimizer['flat']=('pipeline', 'data')); use the rule adamw or lion, "
        "or rules without that row, such as zero2"
    )
    assert [line for line in str(caught.value).splitlines() if "optimizer" in line] == [
        f"  - {said}"
    ]
    layout = layout_of("three replicas")
    with pytest.raises(ConfigError) as caught:
        Optimizer(config, 9).slots(layout.leaves | layout.flat.leaves)
    assert str(caught.value).startswith(f"optimizer.rule={name} works on whole matrices, and ")
