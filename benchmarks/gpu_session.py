"""A session on a machine that is lent for minutes: as many blocks as fit, each in a process group
of its own. Standard library only.

A block is a process that prints lines: "TABLE {json}" whenever a table has grown, and at its end
"DONE {json}". It is killed with all of its processes at its limit. What it has printed until then
is kept: in files, and as lines of JSON on the standard output.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import json
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from gpu_resume import Earlier
from record import Record, Row

LOCK = ".gpu_minutes.lock"
"""The file in the directory of the results that a session holds."""


class Status(enum.StrEnum):
    """How a block ended."""

    OK = "ok"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    SKIPPED = "skipped"


class Block(NamedTuple):
    """Something to measure that is useful alone."""

    run: Callable[..., Any]
    """Takes a Lab, and yields tables. Its name is the block's."""
    least: float
    """Seconds in which it measures something of use, the start included."""
    most: float
    """Seconds after which it is killed."""

    @property
    def name(self) -> str:
        return self.run.__name__


Start = Callable[[Block, float, Row, IO[str]], "subprocess.Popen[bytes]"]
"""Starts a block's process from its seconds, values that earlier blocks have found, and a file for
its standard error. The process leads a group of its own. Its standard input is a pipe that nobody
writes to, and that ends when the session does (see `end_with_parent`)."""


class Ended(NamedTuple):
    """The end of a process group."""

    seconds: float
    status: int | None
    """None if it was killed at its limit."""


def say(text: str) -> None:
    """Prints a line. A standard output on a full disk, or that nobody reads any more, is no reason
    to stop."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[str]:
    """Holds the directory's lock. Yields the reason why it cannot be held, else an empty text.

    Without a place for the lock file, as on a full disk, nothing is locked. The lock ends with the
    process, however it ends.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - closed below, or by the end of the process
    except OSError:
        yield ""
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            yield (
                f"process {file.read().strip() or 'of another machine'} is measuring with this "
                "--output; wait for it, or name another"
            )
            return
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield ""


class Results:
    """The rows of a session. Each is printed, and the files are written after each; a disk on which
    they cannot be is reported once."""

    def __init__(self, record: Record, earlier: Earlier) -> None:
        self.record, self.earlier = record, earlier
        self._printed: dict[str, list[Row]] = {}
        self._reported: set[str] = set()
        self._writing = threading.RLock()

    def table(self, block: str, title: str, rows: list[Row], note: str) -> None:
        """Adds or replaces a table, and prints its new rows."""
        with self._writing:
            printed = self._printed.get(title, [])
            for row in rows:
                if row not in printed:
                    say(json.dumps({"block": block, "table": title, **row}))
            self._printed[title] = rows
            self.record.table(title, rows, note, show=False)
            self.write()
            self._try(lambda: self.earlier.progress(title, rows))

    def complete(self, block: str, summary: Row, tables: dict[str, Any], found: Row) -> None:
        """Keeps a block that had no problem, so that --resume does not run it again."""
        self._try(lambda: self.earlier.complete(block, summary, tables, found))

    def write(self) -> None:
        """Writes the .json and the .md."""
        self._try(lambda: self.record.write())

    def _try(self, write: Callable[[], object]) -> None:
        try:
            with self._writing:
                write()
        except OSError as error:
            reason = error.strerror or str(error)
            if reason not in self._reported:
                self._reported.add(reason)
                say(
                    f"cannot write results to {self.record.directory.name}/: {reason}; the rows "
                    "are here, on the standard output"
                )


