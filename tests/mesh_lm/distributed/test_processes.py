"""Real processes over gloo: the run does not depend on their layout, and the mistakes of one of
them are clear errors."""

import argparse
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from processes import PATIENCE, ROOT, ended, environment, wait_for
from slurm import cluster, why_not

from mesh_lm.network.wire import free_port

WORKER = Path(__file__).with_name("worker.py")
FIELDS = {
    "model.n_layers": 2,
    "model.d_model": 32,
    "model.n_heads": 4,
    "model.seq_len": 32,
    "model.vocab_size": 512,
    "model.dropout": 0.1,
    "data.tokenizer_vocab": 512,
    "train.global_batch": 16,
    "train.microbatches": 2,
    "train.steps": 8,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "optimizer.warmup_steps": 2,
    "launch.compile_cache": "",
    "launch.timeout": PATIENCE,
    "data.max_epochs": 0,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "rules": "hsdp+megatron",
}


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    directory = tmp_path_factory.mktemp("text")
    (directory / "corpus.txt").write_text(inspect.getsource(argparse), encoding="utf-8")

    def make(**changes: object) -> list[str]:
        values = FIELDS | {"data.path": directory / "corpus.txt", "data.cache": directory / "cache"}
        values |= {name.replace("__", "."): value for name, value in changes.items()}
        return [
            f"--config={ROOT}/configs/gpt_tiny.py",
            *(f"--config.{name}={value}" for name, value in values.items()),
        ]

    return make


