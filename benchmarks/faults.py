"""Runs the fault suite three times in a row, with --load under load, and writes the tables of
docs/operations.md from the results."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, Record, Row, options

PAGE = ROOT / "docs" / "operations.md"
MARKS = ("<!-- written by benchmarks/faults.py -->\n", "<!-- end of benchmarks/faults.py -->\n")
"""What the tables stand between on the page."""
FAULTS = {
    "F1": ("kill -9 during an asynchronous save, at three moments", "the step is complete or absent"),
    "F2": ("kill -9 of a worker, and of the coordinator", "the run restarts"),
    "F3": ("kill -9 of a peer between save() and commit", "the run restarts from the step before"),
    "F4": ("SIGSTOP of a worker", "detected within the heartbeat + 5 s, the run restarts"),
    "F5": ("SIGTERM", "all processes save one step and exit with 99"),
    "F6": (
        "flip, zero, truncate or delete in every file of a checkpoint",
        "the bits that were saved, or the previous step",
    ),
    "F7": ("a full disk, for a while and at the end", "training continues, and saves when there is room; at the end an error"),
    "F8": ("a half-copied step under a complete one's name", "the previous step is used"),
    "F9": ("8 devices in 2 processes, 4 in 1, 2 in 2", "the same samples; losses within 1e-6 of a run that never moved"),
    "F10": (
        "NaN; one flipped bit in one device's copy of the weights",
        "the step is skipped; the device is named, the run restarts",
    ),
    "F11": ("wrong config, vocabulary or tree", "one error before any array is read"),
    "F12": ("a process hangs, its heartbeat continues", "its watchdog prints the stacks, the run restarts"),
    "F13": ("the data file is truncated or removed", "the next start names the file"),
    "F14": ("a clock that jumps, a port in use, an output that cannot be written", "no effect; one error each, before the first step"),
    "F15": ("the network between two hosts is cut, and restored", "both sides reconnect, and continue"),
    "F16": ("Slurm: TERM as --signal sends it, and scontrol requeue", "the run saves, is requeued, and resumes"),
    "F17": (
        "five kinds of damage to every entry of the compile cache; two runs fill one cache at once",
        "damaged entries are named, deleted and compiled again",
    ),
    "F18": (
        ("a second run on one output; a restart after kill -9; a suspended run that was replaced "
        "wakes up"),
        "the second run is refused; the restart does not wait; the suspended run writes nothing",
    ),
    "F19": (
        "damage to prepared tokens, cached corpora, their indices and digests, in six ways",
        "the bits that were written, or one error; an index is computed again",
    ),
    "F20": (
        "one node, then the other is lost with its local checkpoints",
        "the run resumes from the newest local step",
    ),
    "F21": (
        "one device computes one wrong bit in a replayed step (FSDP, DDP, distributed)",
        "device and array are named, nothing is saved, the run restarts (FSDP)",
    ),
    "F22": ("a node is killed, and does not return; node 0 is unhealthy", "a spare takes its place; process 0 runs on another node"),
    "F23": (
        "random damage to every other kind of file that a run reads (next table)",
        "refused with one error, recovered and reported, or without effect",
    ),
}  # fmt: skip
_WITHOUT_BITS = ("F6", "F7", "F8", "F9", "F11", "F13", "F18", "F19", "F23")
"""Faults of which not every test compares the bits at the end with those of an undisturbed run."""
_OUTCOMES = ("refused", "recovered", "no effect", "silent", "traceback")
_HEAD = """\
`pytest -m fault` uses real processes, signals, disks, network namespaces and Slurm, on one machine; F6, F8 and F11 run in
one process. Except in {others}, the run must also end with the same bits as an undisturbed one. Every test was run three
times (F23 once, because its seeds are fixed), and {held} of {total} passed. The results ({links}) say what must hold after
each fault. `python benchmarks/faults.py` repeats them.
"""
_DAMAGE = """\
### Damaged files

