"""Every rule equals optax applied to each matrix of each layer separately, and is the same on any
mesh."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from support import GPT, by_stage, host_batch, initial, on_devices, shard_on

from mesh_lm.config import OptimizerConfig, PipelineConfig
from mesh_lm.errors import ConfigError
from mesh_lm.optim import (
    RULES,
    Adafactor,
    AdamW,
    ArraySpec,
    Optimizer,
    decayed,
    is_matrix,
    make_rule,
)
from mesh_lm.optim.adafactor import SHORTEST
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import abstract_state
from mesh_lm.training.step import train_step

COMPILE_BUDGET = 45
SLOW = pytest.mark.slow
SIZES = {
    "layers": 3, "embed": 40, "fused": 2, "heads": 33, "head_dim": 34, "mlp": 48, "vocab": 64,
    "experts": 5, "norm": 41, "position": 35,
    "state": 36,
}  # fmt: skip
"""Sizes of axes, all different, so that a shape identifies its axes."""
ROUNDED = ("adamw8",)
"""Rules that equal optax's within rounding only, and whose blocks the meshes below would divide;
test_adamw8.py is about them."""
RATE, DECAY, CLIP = 0.1, 0.3, 0.5


def leaf(*axes: str, **sizes: int) -> ArraySpec:
    return ArraySpec(
        tuple((SIZES | sizes)[axis.rpartition("/")[2]] for axis in axes), jnp.float32, axes
    )


LEAVES = {
    "embedding": leaf("vocab", "embed"),
    "norm.scale": leaf("norm"),
    "blocks.attention.qkv.weight": leaf("layers", "embed", "fused", "heads", "head_dim"),
    "blocks.attention.qkv.bias": leaf("layers", "fused", "heads", "head_dim"),
    "blocks.attention.out.weight": leaf("layers", "embed", "heads", "head_dim"),
    "blocks.norm.scale": leaf("layers", "norm"),
    "moe.router.weight": leaf("layers", "moe/embed", "moe/experts"),
    "moe.down.weight": leaf("layers", "moe/experts", "moe/embed", "moe/mlp"),
    "moe.mix.weight": leaf("layers", "moe/state", "moe/mlp"),
}
"""The parameters of a decoder and others. The last of three rows of each stack is padding."""
REAL = 2
MATRICES = ("blocks.attention.qkv.weight", "blocks.attention.out.weight", "moe.down.weight")
"""The parameters that Muon orthogonalises. The router has a vector for each expert, and mix has no
dimension embed."""


def config(name: str, **changes: Any) -> OptimizerConfig:
    fields: dict[str, Any] = {
        "learning_rate": RATE,
        "warmup_steps": 0,
        "schedule": "constant",
        "weight_decay": DECAY,
        "clip_norm": CLIP,
    }
    return OptimizerConfig(make_rule(name), **(fields | changes))


def arrays(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Gradients of different sizes, with zeros in padding rows."""
    found = {}
    for number, (name, each) in enumerate(LEAVES.items()):
        found[name] = (random.normal(size=each.shape) * 10.0 ** -(number % 3)).astype(np.float32)
        if each.stacked:
            found[name][REAL:] = 0
    return found


def layers(tree: dict[str, Any]) -> dict[str, Any]:
    """Each layer of each leaf separately."""
    apart = {
        name: {f"{name}#{row}": x[row] for row in range(REAL)}
        for name, x in tree.items()
        if LEAVES[name].stacked
    }
    return {
        part: x
        for name, whole in tree.items()
        for part, x in apart.get(name, {name: whole}).items()
    }


def matrices(tree: dict[str, Any]) -> dict[str, Any]:
    """Each matrix of each layer separately, [embed, other dimensions] or its transpose, and other
    leaves as in `layers`."""
    found = {}
    for name, x in layers(tree).items():
        if name.startswith("blocks.attention.qkv.weight"):
            found |= {f"{name}#{f}": x[:, f].reshape(len(x), -1) for f in range(SIZES["fused"])}
        elif name.startswith("blocks.attention.out.weight"):
            found[name] = x.reshape(len(x), -1)
        elif name.startswith("moe.down.weight"):
            found |= {f"{name}#{e}": x[e] for e in range(SIZES["experts"])}
        else:
            found[name] = x
    return found


