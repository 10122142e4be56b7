"""docs/own_block.py: short, the same on any mesh, trained, and found again by its name from a
checkpoint alone."""

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
from support import gradients, shard_on

import mesh_lm
from mesh_lm.config import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    OptimizerConfig,
    TrainConfig,
    TrainLoop,
    load,
)
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface.configs import family_for
from mesh_lm.inference import Generator, Sampling, Scorer
from mesh_lm.model import DecoderConfig, SegmentConfig
from sharding_rules import MeshConfig, preset

COMPILE_BUDGET = 80
FILE = Path(__file__).parents[2] / "docs" / "own_block.py"
MODEL = DecoderConfig(
    vocab_size=250, vocab_multiple=16, seq_len=16, n_layers=2, d_model=32, dtype="float32",
    loss_chunk=24, positions="rotary",
    norm="rmsnorm", activation="swiglu", biases=False, init_std=0.1, block=f"{FILE}:ParallelLayer",
)  # fmt: skip


def test_it_is_short() -> None:
    (layer,) = [
        node
        for node in ast.parse(FILE.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    lines = [line for line in ast.unparse(layer).splitlines() if line]
    assert len(lines) <= 15


@pytest.mark.slow
def test_its_numbers_are_the_same_on_any_mesh() -> None:
    params, sums, grads = gradients(MODEL, shard_on("ddp"))
    names = {name.split(".")[1] for name in params if name.startswith("blocks.")}
    assert names == {"norm", "attention", "mlp"}
    assert (
        sum(x.size for x in params.values())
        == dataclasses.replace(MODEL, vocab_size=MODEL.padded_vocab).n_params()
    )
    for rules, mesh, microbatches in (
        ("fsdp+megatron_sp", {"fsdp": 2, "tensor": 4}, 1),
        ("ddp", {"pipeline": 2}, 2),
    ):
        _, sharded, found = gradients(MODEL, shard_on(rules, **mesh), microbatches)
        assert abs(sharded["loss"] - sums["loss"]) < 1e-4 * sums["loss"]
        for name, gradient in grads.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_it_trains_and_is_found_again_by_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(FILE.read_text(encoding="utf-8") * 8, encoding="utf-8")
    model = dataclasses.replace(MODEL, vocab_size=272)
    run = mesh_lm.train(
        TrainConfig(
            model=model, output=str(tmp_path / "run"), mesh=MeshConfig(data=2, tensor=4),
            rules=preset("megatron"),
            train=TrainLoop(steps=12, global_batch=16, log_every=1, eval_sequences=8, sample_tokens=4),
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
            data=DataConfig(path=str(tmp_path / "text.txt"), tokenizer="bytes", cache=str(tmp_path / "cache")),
            checkpoint=CheckpointConfig(every=0), launch=LaunchConfig(compile_cache=""),
        )
    )  # fmt: skip
    assert run.losses[-1] < run.losses[0] - 0.2
    trained = mesh_lm.load(run.output)
    assert trained.config.model == model
    (made,) = Generator(
        trained.layout, trained.params, trained.tokenizer, Sampling(temperature=0), batch=1
    ).complete(["de"], 8)
    text = [*trained.tokenizer.encode_batch(["de"])[0].tolist(), *made.tokens]
    (score,) = Scorer(trained.layout, trained.params, batch=1)([text])
    np.testing.assert_allclose(
        made.logprobs,
        score.logprobs[-len(made.tokens) :],
        atol=1e-4,
        err_msg="the cache and the whole text differ",
    )


def test_the_shipped_config_names_its_own_class() -> None:
    model = load("docs/own_block.py").model
    assert (
        isinstance(model, DecoderConfig)
        and model.block == f"{FILE}:ParallelLayer"
        and not model.problems()
    )
    plain = load("gpt_tiny").model
    assert (
        isinstance(plain, DecoderConfig)
        and model.n_params() == plain.n_params() - plain.n_layers * plain.d_model
    )
    assert model.flops_per_token() == plain.flops_per_token()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("dnse", "model.block: no kind of layer 'dnse'; did you mean 'dense'?"),
        ("mamba", "model.block: no kind of layer 'mamba'; known: "),
        (
            "json:Layer",
            "model.block: no kind of layer 'json:Layer': 'Layer' is not a class of the module 'json'",
        ),
        (
            "no_such:Layer",
            "cannot import the module 'no_such' (ModuleNotFoundError: No module named 'no_such')",
        ),
        (
            "no/such.py:Layer",
            "model.block: no kind of layer 'no/such.py:Layer': cannot find a file of this name in ",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_said(name: str, problem: str) -> None:
    (found,) = dataclasses.replace(MODEL, block=name).problems()
    assert problem in found


def test_a_segment_of_it_on_the_command_line() -> None:
    for word in (
        "late:2:my.file:Mine",
        "late:2:docs/own_block.py:ParallelLayer:full:bfloat16",
        "late:2:dense:full",
        "late:2:dense",
    ):
        assert str(SegmentConfig.parse(word)) == word
    assert (
        SegmentConfig.parse("late:2:docs/own_block.py:ParallelLayer:full").kind
        == "docs/own_block.py:ParallelLayer"
    )


def test_hugging_face_has_no_class_for_it() -> None:
    dense = dataclasses.replace(MODEL, block="dense")
    assert family_for(dense).architecture == "LlamaForCausalLM"
    with pytest.raises(
        ConfigError, match=r"model.block='dense', not '.*own_block.py:ParallelLayer'"
    ):
        family_for(MODEL)
