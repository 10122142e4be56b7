"""The GPU suite's parts about our kernels: hangs by name, resumed runs, and NVIDIA's tools, of
which stand-ins write the output."""

import importlib
import itertools
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from processes import ROOT

from pallas_kernels.attention.hopper import ForwardTiles
from pallas_kernels.dev import autotune

COMPILE_BUDGET = 0


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The suite's files that do not import JAX."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return {
        name: importlib.import_module(name) for name in ("gpu_kernels", "gpu_lab", "gpu_resume")
    }


WORKER = """
import json, sys, time
task, arguments = sys.argv[1], json.loads(sys.argv[2])
if task == "kernels":
    print("ROW", json.dumps({"names": ["forward", "backward", "pair"]}), flush=True)
for variant in arguments.get("variants", ()):
    if variant["kernel"] == "backward" and "{hang}":
        time.sleep(60)
    print("ROW", json.dumps({**variant, "rel": 1e-3}), flush=True)
"""


def stand_in(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, hang: str = ""
) -> Any:
    """A lab whose worker of kernels hangs at one of them, or at none."""
    (tmp_path / "worker.py").write_text(WORKER.replace("{hang}", hang), encoding="utf-8")
    monkeypatch.setattr(modules["gpu_kernels"], "KERNELS", str(tmp_path / "worker.py"))
    lab = modules["gpu_lab"].Lab(tmp_path, dry_run=False)
    lab.output = tmp_path / "results"
    return lab


