"""Phases, heartbeat, watchdog and goodput, which share one clock."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mesh_lm.config import HealthConfig
from mesh_lm.distributed.heartbeat import Heartbeat
from mesh_lm.distributed.phases import Phases
from mesh_lm.network.environment import HEARTBEAT
from mesh_lm.training.goodput import Goodput, describe, total
from mesh_lm.training.watchdog import Watchdog

ROOT = Path(__file__).parents[3]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_to_the_wall_time() -> None:
    clock = Clock()
    phases = Phases(clock)
    for phase, seconds in (("start", 2.0), ("data", 3.0), ("start", 1.0)):
        phases.at(phase)
        clock.now += seconds
    assert (phases.phase, phases.idle, phases.age) == ("start", 1.0, 6.0)
    assert {name: value for name, value in phases.seconds().items() if value} == {
        "start": 3.0,
        "data": 3.0,
    }


def test_steps() -> None:
    """Waiting for a batch is not the step; the first compiles, the second waits for it, and neither
    counts for the median."""
    clock = Clock()
    phases = Phases(clock)

    def batches():
        for n in range(4):
            clock.now += 0.5
            yield n

    for n in phases.steps(batches()):
        assert phases.phase == ("step" if n > 1 else "compile")
        clock.now += 20.0 if n == 0 else 2.0
    seconds = phases.seconds()
    assert (seconds["compile"], seconds["step"], seconds["batch"]) == (22.0, 4.0, 2.0)
    assert phases.median_step == 2.5
    assert phases.phase == "batch"


def test_what_the_watchdog_allows() -> None:
    clock = Clock()
    phases = Phases(clock)
    dog = Watchdog(HealthConfig(stall=60, patience=900), phases)
    assert dog.limit == 900
    phases.at("step")
    assert dog.limit == 900, "no step has been timed yet"
    for _ in phases.steps(range(4)):
        clock.now += 1.0
    assert phases.phase == "batch"
    assert dog.limit == 60
    for _ in phases.steps(range(70)):
        clock.now += 30.0
    assert dog.limit == 300, "ten median steps"
    phases.at("save")
    assert dog.limit == 900


STUCK = """
import threading, time
from mesh_lm.config import HealthConfig
from mesh_lm.distributed.phases import Phases
from mesh_lm.training.watchdog import Watchdog
phases = Phases()
def here_it_hangs():
    time.sleep(600)
with Watchdog(HealthConfig(stall=0.4), phases, "[process 3] "):
    for n in phases.steps(range(100)):
        phases.step = n
        time.sleep(0.01)
        if n == 50:
            here_it_hangs()
