"""The list of planted mistakes is sound: each has its place in the code, and tests that CI runs.
run.py says who kills whom."""

import ast
import functools
import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiers
from mutations import copies, planted, run, server

MUTATIONS = planted.load_texts()
PACKAGES = {
    "mesh_lm": 2, "mesh_lm/model": 16, "mesh_lm/parallel": 30, "mesh_lm/parallel/problems": 3,
    "mesh_lm/schedules": 6, "mesh_lm/optim": 8, "mesh_lm/training": 6,
    "mesh_lm/state": 6, "mesh_lm/checkpoint": 14, "mesh_lm/data": 10, "mesh_lm/data/tokenizer": 1,
    "mesh_lm/data/prepare": 1,
    "mesh_lm/inference": 4, "mesh_lm/huggingface": 2, "mesh_lm/launch": 1, "mesh_lm/network": 10,
    "mesh_lm/launch/health": 6, "sharding_rules": 8,
    "sharding_rules/lab": 5, "pallas_kernels/grouped": 1, "pallas_kernels/stacked": 2,
    "pallas_kernels/attention": 4,
    "pallas_kernels/attention/hopper": 1,
}  # fmt: skip
"""Folder -> mutations of files directly in it, at least."""
TOPICS = ("lease", "wire", "health", "digest", "context", "tensor2d", "flat")
"""How the ids of at least three mutations begin."""


@functools.cache
def marks_of(file: str) -> dict[str, set[str]]:
    """The marks of each test function of a file. Those of single cases are not among them."""
    tree = ast.parse((planted.ROOT / file).read_text(encoding="utf-8"))
    everywhere = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            everywhere = {name for part in ast.walk(node.value) if (name := _mark(part))}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        node.name: everywhere
        | {name for decorator in node.decorator_list if (name := _mark(decorator))}
        for node in functions
    }


def _mark(node: ast.AST) -> str:
    """The name of pytest.mark.name or pytest.mark.name(...); empty for anything else."""
    words = ast.unparse(node).partition("(")[0].split(".")
    return words[2] if len(words) == 3 and words[:2] == ["pytest", "mark"] else ""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.id)
def test_a_mutation_has_its_place_and_its_tests(mutation: planted.Mutation) -> None:
    """Its tests are there, and CI selects them as far as the marks of functions say it."""
    assert not mutation.place(planted.ROOT)
    assert mutation.new != mutation.old and mutation.plants.endswith(".") and mutation.tests
    path = planted.ROOT / mutation.file
    ast.parse(path.read_text(encoding="utf-8").replace(mutation.old, mutation.new))
    for test in mutation.tests:
        file, _, function = test.partition("[")[0].partition("::")
        marks = marks_of(file)
        assert not function or function in marks, f"{test} is not there"
        named = (
            [marks[function]]
            if function
            else [each for name, each in marks.items() if name.startswith("test_")]
        )
        assert any(tiers.selects(tiers.ci_selects(file), each) for each in named), (
            f"CI leaves out {test}"
        )


def test_the_list_spans_the_packages() -> None:
    assert (
        len({mutation.id for mutation in planted.load()})
        == len(planted.load())
        >= len(MUTATIONS) + 40
    )
    folders = [str(Path(mutation.file).parent) for mutation in MUTATIONS]
    assert not {
        folder: least for folder, least in PACKAGES.items() if folders.count(folder) < least
    }
    topics = [mutation.id.partition("-")[0] for mutation in MUTATIONS]
    assert not {topic: topics.count(topic) for topic in TOPICS if topics.count(topic) < 3}