def local(processes: int, devices: int, script: Path, *arguments: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "mesh_lm.launch",
        f"--per-node={processes}",
        f"--devices={devices}",
        str(script),
        *arguments,
    ]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def outcome(output: Path) -> tuple[dict, np.ndarray]:
    """Returns the digests that the worker wrote, and the losses of train.py."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    losses = np.array([row["loss"] for row in rows if "loss" in row])
    bits = json.loads((output / "bits.json").read_text(encoding="utf-8"))
    return bits, losses


@pytest.fixture(scope="module")
def alone(
    fields: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict, np.ndarray]:
    """One process with all eight devices."""
    output = tmp_path_factory.mktemp("alone")
    process = local(1, 8, WORKER, str(output), *fields())
    out = ended(process)
    assert process.returncode == 0, out
    return outcome(output)


def assert_same_run(
    actual: tuple[dict, np.ndarray], expected: tuple[dict, np.ndarray], processes: int
) -> None:
    bits, losses = actual
    expected_bits, expected_losses = expected
    assert bits["processes"] == processes
    assert bits["devices"] == 8
    assert expected_bits["processes"] == 1
    for part in ("init", "batches", "masks"):
        assert bits[part] == expected_bits[part], part
    assert len(losses) == 8
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6, atol=0)


@pytest.mark.exhaustive
def test_two_processes_are_one_run(
    fields: Callable[..., list[str]], alone: tuple[dict, np.ndarray], tmp_path: Path
) -> None:
    process = local(2, 4, WORKER, str(tmp_path), *fields())
    out = ended(process)
    assert process.returncode == 0, out
    assert_same_run(outcome(tmp_path), alone, 2)


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_four_processes(
    fields: Callable[..., list[str]], alone: tuple[dict, np.ndarray], tmp_path: Path, times: int
) -> None:
    """The same layout gives the same bits, losses included."""
    runs = []
    for n in range(times):
        process = local(4, 2, WORKER, str(tmp_path / str(n)), *fields())
        out = ended(process)
        assert process.returncode == 0, out
        assert out.count("step 8/8") == 1, "another process than the first speaks"
        runs.append(outcome(tmp_path / str(n)))
        assert_same_run(runs[-1], alone, 4)
    for _, losses in runs[1:]:
        np.testing.assert_array_equal(losses, runs[0][1])


@pytest.mark.slow
def test_two_nodes_of_slurm(
    fields: Callable[..., list[str]], alone: tuple[dict, np.ndarray], tmp_path: Path
) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    directory = tmp_path / "slurm"
    directory.mkdir()
    with cluster(directory) as slurm:
        command = [
            "srun",
            "-N2",
            "-n2",
            sys.executable,
            str(WORKER),
            str(tmp_path / "run"),
            *fields(),
        ]
        run = subprocess.run(
            command,
            env=environment()
            | slurm
            | {"XLA_FLAGS": environment()["XLA_FLAGS"], "JAX_NUM_CPU_DEVICES": "4"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    assert_same_run(outcome(tmp_path / "run"), alone, 2)


@pytest.mark.exhaustive
def test_two_nodes_of_slurm_under_launchers(
    fields: Callable[..., list[str]], alone: tuple[dict, np.ndarray], tmp_path: Path
) -> None:
    """One launcher per node; a worker is killed during the run, which ends with the same result."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    directory = tmp_path / "slurm"
    directory.mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        "import os, runpy, signal, sys, threading\n"
        "if os.environ['MESH_LM_GENERATION'] + os.environ['MESH_LM_PROCESS_INDEX'] == '11':\n"
        "    threading.Timer(5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        f"sys.path[0], sys.argv[0] = {str(WORKER.parent)!r}, {str(WORKER)!r}\n"
        f"runpy.run_path({str(WORKER)!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    with cluster(directory) as slurm:
        launch = [
            sys.executable,
            "-m",
            "mesh_lm.launch",
            "--devices=4",
            str(script),
            str(tmp_path / "run"),
            *fields(),
        ]
        run = subprocess.run(
            ["srun", "-N2", "--ntasks-per-node=1", *launch],
            env=environment() | slurm | {"XLA_FLAGS": environment()["XLA_FLAGS"]},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "process 1 on node 1" in run.stderr, run.stdout + run.stderr
    assert "restart 1 of 3" in run.stderr, run.stdout + run.stderr
    assert_same_run(outcome(tmp_path / "run"), alone, 2)


@pytest.mark.slow
def test_sigterm_to_one_process_stops_all_at_one_step(
    fields: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Only the second process gets the signal; all save at the same step, exit with 99, and the run
    continues from there."""
    arguments = fields(output=tmp_path, train__steps=100_000, train__eval_every=7)
    process = local(2, 4, ROOT / "train.py", *arguments)
    metrics = tmp_path / "metrics.jsonl"
    wait_for(
        lambda: metrics.exists() and len(metrics.read_text(encoding="utf-8").splitlines()) >= 4,
        process,
    )
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(children[-1]), signal.SIGTERM)
    out = ended(process)
    assert process.returncode == 99, out
    (step,) = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert f"stopped by SIGTERM after step {step}; the same command continues from there" in out

    process = local(2, 4, ROOT / "train.py", *fields(output=tmp_path, train__steps=step + 1))
    out = ended(process)
    assert process.returncode == 0, out
    assert f"resumed at step {step}" in out, out


@pytest.mark.exhaustive
def test_two_processes_start_from_another_run(
    fields: Callable[..., list[str]], tmp_path: Path
) -> None:
    for changes in (
        {"output": tmp_path / "first"},
        {"output": tmp_path / "tuned", "init_from": tmp_path / "first"},
    ):
        process = local(2, 4, ROOT / "train.py", *fields(train__steps=1, **changes))
        out = ended(process)
        assert process.returncode == 0, out
        assert "step 1/1" in out, out
        assert "restart" not in out, out


ENDS = """
import sys
from mesh_lm import distributed
def main(argv):
    distributed.print_on_process0("a line")
    return 1 // int(argv[0]) - 1
sys.exit(distributed.run(main, sys.argv[1:]))
"""


@pytest.mark.parametrize(("divisor", "status"), [("1", 0), ("0", 70)])
def test_a_log_that_takes_no_more_changes_no_status(divisor: str, status: int) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-c", ENDS, divisor],
            env=environment(),
            stdout=full,
            stderr=full,
            timeout=PATIENCE,
        )
    assert done.returncode == status


@pytest.mark.slow
def test_configs_that_differ_are_told_apart(
    fields: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The error comes before any device is used. The script gives each process another seed."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "sys.argv.append(f\"--config.seed={os.environ['MESH_LM_PROCESS_INDEX']}\")\n"
        f"exec(compile(open({str(ROOT / 'train.py')!r}).read(), 'train.py', 'exec'))\n",
        encoding="utf-8",
    )
    process = local(2, 1, script, *fields(output=tmp_path / "run"))
    out = ended(process)
    assert process.returncode == 1, out
    assert "Traceback" not in out, out
    assert out.count("config.seed: 0 on process 0, 1 there") == 2, out
    assert not (tmp_path / "run").exists()


def apart(arguments: list[str], *environments: dict[str, str]) -> list[tuple[int, str]]:
    """Returns (status, output) of processes without a launcher, as on several hosts."""
    shared = {
        "MESH_LM_COORDINATOR": f"127.0.0.1:{free_port()}",
        "MESH_LM_PROCESSES": str(len(environments)),
        "JAX_NUM_CPU_DEVICES": "4",
    }
    shared["MESH_LM_SECRET"] = "these hosts share no home directory"
    running = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *arguments],
            env=environment() | shared | {"MESH_LM_PROCESS_INDEX": str(i)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, variables in enumerate(environments)
    ]
    try:
        outs = [ended(process) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, out) for process, out in zip(running, outs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("absent", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_what_one_host_lacks_ends_all(
    fields: Callable[..., list[str]], tmp_path: Path, absent: int
) -> None:
    """The run fails long before JAX's timeout, and both processes print the reason."""
    homes = [tmp_path / "a", tmp_path / "b"]
    for home in homes:
        home.mkdir()
    (homes[1 - absent] / "corpus.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    arguments = fields(output=tmp_path / "run", data__path="~/corpus.txt", data__cache="~/cache")
    for status, out in apart(arguments, *({"HOME": str(home)} for home in homes)):
        assert status == 1, out
        assert "Traceback" not in out, out
        assert "data.path=~/corpus.txt: no such data file or directory" in out, out


@pytest.mark.slow
def test_an_output_that_hosts_do_not_share_is_refused(
    fields: Callable[..., list[str]], tmp_path: Path
) -> None:
    homes = [tmp_path / "a", tmp_path / "b"]
    for home in homes:
        home.mkdir()
    for status, out in apart(fields(output="~/run"), *({"HOME": str(home)} for home in homes)):
        assert status == 1, out
        assert "Traceback" not in out, out
        assert (
            "is not the directory that process 0 sees; set output to a directory that all hosts "
            "share"
        ) in out, out


@pytest.mark.slow
def test_config_files_that_differ_inside_are_told_apart(
    fields: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Two files with the same name and equal configs, but different code."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text = (ROOT / "configs" / "gpt_tiny.py").read_text(
            encoding="utf-8"
        ) + f"\nNOTE = {name!r}\n"
        (tmp_path / name / "mine.py").write_text(text, encoding="utf-8")
    arguments = ["--config=~/mine.py", *fields(output=tmp_path / "run")[1:]]
    for status, out in apart(arguments, *({"HOME": str(tmp_path / name)} for name in ("a", "b"))):
        assert status == 1, out
        assert "code.mine.py: " in out, out


SET = """
from mesh_lm.model.dense import DenseLayer


class Layer(DenseLayer):
    def __call__(self, x, ctx):
        for word in {"a", "set", "of", "strings", "has", "another", "order", "in", "each", "process"}:
            x = x + 0.125 * len(word)
        return super().__call__(x, ctx)
"""


@pytest.mark.exhaustive
def test_programs_that_differ_are_told_apart(
    fields: Callable[..., list[str]], tmp_path: Path
) -> None:
    """A layer that iterates over a set is another program under another hash seed: an error, not
    two processes that wait for each other."""
    (tmp_path / "mine.py").write_text(SET, encoding="utf-8")
    arguments = fields(output=tmp_path / "run", model__block=f"{tmp_path / 'mine.py'}:Layer")
    for status, out in apart(arguments, {"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}):
        assert status == 1, out
        assert "Traceback" not in out, out
        assert "the processes do not agree on the program of the training step: " in out, out
        assert " on process 1 on " in out, out


def test_the_launcher_takes_a_module(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "mesh_lm.launch", "--per-node", "2", "-m", "this"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert process.returncode == 0
    assert process.stdout.count("Namespaces are one honking great idea") == 2
    process = subprocess.run(
        [sys.executable, "-m", "mesh_lm.launch", "--per-node=2"],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1
    assert "name a Python script, such as train.py" in process.stderr


def test_the_launcher_ends_when_one_process_fails(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        (
            "import os, time\nif os.environ['MESH_LM_PROCESS_INDEX'] == '1': raise "
            "SystemExit(1)\ntime.sleep(600)\n"
        ),
        encoding="utf-8",
    )
    process = local(2, 1, script)
    ended(process)
    assert process.returncode == 1
