"""Segments of different layers: loss, sums and gradients equal one device for any division, and
each segment has its own rules."""

import dataclasses
import functools
import json
import math
import re
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_toy import EXPERTS, MODEL, rules
from flax import nnx
from support import (
    GPT,
    Outcome,
    assert_same_gradients,
    by_stage,
    gradients,
    host_batch,
    initial,
    on_devices,
    reference,
    shard_on,
)

from mesh_lm import checkpoint
from mesh_lm.checkpoint import node_local as local
from mesh_lm.commands import command_line
from mesh_lm.config import PipelineConfig, TrainConfig, TrainLoop, as_dict
from mesh_lm.errors import ConfigError
from mesh_lm.inference.trained import config_from
from mesh_lm.model import DecoderConfig, SegmentConfig, dense, token_batch
from mesh_lm.model.kinds import KINDS
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.schedules.segments import Segment, Stack
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, Rules, ShardingRuleError, preset

COMPILE_BUDGET = 110

SPLIT = rules("megatron_sp").replace(
    "each segment its own", params={"moe/mlp": None, "moe/heads": None, "moe/kv_heads": None},
    activations={"moe/mlp": None, "moe/heads": None, "moe/kv_heads": None},
)  # fmt: skip
"""Dense layers are tensor-parallel, the others replicated."""

CASES = {
    "ddp": ("ddp", {"data": 2, "pipeline": 2}, 4, PipelineConfig()),
    "stages of one kind each, nearly": ("ddp", {"pipeline": 2}, 4, PipelineConfig(layers=(4, 2))),
    "sequence parallel": (
        "megatron_sp",
        {"data": 2, "pipeline": 2, "tensor": 2},
        4,
        PipelineConfig(layers=(3, 3)),
    ),
    "residuals": (
        "hsdp+megatron",
        {"fsdp": 2, "pipeline": 2, "tensor": 2},
        4,
        PipelineConfig(layers=(1, 5), stash="residuals"),
    ),
    "three chunks": (
        "zero2",
        {"data": 2, "pipeline": 2},
        4,
        PipelineConfig(chunks=3, layers=(1,) * 6),
    ),
    "two chunks": (
        "hsdp",
        {"data": 2, "fsdp": 2, "pipeline": 2},
        4,
        PipelineConfig(chunks=2, layers=(1, 2, 2, 1)),
    ),
    "gpipe": ("ddp", {"pipeline": 4}, 4, PipelineConfig(schedule="gpipe", layers=(1, 2, 1, 2))),
    "no pipeline": ("hsdp+megatron_sp", {"data": 2, "fsdp": 2, "tensor": 2}, 2, PipelineConfig()),
    "own rules": (SPLIT, {"pipeline": 2, "tensor": 2}, 4, PipelineConfig(layers=(3, 3))),
}
SLOW = ("own rules",)


def marks(name: str) -> Any:
    return pytest.mark.slow if name in SLOW else pytest.mark.exhaustive


@functools.cache
def weights() -> dict[str, np.ndarray]:
    return initial(ModelLayout.of(MODEL, shard_on(rules("ddp"))))


@functools.cache
def one_device() -> Outcome:
    return gradients(MODEL, shard_on(rules("ddp")))


@pytest.mark.parametrize("case", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_equals_one_device(case: str) -> None:
    """Includes the shared matrix, whose gradient comes from layers in both segments and on all
    stages, and the loads of every layer."""
    strategy, mesh, microbatches, pipeline = CASES[case]
    strategy = rules(strategy) if isinstance(strategy, str) else strategy
    _, expected_sums, expected_grads = one_device()
    params, sums, grads = gradients(
        MODEL, shard_on(strategy, **mesh), microbatches, pipeline=pipeline
    )
    for name, value in weights().items():
        np.testing.assert_array_equal(params[name], value, err_msg=f"initial bits of {name}")
    assert sums.keys() == expected_sums.keys() >= {"router_z", "moe/load"}
    assert expected_sums["moe/load"].shape == (4, EXPERTS)
    for name, value in expected_sums.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)
    assert_same_gradients(grads, expected_grads)
    assert np.abs(expected_grads["mixer"]).max() > 0