@pytest.mark.slow
def test_every_parameter_of_a_test_is_there_and_ci_selects_it() -> None:
    """pytest refuses an id that it does not find, and lists those that it selects."""
    ids = sorted({test for mutation in planted.load() for test in mutation.tests})
    for expression, group in itertools.groupby(
        ids, lambda test: tiers.ci_selects(test.partition("::")[0])
    ):
        tests = list(group)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-m",
            expression,
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        done = subprocess.run(command, cwd=planted.ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        selected = done.stdout.splitlines()
        assert not [
            test for test in tests if not any(copies.is_of(case, [test]) for case in selected)
        ], "CI leaves them out"


def test_the_tiers_have_every_test_that_needs_no_gpu() -> None:
    """With any marks, and those of CI have none that is exhaustive or another fault."""
    for flags in itertools.product((False, True), repeat=4):
        marks = {
            name
            for name, is_set in zip(
                ("slow", "exhaustive", "deviceless", "fault"), flags, strict=True
            )
            if is_set
        }
        assert any(tiers.selects(expression, marks) for expression in tiers.TIERS.values()), marks
        assert tiers.selects(tiers.ci_selects("tests/any.py"), marks) == (
            not marks & {"exhaustive", "fault"}
        )
        assert tiers.selects(tiers.ci_selects(tiers.CI_FAULTS), marks) == ("fault" in marks)
    assert not any(
        tiers.selects(expression, {"gpu"})
        for name, expression in tiers.TIERS.items()
        if name != "faults"
    )
    assert (planted.ROOT / tiers.CI_FAULTS).is_file()


def test_a_mistake_that_lives_a_mistaken_one_and_tests_that_fail_anyway(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """The script itself, on a repository of two files."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "code_here.py").write_text("def double(x):\n    return 2 * x\n", encoding="utf-8")
    (tmp_path / "test_code.py").write_text(
        "import code_here as code, pytest\n\ndef test_2():\n    assert code.double(2) == 4\n\n"
        "def test_0():\n    assert code.double(0) == 0\n\n"
        "def test_wrong():\n    assert False\n\n@pytest.mark.gpu\ndef test_4():\n    assert "
        "code.double(4) == 8\n\n"
        "def test_that_writes():\n    open('test_code.py', 'w').write('')\n    assert "
        "code.double(2) == 4\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(planted, "ROOT", tmp_path)
    monkeypatch.setattr(copies, "PREPARED", ())
    monkeypatch.setattr(copies, "tracked", lambda: ["code_here.py", "test_code.py"])

    def plant(name: str, old: str, test: str, new: str = "3 * x") -> planted.Mutation:
        return planted.Mutation(
            name, "code_here.py", old, new, "It triples.", (f"test_code.py::{test}",)
        )

    every = [
        plant("dead", "2 * x", "test_2"), plant("alive", "2 * x", "test_0"),
        plant("gone", "4 * x", "test_2"),
        plant("idle", "2 * x", "test_wrong"), plant("syntax", "2 * x", "test_2", "2 *"),
        plant("elsewhere", "2 * x", "test_4"),
        plant("written", "2 * x", "test_that_writes"),
    ]  # fmt: skip
    monkeypatch.setattr(planted, "load", lambda: every)
    assert run.main(["--jobs=2"]) == 1
    out = capsys.readouterr().out
    found = {
        line.split(" s  ")[1].split(":")[0]: line.split("  ")[0].strip()
        for line in out.splitlines()
        if " s  " in line
    }
    assert found == {"dead": "killed", "alive": "SURVIVED", "gone": "does not apply", "idle": "proves nothing", "syntax": "broken",
        "elsewhere": "not in CI", "written": "killed"}  # fmt: skip
    assert (
        "7 mutations: 2 killed, 1 SURVIVED, 1 does not apply, 1 proves nothing, 1 broken, 1 not in "
        "CI"
    ) in out
    assert "def test_2" in (tmp_path / "test_code.py").read_text(encoding="utf-8")
    assert "return 2 * x" in (tmp_path / "code_here.py").read_text(encoding="utf-8")
    monkeypatch.setattr(
        run,
        "judge",
        lambda mutations, jobs: {
            mutation.id: copies.Verdict(copies.KILLED) for mutation in mutations
        },
    )
    assert run.main(["dead"]) == 0


def test_tests_that_hang_are_ended_with_what_they_started(tmp_path: Path) -> None:
    hangs = subprocess.Popen(
        ["sh", "-c", "sleep 99 & echo $! > child; wait"], cwd=tmp_path, start_new_session=True
    )
    assert server.ended(hangs.pid, 0.3) is None
    child = Path("/proc", (tmp_path / "child").read_text(encoding="utf-8").strip(), "stat")
    deadline = time.monotonic() + 60
    while child.exists() and child.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "what it started is alive"
        time.sleep(0.01)  # the signal is on its way
    assert copies.verdict(["a"], copies.Outcome(None, 0.3, {}, "")).status == "timed out"
    hangs.wait()
