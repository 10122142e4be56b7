"""The list of planted mistakes is sound: each still has its place in the code, and its tests are there. run.py says who kills whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import run

MUTATIONS = run.load()
PACKAGES = {
    "mesh_lm/model": 8, "mesh_lm/parallel": 8, "mesh_lm/schedules": 6, "mesh_lm/optim": 8, "mesh_lm/training": 6, "mesh_lm/state": 4,
    "mesh_lm/checkpoint": 3, "mesh_lm/data": 6, "mesh_lm/data/tokenizer": 1, "mesh_lm/data/prepare": 1, "mesh_lm/inference": 4,
    "mesh_lm/huggingface": 2, "mesh_lm/launch": 2, "sharding_rules": 4, "sharding_rules/lab": 5, "pallas_kernels/grouped": 1,
    "pallas_kernels/stacked": 2, "pallas_kernels/attention": 4, "pallas_kernels/attention/hopper": 1,
}  # fmt: skip
"""Folder -> mutations of files directly in it, at least."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.id)
def test_a_mutation_has_its_place_and_its_tests(mutation: run.Mutation) -> None:
    assert not mutation.place(run.ROOT)
    assert mutation.new != mutation.old and mutation.plants.endswith(".") and mutation.tests
    path = run.ROOT / mutation.file
    ast.parse(path.read_text().replace(mutation.old, mutation.new))
    for test in mutation.tests:
        file, _, function = test.partition("[")[0].partition("::")
        defined = {node.name for node in ast.walk(ast.parse((run.ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
        assert not function or function in defined, f"{test} is not there"


def test_the_list_spans_the_packages() -> None:
    assert len({mutation.id for mutation in MUTATIONS}) == len(MUTATIONS) >= 30
    folders = [str(Path(mutation.file).parent) for mutation in MUTATIONS]
    assert not {folder: least for folder, least in PACKAGES.items() if folders.count(folder) < least}


@pytest.mark.slow
def test_every_parameter_of_a_test_is_there() -> None:
    """pytest refuses an id that it does not find."""
    ids = sorted({test for mutation in MUTATIONS for test in mutation.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *ids]
    done = subprocess.run(command, cwd=run.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mistake_that_lives_a_mistaken_one_and_tests_that_fail_anyway(tmp_path: Path, monkeypatch, capsys) -> None:
    """The script itself, on a repository of two files."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "code_here.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_code.py").write_text(
        "import code_here as code\n\ndef test_2():\n    assert code.double(2) == 4\n\ndef test_0():\n    assert code.double(0) == 0\n\n"
        "def test_wrong():\n    assert False\n"
    )
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "tracked", lambda: ["code_here.py", "test_code.py"])

    def planted(name: str, old: str, test: str, new: str = "3 * x") -> run.Mutation:
        return run.Mutation(name, "code_here.py", old, new, "It triples.", (f"test_code.py::{test}",))

    every = [
        planted("dead", "2 * x", "test_2"), planted("alive", "2 * x", "test_0"), planted("gone", "4 * x", "test_2"),
        planted("idle", "2 * x", "test_wrong"), planted("syntax", "2 * x", "test_2", "2 *"),
    ]  # fmt: skip
    monkeypatch.setattr(run, "load", lambda: every)
    assert run.main(["--jobs=2"]) == 1
    out = capsys.readouterr().out
    found = {line.split(" s  ")[1].split(":")[0]: line.split("  ")[0].strip() for line in out.splitlines() if " s  " in line}
    assert found == {"dead": "killed", "alive": "SURVIVED", "gone": "does not apply", "idle": "proves nothing", "syntax": "broken"}
    assert "5 mutations: 1 killed, 1 SURVIVED, 1 does not apply, 1 proves nothing, 1 broken" in out
    assert "return 2 * x" in (tmp_path / "code_here.py").read_text()
    monkeypatch.setattr(run, "judge", lambda mutations, jobs: {mutation.id: run.Verdict(run.KILLED) for mutation in mutations})
    assert run.main(["dead"]) == 0
