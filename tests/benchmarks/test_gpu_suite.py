"""A dry run of the GPU suite on the CPU: time on a GPU is too rare to lose to a typo."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from gpt_175b import MATRICES, TOKENS
from processes import PATIENCE, ROOT
from rehearsal import rehearsed, suite

from pallas_kernels.stacked_matmul import GOAL

PARTS = [
    "smoke",
    "autotune",
    "headline",
    "variants",
    "correct",
    "grouped",
    "stacked",
    "peers",
    "end_to_end",
    "deviceless",
    "training",
]
BY_NAME = ["losses", "resume", "rerun", "layouts"]


@pytest.mark.exhaustive
def test_dry_run(tmp_path: Path) -> None:
    """CI rehearses the same parts as blocks of gpu_minutes.py."""
    tables, record = rehearsed("gpu_suite", tmp_path, PARTS)
    ours = {
        (row["mask"], row["kv_heads"])
        for title in ("Headline", "Attention, JAX")
        for row in tables[title]
        if row["peer"] == "mosaic"
    }
    assert ours == {("causal", 2), ("packed", 1)}
    assert all(row["ours"] for row in tables["Attention, compared"])
    assert {row["kernel"] for row in tables["Smoke"]} == {
        "backward, head dim 64",
        "grouped matmul",
        "stacked matmul",
    }
    ranked = {row["variant"] for row in tables["Variants, ranked"]}
    assert ranked == {"bwd tma", "fwd 128 rows, named barriers alone"}
    assert {row["peer"] for row in tables["Grouped matmul"]} == {"mosaic", "xla"}
    assert {row["form"] for row in tables["Stacked matmul"] if row["rel"] < 4e-3} == {
        "add",
        "product",
        "transposed",
    }
    assert {row["least"] for row in tables["Goals of the stacked matmul"]} == {0.95}
    assert {row["case"] for row in tables["Correctness"]} == {"head dim 64"}
    assert all(
        row["rel_out"] < 4e-3 and row["rel_dq"] < 8e-3 and row["reruns_differ"] == 0
        for row in tables["Correctness"]
    )
    steps = {(row["model"], row["attention"]): row["loss_first"] for row in tables["Train step"]}
    assert steps["gpt2_124m", "mosaic"] == pytest.approx(steps["gpt2_124m", "xla"], rel=1e-3)
    assert steps["llama3_8b", "mosaic"] == pytest.approx(steps["llama3_8b", "xla"], rel=1e-3)
    assert tables["Loaded and run"][0]["rel_difference"] == 0
    assert tables["train.py"][0]["steps_made_twice"] >= 1
    assert len(record["charts"]) == 2 and all(
        (tmp_path / chart).stat().st_size > 5000 for chart in record["charts"]
    )


@pytest.mark.exhaustive
def test_dry_run_of_the_parts_that_are_run_by_name(tmp_path: Path) -> None:
    tables, _ = rehearsed("gpu_suite", tmp_path, BY_NAME, f"--parts={','.join(BY_NAME)}")
    assert all(tables.values())
    assert {
        (row["differ_same_program"], row["differ_new_process"]) for row in tables["Bitwise reruns"]
    } == {(0, 0)}


@pytest.mark.parametrize("name", ["gpu_suite", "gpu_truth"])
def test_without_a_gpu_it_says_so(name: str, tmp_path: Path) -> None:
    done = suite(name, f"--output={tmp_path}")
    assert done.returncode == 0 and "no GPU that JAX can use" in done.stdout, (
        done.stdout + done.stderr
    )
    assert not list(tmp_path.iterdir())


def test_unknown_part(tmp_path: Path) -> None:
    done = suite("gpu_suite", "--parts=correct,speed", f"--output={tmp_path}")
    assert done.returncode == 2 and "no part 'speed'; there are smoke, autotune" in done.stderr


WORKERS = [
    "attention_worker",
    "device_worker",
    "gpu_worker",
    "kernel_worker",
    "multi_gpu_worker",
    "torch_peers",
]


def test_where_nothing_is_installed() -> None:
    """On a GPU machine this repository is not installed: a file that imports its packages must put
    them on the path first.

    Each file runs in a process that is forked from one with JAX.
    """
    names = [*WORKERS, "gpu_suite", "gpu_truth", "gpu_minutes"]
    if importlib.util.find_spec("torch") is None:
        names.remove("torch_peers")
    code = f"""
import os, runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
sys.path = [path for path in sys.path if path not in ("", {str(ROOT)!r})]
import flax, jax, jax.numpy, optax
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
assert not any(name.partition(".")[0] in ("mesh_lm", "sharding_rules", "pallas_kernels") for name in sys.modules)
failed = []
for name in {names!r}:
    child = os.fork()
    if not child:
        runpy.run_path({str(ROOT / "benchmarks")!r} + f"/{{name}}.py", run_name="imported")
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"cannot be imported: {{failed}}" if failed else 0)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=Path(sys.prefix),
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The suite's files that do not import JAX."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return {
        name: importlib.import_module(name)
        for name in ("gpu_attention", "gpu_kernels", "gpu_lab", "gpu_power")
    }


def test_the_stacks_are_those_of_gpt_175b(modules: dict[str, ModuleType]) -> None:
    kernels = modules["gpu_kernels"]
    assert kernels.MATRICES == MATRICES and {row["tokens"] for row in kernels.STACKS} == {TOKENS}
    assert len(kernels.STACKS) == 3 * 3 * len(MATRICES) and kernels.CUBLAS == GOAL


WORKER = """
import json, os, sys
for variant in json.loads(sys.argv[2])["variants"]:
    if variant["n"] == 2:
        print("ROW", json.dumps({**variant, "error": "illegal address"}), flush=True)
        os._exit(75)
    if variant["n"] == 4:
        os._exit(9)
    print("ROW", json.dumps({**variant, "square": variant["n"] ** 2}), flush=True)
"""


