"""AdamW with 8-bit moments: equals its formula in float64, has the same bits on any mesh, and stays
close to AdamW."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support import GPT, by_stage, host_batch, in_model_order, initial, on_devices, shard_on

from mesh_lm.config import OptimizerConfig, TrainConfig, load
from mesh_lm.errors import ConfigError
from mesh_lm.optim import AdamW, AdamW8, ArraySpec, Optimizer, Rule
from mesh_lm.optim.quantization import dequantized, quantized, quantized_root
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning.program import Program
from mesh_lm.state import abstract_state, parts
from mesh_lm.training import offload
from mesh_lm.training.check import check
from mesh_lm.training.step import train_step
from sharding_rules import ShardingRuleError

COMPILE_BUDGET = 20
BLOCK = 16
RULE = AdamW8(block_size=BLOCK)
"""With the model's width of 32, each of two devices has whole blocks."""
SLOTS = ("mu", "nu", "mu8", "mu_scale", "root8", "root_scale")
QUANTIZED = {"embedding", "blocks.mlp.up.weight", "blocks.mlp.down.weight"}
"""The matrices of at least 4096 elements a layer, whose last dimension is not a head's 8."""
MESHES: dict[str, tuple[str, dict[str, int]]] = {
    "one device": ("ddp", {}),
    "fsdp+megatron": ("fsdp+megatron", {"fsdp": 2, "tensor": 2}),
    "zero1": ("zero1", {"data": 2}),
    "hsdp, 2 stages": ("hsdp", {"data": 2, "fsdp": 2, "pipeline": 2}),
}


def optimizer(rule: Rule = RULE, **changes: Any) -> Optimizer:
    return Optimizer(OptimizerConfig(rule, warmup_steps=0, **changes), 9)


def zeros(layout: ModelLayout, made: Optimizer) -> dict[str, Any]:
    return jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
        abstract_state(layout, made),
    )


# Quantization.

N_BLOCKS = 3
FLOATS = arrays(
    np.float32,
    (2, N_BLOCKS * BLOCK),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    fill=st.sampled_from([np.float32(x) for x in (0, 1, -1e-3, 2e-7)]),
)
LOST = 256 * 2.0**-126
"""A block whose largest value is smaller may become zeros: its scale is not a normal number."""


@functools.cache
def there_and_back(root: bool) -> Any:
    def program(x: jax.Array) -> tuple[jax.Array, ...]:
        levels, scale = quantized_root(x, BLOCK) if root else quantized(x, BLOCK)
        return levels, scale, dequantized(levels, scale)

    return jax.jit(program)


def blocks(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64).reshape(2, N_BLOCKS, BLOCK)


@settings(max_examples=60)
@given(FLOATS)
def test_the_error_is_half_a_level(x: np.ndarray) -> None:
    """A level is 1/127 of the largest value of the block."""
    levels, scale, back = there_and_back(root=False)(x)
    assert levels.dtype == jnp.int8 and scale.shape == (2, N_BLOCKS)
    largest = np.abs(blocks(x)).max(-1, keepdims=True)
    error = np.abs(blocks(back) - blocks(x))
    assert (error <= largest / 254 * (1 + 1e-5) + LOST).all()
    assert (np.sign(back) * np.sign(x) >= 0).all()


@settings(max_examples=60)
@given(FLOATS)
def test_a_root_is_not_rounded_to_zero(x: np.ndarray) -> None:
    """Elements that nearest rounds to 0 become one level of 1/255: a denominator may be too large
    by that, but never vanishes beside a first moment that does not."""
    x = np.abs(x)
    levels, _, back = there_and_back(root=True)(x)
    assert levels.dtype == jnp.uint8
    largest = blocks(x).max(-1, keepdims=True)
    level = largest / 255
    bound = np.where(blocks(x) < level / 2, level, level / 2)
    assert (np.abs(blocks(back) - blocks(x)) <= bound * (1 + 1e-5) + LOST).all()
    is_lost = largest < LOST
    assert (((blocks(levels) > 0) == (blocks(x) > 0)) | is_lost).all()