@pytest.mark.slow
def test_an_auxiliary_loss_is_part_of_the_objective() -> None:
    sums = one_device()[1]
    assert sums["objective"] == pytest.approx(sums["loss"] + sums["router_z"], rel=1e-6)
    assert sums["router_z"] > 1


def test_evaluation_equals_one_device() -> None:
    """Scalars only, without dropout, by a table of forward slots."""

    def evaluate(strategy: Rules, mesh: dict[str, int], pipeline: PipelineConfig) -> dict:
        layout = ModelLayout.of(MODEL, shard_on(strategy, **mesh), pipeline)
        params = by_stage(layout, weights())
        batch = on_devices(host_batch(4), layout)
        sums = jax.jit(engine.evaluate(layout))(params, batch)
        return {name: float(x) for name, x in sums.items()}

    pipeline = PipelineConfig(chunks=2, layers=(1, 2, 2, 1))
    sums = evaluate(SPLIT, {"pipeline": 2, "tensor": 2}, pipeline)
    assert sums == pytest.approx(evaluate(rules("ddp"), {}, PipelineConfig()), rel=1e-6)
    assert sums.keys() == {"objective", "loss", "weight", "router_z"}


def test_each_segment_has_its_own_rules() -> None:
    layout = ModelLayout.of(
        MODEL, shard_on(SPLIT, pipeline=2, tensor=2), PipelineConfig(layers=(3, 3))
    )
    shardings = layout.shardings("params")
    assert shardings["dense.mlp.up.weight"].spec == jax.P("pipeline", None, "tensor")
    assert shardings["moe.mlp.up.weight"].spec == jax.P("pipeline", None, None)
    assert shardings["moe.attention.qkv.weight"].spec == jax.P("pipeline", None, None, None, None)


@pytest.mark.parametrize(("chunks", "layers"), [(1, (1, 5)), (3, (1,) * 6)])
def test_memory_holds_every_layer_of_every_segment(chunks: int, layers: tuple[int, ...]) -> None:
    """Rows in memory equal those computed with NumPy, and are restored to model order bit for
    bit."""
    layout = ModelLayout.of(
        MODEL,
        shard_on(rules("hsdp"), fsdp=2, pipeline=2),
        PipelineConfig(chunks=chunks, layers=layers),
    )
    params = weights()
    canonical = layout.canonical_shardings("params")
    disk = {name: jax.device_put(x, canonical[name]) for name, x in params.items()}
    memory = layout.to_memory_order(disk, "params")
    expected = by_stage(layout, params)
    for name, x in memory.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(expected[name]), err_msg=name)
    for name, x in layout.to_model_order(memory, "params").items():
        np.testing.assert_array_equal(np.asarray(x), params[name], err_msg=name)


SPLIT_GPT = dataclasses.replace(
    GPT,
    segments=(SegmentConfig("early", 1), SegmentConfig("late", 1, remat="full", dtype="bfloat16")),
)


def program(config: DecoderConfig) -> str:
    layout = ModelLayout.of(config, shard_on("ddp"))
    value_and_grad = engine.value_and_grad(layout)
    return str(jax.make_jaxpr(value_and_grad)(layout.shapes, host_batch(2), jax.random.key(0)))


def test_one_segment_is_the_same_program_as_none() -> None:
    assert program(dataclasses.replace(GPT, segments=(SegmentConfig("blocks", 2),))) == program(GPT)


