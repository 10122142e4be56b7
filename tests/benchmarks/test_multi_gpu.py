"""A dry run of the suite for several GPUs on eight CPU devices: the problems that it finds, and
that it survives them."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from processes import PATIENCE, ROOT, environment

from mesh_lm.training.check import check
from sharding_rules import PRESETS, preset
from sharding_rules.lab.targets import devices

sys.path.append(str(ROOT / "benchmarks"))

import gpu_lab
import gpu_worker
import multi_gpu
import multi_gpu_worker as worker
import strategies
from strategies import ONE, Strategy

COMPILE_BUDGET = 80

TINY = {
    "model": gpu_lab.TINY
    | multi_gpu.MODELS["llama"]
    | {"n_layers": 4, "n_heads": 8, "dtype": "float32", "remat": "none"},
    "train": {"global_batch": 16, "steps": 100},
    "optimizer": {"warmup_steps": 2, "learning_rate": 1e-2},
}


@pytest.mark.parametrize("n", strategies.COUNTS)
def test_strategies(n: int) -> None:
    """All presets on meshes of n devices, but for those of experts, which the models of the suite do
    not have; rules shard over every axis of their mesh; names are unique."""
    found = strategies.strategies(n)
    assert len({tuple(s.columns.values()) for s in found}) == len(found)
    for s in found:
        assert np.prod(list(s.mesh.values())) == n
        assert set(s.mesh) - {"pipeline"} <= preset(s.rules).mesh_axes()
    if n == 8:
        of_experts = {name for name, rules in PRESETS.items() if rules.exchange}
        assert {s.rules for s in found} >= set(PRESETS) - of_experts, "the models here are dense"
        assert {(s.stages, s.pipeline.get("chunks", 1)) for s in found} >= {
            (1, 1),
            (2, 1),
            (2, 2),
            (4, 1),
            (4, 2),
            (8, 1),
        }
        assert len([s for s in found if s.quick]) >= 5


@pytest.mark.parametrize("gib", [0, 16, 40, 80])
def test_every_run_can_run(gib: int) -> None:
    """The compared and timed runs pass the config's own check; 0 GiB: on the CPU."""
    for n in strategies.COUNTS:
        suite = multi_gpu.Suite(n, quick=False, cpu=not gib, memory_gib=gib)
        for s in [ONE, *suite.strategies]:
            told = [
                (suite.compared(Path(), fields), multi_gpu.microbatches(s))
                for fields in multi_gpu.MODELS.values()
            ]
            told += [(suite.sized(Path(), n), multi_gpu.timed_microbatches(s))] if s.main else []
            for each, microbatches in told:
                changes = worker.both(each["changes"], s.variant(microbatches))
                check(gpu_worker.configured("", changes, s.rules), math.prod(s.mesh.values()))
        sized = suite.sized(Path(), n)["changes"]
        for rules, axis, choices in strategies.SETTINGS:
            for choice in choices:
                fields = {
                    name: sized["model"]["n_layers"] if value == -1 else value
                    for name, value in choice.items()
                }
                changes = worker.both(sized, Strategy(rules, {axis: n}).variant(1, fields))
                check(gpu_worker.configured("", changes, rules), n)


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [
        json.loads(line.removeprefix("ROW "))
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("ROW ")
    ]


@pytest.mark.exhaustive
def test_strategies_equal_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, pipeline = str(tmp_path / "reference.npz"), Strategy("fsdp", {"pipeline": 2, "fsdp": 4})
    flat, gathered = (
        Strategy("distributed", {"pipeline": 2, "data": 4}),
        Strategy("zero3", {"data": 8}),
    )
    gathered_by_stages = Strategy("zero3", {"pipeline": 2, "data": 4}, {"chunks": 2})
    right_ones = [(pipeline, 4), (flat, 4), (gathered, 2), (gathered_by_stages, 4)]
    worker.reference(str(tmp_path), TINY, [ONE.variant(1)], path)
    unknown = {"rules": "fsdp", "mesh": "fsdp=3", "changes": {"mesh": {"data": 1, "fsdp": 3}}}
    worker.equality(
        str(tmp_path),
        TINY,
        [unknown, *(strategy.variant(microbatches) for strategy, microbatches in right_ones)],
        path,
    )
    _, wrong, *found = rows(capsys)
    assert "is not divisible by" in wrong["error"] and wrong["mesh"] == "fsdp=3"
    for right, (strategy, _) in zip(found, right_ones, strict=True):
        assert "error" not in right, right["error"]
        assert right.items() >= (strategy.columns | {"init_differ": 0}).items()
        assert 0 < right["grads_rel"] <= worker.TOLERANCE and right["sums_rel"] <= worker.TOLERANCE