# The rule.

LEAVES = {
    "blocks.w": ArraySpec((2, 40, 128), jnp.dtype("float32"), ("layers", "embed", "mlp")),
    "blocks.small": ArraySpec((2, 24, 128), jnp.dtype("float32"), ("layers", "embed", "mlp")),
    "blocks.odd": ArraySpec((2, 40, 136), jnp.dtype("float32"), ("layers", "embed", "mlp")),
    "blocks.bias": ArraySpec((2, 8192), jnp.dtype("float32"), ("layers", "mlp")),
}


def test_which_parameters_have_8_bit_moments() -> None:
    """Neither vectors, nor matrices with fewer than 4096 elements a layer, however many layers, nor
    blocks of less than 16."""
    slots = AdamW8().slots(LEAVES)
    assert tuple(slots) == SLOTS
    assert {slot: set(leaves) for slot, leaves in slots.items()} == {
        "mu": set(LEAVES) - {"blocks.w"},
        "nu": set(LEAVES) - {"blocks.w"},
        "mu8": {"blocks.w"},
        "mu_scale": {"blocks.w"},
        "root8": {"blocks.w"},
        "root_scale": {"blocks.w"},
    }
    assert slots["mu_scale"]["blocks.w"].shape == (2, 40, 4)
    assert AdamW8(block_size=48).block("blocks.w", LEAVES["blocks.w"]) == 16


def test_equals_its_formula_in_float64() -> None:
    """Each of five updates starts from the same levels. A level may differ by one where float32
    decides a tie; gradients span six orders of magnitude in a block."""
    random = np.random.default_rng(0)
    name = "blocks.w"
    leaves = {name: LEAVES[name]}
    rule = AdamW8()
    slots: Any = {
        slot: {n: np.zeros(leaf.shape, leaf.dtype) for n, leaf in entries.items()}
        for slot, entries in rule.slots(leaves).items()
    }
    direction = jax.jit(functools.partial(rule.direction, leaves=leaves))
    for n_updates in range(5):
        grad = random.normal(size=leaves[name].shape)
        grad *= 10.0 ** random.uniform(-6, 0, grad.shape) * (random.random(grad.shape) < 0.9)
        grads = {name: grad.astype(np.float32)}
        wanted, mu, root = twin(rule, grads[name], slots, name, n_updates)
        directions, slots = direction(grads, slots, grads, count=np.int32(n_updates))
        np.testing.assert_allclose(directions[name], wanted, rtol=2e-5, atol=1e-7)
        for levels, scale, (twin_levels, twin_scale) in (
            (slots["mu8"], slots["mu_scale"], mu),
            (slots["root8"], slots["root_scale"], root),
        ):
            np.testing.assert_allclose(scale[name], twin_scale, rtol=1e-6)
            different = np.asarray(levels[name], np.int32) - twin_levels
            assert np.abs(different).max() <= 1 and (different != 0).mean() < 1e-3


def twin(rule: AdamW8, grad: np.ndarray, slots: Any, name: str, n_updates: int) -> tuple:
    """(direction, (levels, scales) of mu, and of the root of nu), in float64."""
    shape = (*grad.shape[:-1], -1, rule.block_size)
    n = n_updates + 1

    def value(levels: str, scale: str) -> np.ndarray:
        x = np.asarray(slots[levels][name], np.float64).reshape(shape)
        return (x * np.asarray(slots[scale][name], np.float64)[..., None]).reshape(grad.shape)

    g = grad.astype(np.float64)
    mu = rule.beta1 * value("mu8", "mu_scale") + (1 - rule.beta1) * g
    nu = rule.beta2 * value("root8", "root_scale") ** 2 + (1 - rule.beta2) * g**2
    direction = (mu / (1 - rule.beta1**n)) / (np.sqrt(nu / (1 - rule.beta2**n)) + rule.eps)

    def levels(x: np.ndarray, most: int, least: int) -> tuple[np.ndarray, np.ndarray]:
        x = x.reshape(shape)
        scale = np.abs(x).max(-1) / most
        rounded = np.round(x / scale[..., None])
        rounded = np.where((rounded == 0) & (x > 0), least, rounded)
        return rounded.reshape(grad.shape), scale

    return direction, levels(mu, 127, 0), levels(np.sqrt(nu), 255, 1)


