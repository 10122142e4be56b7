"""The benchmarks of sums of gradients: their configs can run, differences are of pairs of runs, and
their quick forms run."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.test_benchmarks import run

ROOT = Path(__file__).parents[2]


def module(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def test_every_subject_is_a_config_that_can_run() -> None:
    from mesh_lm.training.check import check

    reductions = module("reductions")
    assert len(reductions.subjects()) == 10
    for subject in reductions.subjects():
        config = check(reductions.prepared(subject, False), reductions.DEVICES)
        inside = subject.table == reductions.TWO
        assert ("node" in config.mesh.sizes()) == inside and bool(config.rules.node_axis) == (
            "by node" in subject.form
        )
        if "reduce-scatter" in subject.form:
            assert set(config.rules.column("optimizer")["flat"]) == {
                "pipeline",
                "data",
                *(["node"] if inside else []),
            }
        assert (
            {"data", "node"} >= set(config.rules.activations["batch"])
            if inside
            else config.rules.activations["batch"] == "data"
        )


def test_differences_are_of_pairs_of_runs() -> None:
    reduced_loss = module("reduced_loss")
    rows = [
        {"sums": sums, "seed": seed, "learning_rate": 8e-3, "heldout_loss": loss, "train_loss": 1.0}
        for sums, losses in {"float32": (2.0, 4.0), "int8": (2.02, 3.96)}.items()
        for seed, loss in enumerate(losses)
    ]
    exact, int8 = (
        line for line in reduced_loss.differences(rows) if line["loss"] == "heldout_loss"
    )
    assert exact["sums"] == "float32, from its mean" and exact["seed_0_pct"] == pytest.approx(
        -100 / 3
    )
    assert (int8["seed_0_pct"], int8["seed_1_pct"]) == (pytest.approx(1), pytest.approx(-1))
    assert int8["mean_pct"] == pytest.approx(0, abs=1e-9) and int8[
        "deviation_pct"
    ] == pytest.approx(2**0.5)


@pytest.mark.exhaustive
@pytest.mark.deviceless
def test_the_bytes(tmp_path: Path) -> None:
    tables = run("reductions", tmp_path)
    (measured,) = (rows for title, rows in tables.items() if title.startswith("One"))
    assert len(measured) == 2 and all(row["sent_gib"] > 0 and row["fits"] for row in measured)


@pytest.mark.exhaustive
def test_the_loss(tmp_path: Path) -> None:
    assert {row["sums"] for row in run("reduced_loss", tmp_path)["Runs"]} == {
        "float32",
        "float32, by node",
        "bfloat16",
        "int8",
    }