@pytest.mark.slow
def test_each_segment_has_its_own_precision() -> None:
    """The residual stream has the model's dtype, so the loss is close to that of fp32, but not
    equal."""
    assert "bf16" not in program(GPT)
    assert "bf16" in program(SPLIT_GPT)
    params, _, expected_grads = reference(GPT)
    split_params = {}
    for name, x in params.items():
        if name.startswith("blocks."):
            split_params[name.replace("blocks.", "early.")] = x[:1]
            split_params[name.replace("blocks.", "late.")] = x[1:]
        else:
            split_params[name] = x
    layout = ModelLayout.of(SPLIT_GPT, shard_on("ddp"))
    params = {name: split_params[name] for name in layout.shapes}
    batch = on_devices(host_batch(1), layout)
    _, split_grads = jax.jit(engine.value_and_grad(layout))(params, batch, jax.random.key(3))
    grads = dict(expected_grads)
    for name in expected_grads:
        if name.startswith("blocks."):
            early = split_grads[name.replace("blocks.", "early.")]
            late = split_grads[name.replace("blocks.", "late.")]
            grads[name] = np.concatenate([early, late])
    assert_same_gradients(grads, expected_grads, tolerance=0.1)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_text_is_continued_through_all_segments(dtypes: tuple) -> None:
    """Reads a text in two parts with a cache, as generation does, for any precision of a
    segment."""
    segments = SegmentConfig("early", 1), SegmentConfig("late", 1, dtype=dtypes[1])
    config = dataclasses.replace(GPT, dropout=0.0, segments=segments, dtype=dtypes[0])
    layout = ModelLayout.of(config, shard_on("ddp"))
    params = initial(layout)
    tokens = host_batch(1)["tokens"][0, :2]
    batch = {
        "tokens": tokens,
        "positions": np.broadcast_to(np.arange(16), tokens.shape),
        "segment_ids": np.ones_like(tokens),
    }

    def in_parts(params) -> jax.Array:
        model = layout.bind(params)
        first, last = (
            {name: x[:, part] for name, x in batch.items()} for part in (slice(9), slice(9, None))
        )
        cache = model.extend(first, model.empty_cache(2, 16), 0)[1]  # pyright: ignore[reportAttributeAccessIssue]
        return model.extend(last, cache, 9)[0]  # pyright: ignore[reportAttributeAccessIssue]

    whole = jax.jit(lambda params: layout.bind(params).logits(token_batch(tokens)))(params)
    np.testing.assert_allclose(jax.jit(in_parts)(params), whole[:, -1], rtol=3e-2, atol=3e-2)


def test_layers_that_look_at_labels_read_texts() -> None:
    layout = ModelLayout.of(MODEL, shard_on(rules("ddp")))
    batch = token_batch(np.zeros((2, 16), np.int32))
    assert jax.eval_shape(
        lambda params: layout.bind(params).logits(batch), layout.shapes
    ).shape == (2, 16, 250)


def test_a_layer_of_a_period_may_have_sums_that_others_have_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Second(dense.Layer):
        def __call__(self, x, ctx):
            x, cache, _ = super().__call__(x, ctx)
            extra = jnp.float32(1 + ctx.place)
            return x, cache, {"objective": extra, "extra": extra} if ctx.place == 1 else {}

    kind = SimpleNamespace(
        Layer=Second, n_params=dense.n_params, flops_per_token=dense.flops_per_token
    )
    monkeypatch.setitem(KINDS, "second", "second")
    monkeypatch.setitem(sys.modules, "second", kind)
    config = dataclasses.replace(
        GPT, n_layers=4, window=(4, 0), dropout=0.0, segments=(SegmentConfig("only", 4, "second"),)
    )
    _, sums, _ = gradients(config, shard_on("ddp"))
    assert sums["extra"] == 4 and sums["objective"] == pytest.approx(sums["loss"] + 4, rel=1e-6)


@pytest.mark.exhaustive
def test_stashed_residuals_save_the_forward_pass_of_layers_with_sums() -> None:
    """If the sums were not saved, the backward slot would recompute the layers for them."""
    model = dataclasses.replace(MODEL, dropout=0.0, remat="none")

    def flops(stash) -> float:
        layout = ModelLayout.of(
            model, shard_on(rules("ddp"), pipeline=2), PipelineConfig(stash=stash)
        )
        params = by_stage(layout, initial(layout))
        program = jax.jit(engine.value_and_grad(layout)).lower(
            params, on_devices(host_batch(4), layout), jax.random.key(0)
        )
        return program.compile().cost_analysis()["flops"]

    assert flops("residuals") < 0.85 * flops("input")


def test_a_loss_returns_scalars() -> None:
    class Loud(type(MODEL)):
        def make(self, shard, rngs):
            model = super().make(shard, rngs)
            model.loss = lambda x, batch, dropout: {
                "objective": x.sum(),
                "loss": x.sum(),
                "weight": x.sum(),
                "each": x[0, 0],
            }
            return model

    config = Loud(**{field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)})
    for stages in (1, 2):
        layout = ModelLayout.of(config, shard_on(rules("ddp"), pipeline=stages))
        with pytest.raises(
            ConfigError,
            match=re.escape(
                "ExpertsDecoder.loss returns 'each' (16,); each sum of a loss is a scalar"
            ),
        ):
            jax.eval_shape(
                engine.value_and_grad(layout),
                layout.memory_shapes,
                host_batch(4),
                jax.random.key(0),
            )


