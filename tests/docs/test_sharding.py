"""docs/sharding.md: its tables are the presets, its examples answer as shown; and docs/errors.md
has every error of the rules."""

import ast
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LLAMA, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.parallel.flat import FLAT
from mesh_lm.training.check import check
from sharding_rules import PRESETS, MeshConfig, axes_of, preset

COMPILE_BUDGET = 20
ROOT = Path(__file__).parents[2]
PAGE, ERRORS = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("sharding.md", "errors.md")
)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EXPERIMENTS = re.findall(r"^\| `(\w+=\{.*\})` \|", PAGE, re.MULTILINE)


def rows(head: str) -> dict[str, list[str]]:
    """Preset -> the cells of its row, which several may share, in the table whose first row begins
    with this."""
    lines = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| `")
    ]
    return {name.strip("`"): cells for names, *cells in found for name in names.split(", ")}


def test_the_table_of_presets() -> None:
    """Read back: the axes of the rules, and gradients like the optimizer state where that is
    flat."""
    shown = rows("| preset | weights |")
    assert shown.keys() == PRESETS.keys()
    for name, (weights, grads, moments, batch, _) in shown.items():
        rules = PRESETS[name]
        flat = rules.column("optimizer").get(FLAT) is not None
        for kind, cell in (
            ("params", weights),
            ("optimizer" if flat else "gradients", grads),
            ("optimizer", moments),
        ):
            used = {axis for entry in rules.column(kind).values() for axis in axes_of(entry)} - {
                "pipeline"
            }
            assert cell.replace("`", "") == (" x ".join(sorted(used)) or "replicated"), (
                f"{name}: {kind}"
            )
        assert batch.replace("`", "") == " x ".join(axes_of(rules.activations["batch"]))


def test_the_rows_of_presets() -> None:
    """Read back: with the default of each column they are the rules."""
    shown = rows("| preset | `params` |")
    assert shown.keys() == PRESETS.keys()
    for name, cells in shown.items():
        columns = dict(zip(("params", "gradients", "optimizer", "activations"), cells, strict=True))
        for kind in columns:
            column = {
                row: axes
                for row, entry in PRESETS[name].column(kind).items()
                if (axes := axes_of(entry)) and row != "layers"
            }
            told = columns[kind] or columns["params"]
            groups = (
                []
                if told == "none"
                else [part.replace("`", "").split(" -> ") for part in told.split("; ")]
            )
            assert {
                row: tuple(axes.split(", ")) for these, axes in groups for row in these.split(", ")
            } == column, f"{name}: {kind}"


def test_every_preset_shards_its_layers_over_stages() -> None:
    for rules in PRESETS.values():
        assert all(
            rules.column(kind)["layers"] == "pipeline"
            for kind in ("params", "gradients", "optimizer")
        )


def test_every_preset_has_a_use() -> None:
    section = PAGE[PAGE.index("### Which preset to use") :].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert {*PRESETS} - named <= {"megatron", "megatron_2d", "by_node"}, (
        "those that other sections of the page explain"
    )


def test_every_logical_axis_of_the_presets_is_explained() -> None:
    start = PAGE.index("The logical axes of the decoder")
    explained = set(re.findall(r"`([\w/]+)`", PAGE[start : PAGE.index("##", start)]))
    assert {
        row
        for rules in PRESETS.values()
        for kind in ("params", "activations")
        for row in rules.column(kind)
    } <= explained


def test_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's Python sessions, one after the other in one namespace."""
    monkeypatch.chdir(ROOT)
    session = "".join(text for kind, text in BLOCKS if kind == "pycon")
    failures: list[str] = []
    test = doctest.DocTestParser().get_doctest(session, {}, "docs/sharding.md", None, 0)
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert test.examples and not failures, "".join(failures)


def test_the_config_runs() -> None:
    (source,) = [text for kind, text in BLOCKS if kind == "python" and "vocabulary whole" in text]
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    config = check(namespace["get_config"](), 8)
    assert config.mesh == MeshConfig(data=2, fsdp=2, tensor=2)
    assert config.rules.params["vocab"] is None and config.rules.params["mlp"] == "tensor"


ONE_BY_ONE = [pytest.param([row], marks=pytest.mark.exhaustive, id=row) for row in EXPERIMENTS]


@pytest.mark.parametrize(
    "rows", [*ONE_BY_ONE, pytest.param(EXPERIMENTS, marks=pytest.mark.slow, id="all rows at once")]
)
def test_rows_worth_a_try_change_no_number(rows: list[str]) -> None:
    assert len(EXPERIMENTS) == 5
    rules = preset("hsdp+megatron")
    for row in rows:
        rules = rules.replace(**eval(f"dict({row})"))
    _, sums, grads = gradients(LLAMA, shard_on(rules, data=2, fsdp=2, tensor=2), microbatches=2)
    assert sums == pytest.approx(reference(LLAMA)[1], rel=1e-6)
    assert_same_gradients(grads, reference(LLAMA)[2])


def messages(path: str, functions: tuple[str, ...] = ()) -> Iterator[str]:
    """The longest constant part of each error text that a file raises, or that some of its
    functions yield."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    if functions:
        bodies = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name in functions
        ]
        texts = [
            node.value for body in bodies for node in ast.walk(body) if isinstance(node, ast.Yield)
        ]
    else:
        texts = [
            node.exc.args[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        ]
    for text in texts:
        parts = [
            node.value
            for node in ast.walk(text)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        yield max(parts, key=len)


def test_every_error_is_on_the_page() -> None:
    found = [
        text
        for name in ("mesh", "presets", "rules", "shard")
        for text in messages(f"sharding_rules/{name}.py")
    ]
    problems = "mesh_lm/parallel/problems"
    found += messages(
        f"{problems}/rows.py",
        (
            "axis_problems",
            "unused_axis_problems",
            "_weight_row_problems",
            "_activation_row_problems",
        ),
    )
    found += messages(
        f"{problems}/experts.py",
        (
            "expert_problems",
            "_column_problems",
            "_axis_problems",
            "_router_problems",
            "_residual_problems",
        ),
    )
    found += messages("mesh_lm/model/experts_config.py", ("problems",))
    found.append("XLA would permute arrays in a branch that some stages skip")
    found += messages(f"{problems}/sizes.py", ("size_problems", "batch_problems"))
    assert len(found) >= 15
    assert not [text for text in found if text not in ERRORS], (
        "errors that docs/errors.md does not show"
    )