def optax_chain(name: str, parts: dict[str, Any]) -> optax.GradientTransformation:
    """optax's updates of leaves that `layers` or `matrices` separates."""
    c, of = AdamW(), {part: part.partition("#")[0] for part in parts}
    decays = {part: of[part] in decayed(LEAVES) for part in parts}
    adamw = optax.adamw(RATE, b1=c.beta1, b2=c.beta2, eps=c.eps, weight_decay=DECAY, mask=decays)
    chosen = {
        "adamw": lambda: adamw,
        "lion": lambda: optax.lion(RATE, b1=c.beta1, b2=c.beta2, weight_decay=DECAY, mask=decays),
        "muon": lambda: optax.partition(
            {
                True: optax.contrib.muon(RATE, beta=0.95, weight_decay=DECAY, consistent_rms=0.2),
                False: adamw,
            },
            {part: of[part] in MATRICES for part in parts},
        ),
        "adafactor": lambda: optax.chain(
            optax.partition(
                {
                    wide: optax.scale_by_factored_rms(
                        factored=wide, min_dim_size_to_factor=SHORTEST
                    )
                    for wide in (False, True)
                },
                {part: is_matrix(of[part], LEAVES[of[part]].axes) for part in parts},
            ),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(DECAY, decays),
            optax.scale(-RATE),
        ),
    }[name]()
    return optax.chain(optax.clip_by_global_norm(CLIP), chosen)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ROUNDED])
def test_equals_optax(name: str) -> None:
    """Three updates, the second with a gradient too small to be clipped, with skipped steps between
    them, which `count` excludes."""
    random, cut = np.random.default_rng(0), matrices if name == "muon" else layers
    params = arrays(random)
    optimizer = Optimizer(config(name), 99)
    update = jax.jit(functools.partial(optimizer.update, leaves=LEAVES))
    slots: Any = {
        slot: {n: np.zeros(each.shape, np.float32) for n, each in kept.items()}
        for slot, kept in optimizer.slots(LEAVES).items()
    }
    ours, theirs, chain = cast(Any, params), cut(params), optax_chain(name, cut(params))
    state = jax.jit(chain.init)(theirs)
    step = jax.jit(chain.update)
    for count, size in enumerate((1, 1e-4, 3)):
        grads = {n: size * g for n, g in arrays(random).items()}
        norm = np.float32(
            math.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads.values()))
        )
        ours, slots = update(grads, norm, slots, ours, np.int32(3 * count + 1), np.int32(count))
        changes, state = step(cut(grads), state, theirs)
        theirs = {n: theirs[n] + np.asarray(change) for n, change in changes.items()}
    ours, slots = jax.tree.map(np.asarray, (ours, slots))
    found, before = cut(ours), cut(params)
    for part, wanted in theirs.items():
        moved = np.abs(wanted - before[part]).max()
        np.testing.assert_allclose(found[part], wanted, rtol=0, atol=2e-5 * moved, err_msg=part)
        assert moved > 0.01
    stacks = [name for name in LEAVES if LEAVES[name].stacked]
    assert not any(ours[name][REAL:].any() for name in stacks), "rows of padding are no longer zero"
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slots))


def test_muon_moves_weights_as_adamw_does() -> None:
    """The RMS of a direction is about 0.2 for any matrix (Moonlight, arXiv 2502.16982), within the
    30 % of Newton-Schulz."""
    optimizer, grads = (
        Optimizer(config("muon", weight_decay=0.0, clip_norm=0.0, learning_rate=1.0), 9),
        arrays(np.random.default_rng(1)),
    )
    zeros = jax.tree.map(np.zeros_like, grads)
    slots = {slot: {n: zeros[n] for n in kept} for slot, kept in optimizer.slots(LEAVES).items()}
    after, _ = jax.jit(functools.partial(optimizer.update, leaves=LEAVES))(
        grads, 1.0, slots, zeros, 0, 0
    )
    for name in MATRICES:
        rms = np.sqrt(np.square(np.asarray(after[name])[:REAL]).mean())
        assert 0.14 < rms < 0.26, f"{name}: {rms}"


def test_adafactor_keeps_means_over_the_dimension_that_a_slot_lacks() -> None:
    """Also for a square matrix, whose rows and columns differ by their axes only."""
    leaves = {
        "blocks.w": leaf("layers", "embed", "mlp", mlp=40),
        "wide": leaf("vocab", "embed"),
        "thin": leaf("experts", "embed"),
    }
    random = np.random.default_rng(2)
    grads: Any = {
        name: random.normal(size=each.shape).astype(np.float32) for name, each in leaves.items()
    }
    made = Adafactor()
    slots = made.slots(leaves)
    assert {slot: set(kept) for slot, kept in slots.items()} == {
        "v_row": {"blocks.w", "wide"},
        "v_col": {"blocks.w", "wide"},
        "v": {"thin"},
    }
    zeros = {
        slot: {name: np.zeros(each.shape, np.float32) for name, each in kept.items()}
        for slot, kept in slots.items()
    }
    direction = jax.jit(functools.partial(made.direction, leaves=leaves))
    _, after = direction(grads, zeros, grads, count=np.int32(0))
    for slot in ("v_row", "v_col"):
        for name, kept in slots[slot].items():
            lacks = tuple(
                dim for dim, axis in enumerate(leaves[name].axes) if axis not in kept.axes
            )
            assert len(lacks) == 1
            np.testing.assert_allclose(
                after[slot][name], np.square(grads[name]).mean(lacks), rtol=1e-5
            )