# On any mesh.


@functools.cache
def updated(where: str) -> dict[str, np.ndarray]:
    """Slots after four updates with the same gradients, "slot/parameter" -> layers in model
    order."""
    rules, mesh = MESHES[where]
    layout = ModelLayout.of(GPT, shard_on(rules, **mesh))
    made = optimizer()
    declared = parts(layout, made)
    state = zeros(layout, made)
    slots = {slot: state[slot] for slot in SLOTS}

    @jax.jit
    def update(grads: Any, slots: Any, weights: Any, number: jax.Array) -> offload.Updated:
        return offload.update(
            layout,
            made,
            grads,
            weights,
            slots,
            {},
            grad_norm=jnp.float32(0.5),
            step=number,
            n_updates=number,
            accepted=jnp.bool_(True),
        )

    random = np.random.default_rng(0)
    weights = by_stage(layout, initial(layout))
    gradient_shardings = layout.shardings("gradients")
    for n_updates in range(4):
        grads = {}
        for name, leaf in layout.leaves.items():
            grad = random.normal(size=leaf.shape) * 10.0 ** random.uniform(-4, 0, leaf.shape)
            grads[name] = jax.device_put(grad.astype(np.float32), gradient_shardings[name])
        weights, slots, _ = update(grads, slots, weights, np.int32(n_updates))
        for slot in SLOTS:
            for name, x in slots[slot].items():
                slots[slot][name] = jax.device_put(x, declared[slot].shardings[name])
    return {
        f"{slot}/{name}": in_model_order(layout, name, x)
        for slot, entries in slots.items()
        for name, x in entries.items()
    }


@pytest.mark.parametrize("where", [where for where in MESHES if where != "one device"])
def test_slots_are_the_same_bits_on_any_mesh(where: str) -> None:
    """Blocks are of the whole parameter, not of a device's part."""
    wanted = updated("one device")
    assert {name.partition("/")[2] for name in wanted if name.startswith("mu8")} == QUANTIZED
    found = updated(where)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert x.any(), name
        assert found[name].tobytes() == x.tobytes(), name


@functools.cache
def losses(rule: Rule, where: str, microbatches: int = 1) -> list[float]:
    """Losses of six steps with the same batch."""
    rules, mesh = MESHES[where]
    layout = ModelLayout.of(GPT, shard_on(rules, **mesh))
    made = optimizer(rule, learning_rate=3e-3)
    state = zeros(layout, made) | {"params": by_stage(layout, initial(layout))}
    step = train_step(layout, made, seed=0)
    batch = on_devices(host_batch(microbatches), layout)
    found = []
    for _ in range(6):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def test_stays_close_to_adamw() -> None:
    """The moments are rounded from the second step on."""
    adamw = losses(AdamW(), "one device")
    found = losses(RULE, "one device")
    assert adamw[-1] < adamw[0] - 0.1
    np.testing.assert_allclose(found[:2], adamw[:2], rtol=1e-6)
    np.testing.assert_allclose(found, adamw, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "microbatches"), [("fsdp+megatron", 2), ("zero1", 1), ("hsdp, 2 stages", 4)]
)
def test_losses_do_not_depend_on_the_mesh(where: str, microbatches: int) -> None:
    """Within what a level that a rounding of the gradients moves can do."""
    np.testing.assert_allclose(
        losses(RULE, where, microbatches), losses(RULE, "one device"), rtol=2e-5
    )


# What is refused, and what it takes.


