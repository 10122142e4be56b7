"""Each benchmark's quick form runs and writes its tables as JSON and Markdown, without anything
that identifies the machine's owner."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE, ROOT, environment

from sharding_rules.lab import LabError
from sharding_rules.lab.machine import Machine
from sharding_rules.lab.profile import load_profile


def run(name: str, output: Path) -> dict[str, list[dict]]:
    """Returns table title -> rows of `python benchmarks/<name>.py --quick`."""
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", f"--output={output}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment(), timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (results,) = output.glob(f"{name}-quick_*.json")
    record, text = (
        json.loads(results.read_text(encoding="utf-8")),
        results.with_suffix(".md").read_text(encoding="utf-8"),
    )
    assert (
        record["command"] == f"python benchmarks/{name}.py --quick"
        and record["versions"]["jax"]
        and record["machine"]["cores"]
    )
    for private in (str(ROOT), str(output), os.uname().nodename):
        assert private not in text and private not in results.read_text(encoding="utf-8")
    assert all(f"## {title}" in text for title in record["tables"])
    return {title: table["rows"] for title, table in record["tables"].items()}


@pytest.mark.exhaustive
def test_features(tmp_path: Path) -> None:
    tables = run("features", tmp_path)
    assert [row["verdict"] for row in tables["Rows"]] == ["same", "refused"]
    assert all(row["as expected"] for row in tables["Rows"])


@pytest.mark.slow
def test_host_cost(tmp_path: Path) -> None:
    rows = run("host_cost", tmp_path)["Host cost of a step"]
    assert [row["part"] for row in rows][-1] == "whole step" and len(rows) == 5
    assert all(0 < row["median_ms"] <= row["p99_ms"] for row in rows)


@pytest.mark.slow
def test_grouped_cpu(tmp_path: Path) -> None:
    rows = run("grouped_cpu", tmp_path)["Grouped matmul on a CPU"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    exact, rounded = (row["difference"] for row in rows)
    assert exact < 1e-5 and rounded < 1e-2
    assert all(row["blocks_ms"] > 0 and row["ragged_dot_forward_ms"] > 0 for row in rows)


@pytest.mark.slow
def test_comm_and_matmul_write_one_profile(tmp_path: Path) -> None:
    tables = run("comm", tmp_path)
    fits, times = tables["Latency and bandwidth"], tables["Times"]
    assert {row["axis"] for row in fits} == {"tensor"} and len(fits) == 6
    assert all(row["latency_us"] >= 0 and row["bandwidth_gb_per_s"] > 0 for row in fits)
    assert len(times) == 6 * 4 and all(row["us"] > 0 for row in times)
    (chart,) = tmp_path.glob("comm-quick_*.png")
    assert chart.stat().st_size > 10_000
    rows = run("matmul", tmp_path)["Square matmuls in bf16"]
    assert [row["size"] for row in rows] == [64, 128]
    profile = load_profile(str(tmp_path / "profile.json"))
    assert len(profile.collectives) == 6 and len(profile.matmuls) == 2
    with pytest.raises(LabError, match=r"profile\.json was measured on a CPU, .* is for h100"):
        Machine.of(f"h100,{tmp_path}/profile.json")


@pytest.mark.slow
def test_loss_memory(tmp_path: Path) -> None:
    tables = run("loss_memory", tmp_path)
    few, many = tables["Temp memory of loss and gradients"]
    assert many["chunked_bytes"] == few["chunked_bytes"], (
        "the chunked loss's memory must not grow with the tokens"
    )
    assert many["naive_bytes"] > 1.9 * few["naive_bytes"] and many["ratio"] > 2
    assert tables["Time"][0]["gradients_rel_difference"] < 1e-5


@pytest.mark.exhaustive
def test_loader(tmp_path: Path) -> None:
    rows = run("loader", tmp_path)["Loader against model"]
    assert [(row["documents"], row["threads"]) for row in rows] == [
        (d, n) for d in ("joined", "separate") for n in (0, 1, 2)
    ]
    assert all(row["loader_tokens_per_s"] > 0 and row["model_tokens_per_s"] > 0 for row in rows)


@pytest.mark.exhaustive
def test_verified_data(tmp_path: Path) -> None:
    tables = run("verified_data", tmp_path)
    assert len(rows := tables["Loader"]) == 3 * 3 and all(
        row["verified_s"] > 0 and row["without_s"] > 0 for row in rows
    )
    assert all(row["gb_per_s"] > 0 for row in tables["Digests"])


def test_prepare(tmp_path: Path) -> None:
    rows = run("prepare", tmp_path)["Text to .bin/.idx"]
    assert [row["workers"] for row in rows] == [1, 1, 1, 2] and len(
        {row["tokens"] for row in rows}
    ) == 1
    assert all(row["mb_per_s"] > 0 and row["cpu_s"] > 0 for row in rows)


@pytest.mark.exhaustive
def test_huggingface(tmp_path: Path) -> None:
    rows = run("huggingface", tmp_path)["Import and export"]
    assert len(rows) == 3 and len({row["read_MiB"] for row in rows}) == 1, (
        "replicas must not be read again"
    )
    assert all(row["import_beside_MiB"] < row["arrays_MiB"] for row in rows)


@pytest.mark.exhaustive
def test_generate(tmp_path: Path) -> None:
    rows = run("generate", tmp_path)["Tokens a second"]
    assert [(row["batch"], row["way"]) for row in rows] == [
        (b, w) for b in (1, 2) for w in ("cache", "cache, streamed", "no cache")
    ]
    assert all(row["tokens_per_s"] > 0 and row["tokens_as_with_cache"] == 1 for row in rows)


@pytest.mark.exhaustive
def test_start_time(tmp_path: Path) -> None:
    tables = run("start_time", tmp_path)
    rows = {row["case"]: row for row in tables["Command to first step"]}
    assert rows["all cold"]["cache_hits"] == 0 and rows["all warm"]["cache_hits"] > 0
    assert rows["all warm"]["data_s"] < rows["all cold"]["data_s"]
    assert rows["warm, resumed"]["programs"] < rows["all warm"]["programs"], (
        "a resumed run has no state to initialise"
    )
    assert {row["status"] for row in rows.values()} == {99}
    assert tables["train.py itself, from outside"][0]["first_step_printed_s"] > 0
    assert {"train", "jax"} <= {row["package"] for row in tables["Imports"]}


@pytest.mark.exhaustive
def test_save_cost(tmp_path: Path) -> None:
    (row,) = run("save_cost", tmp_path)["Cost of saving"]
    assert row["with_save_s"] > row["blocking_ms"] / 1e3 > 0 and row["digests_ms"] > 0


@pytest.mark.exhaustive
def test_local_copies(tmp_path: Path) -> None:
    (row,) = run("local_copies", tmp_path)["Cost of a local save and of its copy"]
    assert (
        row["saved_s"] > row["blocked_saving_ms"] / 1e3 > 0
        and row["copied_s"] > row["blocked_copying_ms"] / 1e3 > 0
    )


@pytest.mark.exhaustive
def test_replay_cost(tmp_path: Path) -> None:
    rows = run("replay_cost", tmp_path)["Cost of a replayed step"]
    assert all(row["replayed_ms"] > row["step_ms"] > 0 for row in rows)


@pytest.mark.exhaustive
def test_extend_context(tmp_path: Path) -> None:
    """The run with long sequences starts from the short one's weights, on 8 devices."""
    rows = {row["model"]: row for row in run("extend_context", tmp_path)["Loss on long texts"]}
    assert [*rows] == ["short", "short, continued", "long"] and len(
        {row["scored_tokens"] for row in rows.values()}
    ) == 1
    assert (
        rows["long"]["nats_per_token"] < rows["short"]["nats_per_token"]
        and "--rules=ring" in rows["long"]["command"]
    )