AXES = st.lists(
    st.sampled_from([axis for axis in SIZES if axis != "layers"]),
    min_size=1,
    max_size=4,
    unique=True,
)
TREES = st.dictionaries(
    st.sampled_from(["a.weight", "b.weight", "c.bias", "d.scale", "e"]),
    st.tuples(st.booleans(), st.sampled_from(["", "moe/"]), AXES),
)


@settings(max_examples=40)
@given(TREES, st.sampled_from(sorted(RULES)))
def test_slots_are_what_comes_back(tree: dict[str, tuple[bool, str, list[str]]], name: str) -> None:
    """For any parameters, slots keep their shapes and dtypes, their axes match their sizes, and
    directions are shaped like parameters."""
    leaves = {
        n: leaf(*["layers"] * stacked, *(f"{scope}{axis}" for axis in axes))
        for n, (stacked, scope, axes) in tree.items()
    }
    made = make_rule(name)
    try:
        slots = made.slots(leaves)
    except ConfigError:  # of an 8-bit rule whose blocks suit none of these matrices
        reject()
    for each in (each for kept in slots.values() for each in kept.values()):
        *first, last = each.shape
        assert (*first, last * each.block) == leaf(*cast(Any, each.axes)).shape
    params, before = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), (leaves, slots)
    )
    count = jax.ShapeDtypeStruct((), jnp.int32)
    directions, after = jax.eval_shape(
        functools.partial(made.direction, leaves=leaves), params, before, params, count=count
    )
    assert directions == params and after == before


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_short(name: str) -> None:
    file = Path(__file__).parents[3] / (RULES[name].partition(":")[0].replace(".", "/") + ".py")
    assert file.read_text(encoding="utf-8").count("\n") <= 120


# On any mesh.

SMALL = dataclasses.replace(GPT, n_layers=3)
MESHES: dict[str, tuple[str, dict[str, int], PipelineConfig]] = {
    "one device": ("ddp", {}, PipelineConfig()),
    "hsdp+megatron": ("hsdp+megatron", {"data": 2, "fsdp": 2, "tensor": 2}, PipelineConfig()),
    "zero2": ("zero2", {"data": 8}, PipelineConfig()),
    "uneven stages": ("hsdp", {"pipeline": 2, "fsdp": 2}, PipelineConfig(layers=(1, 2))),
}
CI = {
    ("adafactor", "uneven stages"),
    ("adafactor", "hsdp+megatron"),
    ("muon", "hsdp+megatron"),
}
"""The others are exhaustive: Lion and AdamW treat each element alone."""


@functools.cache
def trained(name: str, where: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses of three steps, weights after them in memory order)."""
    rules, mesh, pipeline = MESHES[where]
    layout = ModelLayout.of(SMALL, shard_on(rules, **mesh), pipeline)
    optimizer = Optimizer(
        config(
            name, learning_rate=0.001 if name == "lion" else 0.01, weight_decay=0.1, clip_norm=1.0
        ),
        9,
    )
    zeros = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
        abstract_state(layout, optimizer),
    )
    state, step, losses = (
        zeros | {"params": by_stage(layout, initial(layout))},
        train_step(layout, optimizer, seed=0),
        [],
    )
    for number in (0, 1, 0):
        state, metrics = step(state, on_devices(host_batch(2, seed=number), layout))
        losses.append(float(metrics["loss"]))
    return losses, {name: np.asarray(x) for name, x in state["params"].items()}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(name, where, marks=SLOW if (name, where) in CI else pytest.mark.exhaustive)
        for name in RULES
        if name not in ROUNDED
        for where in MESHES
        if where != "one device"
    ],
)
def test_losses_do_not_depend_on_the_mesh(name: str, where: str) -> None:
    """Compares losses, not leaves, because gradients that are zero in exact arithmetic are noise.

    An example is the K bias: Adafactor has nearly no epsilon, so this noise becomes steps of full
    size. They do not change attention, but q, k and v are clipped by a common RMS, which changes
    the biases of q and v by 6e-4 after three steps.
    """
    (wanted, _), (found, params) = trained(name, "one device"), trained(name, where)
    assert wanted[2] < wanted[0] - 0.01
    np.testing.assert_allclose(found, wanted, rtol=5e-6 if name == "adafactor" else 2e-6)
    rules, mesh, pipeline = MESHES[where]
    stack = ModelLayout.of(SMALL, shard_on(rules, **mesh), pipeline).stacks["blocks"]
    padding = stack.layer_of_row() < 0
    assert padding.sum() == (1 if where == "uneven stages" else 0)
    assert not any(x[padding].any() for name, x in params.items() if name.startswith("blocks."))
