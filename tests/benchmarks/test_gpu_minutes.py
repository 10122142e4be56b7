"""Blocks on a lent GPU: the budget, what is skipped and resumed, and what goes wrong, with
stand-ins that take milliseconds."""

import fcntl
import gzip
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from processes import PATIENCE, ROOT, environment
from rehearsal import suite

COMPILE_BUDGET = 0


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The files of the session that do not import JAX."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = (
        "gpu_session",
        "gpu_minutes",
        "gpu_resume",
        "gpu_trace",
        "gpu_training",
        "gpu_twins",
        "gpu_lab",
    )
    names += ("gpu_predictions", "record", "rehearse")
    return {name: importlib.import_module(name) for name in names}


STAND_IN = """
import json, os, sys, time
name = sys.argv[1]
def tell(kind, **values):
    print(kind, json.dumps(values), flush=True)
row = {"block": name, "n": 1}
if name != "crashes":
    tell("TABLE", title=name, rows=[row], note="")
if name == "crashes":
    sys.exit("RuntimeError: illegal address")
if name == "hangs":
    if not os.fork():
        time.sleep(60)
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(60)
if name == "wrong":
    tell("DONE", problems=["the loss does not fall"], left_out=[])
elif name != "hangs":
    tell("TABLE", title=name, rows=[row, {"block": name, "n": 2}], note="")
    tell("DONE", problems=[], left_out=[], found={"seen": name})
"""


class Stage:
    """A session of stand-ins in a directory."""

    def __init__(self, modules: dict[str, ModuleType], directory: Path) -> None:
        self.modules, self.directory, self.started = modules, directory, []
        self.stand_in = directory / "stand_in.py"
        self.stand_in.write_text(STAND_IN, encoding="utf-8")

    def session(self, seconds: float, resume: bool = False, kind: str = "Some GPU") -> Any:
        output = self.directory / "results"
        record = self.modules["record"].Record("gpu_minutes", output, kind=kind)
        earlier = self.modules["gpu_resume"].Earlier(
            output / "gpu_minutes.parts.json", kind, resume
        )
        session = self.modules["gpu_session"]
        return session.Session(
            session.Results(record, earlier),
            time.monotonic() + seconds,
            self.start,
            self.directory / "log",
        )

    def start(self, block: Any, limit: float, found: dict, stderr: Any) -> subprocess.Popen[bytes]:
        self.started.append((block.name, dict(found)))
        command = [
            sys.executable,
            "-S",
            "-E",
            str(self.stand_in),
            block.name,
            str(self.directory / "pid"),
        ]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )

    def blocks(self, **seconds: tuple[float, float]) -> list[Any]:
        """Blocks of these names, with their least and most seconds."""

        def run() -> None:
            raise AssertionError("stand-ins run in processes")

        made = []
        for name, (least, most) in seconds.items():
            function = type(run)(run.__code__, {}, name)
            made.append(self.modules["gpu_session"].Block(function, least, most))
        return made


@pytest.fixture
def stage(modules: dict[str, ModuleType], tmp_path: Path) -> Stage:
    return Stage(modules, tmp_path)


def test_rows_are_printed_and_written_and_values_are_passed_on(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    session = stage.session(60)
    assert session.run(stage.blocks(first=(1, 30), second=(1, 30))) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(row["block"], row["table"], row["n"]) for row in rows] == [
        ("first", "first", 1), ("first", "first", 2), ("second", "second", 1),
        ("second", "second", 2),
    ]  # fmt: skip
    assert stage.started == [("first", {}), ("second", {"seen": "first"})]
    (results,) = (stage.directory / "results").glob("gpu_minutes_*.json")
    tables = json.loads(results.read_text(encoding="utf-8"))["tables"]
    assert [row["status"] for row in tables["Blocks"]["rows"]] == ["ok", "ok"] and len(
        tables["second"]["rows"]
    ) == 2