{damaged} files were damaged at random, one at a time, from one flipped bit to a deleted file: {refused} were *refused* (one
error names the file), {recovered} *recovered* (the run uses an older step or writes the contents again, and says so), and
{no effect} had no effect; {silent} gave another result without a message, and {traceback} ended with a traceback. A
tokenizer, a config file or a Hugging Face directory from elsewhere cannot be verified when it is first read; a resumed run
compares the first two with its checkpoint.
"""


def passed(arguments: list[str]) -> list[Row]:
    """Runs the suite once. Returns a row for each test, with "outcome" (passed, failed or skipped:
    why) and "seconds"."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        # without shared fixtures, such as the undisturbed run
        alone = ["-o", "junit_duration_report=call"]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "fault",
            "tests/fault",
            f"--junitxml={report}",
            *alone,
            *arguments,
        ]
        status = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}
        ).returncode
        if status not in (0, 1):
            raise SystemExit(f"pytest ended with {status}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return [row for case in cases if (row := _row(case))]


def _row(case: ElementTree.Element) -> Row | None:
    name = case.get("name", "")
    if not (match := re.match(r"test_(f\d+)_", name)):
        return None
    problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    outcome = (
        "passed"
        if problem is None
        else "failed"
        if problem.tag != "skipped"
        else f"skipped: {problem.get('message')}"
    )
    noted = {element.get("name", ""): element.get("value") for element in case.iter("property")}
    return {
        "fault": match[1].upper(),
        "test": name,
        "outcome": outcome,
        "seconds": float(case.get("time", 0)),
    } | noted


def table(rows: list[Row]) -> list[Row]:
    """Returns a row for each fault that was tested, over all runs."""
    rows_by_fault: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        rows_by_fault[row["fault"]].append(row)
    out = []
    for fault, (description, must_hold) in FAULTS.items():
        if not (mine := rows_by_fault[fault]):
            continue
        skipped = next((row["outcome"] for row in mine if row["outcome"].startswith("skipped")), "")
        n_passed = sum(row["outcome"] == "passed" for row in mine)
        seconds = [row["seconds"] for row in mine if row["outcome"] == "passed"]
        out.append({
            "": fault, "what happens": description, "what must hold": must_hold,
            "held": f"{n_passed} of {len(mine)}" + (f"; {skipped}" if skipped else ""),
            "seconds": f"{statistics.median(seconds):.0f}" if seconds else "",
        })  # fmt: skip
    return out


def corruptions(rows: list[Row]) -> list[Row]:
    """Returns a row for each kind of file that a test damaged at random, of the last run, and their
    sum."""
    last = {row["files"]: row for row in rows if row.get("files")}
    out = [
        {
            "file": file,
            "damaged": str(sum(int(row[name]) for name in _OUTCOMES)),
            **{name: str(row[name]) for name in _OUTCOMES},
        }
        for file, row in last.items()
    ]
    return (
        [
            *out,
            {
                name: str(sum(int(row[name]) for row in out)) if name != "file" else "all"
                for name in out[0]
            },
        ]
        if out
        else []
    )


def _markdown(rows: list[Row]) -> str:
    lines = [
        "| " + " | ".join(row.values()) + " |"
        for row in [{column: column for column in rows[0]}, *rows]
    ]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def section(results: list[tuple[str, dict[str, Any]]]) -> str:
    """Returns what docs/operations.md has between MARKS. results: names and contents of files,
    oldest first; a fault's row is from the newest that has it.
    """
    tables = {name: data["tables"]["Faults"] for name, data in results}
    source = {row[""]: name for name, table_data in tables.items() for row in table_data["rows"]}
    rows = [
        next(row for row in tables[source[fault]]["rows"] if row[""] == fault)
        for fault in FAULTS
        if fault in source
    ]
    shown = [{"": row[""], "fault": FAULTS[row[""]][0]} for row in rows]
    n_held, total = (
        sum(int(row["held"].split(";")[0].split(" of ")[n]) for row in rows) for n in (0, 1)
    )
    sources = dict.fromkeys(source[row[""]] for row in rows)
    links = ", ".join(
        f"[{n}](../benchmarks/results/{name.replace('.json', '.md')})"
        for n, name in enumerate(sources, 1)
    )
    checks = ", ".join(_WITHOUT_BITS[:-1]) + f" and {_WITHOUT_BITS[-1]}"
    head = _filled(_HEAD.format(others=checks, links=links, held=n_held, total=total))
    damaged = {
        row["files"]: row
        for _, data in results
        for row in data["tables"]["Tests"]["rows"]
        if row.get("files")
    }
    below = _damaged_files(corruptions([*damaged.values()])) if damaged else []
    return "\n".join(["## Tested faults", "", head, "", _markdown(shown), "", *below])


def _damaged_files(rows: list[Row]) -> list[str]:
    """The section about random damage: its sums, and the outcomes of each kind of file. rows: those
    of `corruptions`."""
    *kinds, everything = rows
    numbers = {name: "none" if number == "0" else number for name, number in everything.items()}
    heading, _, text = _DAMAGE.format(**numbers).partition("\n\n")
    outcomes = [name for name in _OUTCOMES if name != "no effect"]
    shown = [
        {
            "file": row["file"],
            "if it is damaged": " or ".join(name for name in outcomes if row[name] != "0"),
        }
        for row in kinds
    ]
    return [heading, "", _filled(text), "", _markdown(shown), ""]


def _filled(text: str) -> str:
    """A paragraph in lines of at most 120 columns, with code in one line."""
    code = re.sub(r"`[^`]*`", lambda match: match[0].replace(" ", "\0"), " ".join(text.split()))
    return textwrap.fill(code, 120, break_long_words=False, break_on_hyphens=False).replace(
        "\0", " "
    )


def shown() -> str:
    """Returns what the page has between MARKS."""
    begin, end = MARKS
    return PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]


