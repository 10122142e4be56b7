"""docs/custom_model.py is trained by train.py as it stands, equals itself on one device, and is
what its page shows, errors included."""

import argparse
import dataclasses
import inspect
import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import (
    SEQ,
    VOCAB,
    assert_same_gradients,
    gradients,
    host_batch,
    in_model_order,
    on_devices,
    shard_on,
)

import train
from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.model import token_batch
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import MASTER, parts
from mesh_lm.state.initial import init_state
from mesh_lm.training.check import check
from mesh_lm.training.step import train_step
from sharding_rules import Rules, ShardingRuleError, preset

COMPILE_BUDGET = 60
ROOT = Path(__file__).parents[2]
FILE, PAGE = ROOT / "docs" / "custom_model.py", ROOT / "docs" / "custom_model.md"
ROUTED = ROOT / "docs" / "router_bias.py"
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
SHOWN = [
    (*change, answer) for change, (kind, answer) in itertools.pairwise(BLOCKS) if kind == "text"
]
GATES, OUT = (
    "blocks.gates('layers', 'embed', 'gate', 'state')",
    "blocks.out('layers', 'state', 'embed')",
)
KNOWN = (
    "known: embed, expert_mlp, experts, fused, head_dim, heads, kv_heads, layers, mlp, norm, "
    "position, router, vocab"
)
MINE, RULES = (
    """-    mine = {"gate": None, "state": "tensor"}\n""",
    """.replace("fsdp+state", params=mine, activations=mine),\n""",
)
DO_NOT_FIT = "error: these rules do not fit the model\n"
UNSEEN = (
    (
        "diff",
        f"""-        rules=preset("fsdp+megatron"){RULES}+        rules=preset("zero1+fsdp+megatron"){RULES}""",
        f"{DO_NOT_FIT}  - {GATES}: no optimizer rule for the logical axis 'gate'; {KNOWN}\n"
        f"  - {OUT}: no optimizer rule for the logical axis 'state'; {KNOWN}\n",
    ),
    (
        "sh",
        "mesh-lm train docs/custom_model.py --rules=fsdp+megatron",
        f"{DO_NOT_FIT}  - {GATES}: no params rule for the logical axis 'gate'; {KNOWN}\n"
        f"  - {OUT}: no params rule for the logical axis 'state'; {KNOWN}\n",
    ),
    (
        "diff",
        f"""{MINE}+    mine = {{"gate": None, "state": "fsdp"}}\n""",
        f"{DO_NOT_FIT}  - {GATES}: mesh axis 'fsdp' shards both 'embed' and 'state'; set one of "
        "them to None in rules.params\n"
        f"  - {OUT}: mesh axis 'fsdp' shards both 'state' and 'embed'; set one of them to None in "
        "rules.params\n",
    ),
    (
        "sh",
        "mesh-lm train docs/custom_model.py --model.d_state=250 --mesh.tensor=4",
        "error: this config cannot run\n  - model.d_state=250 is not divisible by its number of "
        "shards, mesh.tensor=4 "
        "(rules.params: state -> tensor); mesh.tensor can be 1, 2, 5, 10, 25, 50, 125, 250\n",
    ),
)
"""More mistakes, as (kind, change, answer): a column of ZeRO-1, a preset on the command line, an
axis used twice, a size."""
MISTAKES = [*SHOWN, *UNSEEN]

