"""SIGTERM to one process: at once with status 99 where no step is new, and else after the step."""

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
from mesh_lm.distributed import StopOnSigterm
from mesh_lm.distributed.phases import Phases

directory = pathlib.Path(sys.argv[1])

def run(what):
    phases = Phases()
    with StopOnSigterm(phases) as stop:
        phases.at("data" if what == "prepare" else "compile")
        if what == "step":
            phases.step = 1
        if what == "resumed":
            phases.saved = phases.step = 5
        (directory / what).touch()
        if what == "prepare":
            try:
                while True:
                    time.sleep(0.01)
            finally:
                (directory / "removed").touch()
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
        else:  # as XLA: it does not return, and lets no handler of Python run
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    return 7

running = {}
for what in ("prepare", "compile", "resumed", "step", "child"):
    if not (pid := os.fork()):
        try:
            code = run(what)
        except SystemExit as left:
            code = left.code
        os._exit(code)
    running[what] = pid
while not all((directory / what).exists() for what in running):
    time.sleep(0.01)
asked = time.monotonic()
for what, pid in running.items():
    if what != "child":
        os.kill(pid, signal.SIGTERM)
ended = {what: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for what, pid in running.items()}
print(json.dumps(ended | {"seconds": time.monotonic() - asked}))
"""


def test_at_once_or_after_the_step(tmp_path: Path) -> None:
    """prepare: Python is interrupted, and cleans up. compile, resumed: it cannot be. step: there is something to save.
    child: SIGTERM to a forked child is none to its parent.
    """
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)
    found = json.loads(done.stdout)
    assert found.pop("seconds") < 2 + 10
    assert found == {"prepare": 99, "compile": 99, "resumed": 99, "step": 7, "child": 7}, done.stderr
    assert (tmp_path / "removed").exists()
    assert done.stderr.count("stopped by SIGTERM in phase compile: there is nothing new to save") == 2, done.stderr
    assert done.stderr.count("stopped by SIGTERM in phase data") == 1 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_train_py_stops_while_it_compiles(tmp_path: Path) -> None:
    """A run without a launcher ends with 99 in its first compilation, and leaves no checkpoint; the same command then begins."""
    (tmp_path / "corpus.txt").write_text((ROOT / "mesh_lm" / "launch" / "controller.py").read_text())
    command = [
        sys.executable, str(ROOT / "train.py"), f"--config={ROOT}/configs/gpt_tiny.py", f"--data.path={tmp_path}/corpus.txt",
        f"--data.cache={tmp_path}/cache", f"--output={tmp_path}/run", "--launch.compile_cache=", "--data.tokenizer_vocab=512",
        "--data.max_epochs=0",
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)  # what follows is the first step
    time.sleep(1)
    os.kill(process.pid, signal.SIGTERM)
    asked = time.monotonic()
    out = ended(process)
    assert process.returncode == 99 and "stopped by SIGTERM in phase" in out, out
    assert time.monotonic() - asked < 2 + 10
