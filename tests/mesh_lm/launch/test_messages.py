"""The launcher's messages about processes; nothing is started."""

import signal

import pytest

from mesh_lm.launch import messages


def beat(
    step: int = 5, phase: str = "step", since: float = 40.0, age: float = 0.5, **seconds: float
) -> dict:
    return {
        "step": step,
        "phase": phase,
        "since": since,
        "age": age,
        "saved": -1,
        "seconds": seconds,
    }


@pytest.mark.parametrize(
    ("status", "processes", "said"),
    [
        (-signal.SIGKILL, 1, "was killed by SIGKILL: out of memory, or killed from outside"),
        (
            -signal.SIGBUS,
            1,
            "was killed by SIGBUS: usual cause: a memory-mapped data file was truncated",
        ),
        (
            -signal.SIGABRT,
            2,
            (
                "was killed by SIGABRT: usual cause: JAX's coordination service aborted it, "
                "because another process had"
            ),
        ),
        (-signal.SIGABRT, 1, "was killed by SIGABRT"),
        (-40, 1, "was killed by signal 40"),
        (3, 1, "ended with status 3"),
    ],
)
def test_how_a_process_ended(status: int, processes: int, said: str) -> None:
    assert messages.describe_exit(status, processes).startswith(said)
    assert messages.shell_status(status) == (status if status > 0 else 128 - status)


def test_the_lowest_step_is_to_blame() -> None:
    beats = {0: beat(), 1: beat(), 2: beat(step=4, phase="batch", since=41), 3: beat()}
    assert messages.suspects(beats) == {2}
    assert messages.progress_table(beats, messages.suspects(beats)) == [
        "  process 2: step 4, batch for 42 s   <- likely the cause",
        "  processes 0-1, 3: step 5, step for 40 s",
    ]  # fmt: skip


def test_another_phase_than_most_is_to_blame() -> None:
    assert messages.suspects({0: beat(), 1: beat(phase="save"), 2: beat()}) == {1}
    assert messages.suspects({0: beat(), 1: beat(phase="save")}) == set(), "one of two is not most"
    assert messages.suspects({0: beat(), 1: beat()}) == set()


def test_the_silent_are_to_blame_first() -> None:
    beats = {0: beat(step=4), 1: beat(age=31.0)}
    assert messages.suspects(beats) == {1}
    assert (
        "  process 1: step 5, step for 71 s, no heartbeat for 31 s   <- likely the cause"
        in messages.progress_table(beats, {1})
    )


def test_stragglers() -> None:
    """Process 2 spends 0.3 of its 1 s per step on batches; the others wait for it in their
    steps."""
    before = {process: beat(step=10, step_=0.0, batch=0.0) for process in range(4)}
    now = {
        process: beat(step=110, compile=50.0, batch=30.0 if process == 2 else 1.0)
        for process in range(4)
    }
    for process in range(4):
        now[process]["seconds"]["step"] = 100 - now[process]["seconds"]["batch"]
    assert messages.stragglers(before, now) == [
        ("process 2 is a straggler: it spends 0.3 s per step outside of the step itself, the "
            "others "
        "0.01 s")
    ]  # fmt: skip
    now[2]["seconds"]["batch"] = 1.5
    assert messages.stragglers(before, now) == [], "1.5 times the others is nothing"
    now[2]["seconds"]["batch"] = 4.0
    assert messages.stragglers(before, now) == [], "4 times the others, but 3 % of a step"
    assert messages.stragglers({}, now) == [] and messages.stragglers(now, now) == [], (
        "no steps, no time per step"
    )
    assert messages.stragglers({0: before[0]}, {0: now[0]}) == [], "alone"