def test_what_differs_is_named() -> None:
    grad = np.array([1.0, -2.0], np.float32)
    wanted = {
        "params.w": grad,
        "sums.loss": np.float32(5),
        "grads.w": grad,
        "grads.noise": 1e-9 * grad,
    }
    assert "error" not in worker.compared(wanted | {"grads.noise": np.zeros_like(grad)}, wanted)
    for name, value, said in (
        ("grads.w", grad * np.float32(1.0001), "grads.w is 1.0e-04 from the reference's"),
        ("grads.w", grad * np.float32("nan"), "grads.w is nan from the reference's"),
        ("sums.loss", np.float32(5.001), "sums.loss is 2.0e-04 from the reference's"),
        ("params.w", np.nextafter(grad, np.float32(3)), "initial bits of w differ"),
    ):
        assert worker.compared(wanted | {name: value}, wanted)["error"] == said


@pytest.mark.parametrize("name", worker.COLLECTIVES)
def test_collectives_are_what_they_are_called(name: str) -> None:
    """Two groups of four: each device's result, compared with NumPy."""
    n, collective = 4, worker.COLLECTIVES[name]
    mesh = Mesh(np.array(jax.devices()).reshape(2, n), ("groups", "group"))
    spec = jax.P(("groups", "group"))
    local = collective.local(64 * n, n) // 4
    x = np.random.default_rng(0).integers(0, 9, (2, n, local)).astype(np.float32)
    run = jax.shard_map(
        lambda x: collective.run(x, n), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    found = np.asarray(jax.jit(run)(x.ravel())).reshape(2, n, -1)
    total = x.sum(1)
    wanted = {
        "all-reduce": np.stack([total] * n, 1),
        "all-gather": np.stack([x.reshape(2, -1)] * n, 1),
        "reduce-scatter": total.reshape(2, n, -1),
        "all-to-all": x.reshape(2, n, n, -1).swapaxes(1, 2).reshape(2, n, -1),
        "ppermute": np.roll(x, 1, 1),
    }[name]
    np.testing.assert_array_equal(found, wanted)
    assert max(found[0, 0].nbytes, x[0, 0].nbytes) == 64 * n, (
        "the bytes are the larger of what a device brings and gets"
    )


@pytest.mark.deviceless
@pytest.mark.parametrize("name", worker.COLLECTIVES)
def test_nothing_but_the_collective_is_timed(name: str) -> None:
    """On H100s the loop has one collective and no copy of an array, which would take a sixth of its
    time."""
    collective, n, size = worker.COLLECTIVES[name], 8, 1 << 20
    mesh = Mesh(np.array(devices("h100", n)).reshape(1, n), ("groups", "group"))
    where = jax.NamedSharding(mesh, jax.P(("groups", "group")))
    x = jax.ShapeDtypeStruct((n * collective.local(size, n) // 4,), np.float32, sharding=where)
    text = worker.repeated(collective, n, 7, mesh).lower(x).compile().as_text()
    kind = name.replace("ppermute", "collective-permute")
    assert len(re.findall(rf" {kind}(-start)?\(", text)) == 1 and " while(" in text
    copied = [
        line
        for line in text.splitlines()
        if re.search(r"= f32\[[\d,]{3,}\]\S* copy(-start)?\(", line)
    ]
    assert not copied


def test_bandwidth_by_nccls_convention(capsys: pytest.CaptureFixture[str]) -> None:
    variant = {
        "collective": "all-reduce",
        "group": "all",
        "bytes": 1024,
        "devices": [list(range(8))],
    }
    worker.bandwidth([variant, variant | {"collective": "all-gather", "devices": [[0, 1]]}], most=3)
    for row, factor in zip(rows(capsys), (2 * 7 / 8, 1 / 2), strict=True):
        assert row["gb_per_s"] == pytest.approx(1024 / row["microseconds"] / 1e3)
        assert (
            row["bus_gb_per_s"] == pytest.approx(factor * row["gb_per_s"])
            and row["nominal_gb_per_s"] is None
        )
    assert (
        worker.nvlink("NVIDIA H100 80GB HBM3") == 450e9
        and worker.nvlink("NVIDIA A100-SXM4-40GB") == 300e9
    )
    assert worker.nvlink("NVIDIA H100 PCIe") is None


DYING = """
import json, os, sys, time
for variant in json.loads(sys.argv[2])["variants"]:
    if variant["name"] == "aborts":
        print("terrible", file=sys.stderr, flush=True)
        os.abort()
    if variant["name"] == "hangs":
        time.sleep(600)
    print("ROW", json.dumps(variant), flush=True)
"""


def test_a_strategy_that_dies_or_hangs_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(DYING, encoding="utf-8")
    lab = gpu_lab.Lab(tmp_path, dry_run=True, worker=str(tmp_path / "worker.py"))
    names = ["aborts", "a", "hangs", "b"]
    found = lab.each("task", [{"name": name, "changes": {}} for name in names], patience=3)
    assert [row["name"] for row in found] == names
    assert [row.get("error", "") for row in found] == [lab.problems[0], "", lab.problems[1], ""]
    assert lab.problems == [
        "task aborts: exit status -6: terrible",
        "task hangs: hangs: nothing for 3 s, stopped: no message",
    ]
    lab.deadline = time.monotonic()
    assert lab.each("task", [{"name": "a"}], patience=3) == [] and lab.problems[2:] == [
        "task: no time left for 1 of 1 variants"
    ]


def rehearsal(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/multi_gpu.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment(), timeout=5 * PATIENCE
    )


@pytest.mark.exhaustive
def test_rehearsal(tmp_path: Path) -> None:
    done = rehearsal("--cpu", "--quick", "--devices=4", f"--output={tmp_path}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "imported though a GPU machine may lack it: nothing" in done.stdout
    (results,) = tmp_path.glob("multi_gpu-quick_*.json")
    tables = {
        title: table["rows"]
        for title, table in json.loads(results.read_text(encoding="utf-8"))["tables"].items()
    }
    assert {row["status"] for row in tables["Parts"]} == {"ok"} and len(tables["Parts"]) == 7
    wanted = [s for s in strategies.strategies(4) if s.quick]
    assert [(row["rules"], row["mesh"], row["pipeline"]) for row in tables["Summary"]] == [
        tuple(s.columns.values()) for s in wanted
    ]
    for row in tables["Summary"]:
        assert (
            (row["fp32"], row["bf16"], row["speed"]) == ("ok", "ok", "ok")
            and row["weak_scaling"] > 0
            and row["peak_gib"] > 0
        )
    settings = tables["Settings"]
    assert (
        settings[0]["setting"] == "unroll=False kept_layers=0"
        and settings[0]["ratio"] == 1
        and all(row["ratio"] > 0 for row in settings[1:])
    )
    assert {row["group"] for row in tables["Bandwidth"]} == {"all", "neighbours"} and len(
        tables["Best bus bandwidth"]
    ) == 10
    text = results.read_text(encoding="utf-8") + results.with_suffix(".md").read_text(
        encoding="utf-8"
    )
    assert all(private not in text for private in (str(ROOT), str(tmp_path), os.uname().nodename))


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = rehearsal(f"--output={tmp_path}")
    assert done.returncode == 0 and "no GPU that JAX can use" in done.stdout, (
        done.stdout + done.stderr
    )
    assert not list(tmp_path.iterdir())
