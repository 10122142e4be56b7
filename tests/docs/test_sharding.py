"""docs/sharding.md: its tables are the presets, its examples and commands answer as shown, and it has every error of the rules."""

import argparse
import ast
import doctest
import inspect
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LLAMA, assert_same_gradients, gradients, reference, shard_on

import train
from mesh_lm.errors import ConfigError
from mesh_lm.optim.flat import gathered_axes_of, replica_axes_of
from mesh_lm.training.check import check
from sharding_rules import PRESETS, MeshConfig, Rules, ShardingRuleError, axes_of, preset
from sharding_rules.rules import Kind

COMPILE_BUDGET = 20
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    (shlex.split(command)[2:], answer)
    for kind, text in BLOCKS
    if kind == "console"
    for command, answer in re.findall(r"^\$ (.*)\n((?:[^$].*\n)+)", text, re.MULTILINE)
]
EXPERIMENTS = re.findall(r"^\| `(\w+=\{.*\})` \|", PAGE, re.MULTILINE)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def cell(entry: Any) -> str:
    return ", ".join(f"`{axis}`" for axis in axes_of(entry))


def preset_table() -> str:
    """Rows that some preset cuts, those that all presets treat alike in one line."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for kind in ("params", "gradients", "optimizer", "activations"):
        columns = [rules.column(kind) for rules in PRESETS.values()]
        for logical in dict.fromkeys(itertools.chain(*columns)):
            alike.setdefault((f"`{kind}`", *(cell(column.get(logical)) for column in columns)), []).append(f"`{logical}`")
    rows = [[kind, ", ".join(names), *cells] for (kind, *cells), names in alike.items() if any(cells)]
    return table(["column", "rows", *(f"`{name}`" for name in PRESETS)], rows)


def weight_table() -> str:
    """One weight under every preset."""

    def spec(rules: Rules, kind: Kind) -> str:
        # A matrix that is flat has no dimensions that could be cut: gradients reach the optimizer as its vectors are.
        if kind == "params" and (over := gathered_axes_of(rules, "blocks")):
            return f"flat, over {cell(over)}"
        if kind in ("gradients", "optimizer") and (over := replica_axes_of(rules, "blocks")):
            return f"flat, over {cell(tuple(axis for axis in over if axis != 'pipeline'))}"
        return f"`{rules.spec(kind, ('embed', 'mlp'))}`"

    kinds: tuple[Kind, ...] = ("params", "gathered", "gradients", "optimizer")
    rows = [[f"`{name}`", *(spec(rules, kind) for kind in kinds), cell(rules.activations["batch"])] for name, rules in PRESETS.items()]
    return table(["preset", "stored", "used by a layer", "its gradient", "its moments", "the batch is sharded over"], rows)


@pytest.mark.parametrize("render", [preset_table, weight_table])
def test_tables_are_the_presets(render) -> None:
    assert render() in PAGE, f"docs/sharding.md must have this table:\n{render()}"


def test_every_logical_axis_of_the_presets_is_explained() -> None:
    start = PAGE.index("The logical axes of the decoder")
    explained = set(re.findall(r"`([\w/]+)`", PAGE[start : PAGE.index("##", start)]))
    assert {row for rules in PRESETS.values() for kind in ("params", "activations") for row in rules.column(kind)} <= explained


def test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's Python sessions, one after the other in one namespace."""
    monkeypatch.chdir(ROOT)
    session = "".join(text for kind, text in BLOCKS if kind == "pycon")
    failures: list[str] = []
    test = doctest.DocTestParser().get_doctest(session, {}, "docs/sharding.md", None, 0)
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert test.examples and not failures, "".join(failures)


@pytest.mark.parametrize(("arguments", "answer"), COMMANDS, ids=[" ".join(arguments) for arguments, _ in COMMANDS])
def test_commands_are_answered_as_the_page_says(arguments: list[str], answer: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    here = [
        "--config.data.max_epochs=0",
        f"--config.data.path={tmp_path}/corpus.txt",
        f"--config.output={tmp_path}",
        "--config.launch.compile_cache=",
    ]
    with pytest.raises((ConfigError, ShardingRuleError)) as caught:
        train.main([*here, *arguments])
    assert f"error: {caught.value}\n" == answer


def test_the_config_runs() -> None:
    source = [text for kind, text in BLOCKS if kind == "python"][-1]
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    config = check(namespace["get_config"](), 8)
    assert config.mesh == MeshConfig(data=2, fsdp=2, tensor=2)
    assert config.rules.params["vocab"] is None and config.rules.params["mlp"] == "tensor"


ONE_BY_ONE = [pytest.param([row], marks=pytest.mark.exhaustive, id=row) for row in EXPERIMENTS]


@pytest.mark.parametrize("rows", [*ONE_BY_ONE, pytest.param(EXPERIMENTS, marks=pytest.mark.slow, id="all rows at once")])
def test_rows_worth_a_try_change_no_number(rows: list[str]) -> None:
    assert len(EXPERIMENTS) == 5
    rules = preset("hsdp+megatron")
    for row in rows:
        rules = rules.replace(**eval(f"dict({row})"))
    _, sums, grads = gradients(LLAMA, shard_on(rules, data=2, fsdp=2, tensor=2), microbatches=2)
    assert sums == pytest.approx(reference(LLAMA)[1], rel=1e-6)
    assert_same_gradients(grads, reference(LLAMA)[2])


def messages(path: str, functions: tuple[str, ...] = ()) -> Iterator[str]:
    """The longest constant part of each error text that a file raises, or that some of its functions yield."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    if functions:
        bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions]
        texts = [node.value for body in bodies for node in ast.walk(body) if isinstance(node, ast.Yield)]
    else:
        texts = [node.exc.args[0] for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    for text in texts:
        parts = [node.value for node in ast.walk(text) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        yield max(parts, key=len)


def test_every_error_is_on_the_page() -> None:
    found = [text for name in ("mesh", "presets", "rules", "shard") for text in messages(f"sharding_rules/{name}.py")]
    found += messages("mesh_lm/training/check.py", ("_mesh_axes", "_unused_axes", "_unsupported_rows", "_permuted", "_sizes", "_batch"))
    assert len(found) >= 15
    assert not [text for text in found if text not in PAGE], "errors that docs/sharding.md does not show"