class Session:
    """Runs blocks, in order, until `deadline` (time.monotonic)."""

    def __init__(self, results: Results, deadline: float, start: Start, log: Path) -> None:
        """start: starts a block. log: for its stderr."""
        self.results, self.deadline, self.start, self.log = results, deadline, start, log
        self.found: Row = {}
        self.logs: dict[str, str] = {}
        self.modules: set[str] = set()
        self.summary: list[Row] = []

    def run(self, blocks: Sequence[Block], lanes: int = 1) -> int:
        """Returns the exit status: 1 if a block failed or was stopped at its limit.

        lanes: blocks that run at the same time, for a rehearsal, which measures nothing.
        """
        earlier = self.results.earlier.parts
        for block in blocks:
            if block.name in earlier:
                self._take_over(earlier[block.name])
        missing = [block for block in blocks if block.name not in earlier]
        if lanes == 1:
            for block in missing:
                self._finish(self._run(block))
        else:
            with ThreadPoolExecutor(lanes) as pool:
                for row in pool.map(self._run, missing):
                    self._finish(row)
        return int(any(row["status"] in (Status.FAILED, Status.STOPPED) for row in self.summary))

    def _take_over(self, part: Row) -> None:
        """Keeps a block of an earlier command."""
        self.found |= part["found"]
        for title, table in part["tables"].items():
            self.results.record.table(title, table["rows"], table["note"], show=False)
        self._finish(part["summary"] | {"left_out": "measured by an earlier command"})

    def _finish(self, row: Row) -> None:
        self.summary.append(row)
        reasons = "; ".join(filter(None, (row.get("problems"), row.get("left_out"))))
        say(
            f"{row['block']}: {row['status']}{f', {reasons}' if reasons else ''} "
            f"({row['seconds']:.0f} s)"
        )
        self.results.record.table("Blocks", self.summary, show=False)
        self.results.record.data |= {
            "not_needed_but_imported": sorted(self.modules),
            "logs": self.logs,
        }
        self.results.write()

    def _run(self, block: Block) -> Row:
        """Runs a block, and returns its row of the summary."""
        remaining_s = self.deadline - time.monotonic()
        if remaining_s < block.least:
            reason = f"it needs {block.least:.0f} s, and {max(0.0, remaining_s):.0f} s are left"
            return {
                "block": block.name,
                "status": Status.SKIPPED,
                "seconds": 0.0,
                "problems": "",
                "left_out": reason,
            }
        limit = min(block.most, remaining_s)
        tables: dict[str, Any] = {}
        done: list[Row] = []

        def take(line: str) -> None:
            kind, _, text = line.partition(" ")
            if kind == "TABLE":
                table = json.loads(text)
                tables[table["title"]] = {"rows": table["rows"], "note": table["note"]}
                self.results.table(block.name, table["title"], table["rows"], table["note"])
            elif kind == "DONE":
                done.append(json.loads(text))

        log = self.log.with_name(f"{self.log.name}-{block.name}")
        try:
            ended = run_group(partial(self.start, block, limit, self.found), limit, take, log)
        except OSError as error:  # no process can be started, or there is no room for its log
            ended = None
            problem = f"cannot start: {error.strerror or error}"
        else:
            problem = _problem(ended, limit, done, log)
        report = done[0] if done else {}
        problems = [*report.get("problems", ()), *([problem] if problem else [])]
        status = (
            Status.STOPPED
            if ended and ended.status is None
            else Status.FAILED
            if problems
            else Status.OK
        )
        row: Row = {
            "block": block.name,
            "status": status,
            "seconds": ended.seconds if ended else 0.0,
            "problems": "; ".join(problems),
        }
        if left_out := report.get("left_out"):
            row["left_out"] = "; ".join(left_out)
        self.logs |= report.get("logs", {})
        self.modules |= {*report.get("modules", ())}
        self.found |= report.get("found", {})
        if status == Status.OK and "no time left" not in row.get("left_out", ""):
            self.results.complete(block.name, row, tables, report.get("found", {}))
        return row


def _problem(ended: Ended, limit: float, done: list[Row], log: Path) -> str:
    """Returns in one line why a block did not come to its end; empty if it did."""
    if ended.status is None:
        return f"stopped at its limit of {limit:.0f} s, with all of its processes"
    if done:
        return ""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace", encoding="utf-8").strip().splitlines()
        return f"exit status {ended.status}: {lines[-1][:300] if lines else 'no message'}"
    return f"exit status {ended.status}"


def run_group(
    start: Callable[[IO[str]], subprocess.Popen[bytes]],
    limit: float,
    take: Callable[[str], None],
    log: Path,
) -> Ended:
    """Runs a process that leads a group of its own. The group is killed at the limit, and when the
    process has ended.

    start: takes a file for the standard error. take: gets the process's lines.
    """
    start_time = time.monotonic()
    with log.open("w", encoding="utf-8") as stderr:
        process = start(stderr)
    assert process.stdin and process.stdout
    try:
        with process.stdin, process.stdout:
            late = not _read(process, process.stdout, start_time + limit, take)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(time.monotonic() - start_time, None if late else process.returncode)


def _read(
    process: subprocess.Popen[bytes],
    stdout: IO[bytes],
    deadline: float,
    take: Callable[[str], None],
) -> bool:
    """Takes lines until the process has ended. Returns False if that is after the deadline."""
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            ended = process.poll() is not None  # before reading: what it printed last is read below
            wait = 0.0 if ended else min(0.2, deadline - time.monotonic())
            ready = bool(selector.select(max(0.0, wait)))
            chunk = os.read(stdout.fileno(), 1 << 20) if ready else b""
            *lines, text = (text + chunk).split(b"\n")
            for line in lines:
                take(line.decode(errors="replace"))
            if ended and not chunk:
                return True
            if ready and not chunk:  # it has closed its standard output, and will end
                time.sleep(0.005)
            if time.monotonic() > deadline and not ended:
                return False


def end_with_parent() -> None:
    """Makes this process group end with the session, however that ends: it waits in a thread for
    the end of the standard input."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def tell(kind: str, **values: Any) -> None:
    """Prints a line of a block for its session."""
    print(kind, json.dumps(values, default=str), flush=True)


def seconds_of(text: str) -> float:
    """Returns a number of seconds from the command line. Raises ValueError for what is none."""
    seconds = float(text)
    if not (0 < seconds < math.inf):
        raise ValueError
    return seconds


def interrupted_by_sigterm() -> None:
    """Makes SIGTERM end this process as Ctrl-C does, so that the block that runs is ended, too."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
