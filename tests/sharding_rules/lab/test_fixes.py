"""The search for what makes a program fit: a made-up program whose memory and time are formulas, so
that the best pair is known."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator

import lab_report
import pytest
from lab_report import GIB

from sharding_rules.lab import side_by_side as lab
from sharding_rules.lab.fixes import Candidate, rank
from sharding_rules.lab.report import LabError, Report

SCALES = (0.5, 0.25, 0.125, 1 / 16, 1 / 32)
SINGLES: dict[str, tuple[str, float, float, float]] = {
    # text: kind, scale, activations x, time x
    "full": ("remat", 1, 0.5, 1.05),
    **{f"M={1 / scale:g}": ("microbatch", scale, 1, 1) for scale in SCALES},
    "tp": ("mesh", 1, 0.9, 1.01),
    "offload": ("offload", 1, 0.7, 1.0),
}


def program(*texts: str) -> Report:
    """10 GiB of state and 300 of activations; a step of 1 s, of which 0.5 % is for each of the
    microbatches."""
    activations, step, scale = 300.0, 1.0, 1.0
    for text in texts:
        _, each, memory, time = SINGLES[text]
        activations, step, scale = activations * memory, step * time, scale * each
    seconds = step * (0.995 + 0.005 / scale)
    plain = lab_report.report()
    assert plain.timeline
    memory = dataclasses.replace(plain.memory, peak=int((10 + activations * scale) * GIB))
    return dataclasses.replace(
        plain,
        hbm=72 * GIB,
        memory=memory,
        timeline=dataclasses.replace(plain.timeline, step=1e6 * seconds),
    )


def candidates(
    compile: Callable[..., Report] = program, *, names: tuple[str, ...] = tuple(SINGLES)
) -> Iterator[Candidate]:
    for n in (1, 2):
        for texts in itertools.combinations(names, n):
            kinds = [SINGLES[text][0] for text in texts]
            if len(set(kinds)) == n:
                scale = min(SINGLES[text][1] for text in texts)
                yield Candidate(
                    "+".join(kinds), " ".join(texts), lambda texts=texts: compile(*texts),
                    scale=scale, parts=texts if n > 1 else (),
                    first=set(kinds) <= {"remat", "microbatch"},
                )  # fmt: skip


def test_the_best_pair_is_found_with_few_programs() -> None:
    """M=8 alone fits at x 1.035, `full` with M=4 at x 1.066: of 26 changes and pairs five are
    compiled, and the rest need not be."""
    compiled: list[tuple[str, ...]] = []
    found = rank(
        program(), candidates(lambda *texts: compiled.append(texts) or program(*texts)), workers=1
    )
    assert found[0].text == "M=8" and found[0].cost == pytest.approx(1.035)
    assert set(compiled) >= {("full",), ("M=2",), ("M=32",)} and len(compiled) <= 5
    assert [fix.fits for fix in found] == sorted((fix.fits for fix in found), reverse=True)


def test_a_pair_where_no_single_change_will_do() -> None:
    """Microbatches stop at 4: only with `full` does it fit, at 10 + 300 / 2 / 4 GiB."""
    found = rank(program(), candidates(names=("full", "M=2", "M=4")))
    assert [fix.text for fix in found if fix.fits] == ["full M=4"]
    assert found[0].report.peak_bytes == int(47.5 * GIB) and found[0].kind == "remat+microbatch"


def test_what_is_dear_makes_the_others_be_tried() -> None:
    """With `full` twice as slow nothing among the first is good: the rest is tried, and a pair of
    those fits cheaply enough."""
    slow = SINGLES | {"full": ("remat", 1, 0.5, 2.0), "tp": ("mesh", 1, 0.15, 1.01)}
    try:
        SINGLES.update(slow)
        found = rank(program(), candidates(names=("full", "M=2", "tp")))
        assert found[0].text == "tp" and found[0].cost == pytest.approx(1.01)
    finally:
        SINGLES.update({"full": ("remat", 1, 0.5, 1.05), "tp": ("mesh", 1, 0.9, 1.01)})


def test_a_search_that_is_cut_keeps_what_it_has() -> None:
    said: list[str] = []

    def compile(*texts: str) -> Report:
        if texts == ("M=32",):
            raise KeyboardInterrupt
        return program(*texts)

    found = rank(program(), candidates(compile), say=said.append, workers=1)
    assert {fix.text for fix in found} == {"full", "M=2"} and "interrupted: " in said[-1]


def test_programs_compile_at_once_and_trace_in_turn() -> None:
    """Two at once: each waits for its child, giving up its turn, until the other is there, too."""
    meeting = threading.Condition(lab.TURN)
    arrived = 0

    def compile(*texts: str) -> Report:
        nonlocal arrived
        arrived += 1
        meeting.notify_all()
        assert meeting.wait_for(lambda: arrived >= 2, timeout=30)
        return program(*texts)

    found = rank(program(), candidates(compile, names=("full", "M=2")), workers=2)
    assert arrived >= 2 and {fix.text for fix in found} >= {"full", "M=2"}


def test_what_does_not_compile_or_saves_nothing_is_no_fix() -> None:
    def compile(*texts: str) -> Report:
        if "full" in texts:
            raise LabError("no")
        return dataclasses.replace(program(), name="as before")

    said: list[str] = []
    assert rank(program(), candidates(compile, names=("full", "M=2")), say=said.append) == ()
    assert "full does not compile: no" in said


def test_a_machine_has_room_for_one_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.os, "cpu_count", lambda: 64)
    assert 1 <= lab.parallel() <= 64
    monkeypatch.setattr(lab, "_CHILD", 2**60)
    assert lab.parallel() == 1