def write() -> None:
    """Replaces what is between MARKS on the page, from all results."""
    begin, end = MARKS
    head, _, tail = PAGE.read_text(encoding="utf-8").partition(begin)
    PAGE.write_text(
        f"{head}{begin}{section(newest())}{end}{tail.partition(end)[2]}", encoding="utf-8"
    )


def newest() -> list[tuple[str, dict[str, Any]]]:
    """Returns the names and contents of all results, oldest first. Raises FileNotFoundError if
    there are none."""
    results = [
        (path.name, json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(RESULTS.glob("faults_*.json"))
    ]
    if not results:
        raise FileNotFoundError(
            "no benchmarks/results/faults_*.json; run: python benchmarks/faults.py"
        )
    return sorted(results, key=lambda each: each[1]["date"])


def main() -> int:
    parser = options(__doc__ or "", quick_help="one run instead of three")
    parser.add_argument(
        "--load", type=int, default=0, help="processes that keep a core busy meanwhile"
    )
    parser.add_argument("-k", default="", help="pytest's -k")
    arguments = parser.parse_args()
    some = re.sub(r"\W+", "-", arguments.k.replace(" or ", " "))
    record = Record(f"faults_{some}" if some else "faults", arguments.output)
    burning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.load)
    ]
    runs, rows, loads = 1 if arguments.quick else 3, [], []
    try:
        for n in range(1, runs + 1):
            loads.append(os.getloadavg()[0])
            rows += [row | {"run": n} for row in passed(["-k", arguments.k] if arguments.k else [])]
    finally:
        for process in burning:
            process.kill()
    cases = [row for row in rows if row.get("cases")]
    loads = ", ".join(f"{load:.1f}" for load in loads)
    times = f"{runs} runs in a row" if runs > 1 else "One run"
    note = (
        f"{times}; load averages on {os.cpu_count()} cores before: {loads}. Seconds: the median of "
        "a test."
    )
    if cases:
        note += (
            f" F6: {cases[0]['cases']} corruptions per run, {cases[0]['older step taken']} of "
            "which hit data that is read: then the older step was used; none gave wrong weights."
        )
    if data := [row for row in rows if row.get("cases of F19")]:
        total, refused, again = (
            sum(int(row[name]) for row in data)
            for name in ("cases of F19", "refused", "computed again")
        )
        note += (
            f" F19: {total} corruptions, of which {refused} were refused, {again} computed again, "
            "and none read in silence."
        )
    record.table("Faults", table(rows), note)
    record.table("Tests", rows, "Every test of every run.", show=False)
    record.write()
    if arguments.output == RESULTS:
        write()
    complete = bool(some) or {row["fault"] for row in rows} == {*FAULTS}
    return 0 if complete and "failed" not in {row["outcome"] for row in rows} else 1


if __name__ == "__main__":
    sys.exit(main())
