"""One launcher with dummy workers that send heartbeats: its reactions when they die, stall, or get
a signal."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import PATIENCE, ended, wait_for

from tests.mesh_lm.launch.launchers import (
    ROOT,
    SLOW,
    alive,
    dies,
    life,
    lives,
    outcome,
    start,
    state,
)


def test_a_killed_worker_is_restarted_with_the_others(tmp_path: Path) -> None:
    status, out = outcome(
        tmp_path, "--per-node=3 --devices=2", "saved=7 step=9 1@2:step=8 1@2:kill 1@deaf"
    )
    assert status == 0, out
    assert "process 2 was killed by SIGKILL: out of memory, or killed from outside" in out
    assert "restart 1 of 3 from its newest checkpoint (step 7 or later), immediately" in out
    assert "process 2: step 8, step for" in out
    assert "processes 0-1: step 9, step for" in out
    first, second = lives(tmp_path)
    assert first["MESH_LM_COORDINATOR"] != second["MESH_LM_COORDINATOR"], (
        "every life has a port of its own"
    )
    assert first["MESH_LM_PROCESSES"] == "3"
    assert first["JAX_NUM_CPU_DEVICES"] == "2"
    assert first["JAX_PLATFORMS"] == "cpu"
    assert 4 < second["at"] - first["at"] < 4 + 1 + SLOW, (
        "the others have 2 s to end by themselves, and 2 more after SIGTERM"
    )


@pytest.mark.parametrize(
    ("action", "status", "words"),
    [
        ("bus", 135, "was killed by SIGBUS: usual cause: a memory-mapped data file was truncated"),
        (
            "phase=start exit=1",
            1,
            "ended with status 1: the run cannot start as configured; the error is above",
        ),
        ("exit=1", 1, "ended with status 1: the run cannot continue; the error is above"),
        (
            "exit=2",
            2,
            (
                "ended with status 2: there is no such script, or it has no such option; the error "
                "is above"
            ),
        ),
        ("exit=70", 70, "ended with status 70: an unexpected error; its traceback is above"),
        (
            "exit=75",
            75,
            (
                "ended with status 75: no progress, or a disk that failed; the stacks or the error "
                "are above"
            ),
        ),
        ("exit=99", 99, "ended with status 99: it was asked to stop, and saved"),
    ],
)
def test_the_last_status_is_the_launchers(
    tmp_path: Path, action: str, status: int, words: str
) -> None:
    actual, out = outcome(tmp_path, "--restarts=1", action)
    assert actual == status, out
    assert words in out, out
    assert len(lives(tmp_path)) == (1 if status in (1, 2, 99) else 2), out
    assert ("giving up after 1 restart" in out) == (status not in (1, 2, 99))


@pytest.mark.slow
def test_the_mistake_of_one_process_is_an_accident_once_there_is_a_checkpoint(
    tmp_path: Path,
) -> None:
    status, out = outcome(tmp_path, "--per-node=2", "1:exit=1 wait")
    assert status == 1, out
    assert len(lives(tmp_path)) == 1, out
    status, out = outcome(
        tmp_path / "later", "--per-node=2 --restarts=1", "saved=5 saved=5 1:exit=1 wait"
    )
    assert status == 1, out
    assert len(lives(tmp_path / "later")) == 2, out
    assert "giving up after 1 restart" in out, out


def test_a_victims_mistake_hides_no_accident(tmp_path: Path) -> None:
    status, out = outcome(tmp_path, "--per-node=2 --restarts=1", "0:exit=1 step=1 step=2 1:exit=70")
    assert status == 70, out
    assert len(lives(tmp_path)) == 2, out


def test_a_run_whose_output_was_taken_over_is_not_restarted(tmp_path: Path) -> None:
    """Process 0 alone knows of it; the other one dies of its absence."""
    status, out = outcome(
        tmp_path, "--per-node=2 --restarts=3", "saved=5 0:exit=77 step=1 step=2 step=3 1:abrt"
    )
    assert status == 1, out
    assert len(lives(tmp_path)) == 1, out
    assert "another run has taken its output over" in out, out


def test_a_log_that_takes_no_more_ends_nothing(tmp_path: Path) -> None:
    """It blocks no process either that prints more than a pipe holds."""
    script = tmp_path / "script.py"
    script.write_text(
        (
            "import os, sys\nfor _ in range(3000): print('x' * "
            "100)\nsys.exit(os.environ['MESH_LM_GENERATION'] == '1' and 70)\n"
        ),
        encoding="utf-8",
    )
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "mesh_lm.launch", "--per-node=2", str(script)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": ""}
        assert (
            subprocess.run(
                command, cwd=ROOT, env=environment, stdout=full, stderr=full, timeout=PATIENCE
            ).returncode
            == 0
        )


def test_restarts_without_progress_are_counted_and_slow_down(tmp_path: Path) -> None:
    """The third life saves a checkpoint, so earlier failures no longer count."""
    status, out = outcome(tmp_path, "--restarts=2", "1@saved=5 2@saved=5 3@saved=6 kill")
    assert status == 137, out
    assert "giving up after 2 restarts without a new checkpoint" in out, out
    starts = [record["at"] for record in lives(tmp_path)]
    waits = [b - a for a, b in itertools.pairwise(starts)]
    assert len(starts) == 5
    assert [line.rpartition("restart ")[2] for line in out.splitlines() if " restart " in line] == [
        f"{n} of 2 from its newest checkpoint (step {step} or later), {when}"
        for step in (5, 6)
        for n, when in ((1, "immediately"), (2, "in 1 s"))
    ]
    assert all(wait > 1 for wait in waits[1::2]), waits


def test_a_checkpoint_after_one_that_was_put_aside_is_new(tmp_path: Path) -> None:
    """Step 9 was damaged, or not finite: the run continues from an earlier step."""
    status, out = outcome(
        tmp_path, "--restarts=1", "1@saved=9 1@kill 2@saved=7 2@kill 3@saved=8 3@kill step=1"
    )
    assert status == 0, out
    assert len(lives(tmp_path)) == 4, out
    assert [line.rpartition("restart ")[2] for line in out.splitlines() if " restart " in line] == [
        f"1 of 1 from its newest checkpoint (step {step} or later), immediately"
        for step in (9, 7, 8)
    ]


BEGINNING = """
import json, os, sys
life = int(os.environ["MESH_LM_GENERATION"])
print(f"life {life} after {os.environ['MESH_LM_BEGUN']}", flush=True)
beat = {"phase": ["start", "restore", "step"][life - 1], "saved": -1}
os.write(int(os.environ["MESH_LM_HEARTBEAT"]), json.dumps(beat).encode() + b"\\n")
sys.exit(70 if life < 3 else 0)
"""


def test_a_life_that_did_not_come_to_its_checkpoints_is_none_before(tmp_path: Path) -> None:
    """The run has not yet checked whether checkpoint.resume=never rejects an existing
    checkpoint."""
    script = tmp_path / "script.py"
    script.write_text(BEGINNING, encoding="utf-8")
    command = [sys.executable, "-m", "mesh_lm.launch", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0
    assert re.findall(r"life \d after \d", done.stdout) == [
        "life 1 after 0",
        "life 2 after 0",
        "life 3 after 1",
    ]


def test_a_stopped_worker_is_found_by_its_silence(tmp_path: Path) -> None:
    status, out = outcome(tmp_path, "--per-node=2 --heartbeat=1", "step=5 1@1:stop 1@deaf")
    assert status == 0, out
    assert re.search(
        r"process 1 sent no heartbeat for \d s: it is stopped, or hangs outside of Python", out
    ), out
    assert re.search(r"  process 1: step 5, step for \d s   <- likely the cause\n", out), out
    assert out.count("likely the cause") == 1, out
    first, second = lives(tmp_path)
    assert second["at"] - first["at"] < 1 + 5 + SLOW
    assert not alive(first["pid"])
    assert not alive(lives(tmp_path, 1)[0]["pid"])


def test_who_never_says_anything_has_longer(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(3)\n", encoding="utf-8")
    for limit, status in ((1, 75), (0, 0)):
        command = [
            sys.executable,
            "-m",
            "mesh_lm.launch",
            f"--start={limit}",
            "--heartbeat=2",
            "--restarts=0",
            str(script),
        ]
        done = subprocess.run(command, cwd=ROOT, timeout=PATIENCE, capture_output=True, text=True)
        reason = (
            "process 0 did not begin within --start=1 s: it has sent no heartbeat yet; raise "
            "--start if this host is slow"
        )
        assert done.returncode == status, done.stderr
        assert (reason in done.stderr) == (limit == 1), done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_lets_the_workers_save(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, "--per-node=2", "step=3 wait")
    life(tmp_path, 1, 0, process)
    life(tmp_path, 1, 1, process)
    process.send_signal(number)
    out = ended(process)
    assert process.returncode == 99, out
    assert f"{signal.Signals(number).name}: the workers save and exit, within 120 s" in out, out
    assert len(lives(tmp_path)) == 1


def test_workers_with_nothing_to_save_end_at_once(tmp_path: Path) -> None:
    """They compile, and would obey when XLA has finished."""
    process = start(tmp_path, "--per-node=2", "phase=compile deaf")
    life(tmp_path, 1, 0, process)
    life(tmp_path, 1, 1, process)
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)
    signalled_at = time.monotonic()
    out = ended(process)
    assert process.returncode == 99, out
    assert "SIGTERM: the workers have nothing to save, and end at once" in out, out
    assert time.monotonic() - signalled_at < 2 + SLOW


def test_a_rank_that_leaves_early_is_named(tmp_path: Path) -> None:
    status, out = outcome(
        tmp_path,
        "--per-node=3 --restarts=0",
        "step=4 2:exit=0 step=4 step=4 step=4 step=4 step=4 0:exit=75 wait",
    )
    assert status == 75, out
    assert (
        "process 2 had ended with status 0 before that: if the run was not complete, this is "
        "the cause"
    ) in out, out
    assert re.search(r"process 2: step 4, step for .*<- likely the cause", out), out
    assert out.count("likely the cause") == 1, out


def test_it_says_from_the_start_only_where_that_is_so(tmp_path: Path) -> None:
    for actions, beginning in (
        ("step=1 step=1", "from the start"),
        ("phase=save step=1", "from its newest checkpoint, if there is one"),
    ):
        _, out = outcome(
            tmp_path,
            "--restarts=1",
            f"{actions} step=1 step=1 step=1 step=1 step=1 step=1 step=1 kill",
        )
        assert f"restart 1 of 1 {beginning}, immediately" in out, out


def test_who_does_not_leave_in_time_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "--grace=1", "deaf")
    worker = life(tmp_path, 1, 0, process)
    process.send_signal(signal.SIGTERM)
    out = ended(process)
    assert process.returncode == 137, out
    assert not alive(worker["pid"]), out
    assert len(lives(tmp_path)) == 1, "a run that was asked to end is not restarted"


def test_a_second_interrupt_is_impatient(tmp_path: Path) -> None:
    process = start(tmp_path, "", "deaf")
    life(tmp_path, 1, 0, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    interrupted_again_at = time.monotonic()
    out = ended(process)
    assert process.returncode == 137, out
    assert time.monotonic() - interrupted_again_at < 5 + SLOW, out
    assert "the workers are killed" in out, out


def test_a_killed_launcher_leaves_no_worker(tmp_path: Path) -> None:
    """A stopped worker, which could not notice that its launcher is gone, ends, too."""
    process = start(tmp_path, "--per-node=2", "1:stop deaf")
    workers = [life(tmp_path, 1, index, process)["pid"] for index in (0, 1)]
    wait_for(lambda: state(workers[1]) == "T", process)
    process.kill()
    assert all(dies(pid, 5) for pid in workers)
    process.communicate()


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    status, out = outcome(tmp_path, "", "child exit=0")
    assert status == 0, out
    assert dies(int((tmp_path / "child").read_text(encoding="utf-8")), 5)


def test_a_launcher_that_was_stopped_forgives_silence(tmp_path: Path) -> None:
    """Slurm's suspend, or a paused virtual machine, stops the launcher together with its
    workers."""
    process = start(tmp_path, "--heartbeat=1", "wait")
    worker = life(tmp_path, 1, 0, process)["pid"]
    time.sleep(0.5)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        process.send_signal(number)
        os.kill(worker, number)
        time.sleep(1.6)
    process.send_signal(signal.SIGTERM)
    out = ended(process)
    assert process.returncode == 99, out
    assert len(lives(tmp_path)) == 1, out


def test_a_wrong_command_line_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    from mesh_lm.commands.launch import main

    two_nodes = ["--nodes=2", "--node=0", "--rendezvous=a:1"]
    for options, message in (
        (
            ["--per-node=0", "--grace=-1", "a.py"],
            (
                "bad command line\n  - --per-node=0 must be at least 1\n  - --grace=-1 must be at "
                "least 0\n"
            ),
        ),
        (["--heartbeat=0", "a.py"], "heartbeat=0 would declare every process dead"),
        (["--min-nodes=3", "a.py"], "min-nodes=3 must not be more than nodes=1"),
        (["--spares=1", "a.py"], "spares=1 are among the nodes=1, and at least one must compute"),
        (
            [*two_nodes, "--spares=1", "--min-nodes=2", "a.py"],
            "min-nodes=2 must not be more than nodes=2 - spares=1",
        ),
        (
            ["--health-command=/bin/sh -c 'a", "a.py"],
            "cannot be split into words: No closing quotation",
        ),
        (
            ["--health-command=/no/such/check", "a.py"],
            "health-command=/no/such/check: there is no such program on this node",
        ),
        (["--nodes=2", "a.py"], "several nodes need all of --nodes (or MESH_LM_NODES)"),
        (
            ["--nodes=2", "--node=2", "--rendezvous=a:1", "a.py"],
            "node=2 must be 0 to nodes - 1 = 1",
        ),
        (
            ["--nodes=2", "--node=0", "--rendezvous=a", "a.py"],
            "rendezvous=a must be host:port of node 0",
        ),
    ):
        assert main(options) == 1
        assert message in capfd.readouterr().err
