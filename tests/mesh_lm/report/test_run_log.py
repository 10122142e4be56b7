"""log.txt: each start appends, lines from before it can be opened are not lost, and a disk that
takes none does not end the run."""

import re
from pathlib import Path

import pytest

from mesh_lm.errors import ConfigError
from mesh_lm.report.run_log import RunLog

HEAD = r"--- \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d, process \d+ on \S+\n"


def test_each_start_appends(tmp_path: Path) -> None:
    printed: list[str] = []
    for n in (1, 2):
        with RunLog(printed.append, speaks=True) as log:
            log.say(f"before {n}")
            log.open(tmp_path / "run")
            print("only there", file=log, flush=True)
            log.say(f"after {n}")
    assert printed == ["before 1", "after 1", "before 2", "after 2"]
    text = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert re.fullmatch(
        "".join(rf"{HEAD}before {n}\nonly there\nafter {n}\n" for n in (1, 2)), text
    ), text


def test_it_says_what_ended_the_run(tmp_path: Path) -> None:
    for error, said in (
        (ConfigError("no room"), "error: no room\n"),
        (ZeroDivisionError("mine"), "error: ZeroDivisionError: mine\n"),
    ):
        with pytest.raises(type(error)), RunLog(print, speaks=True) as log:
            log.open(tmp_path)
            raise error
        assert (tmp_path / "log.txt").read_text(encoding="utf-8").endswith(said)


def test_other_processes_and_runs_that_never_begin_write_nothing(tmp_path: Path) -> None:
    printed: list[str] = []
    with (
        RunLog(printed.append, speaks=False) as other,
        pytest.raises(ZeroDivisionError),
        RunLog(printed.append, speaks=True),
    ):
        other.say("printed, if its function does")
        other.open(tmp_path / "run")
        raise ZeroDivisionError
    assert printed == ["printed, if its function does"] and not (tmp_path / "run").exists()


def test_a_full_disk_is_said_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full takes no byte; when there is room again the lines are written in order."""
    (tmp_path / "log.txt").symlink_to("/dev/full")
    printed: list[str] = []
    with RunLog(printed.append, speaks=True) as log:
        log.open(tmp_path)
        for n in range(100):
            log.write(f"line {n}\n")
        said = "No space left on device; training continues, and its lines are written later"
        assert printed == [f"warning: log.txt cannot be written: {said}"]
        (tmp_path / "log.txt").unlink()
        log.open(tmp_path)
    lines = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert lines[1:] == [f"line {n}" for n in range(100)]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    printed: list[str] = []
    with RunLog(printed.append, speaks=True) as log:
        log.open(tmp_path / "file" / "run")
        for _ in range(3000):
            log.write("x" * 999 + "\n")
        assert len(log._pending) <= 2**20, "lines that wait for a disk have a limit"
    assert len(printed) == 1 and "log.txt cannot be written: Not a directory" in printed[0]