@pytest.mark.parametrize("rules", ["distributed", "zero3", "distributed+megatron"])
def test_flat_vectors_are_refused(rules: str) -> None:
    """A block of a vector would be that of another matrix on another mesh."""
    config = load("configs/gpt_tiny.py")
    config = dataclasses.replace(config, optimizer=OptimizerConfig(RULE))
    layout = ModelLayout.of(GPT, shard_on(rules, data=2))
    config = dataclasses.replace(config, rules=layout.shard.rules)
    with pytest.raises(ConfigError) as caught:
        check(config, 2)
    assert str(caught.value).split("\n  - ")[1:] == [
        f"optimizer.rule=adamw8 needs full matrices, but rules {rules!r} store its state as flat "
        "vectors (rules.optimizer['flat']=('pipeline', 'data')); use the rule adamw or lion, or "
        "rules without that row, such as zero2"
    ]


def test_a_block_size_that_suits_no_matrix_is_refused() -> None:
    """The moments would all be those of AdamW."""
    with pytest.raises(ConfigError, match=r"block_size=33: no matrix .* such as 128 of blocks\.w"):
        AdamW8(block_size=33).slots({"blocks.w": LEAVES["blocks.w"]})
    # In a model of small matrices there is nothing that could be 8-bit.
    small = {name: LEAVES[name] for name in ("blocks.small", "blocks.bias")}
    assert not AdamW8(block_size=33).slots(small)["mu8"]


def test_blocks_that_a_device_would_share_are_refused() -> None:
    """The message's block size works."""
    layout = ModelLayout.of(GPT, shard_on("fsdp", fsdp=2))
    with pytest.raises(ShardingRuleError) as caught:
        parts(layout, optimizer(AdamW8()))
    assert str(caught.value).split("\n  - ")[1:] == [
        "the rules would divide blocks of 32 elements that share a scale, in parameters such as "
        "embedding, whose last dimension has 16 elements on a device; set "
        "optimizer.rule.block_size=16, with which a run starts from scratch: its moments are not those of "
        "a checkpoint with other blocks"
    ]
    assert parts(layout, optimizer(AdamW8(block_size=16)))

    layout = ModelLayout.of(GPT, shard_on("zero1", data=4))
    with pytest.raises(ShardingRuleError) as caught:
        parts(layout, optimizer(AdamW8(block_size=16)))
    assert str(caught.value).endswith(
        "has 8 elements on a device; shard them over fewer devices, or use optimizer.rule=adamw"
    )


@pytest.mark.deviceless
def test_the_update_needs_the_fp32_moments_of_one_layer(reports: str) -> None:
    """Those of all layers at once would take what 8 bits save."""

    model = dataclasses.replace(
        GPT, n_layers=8, d_model=512, n_heads=8, seq_len=512, vocab_size=4096,
        dtype="bfloat16", remat="full", dropout=0.0, attention="xla",
    )  # fmt: skip

    def program(rule: Rule) -> Program:
        config = TrainConfig(model, output="out", optimizer=OptimizerConfig(rule))
        config = dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, global_batch=8, microbatches=4),
            launch=dataclasses.replace(config.launch, compile_cache=reports),
        )
        return Program.of(config, "h100", 1)

    plain = program(AdamW())
    found = program(AdamW8())

    def slot_bytes(one: Program) -> int:
        return sum(part.nbytes for name, part in one.declared.items() if name != "params")

    saved = slot_bytes(plain) - slot_bytes(found)
    assert plain.compile().peak_bytes - found.compile().peak_bytes > 0.8 * saved > 0


@pytest.mark.parametrize(("block_size", "nbytes"), [(32, 2.25), (64, 2.125), (128, 2.0625)])
def test_bytes_of_a_large_model(block_size: int, nbytes: float) -> None:
    """Two bytes and two scales a block; norms are in fp32."""
    model = load("configs/llama3_8b.py").model
    layout = ModelLayout.of(model, shard_on("fsdp", fsdp=8))
    declared = parts(layout, optimizer(AdamW8(block_size=block_size)))
    held = sum(part.nbytes for name, part in declared.items() if name != "params")
    assert held / (declared["params"].nbytes / 4) == pytest.approx(nbytes, rel=1e-3)