"""


def test_the_watchdog_ends_a_stuck_process_and_says_where() -> None:
    start = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", STUCK],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 75
    assert time.monotonic() - start < 100
    assert re.search(
        (
            r"^\[process 3\] error: no progress for \d+ s \(limit 0\): phase step, 50 steps done; "
            r"median step 0\.01 s"
        ),
        run.stderr,
        re.M,
    )
    assert "in here_it_hangs" in run.stderr


def test_a_watchdog_that_is_left_alone() -> None:
    phases = Phases()
    with Watchdog(HealthConfig(stall=0.2, patience=60), phases):
        phases.at("save")
        time.sleep(0.5)


def test_the_heartbeat() -> None:
    reading, writing = os.pipe()
    phases = Phases()
    phases.step = 12
    phases.saved = 10
    phases.at("save")
    Heartbeat(phases, {HEARTBEAT: str(writing)}).start()
    line = json.loads(os.read(reading, 4096).split(b"\n")[0])
    assert {name: line[name] for name in ("pid", "step", "phase", "saved")} == {
        "pid": os.getpid(),
        "step": 12,
        "phase": "save",
        "saved": 10,
    }
    assert 0 <= line["since"] < 5
    assert line["seconds"].keys() >= {"step", "save"}
    Heartbeat(phases, {}).send({"nobody": "listens"})


ORPHAN = """
import os, time
from mesh_lm.distributed.heartbeat import Heartbeat
from mesh_lm.distributed.phases import Phases
reading, writing = os.pipe()
os.close(reading)
Heartbeat(Phases(), {"MESH_LM_HEARTBEAT": str(writing)}).start()
time.sleep(60)
"""


def test_a_process_whose_launcher_is_gone_ends() -> None:
    run = subprocess.run(
        [sys.executable, "-c", ORPHAN], env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=50
    )
    assert run.returncode == 71


def life(directory: Path, born: float, first: int, last: int, **seconds: float) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{born}.json").write_text(
        json.dumps({"born": born, "first": first, "step": last, "seconds": seconds}),
        encoding="utf-8",
    )


def test_goodput_over_lives(tmp_path: Path) -> None:
    """30 steps, of which 10 are repeated; 5 s in which no process ran."""
    life(tmp_path, 1000, 0, 30, step=60.0, compile=10.0)
    life(tmp_path, 1075, 20, 50, step=60.0, compile=5.0)
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    lives = total(tmp_path)
    assert (lives["starts"], lives["lost_steps"]) == (2, 10)
    assert lives["seconds"]["lost"] == pytest.approx(20.0)
    assert lives["seconds"]["step"] == pytest.approx(100.0)
    assert lives["seconds"]["down"] == pytest.approx(5.0)
    assert lives["goodput"] == pytest.approx(100 / 140)
    assert describe(lives) == (
        "goodput 71.4% of 2 min 20 s, 2 starts, 10 steps repeated, 1 damaged record left out: "
        "steps 1 min 40 s, repeated steps 20.0 s, between restarts 5.0 s, first steps (compiling) "
        "15.0 s"
    )


def test_what_is_lost_is_a_share_of_the_life_that_did_it(tmp_path: Path) -> None:
    """Half of the second life's ten steps of 4 s are lost, and none of the first life's 90."""
    life(tmp_path, 1000, 0, 90, step=90.0)
    life(tmp_path, 1100, 90, 100, step=40.0)
    life(tmp_path, 1200, 95, 100, step=20.0)
    lives = total(tmp_path)
    assert lives["lost_steps"] == 5
    assert lives["seconds"]["lost"] == pytest.approx(20.0)
    assert lives["seconds"]["step"] == pytest.approx(130.0)


def test_a_clock_that_jumps_back_loses_no_time(tmp_path: Path) -> None:
    life(tmp_path, 1000, 0, 30, step=60.0)
    life(tmp_path, 1010, 30, 50, step=40.0)
    assert total(tmp_path)["seconds"]["down"] == 0.0


def test_the_time_after_a_run_has_finished_is_not_lost(tmp_path: Path) -> None:
    """It is given more steps ten minutes later."""
    goodput = Goodput(tmp_path, Phases(), first=0)
    goodput.total(finished=True)
    (first,) = (tmp_path / "goodput").glob("*.json")
    born = json.loads(first.read_text(encoding="utf-8"))["born"]
    life(tmp_path / "goodput", born + 600, 5, 9, step=4.0)
    lives = total(tmp_path / "goodput")
    assert lives["starts"] == 2
    assert lives["seconds"]["down"] == 0.0
    goodput.total(finished=False)
    assert total(tmp_path / "goodput")["seconds"]["down"] > 590


def test_a_killed_life_is_on_record(tmp_path: Path) -> None:
    phases = Phases()
    goodput = Goodput(tmp_path, phases, first=5)
    phases.step = 7
    goodput.write(force=True)
    assert total(tmp_path / "goodput")["starts"] == 1
    phases.step = 9
    assert goodput.total()["starts"] == 1, "the same life is written again"


def test_steps_that_a_run_goes_back_over_are_lost(tmp_path: Path) -> None:
    """One start: 10 steps of 2 s, a rollback to step 6 with a restore of 3 s, and steps up to
    12."""
    clock = Clock()
    phases = Phases(clock)
    goodput = Goodput(tmp_path, phases, first=0)

    def spend(phase: str, seconds: float, step: int) -> None:
        phases.at(phase)
        phases.step = step
        clock.now += seconds

    spend("step", 20.0, 10)
    spend("restore", 3.0, 10)
    goodput.roll_back(6)
    spend("step", 12.0, 12)
    summary = goodput.total()
    assert (summary["starts"], summary["lost_steps"]) == (1, 4)
    assert summary["goodput"] == pytest.approx(24 / 35)
    spent = {phase: seconds for phase, seconds in summary["seconds"].items() if seconds > 1e-6}
    assert spent == pytest.approx({"step": 24.0, "lost": 8.0, "restore": 3.0})
    assert ", 4 steps repeated: steps 24.0 s, repeated steps 8.0 s, restoring 3.0 s" in describe(
        summary
    )