def test_a_period_has_a_layer() -> None:
    found = Stack((Segment("a", 2, period=0),)).problems()
    assert found == ["model.segments: 'a' has a period of 0 layers; it needs at least 1"]


def test_local_checkpoints_know_the_order_of_segments() -> None:
    first, second = SegmentConfig("a", 1), SegmentConfig("b", 1)
    models = (
        dataclasses.replace(GPT, segments=order) for order in ((first, second), (second, first))
    )
    one, other = (local._layout({}, ModelLayout.of(model, shard_on("ddp"))) for model in models)
    assert local._first_difference(one, other) == "stages"


def test_segments_in_another_order_are_another_model() -> None:
    saved = checkpoint.find("tests/fixtures/checkpoint")
    assert saved is not None
    config = config_from(saved.metadata["config"], None, "here").model
    first, second = SegmentConfig("a", 1), SegmentConfig("b", 1)
    theirs = {
        **saved.metadata,
        "config": {"model": as_dict(dataclasses.replace(config, segments=(first, second)))},
    }
    swapped = ModelLayout.of(dataclasses.replace(config, segments=(second, first)), shard_on("ddp"))
    with pytest.raises(
        ConfigError, match="its segments are a, b, in this order, and those of this config b, a"
    ):
        dataclasses.replace(saved, metadata=theirs).params(swapped)


def config_of(**changes) -> TrainConfig:
    model = {
        field: changes.pop(field)
        for field in ("segments", "n_layers", "window")
        if field in changes
    }
    defaults = {
        "mesh": MeshConfig(),
        "train": TrainLoop(global_batch=8, microbatches=4),
        "rules": rules("ddp"),
    }
    return TrainConfig(
        model=dataclasses.replace(MODEL, dropout=0.0, **model), output="x", **defaults | changes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"segments": (SegmentConfig("dense", 2, "dnse"), SegmentConfig("moe", 4, "experts"))},
            "model.segments: no kind of layer 'dnse'; did you mean 'dense'?",
        ),
        (
            {"segments": (SegmentConfig("dense", 2), SegmentConfig("dense", 4))},
            (
                "model.segments: 2 segments are called 'dense'; names are unique, as in 'dense_0' "
                "and 'dense_1'"
            ),
        ),
        (
            {"segments": (SegmentConfig("dense", 2), SegmentConfig("moe", 3))},
            "model.segments have 5 layers, not model.n_layers=6",
        ),
        (
            {"segments": (SegmentConfig("head", 2), SegmentConfig("moe", 4))},
            "model.segments: 'head' is the name of another part of the decoder; choose another",
        ),
        (
            {"segments": (SegmentConfig("loss", 2), SegmentConfig("moe", 4))},
            "model.segments: 'loss' is the name of another part of the decoder; choose another",
        ),
        (
            {
                "segments": (SegmentConfig("dense", 2, remat="offload"), SegmentConfig("moe", 4)),
                "mesh": MeshConfig(pipeline=2),
                "pipeline": PipelineConfig(stash="residuals"),
            },
            (
                "pipeline.stash=residuals keeps on the device what remat=offload of segment "
                "'dense' moves to the host; change one of them"
            ),
        ),
        *(
            (
                {"mesh": MeshConfig(pipeline=2, tensor=2, extra=("x=2",)), "rules": scoped},
                (
                    f"mesh.pipeline=2: {pair}; XLA would permute arrays in a branch that some "
                    "stages skip, and deadlock"
                ),
            )
            for scoped, pair in (
                (
                    rules("megatron").replace(axes={"x": "auto"}, activations={"moe/mlp": "x"}),
                    (
                        "rules.activations['moe/mlp']=('x',) and "
                        "rules.gathered['moe/mlp']=('tensor',) differ in the axes that they start with"
                    ),
                ),
                (
                    rules("megatron_sp").replace(
                        axes={"x": "auto"}, activations={"moe/seq_resid": "x"}
                    ),
                    "rules.activations['moe/seq_resid']=('x',) and "
                    "rules.activations['seq_resid']=('tensor',) do not start with the same axes",
                ),
                (
                    rules("megatron").replace(
                        axes={"x": "auto"},
                        params={"dense/mlp": "tensor"},
                        gathered={"moe/mlp": "x"},
                        activations={"moe/mlp": "x"},
                    ),
                    (
                        "rules.params['moe/mlp']=('tensor',) does not start with "
                        "rules.gathered['moe/mlp']=('x',)"
                    ),
                ),
            )
        ),
        (
            {"segments": (SegmentConfig("dense", 6), SegmentConfig("moe", 0))},
            "model.segments: 'moe' has 0 layers; it needs at least 1",
        ),
        (
            {"window": (4, 0, 0)},
            "model.segments: 'dense' has 2 layers, not a multiple of the 3 of model.window",
        ),
        (
            {"rules": rules("ddp").replace(params={"mo/mlp": None})},
            "rules have the scope 'mo' (mo/mlp), which the model does not have; did you mean 'moe'?",
        ),
        (
            {"mesh": MeshConfig(pipeline=4), "pipeline": PipelineConfig(chunks=2)},
            "model.n_layers=6 is too few for the 8 virtual stages of mesh.pipeline=4 x "
            "pipeline.chunks=2: each needs at least 1; lower mesh.pipeline or pipeline.chunks",
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, message: str) -> None:
    config = config_of(**changes)
    with pytest.raises(ConfigError) as caught:
        check(config, math.prod(config.mesh.sizes().values()))
    assert f"  - {message}" in str(caught.value).splitlines()