def test_a_variant_that_ends_its_process_costs_itself_alone(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    """With status 75 the worker reported the error; otherwise it is recorded here. New processes
    then take the rest, in each lane."""
    (tmp_path / "worker.py").write_text(WORKER, encoding="utf-8")
    lab = modules["gpu_lab"].Lab(tmp_path, dry_run=True, worker=str(tmp_path / "worker.py"))
    seen: list[int] = []
    lab.progress = lambda title, rows, note: seen.append(len(rows))
    rows = lab.spread("task", [{"n": n} for n in range(7)], lanes=2, title="Squares", patience=30)
    assert [row["n"] for row in rows] == list(range(7))
    assert [row.get("square") for row in rows] == [0, 1, None, 9, None, 25, 36]
    assert rows[2]["error"] == "illegal address" and "exit status 9" in rows[4]["error"]
    assert len(lab.problems) == 2 and seen


LOCKED = """
import sys, time
sys.path.insert(0, {benchmarks!r})
import gpu_lock
with getattr(gpu_lock, sys.argv[1])():
    print("in", time.monotonic(), flush=True)
    time.sleep(0.5)
    print("out", time.monotonic(), flush=True)
"""


def test_compilers_share_the_gpu_and_a_measurement_does_not(tmp_path: Path) -> None:
    code = LOCKED.format(benchmarks=str(ROOT / "benchmarks"))
    environment = os.environ | {"GPU_LOCK": str(tmp_path / "lock")}

    def start(kind: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, kind], env=environment, stdout=subprocess.PIPE, text=True
        )

    def told(process: subprocess.Popen[str]) -> float:
        assert process.stdout
        return float(process.stdout.readline().split()[1])

    first, second = start("compiling"), start("compiling")
    began = {"first": told(first)}
    measurement = start("measuring")
    began |= {"second": told(second), "measurement": told(measurement)}
    ended = {
        name: told(process)
        for name, process in (("first", first), ("second", second), ("measurement", measurement))
    }
    assert all(process.wait(PATIENCE) == 0 for process in (first, second, measurement))
    for name in ("first", "second"):
        assert ended[name] <= began["measurement"] or began[name] >= ended["measurement"], (
            began,
            ended,
        )


def test_figures_beside_each_other(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    attention, lab = modules["gpu_attention"], modules["gpu_lab"].Lab(tmp_path, dry_run=True)
    lab.found["roof"] = 800.0
    causal, packed = attention.HEADLINE[0], attention.SHAPES[0]
    rows = [
        causal
        | {
            "peer": "mosaic",
            "fwd_ms": 1.0,
            "fwd_tflops": 650.0,
            "bwd_tflops": 450.0,
            "out_norm": 1.0,
        },
        causal
        | {
            "peer": "cudnn",
            "fwd_ms": 1.0,
            "fwd_tflops": 500.0,
            "bwd_tflops": 500.0,
            "out_norm": 1.01,
        },
        causal | {"peer": "mgpu", "fwd_tflops": 300.0},
        causal | {"peer": "torch flash", "unserved": "no such backend"},
        packed | {"peer": "mosaic", "fwd_tflops": 620.0, "bwd_tflops": 400.0},
    ]
    forward, backward, *_ = attention.compared(lab, rows)
    assert (forward["best_peer"], forward["ratio"], forward["roof"]) == ("cudnn", 1.3, 0.8125)
    assert (backward["best_peer"], backward["ratio"], backward["mgpu"]) == ("cudnn", 0.9, None)
    met = {row["goal"]: row["met"] for row in attention.goals(rows)}
    assert met == {
        "causal fwd d128": True, "causal bwd d128": False, "full fwd d128": None,
        "full bwd d128": None, "causal fwd d64": None,
        "full fwd d64": None, "packed fwd d128": True, "packed bwd d128": False,
    }  # fmt: skip
    without = {row["goal"]: row["met"] for row in attention.goals(rows[:1])}
    assert without["causal fwd d128"] is None  # a goal beside cuDNN is not met without cuDNN
    (wrong,) = attention.unlike(rows)
    assert "out_norm is 1, of cudnn 1.01" in wrong


def test_power_without_a_driver(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with modules["gpu_power"].Power() as power:
        time.sleep(0.3)
        assert power.during(0, time.time()) == {}


def test_power_from_nvidia_smi(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '300.5, 1980, 50'\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sampled(modules["gpu_power"]) == {"watts": 300.5, "sm_mhz": 1980.0, "celsius": 50.0}


def test_power_from_pynvml(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with a stand-in with NVML's names; uses the instantaneous power if the driver
    reports it."""
    field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=700_000))
    calls = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetFieldValues": lambda gpu, fields: [field],
        "nvmlDeviceGetPowerUsage": lambda gpu: 500_000,
        "nvmlDeviceGetClockInfo": lambda gpu, which: 1980,
        "nvmlDeviceGetTemperature": lambda gpu, which: 50,
    }
    names = SimpleNamespace(
        **calls, NVML_FI_DEV_POWER_INSTANT=186, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0
    )
    monkeypatch.setitem(sys.modules, "pynvml", names)
    assert sampled(modules["gpu_power"])["watts"] == 700
    field.nvmlReturn = 3
    assert sampled(modules["gpu_power"])["watts"] == 500


def sampled(gpu_power: ModuleType) -> dict[str, float]:
    began = time.time()
    with gpu_power.Power() as power:
        while len(power.samples) < 4 and time.time() < began + PATIENCE:
            time.sleep(0.02)
        return power.during(began, time.time())
