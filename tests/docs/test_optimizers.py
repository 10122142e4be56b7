"""docs/optimizers.md: its bytes are those of the configs, its example is a rule that trains, and
its commands parse."""

import dataclasses
import functools
import math
import re
import shlex
from pathlib import Path
from typing import (
    Any,
    cast,
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import GPT, reference, shard_on

from mesh_lm.commands.command_line import parse
from mesh_lm.config import OptimizerConfig, load
from mesh_lm.errors import ConfigError
from mesh_lm.optim import RULES, ArraySpec, Optimizer, make_rule, rule_name
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import parts
from mesh_lm.training.check import check

COMPILE_BUDGET = 8
PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def table(first: str) -> dict[str, list[str]]:
    """The rows of the table with this heading in its first column, and its head under ""."""
    lines = PAGE[PAGE.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in lines
        if "---" not in line
    ]
    return {"": rows[0][1:]} | {row[0]: row[1:] for row in rows[1:]}


@pytest.fixture
def sgd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the page's example, in a file as the page says."""
    (tmp_path / "sgd.py").write_text(EXAMPLE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "sgd.py:Sgd"


def test_bytes_of_each_weight() -> None:
    shown = table("config")
    assert sorted(shown[""]) == sorted(RULES)
    for config, numbers in list(shown.items())[1:]:
        leaves = ModelLayout.of(load(f"configs/{config}.py").model, shard_on("ddp")).leaves
        weights = sum(math.prod(leaf.shape) for leaf in leaves.values())
        for name, number in zip(shown[""], numbers, strict=True):
            kept = sum(
                leaf.nbytes
                for slot in make_rule(name).slots(leaves).values()
                for leaf in slot.values()
            )
            assert f"{kept / weights:.{len(number.partition('.')[2])}f}" == number, (
                f"{config}, {name}"
            )


def test_bytes_of_the_state_on_a_device() -> None:
    """Of what is declared; and the page's formulas, but for vectors that are replicated and for
    padding."""
    shown, n = table("optimizer"), 8
    model = load("configs/llama3_8b.py").model
    forms = {
        "ddp": lambda s: 4 + s,
        "distributed": lambda s: 2 + (4 + s) / n,
        "fsdp": lambda s: (4 + s) / n,
    }
    forms |= dict.fromkeys(("zero1", "zero2"), lambda s: 4 + s / n)
    columns = shown.pop("")
    assert set(columns) == set(forms) and set(shown) == set(RULES)
    for rules in forms:
        layout = ModelLayout.of(
            model, shard_on(rules, **{"fsdp" if rules == "fsdp" else "data": n})
        )
        weights = sum(math.prod(leaf.shape) for leaf in layout.leaves.values())
        for name, cells in shown.items():
            number, optimizer = (
                cells[columns.index(rules)],
                Optimizer(OptimizerConfig(make_rule(name)), 9),
            )
            if number == "refused":
                with pytest.raises(ConfigError, match="works on whole matrices"):
                    parts(layout, optimizer)
                continue
            held = sum(part.nbytes for part in parts(layout, optimizer).values()) / weights
            assert f"{held:.2f}" == number, f"{name}, {rules}"
            if slots := {"adamw": 8, "adamw8": 2.25, "lion": 4}.get(name):
                assert held == pytest.approx(forms[rules](slots), abs=1e-3)


def test_every_rule_is_in_the_table() -> None:
    rows = table("rule")
    assert set(rows) - {""} == set(RULES)
    assert {name: row[1] == "yes" for name, row in rows.items() if name} == {
        n: make_rule(n).elementwise for n in RULES
    }
    for name, row in rows.items():
        if name:
            shown = set(re.findall(r"beta\d|eps|momentum|block_size", row[2]))
            assert shown == {field.name for field in dataclasses.fields(cast(Any, make_rule(name)))}


def test_fields_that_a_rule_reads() -> None:
    """Each changes the program."""
    leaves = {
        "blocks.w": ArraySpec((2, 64, 96), jnp.float32, ("layers", "embed", "mlp")),
        "norm.scale": ArraySpec((36,), jnp.float32, ("norm",)),
    }

    def program(made: Any) -> str:
        params, slots = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (leaves, made.slots(leaves))
        )
        traced = jax.make_jaxpr(functools.partial(made.direction, leaves=leaves))
        return str(traced(params, slots, params, count=jax.ShapeDtypeStruct((), jnp.int32)))

    for name in RULES:
        plain: Any = make_rule(name)
        for field in dataclasses.fields(plain):
            value = 16 if field.name == "block_size" else 0.5
            changed = dataclasses.replace(plain, **{field.name: value})
            assert program(plain) != program(changed), f"{name}: {field.name}"


def test_the_example_is_a_rule(sgd: str) -> None:
    """Three steps of it, against the formula."""
    assert len(EXAMPLE.splitlines()) <= 24
    rule = dataclasses.replace(cast(Any, make_rule(sgd)), momentum=0.5)
    optimizer = Optimizer(
        OptimizerConfig(
            rule,
            learning_rate=0.1,
            warmup_steps=0,
            schedule="constant",
            clip_norm=0,
        ),
        9,
    )
    leaves = {"w": ArraySpec((3, 4), jnp.float32, ("embed", "mlp"))}
    theirs = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    ours: Any = {"w": theirs}
    slots: Any = {"mu": {"w": np.zeros_like(theirs)}}
    trace = np.zeros_like(theirs)
    update = jax.jit(functools.partial(optimizer.update, leaves=leaves))
    for step in range(3):
        grad = np.full_like(theirs, step + 1)
        ours, slots = update({"w": grad}, 1.0, slots, ours, np.int32(step), np.int32(step))
        trace = 0.5 * trace + grad
        theirs = theirs - 0.1 * (trace + 0.1 * theirs)
    np.testing.assert_allclose(ours["w"], theirs, rtol=1e-5)


def test_commands(sgd: str) -> None:
    commands = [
        shlex.split(line) for line in re.findall(r"^mesh-lm (train .*)$", PAGE, re.MULTILINE)
    ]
    found = [
        check(config := parse(words[1:]), config.launch.cpu_devices or 1) for words in commands
    ]
    assert [(rule_name(config.optimizer.rule), config.mesh.island) for config in found] == [
        ("muon", 1),
        ("adamw8", 1),
        ("adamw", 1),
        ("muon", 1),
        ("adamw", 2),
        (str(Path(sgd.partition(":")[0]).resolve()) + ":Sgd", 1),
    ]


@pytest.mark.slow
def test_a_key_bias_has_no_gradient_and_walks() -> None:
    """It is rounding: a millionth of the largest gradient. Lion and Adafactor make full steps of
    it, whatever its size."""
    params, _, grads = reference(GPT)
    name = "blocks.attention.qkv.bias"
    of_keys = grads[name][:, 1]
    assert 0 < np.abs(of_keys).max() < 1e-6 * np.abs(grads[name]).max()

    leaves = ModelLayout.of(GPT, shard_on("ddp")).leaves
    for name_of_rule in ("lion", "adafactor"):
        rule = make_rule(name_of_rule)
        slots = {
            slot: {n: np.zeros(leaf.shape, leaf.dtype) for n, leaf in of.items()}
            for slot, of in rule.slots(leaves).items()
        }
        direction, _ = jax.jit(functools.partial(rule.direction, leaves=leaves))(
            grads, slots, params, count=np.int32(0)
        )
        steps = np.abs(np.asarray(direction[name])[:, 1])
        assert steps.mean() > 0.1, name_of_rule