CONFIG = load(str(FILE))
TINY = dataclasses.replace(
    CONFIG.model, vocab_size=-(-VOCAB // 16) * 16, seq_len=SEQ, n_layers=2, d_model=32, d_state=24
)
OWN = {"gate": None, "state": "tensor"}


def module() -> ModuleType:
    return sys.modules[type(CONFIG.model).__module__]


def with_own(name: str) -> Rules:
    return preset(name).replace(params=OWN, activations=OWN)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that keep a run on this process's devices and in a temporary directory."""
    directory = tmp_path_factory.mktemp("text")
    (directory / "corpus.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    fields = {"data.path": directory / "corpus.txt", "data.cache": directory, "data.max_epochs": 0}
    fields |= {"launch.cpu_devices": 0, "launch.compile_cache": ""}
    return [f"--config.{name}={value}" for name, value in fields.items()]


def test_page_is_the_file() -> None:
    """Every line of the model is on the page, in order, then a part of the other file, and no other
    Python."""
    shown = [
        line for kind, text in BLOCKS if kind == "python" for line in text.splitlines() if line
    ]
    model, routed = (
        [line for line in file.read_text(encoding="utf-8").splitlines() if line]
        for file in (FILE, ROUTED)
    )
    part = shown[len(model) :]
    assert shown[: len(model)] == model
    start = routed.index(part[0])
    assert part == routed[start : start + len(part)] and any(
        "class Routed(" in line for line in part
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", [FILE, ROUTED], ids=lambda file: file.stem)
def test_trains_by_its_own_rules(
    file: Path, here: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fields = {
        "model.n_layers": 2, "model.d_model": 32, "model.d_state": 48, "model.seq_len": 32,
        "model.vocab_size": 512,
        "data.tokenizer_vocab": 512, "train.steps": 6, "train.log_every": 1, "train.eval_every": 0,
        "train.sample_tokens": 8,
        "optimizer.warmup_steps": 2, "data.documents": "separate", "output": tmp_path,
    }  # fmt: skip
    assert (
        train.main(
            [
                f"--config={file}",
                *here,
                *(f"--config.{name}={value}" for name, value in fields.items()),
            ]
        )
        == 0
    )
    rows = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 6 and losses[-1] < losses[0] < 1.1 * np.log(512)
    assert (tmp_path / "sample.txt").exists()
    out = capsys.readouterr().out
    assert "fsdp=4 x tensor=2" in out and "rules fsdp+state" in out


def test_its_own_axis_is_cut() -> None:
    layout = ModelLayout.of(TINY, shard_on(CONFIG.rules, fsdp=4, tensor=2))
    for kind in ("params", "gradients", "optimizer"):
        specs = {name: sharding.spec for name, sharding in layout.shardings(kind).items()}
        assert specs["blocks.gates"] == P("pipeline", "fsdp", None, "tensor") and specs[
            "blocks.out"
        ] == P("pipeline", "tensor", "fsdp")
    assert layout.shard.spec("gathered", layout.axes["blocks.gates"][1:]) == P(None, None, "tensor")


@pytest.mark.parametrize(
    ("rules", "mesh", "separate"),
    [
        pytest.param(
            CONFIG.rules,
            {"fsdp": 4, "tensor": 2},
            False,
            marks=pytest.mark.slow,
            id="its own rules",
        ),
        pytest.param(
            with_own("hsdp+megatron_sp"),
            {"data": 2, "fsdp": 2, "tensor": 2},
            True,
            id="hsdp+megatron_sp, documents separate",
        ),
    ],
)
def test_equals_one_device(rules: Rules, mesh: dict[str, int], separate: bool) -> None:
    """Initial bits, loss and gradients, with microbatches of unequal weight."""
    wanted_params, wanted_sums, wanted = gradients(
        TINY, shard_on(with_own("ddp")), separate=separate
    )
    params, sums, grads = gradients(
        TINY, shard_on(rules, **mesh), microbatches=2, separate=separate
    )
    for name, value in wanted_params.items():
        np.testing.assert_array_equal(params[name], value, err_msg=f"initial bits of {name}")
    assert sums == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(grads, wanted)


def test_a_block_speaks_once() -> None:
    """Cut over tensor, the forward pass has two collectives: the sum over the table's rows, and in
    the scan the sum after `out`."""
    layout = ModelLayout.of(TINY, shard_on(with_own("megatron"), data=4, tensor=2))
    places = layout.shardings("params")
    params = {
        name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=places[name])
        for name, s in layout.shapes.items()
    }
    tokens = jax.ShapeDtypeStruct(
        (8, SEQ), "int32", sharding=layout.shard.sharding("activations", ("batch", "seq"))
    )
    program = (
        jax.jit(lambda params, tokens: layout.bind(params).logits(token_batch(tokens)))
        .lower(params, tokens)
        .compile()
        .as_text()
    )
    found = re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", program)
    assert found == ["all-reduce"] * 2


def test_recurrence_is_a_loop() -> None:
    keep, new = np.random.default_rng(0).random((2, 3, 7, 5), np.float32)
    state, wanted = np.zeros((3, 5), np.float32), []
    for t in range(7):
        state = keep[:, t] * state + new[:, t]
        wanted.append(state)
    np.testing.assert_allclose(
        jax.jit(module().recurrence)(keep, new), np.stack(wanted, 1), rtol=1e-5
    )


def test_neither_the_future_nor_another_document_is_seen() -> None:
    layout = ModelLayout.of(TINY, shard_on(with_own("ddp")))
    params = jax.jit(layout.init)(jax.random.key(0))
    tokens = host_batch(1)["tokens"][0, :2]
    changed = tokens.copy()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    # a document starts at 9
    positions = np.broadcast_to(np.r_[:9, : SEQ - 9], tokens.shape).astype(np.int32)
    run = jax.jit(lambda batch: layout.bind(params).logits(batch))
    for batch, blind in (({}, [slice(5)]), ({"positions": positions}, [slice(5), slice(9, None)])):
        before, after = (np.asarray(run({**token_batch(t), **batch})) for t in (tokens, changed))
        for part in blind:
            np.testing.assert_array_equal(before[:, part], after[:, part])
        assert all((before[:, t] != after[:, t]).any() for t in range(5, 9)), (
            "the recurrence has no memory"
        )


def test_matrices_are_used_in_the_type_that_they_say() -> None:
    """Under a distributed optimizer; the fp32 ones are in parts on the replicas."""
    rules = preset("distributed+megatron").replace(
        "own", params=OWN, activations=OWN, optimizer=OWN
    )
    layout = ModelLayout.of(
        dataclasses.replace(TINY, dtype="bfloat16"), shard_on(rules, data=4, tensor=2)
    )
    kept = parts(layout, Optimizer(CONFIG.optimizer, 9))
    assert {name: str(jnp.dtype(leaf.dtype)) for name, leaf in kept["params"].leaves.items()} == {
        "blocks.gates": "bfloat16", "blocks.out": "bfloat16", "embedding": "bfloat16",
        "blocks.scale": "float32",
    }  # fmt: skip
    assert {str(jnp.dtype(leaf.dtype)) for leaf in kept[MASTER].leaves.values()} == {"float32"}


@pytest.mark.slow
def test_a_bias_balances_experts_on_any_mesh() -> None:
    """Two steps on one device and on stages, replicas and tensor-parallel devices: the same bits,
    by the page's formula."""
    routed = load(str(ROUTED))
    check(routed, 8)
    fields = {field.name: getattr(TINY, field.name) for field in dataclasses.fields(TINY)}
    model = dataclasses.replace(routed.model, **fields, bias_rate=2.0**-7)
    mine, found = {**OWN, "experts": None}, []
    for name, mesh in (
        ("ddp", {}),
        ("distributed+megatron", {"pipeline": 2, "data": 2, "tensor": 2}),
    ):
        rules = preset(name).replace(name, params=mine, activations=mine, optimizer=mine)
        layout = ModelLayout.of(model, shard_on(rules, **mesh))
        optimizer = Optimizer(CONFIG.optimizer, 9)
        state, step = init_state(layout, optimizer, 0), train_step(layout, optimizer, 0)
        for number in range(2):
            state, _ = step(state, on_devices(host_batch(2, seed=number), layout))
        assert list(state["buffers"]) == ["blocks.bias"]
        found.append(in_model_order(layout, "blocks.bias", state["buffers"]["blocks.bias"]))
    np.testing.assert_array_equal(*found)
    up_and_down = found[0] * 2**7
    assert set(np.unique(up_and_down)) == {-2.0, 0.0, 2.0} and up_and_down.any(1).all()


@pytest.mark.parametrize(("kind", "change", "answer"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_answered_as_the_page_says(
    kind: str, change: str, answer: str, here: list[str], tmp_path: Path
) -> None:
    source, arguments = FILE.read_text(encoding="utf-8"), []
    if kind == "diff":
        old, new = (
            "".join(line[1:] for line in change.splitlines(keepends=True) if line[0] == sign)
            for sign in "-+"
        )
        assert source.count(old) == 1, f"not a line of {FILE.name}: {old}"
        source = source.replace(old, new)
    else:
        assert (kind, shlex.split(change)[:3]) == (
            "sh",
            ["mesh-lm", "train", "docs/custom_model.py"],
        )
        arguments = shlex.split(change)[3:]
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    with pytest.raises((ConfigError, ShardingRuleError)) as caught:
        train.main(
            [f"--config={tmp_path}/mine.py", f"--config.output={tmp_path}/run", *here, *arguments]
        )
    assert f"error: {caught.value}\n" == answer