def test_a_block_that_does_not_fit_is_skipped_and_a_shorter_one_runs(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    session = stage.session(20)
    assert session.run(stage.blocks(long=(100, 200), short=(1, 10))) == 0
    assert [name for name, _ in stage.started] == ["short"]
    assert "long: skipped, it needs 100 s, and 20 s are left" in capsys.readouterr().out


def test_a_block_that_hangs_is_killed_with_its_processes_and_the_next_runs(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    session = stage.session(60)
    began = time.monotonic()
    assert session.run(stage.blocks(hangs=(0.5, 1.0), next=(0.5, 30))) == 1
    assert time.monotonic() - began < 20
    hangs, following = session.summary
    assert (hangs["status"], following["status"]) == ("STOPPED", "ok")
    assert hangs["problems"] == "stopped at its limit of 1 s, with all of its processes"
    assert '"table": "hangs"' in capsys.readouterr().out, "the row that it printed before is kept"
    group = int((stage.directory / "pid").read_text(encoding="utf-8"))
    deadline = time.monotonic() + PATIENCE
    while alive(group):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(group: int) -> list[str]:
    """The processes of a group that have not ended: a zombie has, even if nobody has waited for
    it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(path.parent.name)
    return found


def test_a_block_that_crashes_or_finds_a_problem_says_so_in_one_line(stage: Stage) -> None:
    session = stage.session(60)
    assert session.run(stage.blocks(crashes=(0.5, 30), wrong=(0.5, 30), good=(0.5, 30))) == 1
    assert [(row["status"], row["problems"]) for row in session.summary] == [
        ("FAILED", "exit status 1: RuntimeError: illegal address"),
        ("FAILED", "the loss does not fall"), ("ok", ""),
    ]  # fmt: skip


def test_a_resumed_session_runs_what_is_missing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = stage.blocks(first=(0.1, 30), wrong=(0.1, 30))
    stage.session(60).run(blocks)
    stage.started.clear()
    again = stage.session(60, resume=True)
    assert again.run(blocks) == 1 and [name for name, _ in stage.started] == ["wrong"]
    assert (
        again.found == {"seen": "first"}
        and len(again.results.record.data["tables"]["first"]["rows"]) == 2
    )
    for how in ({"kind": "Another GPU"}, {"resume": False}):
        stage.started.clear()
        stage.session(60, **({"resume": True} | how)).run(blocks[:1])
        assert [name for name, _ in stage.started] == ["first"], how
    monkeypatch.setattr(stage.modules["gpu_resume"], "kernels_digest", lambda: "other kernels")
    stage.started.clear()
    stage.session(60, resume=True).run(blocks[:1])
    assert [name for name, _ in stage.started] == ["first"]


def test_on_a_full_disk_the_blocks_run_and_one_line_says_so(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    """Writing the results' temporary files fails as it does on a full disk: they are links to
    /dev/full."""
    session = stage.session(60)
    output = stage.directory / "results"
    output.mkdir()
    for name in (f".{session.results.record.stem}.json.part", "gpu_minutes.parts.part"):
        (output / name).symlink_to("/dev/full")
    assert session.run(stage.blocks(first=(0.1, 30), second=(0.1, 30))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "cannot write" in line] == [
        (
            "cannot write results to results/: No space left on device; the rows are here, on the "
            "standard output"
        )
    ]
    assert (
        len([line for line in lines if line.startswith("{")]) == 4 and "second: ok (0 s)" in lines
    )


def test_a_session_that_ends_ends_its_block(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """A block waits for the end of its standard input, which the session holds."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport gpu_session, time\n"
    )
    code += "gpu_session.end_with_parent()\nprint('up', flush=True)\ntime.sleep(60)"
    block = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert block.stdin and block.stdout and block.stdout.readline()
    block.stdin.close()
    assert block.wait(PATIENCE) == -9
    block.stdout.close()


def minutes(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return suite("gpu_minutes", *arguments, **more)


def test_a_second_start_is_refused_in_one_line(tmp_path: Path) -> None:
    with open(tmp_path / ".gpu_minutes.lock", "w", encoding="utf-8") as file:
        file.write("1234")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        done = minutes(f"--output={tmp_path}")
    wanted = (
        "not started: process 1234 is measuring with this --output; wait for it, or name another\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, wanted, "")


def test_without_a_gpu_and_with_a_broken_one_it_says_so_in_one_line(tmp_path: Path) -> None:
    missing = minutes(f"--output={tmp_path}")
    assert missing.returncode == 0 and missing.stdout.startswith(
        "no GPU that JAX can use here (platform cpu)"
    )
    broken = minutes(f"--output={tmp_path}", JAX_PLATFORMS="cuda")
    assert broken.returncode == 1 and broken.stdout.startswith("JAX cannot use the device: probe")
    for done in (missing, broken):
        assert done.stdout.count("\n") == 1 and not done.stderr, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".gpu_minutes.lock"]


def test_mistakes_on_the_command_line(tmp_path: Path) -> None:
    for words, said in (
        ("--blocks=train", "no block 'train'; there are training, "),
        ("--seconds=-1", "invalid seconds_of value"),
    ):
        done = minutes(words, f"--output={tmp_path}")
        assert done.returncode == 2 and said in done.stderr


GPU_NAMES = {
    "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_TNT": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
    "gemm_fusion_dot_1234": "matmul",
    "cublasLt::splitKreduce_kernel": "matmul",
    "grouped_matmul_mosaic_gpu": "matmul",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention",
    "flash_attention_forward_mosaic_gpu": "attention",
    "flash_attention_bwd_mosaic_gpu": "attention",
    "MemcpyD2D": "copy",
    "input_transpose_fusion_7": "copy",
    "loop_add_fusion_12": "elementwise",
    "input_reduce_fusion": "elementwise",
    "wrapped_convert": "elementwise",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "all-reduce",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": "reduce-scatter",
    "ncclDevKernel_SendRecv": "collective-permute",
}


def test_kernels_by_the_kinds_of_the_lab(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """From a trace with the lines that a GPU's has: streams count; lines that repeat their events
    by operation, and the host, do not."""
    kernel = modules["gpu_trace"].Kernel
    assert {name: kernel(name, "", 0, 1).kind for name in GPU_NAMES} == GPU_NAMES
    assert kernel("sm90_0x7f", "custom-call.3 gemm", 0, 1).kind == "matmul"

    def meta(kind: str, pid: int, tid: int, name: str) -> dict:
        return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}

    events = [meta("process_name", 1, 0, "/device:GPU:0"), meta("process_name", 7, 0, "/host:CPU")]
    events += [
        meta("thread_name", 1, 14, "Stream #14(Compute)"),
        meta("thread_name", 1, 15, "XLA Ops"),
        meta("thread_name", 7, 1, "python"),
    ]
    ran = [
        (14, "nvjet_hsh", 0.0, 60.0),
        (14, "loop_add_fusion", 50.0, 30.0),
        (14, "nvjet_hsh", 90.0, 10.0),
        (15, "dot.1", 0.0, 60.0),
    ]
    events += [
        {"ph": "X", "pid": 1, "tid": tid, "ts": ts, "dur": dur, "name": name}
        for tid, name, ts, dur in ran
    ]
    events += [
        {
            "ph": "X",
            "pid": 7,
            "tid": 1,
            "ts": 0.0,
            "dur": 500.0,
            "name": "dot",
            "args": {"hlo_op": "dot.1"},
        }
    ]
    path = tmp_path / "plugins/profile/now/vm.trace.json.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    kernels = modules["gpu_trace"].kernels(tmp_path)
    predicted = {"matmul": {"ms": 0.035, "kernels": 2}, "attention": {"ms": 0.01, "kernels": 1}}
    rows = {
        row["kind"]: row for row in modules["gpu_trace"].by_kind(kernels, predicted, step_ms=0.12)
    }
    assert (rows["matmul"]["ms"], rows["matmul"]["kernels"], rows["matmul"]["ratio"]) == (
        pytest.approx(0.07),
        2,
        pytest.approx(2.0),
    )
    assert rows["attention"]["kernels"] == 0 and rows["elementwise"]["predicted_ms"] is None
    assert rows["no kernel"]["ms"] == pytest.approx(0.03), (
        "kernels beside each other are counted once"
    )
    assert modules["gpu_trace"].longest(kernels)[0]["times"] == 2
    assert modules["gpu_trace"].kernels(tmp_path / "none") == []


def test_ratios_of_turns(modules: dict[str, ModuleType]) -> None:
    twins = modules["gpu_twins"]
    shape = {"fields": {"seq_len": 100}, "flops_per_token": 2.0, "peak_flops": 8e3}
    turns = {
        name: [
            {"compile_s": 1.0},
            *({"round": i, "step_ms": ms, "watts": 600.0} for i, ms in enumerate(times)),
        ]
        for name, times in ((twins.OURS, (100.0, 110.0, 90.0)), (twins.THEIRS, (120.0, 110.0)))
    }
    ours, theirs = twins.compared("gpt", shape, 2, turns, {"predicted_step_s": 0.08})
    assert (ours["tokens"], ours["tokens_per_s"], ours["mfu"]) == (200, 2000.0, 0.5)
    assert (ours["ratio"], ours["lowest_ratio"], ours["highest_ratio"]) == (
        pytest.approx(1.1),
        1.0,
        1.2,
    )
    assert (ours["predicted_ms"], ours["measured_by_predicted"]) == (
        80.0,
        1.25,
    ) and "predicted_ms" not in theirs
    assert ours["spread"] == 0.2 and ours["joules_per_token"] == 0.3


def test_a_prediction_is_of_the_step_that_is_measured(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest file of the GPU's kind serves; none, or one of another step, is left out with the
    command that makes it."""
    predictions, results = modules["gpu_predictions"], tmp_path / "results"
    monkeypatch.setattr(predictions, "RESULTS", results)
    lab = modules["gpu_lab"].Lab(tmp_path, dry_run=False)
    lab.device = {"device_kind": "NVIDIA H200"}
    command = "python benchmarks/gpu_predictions.py --target=h200"
    assert predictions.predicted(lab, "trace") == {} and lab.left_out == [
        f"no prediction for h200: {command}"
    ]
    results.mkdir()
    programs = predictions.programs(lab)
    assert set(programs) == {"trace", "steps_124m", "steps_1_3b"}
    for day, seconds in (("2026-11-26", 3.0), ("2026-11-27", 2.0)):
        made = {
            block: {"program": program, "prediction": {"predicted_step_s": seconds}}
            for block, program in programs.items()
        }
        made["steps_124m"]["program"] = made["steps_124m"]["program"] | {"rules": "zero3"}
        (results / f"gpu_predictions_{day}_h200.json").write_text(
            json.dumps({"predictions": made}), encoding="utf-8"
        )
    lab.left_out.clear()
    assert predictions.predicted(lab, "trace") == {"predicted_step_s": 2.0} and not lab.left_out
    assert predictions.predicted(lab, "steps_124m") == {}
    assert lab.left_out == [
        f"the step of steps_124m has changed since it was predicted for h200: {command}"
    ]


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_step_is_predicted_without_a_gpu(tmp_path: Path) -> None:
    done = suite(
        "gpu_predictions",
        "--dry-run",
        f"--output={tmp_path}",
        "--target=h200",
        patience=4 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = tmp_path.glob("gpu_predictions_*_h200.json")
    made = json.loads(results.read_text(encoding="utf-8"))["predictions"]["trace"]["prediction"]
    assert made["target"] == "h200" and made["fits"] and made["predicted_step_s"] > 0
    assert made["kinds"]["matmul"]["kernels"] > 0


@pytest.fixture
def page() -> str:
    return (ROOT / "benchmarks" / "gpu_minutes.md").read_text(encoding="utf-8")


def test_the_page_has_the_blocks(modules: dict[str, ModuleType], page: str) -> None:
    """In order, with their seconds; each is of one to four minutes."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    blocks = modules["gpu_minutes"].BLOCKS
    assert [(name, int(least), int(most)) for name, least, most in rows] == [
        (block.name, block.least, block.most) for block in blocks
    ]
    assert all(block.least < block.most <= 240 for block in blocks)
    (command,) = re.findall(r"```command\n(.+)\n```", page)
    assert command == (
        f"python benchmarks/gpu_minutes.py --seconds={modules['gpu_minutes'].SECONDS:g} "
        "--output=$RESULTS --resume"
    )


def test_the_wheels_are_those_that_the_image_lacks(
    modules: dict[str, ModuleType], page: str
) -> None:
    (block,) = re.findall(r"```wheels\n(.+?)```", page, re.DOTALL)
    wheels = {
        word.partition("==")[0].replace("-", "_")
        for word in block.partition("-d wheels")[2].split()
        if word != "\\"
    }
    assert wheels == set(modules["rehearse"].LACKING)
    # of the image
    needed = set(modules["gpu_training"].NEEDED_BY_TRAIN) - {"tokenizers", "matplotlib"}
    assert needed <= wheels


def test_the_image_hides_packages_from_imports_and_from_questions(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    code = """
import importlib.util, json
found = {name: importlib.util.find_spec(name) is not None for name in ("grain", "tyro", "jax", "numpy")}
try:
    import tyro
except ModuleNotFoundError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""
    bare = modules["rehearse"].image(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=bare,
        timeout=PATIENCE,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "grain": False,
        "tyro": False,
        "jax": True,
        "numpy": True,
        "error": "No module named 'tyro'",
    }


@pytest.mark.exhaustive
def test_every_block_is_rehearsed(tmp_path: Path) -> None:
    """All of them, on a CPU, with tiny shapes: the tables that each must fill, and what must be
    right in them."""
    command = [
        sys.executable,
        "benchmarks/gpu_minutes.py",
        "--dry-run",
        "--seconds=1000",
        f"--output={tmp_path}",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment(), timeout=4 * PATIENCE
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "imported though a GPU machine may lack it: nothing" in done.stdout
    (results,) = tmp_path.glob("gpu_minutes-dry-run_*.json")
    tables = {
        title: table["rows"]
        for title, table in json.loads(results.read_text(encoding="utf-8"))["tables"].items()
    }
    assert {row["status"] for row in tables["Blocks"]} == {"ok"} and all(tables.values())
    (run,) = tables["train.py"]
    assert (
        run["steps_made_twice"] >= 1
        and run["losses_that_differ"] == run["arrays_that_differ"] == 0
        and run["generated"]
    )
    assert {row["kind"] for row in tables["One step by kind"]} >= {
        "matmul",
        "elementwise",
        "no kernel",
    }
    assert {row["kernel"] for row in tables["Smoke"]} >= {"grouped matmul", "stacked matmul"}
    assert all(row["rel_out"] < 4e-3 and row["reruns_differ"] == 0 for row in tables["Correctness"])
    assert tables["Loaded and run"][0]["rel_difference"] == 0
    for name in ("gpt2_124m", "gpt_1_3b"):
        compared = {row["entrant"]: row for row in tables[f"{name} beside torch.compile"]}
        assert (
            len({row["tokens"] for row in compared.values()}) == 1
            and compared["mesh_lm"]["turns"] == 2
        )
        if importlib.util.find_spec("torch"):
            assert compared["mesh_lm"]["ratio"] > 0 and compared["torch.compile"]["turns"] == 2
    text = results.read_text(encoding="utf-8") + results.with_suffix(".md").read_text(
        encoding="utf-8"
    )
    assert all(private not in text for private in (str(ROOT), str(tmp_path), os.uname().nodename))