def test_a_kernel_that_hangs_is_named_and_costs_itself_alone(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = modules["gpu_kernels"]
    monkeypatch.setattr(kernels, "PATIENCE", 2)
    lab = stand_in(tmp_path, modules, monkeypatch, hang="yes")
    ((_, rows, _),) = kernels.smoke(lab)
    found = {row["kernel"]: row.get("error", "ok") for row in rows}
    assert found["forward"] == found["pair"] == "ok"
    assert found["backward"].startswith("smoke backward: hangs: nothing for 2 s")
    assert len(lab.problems) == 1


def test_a_resumed_run_measures_what_is_missing(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First with a kernel that hangs, then without: only that one runs again. Then the part is
    complete, and nothing runs."""
    kernels, lab_module = modules["gpu_kernels"], modules["gpu_lab"]
    monkeypatch.setattr(kernels, "PATIENCE", 2)
    monkeypatch.setattr(sys, "argv", ["gpu_suite.py"])
    device = {"device_kind": "Some GPU"}

    def measured(hang: str, resume: bool) -> tuple[int, list[dict], set[str]]:
        lab = stand_in(tmp_path, modules, monkeypatch, hang)
        started: list[str] = []
        start = lab.start
        lab.start = lambda task, **how: (
            started.extend(v["kernel"] for v in how.get("variants", ())) or start(task, **how)
        )
        parts = [lab_module.Part(kernels.smoke, 60)]
        status = lab_module.measure(
            "suite", parts, lab, device, tmp_path / "results", lab.deadline - 90, resume=resume
        )
        (results,) = (path for path in (tmp_path / "results").glob("suite_*.json"))
        return (
            status,
            json.loads(results.read_text(encoding="utf-8"))["tables"]["Smoke"]["rows"],
            set(started),
        )

    status, _, started = measured("yes", resume=False)
    assert status == 1 and started == {"forward", "backward", "pair"}
    status, rows, started = measured("", resume=True)
    assert (
        status == 0
        and started == {"backward"}
        and {row["kernel"] for row in rows} == {"forward", "backward", "pair"}
    )
    status, rows, started = measured("", resume=True)
    assert status == 0 and not started and len(rows) == 3
    monkeypatch.setattr(modules["gpu_resume"], "kernels_digest", lambda: "other kernels")
    assert measured("", resume=True)[2] == {"forward", "backward", "pair"}


SANITIZER = """#!{python}
import subprocess, sys
log = sys.argv[sys.argv.index("--log-file") + 1]
bad = sys.argv[2] == "memcheck" and '"pair"' in sys.argv[-1]
lines = ["========= Invalid __global__ write of size 16 bytes"] if bad else []
lines += ["========= ERROR SUMMARY: %d errors" % bad]
open(log, "w").write("\\n".join(lines))
sys.exit(subprocess.run(sys.argv[sys.argv.index("--log-file") + 2 :]).returncode)
"""


def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """A program of this name on the path."""
    (tmp_path / name).write_text(text.replace("{python}", sys.executable), encoding="utf-8")
    (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_the_sanitizer_names_the_kernel_and_the_error(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path, monkeypatch, "compute-sanitizer", SANITIZER)
    lab = stand_in(tmp_path, modules, monkeypatch)
    ((_, rows, _),) = modules["gpu_kernels"].sanitizer(lab)
    assert {(row["tool"], row["kernel"], row["errors"]) for row in rows if row["errors"]} == {
        ("memcheck", "pair", 1)
    }
    assert len(rows) == 9
    assert lab.problems == [
        "memcheck of pair: 1 errors, first Invalid __global__ write of size 16 bytes"
    ]


QUERIED = """gpu__time_duration  Counter ns
launch__registers_per_thread
sm__pipe_tensor_cycles_active  Counter
smsp__average_warps_issue_stalled_wait_per_issue_active  Ratio
smsp__average_warps_issue_stalled_barrier_per_issue_active  Ratio
"""
COUNTED = """==PROF== Connected to process 7
"ID","Kernel Name","gpu__time_duration.sum","launch__registers_per_thread",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","","ns","register/thread","%","inst","inst"
"0","flash_attention_bwd_mosaic_gpu","7,500,000","168","81.5","0.25","2.5"
"""
NCU = f"""#!{{python}}
import sys
if "--query-metrics" in sys.argv:
    print({QUERIED!r})
    sys.exit()
assert "dram__throughput" not in sys.argv[sys.argv.index("--metrics") + 1]
open(sys.argv[sys.argv.index("--log-file") + 1], "w").write({COUNTED!r} if "regex:flash_attention_bwd" in sys.argv else "==ERROR== no")
"""


def test_counters_of_each_headline_kernel(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path, monkeypatch, "ncu", NCU)
    lab = stand_in(tmp_path, modules, monkeypatch)
    ((_, rows, _),) = modules["gpu_kernels"].ncu(lab)
    backward = next(row for row in rows if row["way"] == "bwd")
    wanted = {
        "ms": 7.5,
        "registers": 168,
        "tensor_active": 81.5,
        "stalls": "wait 2.50, barrier 0.25",
    }
    assert wanted.items() <= backward.items()
    assert all(row["error"] == "==ERROR== no" for row in rows if row["way"] == "fwd")
    assert len(lab.problems) == len(rows) / 2


def test_without_the_tools_the_parts_say_so(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, lab = modules["gpu_kernels"], stand_in(tmp_path, modules, monkeypatch)
    monkeypatch.setattr(kernels.shutil, "which", lambda *how, **more: None)
    assert [*kernels.ncu(lab), *kernels.sanitizer(lab)] == []
    assert (
        lab.left_out == ["ncu is not installed", "compute-sanitizer is not installed"]
        and not lab.problems
    )


def test_the_variants_of_the_forward_compile_without_spills(modules: dict[str, ModuleType]) -> None:
    """Each is a candidate that passed for its head dims and masks, and no schedule or size that
    passed is missing."""
    variants = importlib.import_module("attention_variants")
    for head_dim, mask in itertools.product((64, 128), ("causal", "full")):
        dims = (head_dim, head_dim)
        stated = [variants.VARIANTS[name] for name in variants.names_for(head_dim, mask)]
        found = {ForwardTiles(**one.tiles) for one in stated if one.kernel == "forward"}
        passed = {one.tiles for one in autotune.passing("forward", dims, mask)}
        assert found <= passed
        assert found >= passed & {*autotune.forward_variants(dims)}


def test_the_smoke_part_runs_variants_at_their_shapes(modules: dict[str, ModuleType]) -> None:
    variants = importlib.import_module("attention_variants").VARIANTS
    for name, case in importlib.import_module("kernel_worker").SMOKE.values():
        if variants[name].kernel == "forward":
            assert case.H in variants[name].head_dims
            assert ("causal" if case.static.get("causal", True) else "full") in variants[name].masks


def test_a_variant_with_other_norms_is_a_problem(modules: dict[str, ModuleType]) -> None:
    shape = {"mask": "full", "head_dim": 64, "seq": 16, "way": "fwd"}
    rows = [
        shape | {"peer": "unserved"},
        shape | {"peer": "first", "out_norm": 1.0},
        shape | {"peer": "alike", "out_norm": 1.002},
        shape | {"peer": "odd", "out_norm": 1.01},
        shape | {"peer": "elsewhere", "way": "bwd", "dq_norm": 2.0},
    ]
    assert modules["gpu_kernels"].odd_norms(rows) == [
        "odd, full 64 16: out_norm is 1.01, of first 1"
    ]