def test_a_segment_order_that_a_stage_cannot_hold() -> None:
    """Stages have complete patterns of windows, in every segment."""
    config = config_of(
        n_layers=8, window=(4, 0),
        segments=(SegmentConfig("dense", 2), SegmentConfig("moe", 6, "experts")),
        mesh=MeshConfig(pipeline=2), pipeline=PipelineConfig(layers=(3, 5)),
    )  # fmt: skip
    message = (
        "pipeline.layers=3,5 divides a period of segment 'moe'; each entry must hold a multiple of "
        "2 of its layers"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config, 2)


def test_a_stack_that_no_segment_has_is_refused() -> None:
    class Lost(type(MODEL)):
        def make(self, shard, rngs):
            model = super().make(shard, rngs)
            model.lost = nnx.Param(np.zeros((6, 3)), out_sharding=("layers", "embed"))
            return model

    config = Lost(**{field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)})
    message = (
        "model.lost has a leading axis layers, but 'lost' is not a segment: its config's stack() "
        "has 'dense', 'moe'"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        ModelLayout.of(config, shard_on(rules("ddp")))


def test_rules_of_an_unknown_scope_do_not_fit_the_model() -> None:
    message = (
        "rules have the scope 'late' (late/mlp), which the model does not have; the model has "
        "'blocks'"
    )
    with pytest.raises(ShardingRuleError, match=re.escape(message)):
        ModelLayout.of(GPT, shard_on(preset("ddp").replace(params={"late/mlp": None})))


def test_an_old_checkpoint_under_a_new_segmentation() -> None:
    saved = checkpoint.find("tests/fixtures/checkpoint")
    assert saved is not None
    config = config_from(saved.metadata["config"], None, "here").model
    assert isinstance(config, DecoderConfig) and config.segments == ()
    halves = dataclasses.replace(
        config, segments=(SegmentConfig("early", 1), SegmentConfig("late", 1))
    )
    message = "its layers are in blocks; those of this config in early, late (model.segments)"
    with pytest.raises(ConfigError, match=re.escape(message)):
        saved.require_model(ModelLayout.of(halves, shard_on("ddp")))


def test_segments_survive_a_checkpoint_and_the_command_line() -> None:
    config = command_line.parse(
        [
            "--config=configs/gpt_tiny.py",
            "--config.model.segments=early:1,late:3:dense:full:bfloat16",
        ]
    )
    assert config.model.segments == (
        SegmentConfig("early", 1),
        SegmentConfig("late", 3, "dense", "full", "bfloat16"),
    )
    assert config_from(json.loads(json.dumps(as_dict(config))), None, "here").model == config.model
    with pytest.raises(
        ConfigError,
        match=re.escape("expected NAME:LAYERS[:KIND[:REMAT[:DTYPE]]], with commas between several"),
    ):
        command_line.parse(["--config=configs/gpt_tiny.py", "--config.model.segments=early:one"])
