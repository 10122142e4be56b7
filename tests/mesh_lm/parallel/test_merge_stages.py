"""Merging pipeline stages: the same weights on the same devices, sharded by FSDP, and the same
scores as on one device."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from support import GPT, LLAMA, SEQ, host_batch, shard_on

from mesh_lm.config import PipelineConfig
from mesh_lm.errors import ConfigError
from mesh_lm.inference import Engine, Scorer
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel import merge_stages as module
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.parallel.merge_stages import merged_layout, without_pipeline
from sharding_rules import preset

COMPILE_BUDGET = 120

UNEVEN = PipelineConfig(layers=(4, 2))
CASES: dict[str, tuple[DecoderConfig, str, dict[str, int], PipelineConfig, dict[str, int]]] = {
    "uneven stages": (LLAMA, "megatron", {"pipeline": 2, "data": 2, "tensor": 2}, UNEVEN, {"data": 2, "fsdp": 2, "tensor": 2}),
    "chunks": (GPT, "fsdp", {"pipeline": 2, "fsdp": 2}, PipelineConfig(chunks=3), {"fsdp": 4}),
    "rows are layers": (GPT, "hsdp+zero1", {"pipeline": 2, "data": 2, "fsdp": 2}, PipelineConfig(), {"data": 2, "fsdp": 4}),
    "d_model does not divide": (GPT, "ddp", {"pipeline": 3, "data": 2}, PipelineConfig(chunks=2), {"data": 6}),
}  # fmt: skip


def layout_of(case: str) -> tuple[ModelLayout, dict[str, int]]:
    model, rules, mesh, pipeline, wanted = CASES[case]
    return ModelLayout.of(
        dataclasses.replace(model, n_layers=6), shard_on(rules, **mesh), pipeline
    ), wanted


def initial(layout: ModelLayout) -> tuple[Params, dict[str, np.ndarray]]:
    """(parameters in memory order, parameters in model order on the host)."""
    params = jax.jit(layout.init, out_shardings=layout.canonical_shardings("params"))(
        jax.random.key(0)
    )
    host = {name: np.array(x) for name, x in params.items()}
    return layout.to_memory_order(params, "params"), host


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_score_text_as_on_one_device(case: str) -> None:
    layout, wanted = layout_of(case)
    params, host = initial(layout)
    before = {name: x.addressable_shards[0].data.nbytes for name, x in params.items()}
    whole, moved = without_pipeline(layout, params)
    mesh = whole.shard.mesh
    assert {axis: n for axis, n in mesh.shape.items() if n > 1} == wanted
    assert set(mesh.devices.flat) == set(layout.shard.mesh.devices.flat) and whole.n_stages == 1
    assert {name: x.sharding for name, x in moved.items()} == whole.shardings("params")
    for name, x in moved.items():
        assert np.array_equal(np.array(x), host[name]), name
        if "fsdp" in wanted and "embed" in whole.axes[name]:  # the weights still fit
            assert x.addressable_shards[0].data.nbytes <= before[name], name

    single = ModelLayout.of(whole.config, shard_on("ddp"))
    texts = [row[:n] for row, n in zip(host_batch(1)["tokens"][0], range(2, SEQ + 1), strict=False)]
    for a, b in zip(
        Scorer(whole, moved)(texts),
        Scorer(single, jax.tree.map(jax.numpy.asarray, host))(texts),
        strict=True,
    ):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


@pytest.mark.parametrize(("case", "travels"), [("rows are layers", 1), ("uneven stages", 0)])
def test_no_matrix_is_gathered(monkeypatch: pytest.MonkeyPatch, case: str, travels: int) -> None:
    """Each stacked parameter moves by one all-to-all; with uneven stages, reordering the layers has
    done it already."""
    layout, _ = layout_of(case)
    canonical = layout.to_model_order(initial(layout)[0], "params")
    where = merged_layout(layout.config, layout.shard).shardings("params")
    programs: list[Any] = []
    jit = jax.jit
    monkeypatch.setattr(
        jax, "jit", lambda f, **options: programs.append(jit(f, **options)) or programs[-1]
    )
    for name in (name for name, axes in layout.axes.items() if "embed" in axes and len(axes) > 2):
        x, text = canonical[name], ""
        programs.clear()
        module._moved(x, where[name], "fsdp")
        for program in programs:
            assert x.is_deleted()
            text = (
                program.lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding))
                .compile()
                .as_text()
            )
        assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == travels, name
        assert not re.search(r"all-gather|all-reduce|collective-permute", text), name


def test_rules_that_cut_weights_over_fsdp_keep_their_dimension() -> None:
    rules = preset("megatron").replace(
        "mine", params={"mlp": ("tensor", "fsdp"), "vocab": ("fsdp",)}
    )
    whole = merged_layout(GPT, shard_on(rules, pipeline=2, tensor=2))
    assert whole.shard.rules.params["embed"] is None and whole.shard.rules.params["mlp"] == (
        "tensor",
        "fsdp",
    )
    assert (
        whole.shard.rules.activations["batch"] == ("data", "fsdp")
        and whole.shard.mesh.shape["fsdp"] == 2
    )


def test_tensor_keeps_its_neighbours() -> None:
    mesh = merged_layout(GPT, shard_on("megatron", pipeline=2, data=2, tensor=2)).shard.mesh
    assert [[device.id for device in row] for row in mesh.devices.reshape(-1, 2)] == [
        [0, 1],
        [4, 5],
        [2, 3],
        [6, 7],
    ]


def test_a_model_without_stages_is_left_alone() -> None:
    layout = ModelLayout.of(GPT, shard_on("megatron", data=2, tensor=2))
    assert without_pipeline(layout, {}) == (layout, {})
    assert merged_layout(GPT, layout.shard).shard is layout.shard


def test_stages_cannot_write() -> None:
    layout, _ = layout_of("chunks")
    message = (
        r"^mesh.pipeline=2: a model in pipeline stages cannot generate or score text; merge its "
        r"stages \("
    )
    for reader in (Engine, Scorer):
        with pytest.raises(ConfigError, match=message):
            reader(layout, dict(layout.memory_shapes))  # pyright: ignore[reportArgumentType]
