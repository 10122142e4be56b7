"""SIGTERM or Ctrl-C to one process: at once with status 99 or 130 where no step is new, and else
after the step."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE, ROOT, ended, environment, wait_for

SCRIPT = """
import hashlib, json, os, pathlib, signal, sys, time
from mesh_lm.distributed import StopOnSignal
from mesh_lm.distributed.phases import Phases

directory = pathlib.Path(sys.argv[1])

def run(what, key):
    phases = Phases()
    with StopOnSignal(phases) as stop:
        phases.at("data" if what in ("prepare", "twice") else "compile")
        if what in ("step", "save"):
            phases.step = 1
        if what == "resumed":
            phases.saved = phases.step = 5
        (directory / key).touch()
        if what in ("prepare", "twice"):
            try:
                while True:
                    time.sleep(0.01)
            finally:
                time.sleep(1.0 if what == "twice" else 0.0)
                (directory / f"removed {key}").touch()
        elif what == "child":
            if not (child := os.fork()):
                (directory / "forked").touch()  # what arrives earlier, during the fork, is lost
                time.sleep(60)
                os._exit(1)
            while not (directory / "forked").exists():
                time.sleep(0.01)
            os.kill(child, signal.SIGTERM)
            os.waitpid(child, 0)
            time.sleep(0.5)
        elif what == "step":
            while not stop.poll():
                time.sleep(0.01)
            return 8 if stop.interrupted else 7
        else:  # as XLA: it does not return, and lets no handler of Python run
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    return 7

running = {}
terminal, behind = os.openpty()
by_term = [(what, signal.SIGTERM) for what in ("prepare", "compile", "resumed", "step", "child", "twice")]
by_interrupt = [(what, signal.SIGINT) for what in ("prepare", "compile", "step", "save", "ignored", "worker")]
for what, number in by_term + by_interrupt:
    key = f"{what} {number.name}"
    if not (pid := os.fork()):
        try:
            if what == "ignored":
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            if key == "compile SIGINT":
                os.dup2(behind, 1)
            if what == "worker":
                os.environ["MESH_LM_HEARTBEAT"] = "-1"
            code = run("step" if what == "ignored" else what, key)
        except SystemExit as left:
            code = left.code
        os._exit(code)
    running[key] = pid
while not all((directory / key).exists() for key in running):
    time.sleep(0.01)
asked = time.monotonic()
for key, pid in running.items():
    if not key.startswith("child"):
        os.kill(pid, signal.Signals[key.split()[1]])
time.sleep(0.5)
os.kill(running["save SIGINT"], signal.SIGINT)
os.kill(running["ignored SIGINT"], signal.SIGTERM)
os.kill(running["twice SIGTERM"], signal.SIGTERM)
ended = {key: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for key, pid in running.items()}
print(json.dumps(ended | {"cursor": os.read(terminal, 64).decode(), "seconds": time.monotonic() - asked}))
"""


def test_at_once_or_after_the_step(tmp_path: Path) -> None:
    """prepare: Python is interrupted, and cleans up. compile, resumed: it cannot be. step: there is
    something to save. child: SIGTERM to a forked child is none to its parent. save: a second SIGINT
    while the first is obeyed. ignored: as a shell's background job, which SIGTERM ends. twice: a
    second SIGTERM does not break off the cleaning up. worker: of a launcher, which takes 130 for a
    failure.
    """
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE
    )
    outcome = json.loads(done.stdout)
    assert outcome.pop("seconds") < 2 + 10
    assert outcome.pop("cursor") == "\x1b[?25h", "a progress bar had hidden it"
    after_sigterm = {
        "prepare SIGTERM": 99,
        "compile SIGTERM": 99,
        "resumed SIGTERM": 99,
        "step SIGTERM": 7,
        "child SIGTERM": 7,
        "twice SIGTERM": 99,
    }
    after_sigint = {
        "prepare SIGINT": 130,
        "compile SIGINT": 130,
        "step SIGINT": 8,
        "save SIGINT": 130,
        "ignored SIGINT": 7,
    }
    assert outcome == after_sigterm | after_sigint | {"worker SIGINT": 99}, done.stderr
    assert {path.name for path in tmp_path.glob("removed *")} == {
        f"removed {key}" for key in ("prepare SIGTERM", "prepare SIGINT", "twice SIGTERM")
    }
    assert sorted(done.stderr.splitlines()) == [
        "ended at once by a second Ctrl-C, without a save; the same command starts again",
        *["stopped by Ctrl-C in phase compile: there is nothing new to save"] * 2,
        "stopped by Ctrl-C in phase data: there is nothing new to save",
        *["stopped by SIGTERM in phase compile: there is nothing new to save"] * 2,
        *["stopped by SIGTERM in phase data: there is nothing new to save"] * 2,
    ]


TORN_DOWN = """
import atexit, os, signal, sys, time
from mesh_lm.distributed import StopOnSignal
from mesh_lm.distributed.phases import Phases

atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))
phases = Phases()
with StopOnSignal(phases):
    phases.at("compile")
    sys.stdout.write("buffered")
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        sys.stdout.write(" and unwound")
"""


def test_the_interpreter_is_not_torn_down_while_xla_compiles() -> None:
    """Its native threads crash then. The contexts inside are left, and what was printed is
    written."""
    done = subprocess.run(
        [sys.executable, "-c", TORN_DOWN],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (99, "buffered and unwound"), done.stderr
    assert done.stderr == "stopped by SIGTERM in phase compile: there is nothing new to save\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [(str(ROOT / "train.py"), "--config=gpt_tiny"), ("-m", "mesh_lm", "train", "gpt_tiny")],
)
def test_ctrl_c_while_jax_is_imported(program: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, *program, f"--output={tmp_path}"]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for(
        lambda: "jaxlib" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8"), process
    )
    process.send_signal(signal.SIGINT)
    assert (ended(process), process.returncode) == ("stopped by Ctrl-C\n", 130)


@pytest.mark.slow
def test_train_py_stops_while_it_compiles(tmp_path: Path) -> None:
    """A run without a launcher ends with 99 in its first compilation, and leaves no checkpoint; the
    same command then begins."""
    (tmp_path / "corpus.txt").write_text(
        (ROOT / "mesh_lm" / "launch" / "controller.py").read_text(encoding="utf-8"),
        encoding="utf-8",
    )
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        f"--config={ROOT}/configs/gpt_tiny.py",
        f"--data.path={tmp_path}/corpus.txt",
        f"--data.cache={tmp_path}/cache",
        f"--output={tmp_path}/run",
        "--launch.compile_cache=",
        "--data.tokenizer_vocab=512",
        "--data.max_epochs=0",
    ]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)  # what follows is the first step
    time.sleep(1)
    os.kill(process.pid, signal.SIGTERM)
    signalled_at = time.monotonic()
    out = ended(process)
    assert process.returncode == 99, out
    assert "stopped by SIGTERM in phase" in out, out
    assert time.monotonic() - signalled_at < 2 + 10
