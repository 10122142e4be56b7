"""A dry run on the CPU of the first benchmark to run on a GPU, and its output if something
fails."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from processes import ROOT
from rehearsal import rehearsed, suite

CASES = ["kernels", "cudnn", "matmul", "elementwise", "steps"]


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_truth")


@pytest.mark.exhaustive
def test_dry_run(tmp_path: Path) -> None:
    """CI rehearses matmul and elementwise as blocks of gpu_minutes.py, and the predicted step in
    gpu_predictions.py."""
    tables, record = rehearsed("gpu_truth", tmp_path, CASES)
    assert record["date"] and record["device"]["device_kind"] and record["versions"]["jax"]
    for title, peer in (("Our attention", "mosaic"), ("cuDNN's attention", "xla")):
        forward, backward = tables[title]
        assert forward["peer"] == backward["peer"] == peer
        assert (
            forward["rel_out"] < 4e-3 and forward["fwd_tflops"] > 0 and "bwd_tflops" not in forward
        )
        assert max(backward[f"rel_d{x}"] for x in "qkv") < 8e-3 and backward["bwd_tflops"] > 0
    assert [row["width"] for row in tables["Matmul"]] == ["64 32", 64] and all(
        row["tflops"] > 0 for row in tables["Matmul"]
    )
    assert [row["dtype"] for row in tables["Elementwise"]] == ["bfloat16", "float32"]
    assert all(row["gb_per_s"] > 0 for row in tables["Elementwise"])
    (row,) = tables["Predicted and measured"]
    assert row["measured_step_s"] > 0 and row["loss_last"] < row["loss_first"]
    if importlib.util.find_spec("jax_cuda13_plugin"):
        assert (
            row["step_ratio"] == row["measured_step_s"] / row["predicted_step_s"]
            and row["predicted_peak_gib"] > 0
        )


@pytest.mark.exhaustive
def test_a_package_that_is_missing_is_named_and_costs_its_case_alone(tmp_path: Path) -> None:
    (tmp_path / "optax.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'optax'\")", encoding="utf-8"
    )
    where = f"{tmp_path}:{ROOT}"
    done = suite(
        "gpu_truth",
        "--dry-run",
        "--parts=steps,elementwise",
        f"--output={tmp_path}",
        PYTHONPATH=where,
    )
    assert done.returncode == 1, done.stderr
    (results,) = tmp_path.glob("gpu_truth-dry-run_*.json")
    tables = {
        title: table["rows"]
        for title, table in json.loads(results.read_text(encoding="utf-8"))["tables"].items()
    }
    elementwise, steps = tables["Parts"]
    assert elementwise["status"] == "ok" and len(tables["Elementwise"]) == 2
    assert (
        steps["status"] == "FAILED"
        and "stepped: exit status 1: ModuleNotFoundError: No module named 'optax'"
        in steps["problems"]
    )


def test_its_shapes_are_those_of_the_configs(truth: ModuleType) -> None:
    devices = {"gpt_1_3b": 8, "llama3_8b": 64, "gpt_175b": 1024}
    replicas = {"gpt_1_3b": 8, "llama3_8b": 64, "gpt_175b": 1024 // 64}
    assert [row["config"] for row in truth.MATMULS] == list(devices)
    for row in truth.MATMULS:
        config = importlib.import_module(f"configs.{row['config']}").get_config()
        model, mesh, train = config.model, config.mesh.resolve(devices[row["config"]]), config.train
        assert mesh.data * mesh.fsdp == replicas[row["config"]]
        assert (
            row["tokens"]
            == train.global_batch // train.microbatches // replicas[row["config"]] * model.seq_len
        )
        assert row["d_model"] == model.d_model
        attention = [model.n_heads * model.d_head] + [3 * model.d_model] * (
            model.kv_heads == model.n_heads
        )
        assert row["width"] == [width // mesh.tensor for width in (*attention, model.d_mlp)]
    shipped = importlib.import_module("configs.gpt_1_3b").get_config()
    assert {
        "global_batch": shipped.train.global_batch // 8,
        "microbatches": shipped.train.microbatches,
    } == truth.SHARE
    assert shipped.rules.name == truth.RULES
    assert {
        "mask": "causal", "head_dim": shipped.model.d_head, "seq": shipped.model.seq_len,
        "batch": truth.SHARE["global_batch"] // 8,
        "heads": shipped.model.n_heads, "kv_heads": shipped.model.kv_heads,
    } == truth.HEADLINE  # fmt: skip
    assert truth.LAYERS[0] == shipped.model.n_layers
    assert sum(part.seconds for part in truth.PARTS) <= 570, "less than 10 minutes"


def steps(
    truth: ModuleType,
    tmp_path: Path,
    answers: dict[str, list[Any]],
    found: dict[str, Any] | None = None,
) -> tuple[list[dict], list[dict]]:
    """Returns (rows of the last table, the tasks' arguments). Prepared answers, one per call of a
    task, replace processes on a GPU."""
    lab, told = importlib.import_module("gpu_lab").Lab(tmp_path, dry_run=False), []
    lab.found |= found or {}

    def run(task: str, **arguments: Any) -> list[dict]:
        told.append({"task": task, **arguments})
        return answers[task].pop(0)

    lab.run = run
    *_, (_, rows, _) = truth.steps(lab)
    return rows, told


RAN = {
    "step_ms": 3000.0,
    "high_water_gib": 44.0,
    "peak_gib": 42.0,
    "loss_first": 10.8,
    "loss_last": 10.5,
}
PLAN = {"target": "h100", "predicted_step_s": 2.5, "predicted_peak_gib": 40.0, "fits": True}


def test_what_was_predicted_and_measured_stand_beside_each_other(
    truth: ModuleType, tmp_path: Path
) -> None:
    (row,), told = steps(truth, tmp_path, {"predicted": [[PLAN]], "stepped": [[RAN]]})
    assert (row["layers"], row["sequences"], row["attention"]) == (24, 64, "auto")
    assert (
        row["measured_step_s"],
        row["step_ratio"],
        row["peak_ratio"],
        row["compiled_peak_gib"],
    ) == (3.0, 1.2, 1.1, 42.0)
    same = ("changes", "name", "rules", "directory")
    assert {name: told[0][name] for name in same} == {name: told[1][name] for name in same}, (
        "the very same config"
    )
    assert told[0]["hidden"] and told[0]["platform"] == "cpu" and told[1]["steps"] == 10


def test_half_the_layers_only_where_memory_does_not_suffice(
    truth: ModuleType, tmp_path: Path
) -> None:
    full = {"error": "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory"}
    (first, second), told = steps(
        truth, tmp_path, {"predicted": [[PLAN], [PLAN]], "stepped": [[full], [RAN]]}
    )
    assert (first["layers"], first["run_error"], first["step_ratio"]) == (24, full["error"], None)
    assert (second["layers"], second["step_ratio"]) == (12, 1.2) and told[3]["changes"]["model"][
        "n_layers"
    ] == 12
    rows, _ = steps(
        truth,
        tmp_path,
        {"predicted": [[PLAN]], "stepped": [[{"error": "XlaRuntimeError: INTERNAL"}]]},
    )
    assert len(rows) == 1


def test_a_kernel_that_failed_is_not_trained_with(truth: ModuleType, tmp_path: Path) -> None:
    (row,), told = steps(
        truth,
        tmp_path,
        {"predicted": [[{"error": "no cuDNN"}]], "stepped": [[RAN]]},
        {"kernels": False},
    )
    assert row["attention"] == "cudnn" and told[1]["changes"]["model"]["attention"] == "cudnn"
    assert (
        row["prediction_error"] == "no cuDNN"
        and row["measured_step_s"] == 3.0
        and row["step_ratio"] is None
    )