@pytest.mark.exhaustive
def test_sparse_loss(tmp_path: Path) -> None:
    rows = run("sparse_loss", tmp_path)["A sparse model beside a dense one"]
    assert [row["config"] for row in rows] == ["gpt_tiny", "gpt_tiny_moe"]
    dense, sparse = (row["active_parameters"] for row in rows)
    assert dense <= sparse <= 1.01 * dense, "a router is small"
    assert all(row["heldout_nats_per_token"] < 10 for row in rows)


@pytest.mark.exhaustive
def test_adam8_loss(tmp_path: Path) -> None:
    rows = run("adam8_loss", tmp_path)["8-bit moments beside AdamW"]
    assert [row["rule"] for row in rows] == ["adamw", "adamw8"]
    adamw, adamw8 = (row["heldout_nats_per_token"] for row in rows)
    assert adamw < 10 and rows[1]["more_than_adamw"] == adamw8 - adamw
    assert 0 < abs(adamw8 - adamw) < 0.1


@pytest.mark.exhaustive
def test_muon_momentum(tmp_path: Path) -> None:
    rows = run("muon_momentum", tmp_path)["Two forms of momentum in Muon"]
    assert [row["momentum"] for row in rows] == ["optax", "jordan"]
    optax, jordan = (row["heldout_nats_per_token"] for row in rows)
    assert optax < 10 and rows[1]["more_than_optax"] == jordan - optax
    assert 0 < abs(jordan - optax) < 0.1


@pytest.mark.exhaustive
def test_diloco(tmp_path: Path) -> None:
    """Islands send over their axis once every other step what data parallelism sends in each."""
    rows = {row["run"]: row for row in run("diloco", tmp_path)["Islands against data parallelism"]}
    assert [*rows] == ["ddp", "diloco, momentum 0.9", "diloco, momentum 0.5", "one island alone"]
    sent = [row["sent_bytes_per_token"] for row in rows.values()]
    assert sent[0] == 2 * sent[1] == 2 * sent[2] > 0 == sent[3]


@pytest.mark.slow
def test_fit_formulas(tmp_path: Path) -> None:
    """Of two models: fitted constants are no worse than those that the project has."""
    tables = run("fit_formulas", tmp_path)
    rows = tables["Errors by model"]
    assert len(rows) == 2 and all(row["programs"] >= 2 for row in rows)
    mean = sum(row["fitted_mean"] for row in rows)
    assert mean <= sum(row["predicted_mean"] for row in rows) + 0.01
    assert all(row["constant"] and row["fitted"] >= 0 for row in tables["Constants"])


@pytest.mark.exhaustive
@pytest.mark.deviceless
def test_random_layouts(tmp_path: Path) -> None:
    tables = run("random_layouts", tmp_path)
    (row,) = tables["The layout chosen, and the best of those drawn"]
    assert row["chosen_step_s"] > 0 and row["considered"] > 1000
    assert len(tables["The programs"]) == row["compiles"] + 1
