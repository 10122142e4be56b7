"""The launcher's messages about processes; nothing is started."""

import signal
import time

import pytest

from mesh_lm.launch import messages
from mesh_lm.launch.messages import Beat


def beat(
    step: int = 5,
    phase: str = "step",
    since: float = 40.0,
    age: float = 0.4,
    seconds: dict[str, float] | None = None,
) -> Beat:
    return Beat(step, phase, since, -1, seconds or {}, received_at=time.monotonic() - age)


@pytest.mark.parametrize(
    ("status", "processes", "text"),
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
def test_how_a_process_ended(status: int, processes: int, text: str) -> None:
    assert messages.describe_exit(status, processes).startswith(text)
    assert messages.shell_status(status) == (status if status > 0 else 128 - status)


def test_the_lowest_step_is_to_blame() -> None:
    beats = {0: beat(), 1: beat(), 2: beat(step=4, phase="batch", since=42.0), 3: beat()}
    assert messages.suspects(beats) == {2}
    assert messages.progress_table(beats, messages.suspects(beats)) == [
        "  process 2: step 4, batch for 42 s   <- likely the cause",
        "  processes 0-1, 3: step 5, step for 40 s",
    ]


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


def stragglers_of(batch_seconds: dict[int, float]) -> list[str]:
    """Returns the messages about 100 steps of a second. batch_seconds: process -> its wait for
    batches in all of them; the others wait 1 s."""
    old = {process: beat(step=10) for process in range(4)}
    new = {}
    for process in range(4):
        batch = batch_seconds.get(process, 1.0)
        seconds = {"compile": 50.0, "batch": batch, "step": 100 - batch}
        new[process] = beat(step=110, seconds=seconds)
    return messages.stragglers(old, new)


def test_stragglers() -> None:
    """Process 2 spends 0.3 of its 1 s per step on batches; the others wait for it in their
    steps."""
    assert stragglers_of({2: 30.0}) == [
        "process 2 is a straggler: it spends 0.3 s per step outside of the step itself, the others "
        "0.01 s"
    ]
    assert stragglers_of({2: 1.5}) == [], "1.5 times the others is nothing"
    assert stragglers_of({2: 4.0}) == [], "4 times the others, but 3 % of a step"


def test_no_stragglers_without_steps_or_others() -> None:
    old = beat(step=10)
    new = beat(step=110, seconds={"batch": 100.0})
    assert messages.stragglers({}, {0: new, 1: new}) == []
    assert messages.stragglers({0: new, 1: new}, {0: new, 1: new}) == []
    assert messages.stragglers({0: old}, {0: new}) == []
