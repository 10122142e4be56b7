"""What CI prints at its end: its parts, the five dearest of them, and how long the README's test
command took for this machine.

python .ci/report.py PARTS --seconds=N # .ci/run does this; PARTS is the file that it writes python
.ci/report.py PARTS --seconds=N --write # writes .ci/yardstick.json, with which later runs are
compared
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

COMMITTED = Path(__file__).resolve().parent / "yardstick.json"
INSTALLATION = "the README's test command: the installation"
TESTS = "the README's test command: the tests"
YARDSTICK = "yardstick"
ALLOWED = 1.10
"""A ratio above this many times the committed one is reported."""
DEAREST = 5


@dataclass(frozen=True)
class Part:
    """Something that CI did. Parts in the background overlap with others."""

    name: str
    seconds: float
    background: bool = False


@dataclass(frozen=True)
class Measurement:
    """What the README's test command took, and what the yardstick took then, in seconds. cores: of
    the machine.
    """

    installation: float
    tests: float
    matmul: float
    compile: float
    cores: int
    cpu: str = ""
    date: str = ""

    @property
    def yardstick(self) -> float:
        """Seconds of the two fixed works together."""
        return self.matmul + self.compile

    @property
    def ratio(self) -> float:
        """Seconds of the README's command in units of the yardstick."""
        return (self.installation + self.tests) / self.yardstick


def main() -> int:
    """Prints the report, and with --write keeps its measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "parts",
        type=Path,
        help=(
            "lines that .ci/run wrote: seconds, foreground or background, and a name, with tabs "
            "between"
        ),
    )
    parser.add_argument("--seconds", type=float, required=True, help="of all of CI")
    parser.add_argument("--write", action="store_true", help="write .ci/yardstick.json")
    arguments = parser.parse_args()
    text = arguments.parts.read_text(encoding="utf-8") if arguments.parts.exists() else ""
    parts = read_parts(text)
    measured = measurement(parts, read_yardsticks(text), cores(), cpu())
    committed = (
        read_measurement(COMMITTED.read_text(encoding="utf-8")) if COMMITTED.exists() else None
    )
    print("\n".join(report(parts, arguments.seconds, measured, committed)))
    if arguments.write:
        if measured is None:
            parser.error("the README's test command or the yardstick did not run to its end")
        COMMITTED.write_text(written(measured, datetime.date.today()), encoding="utf-8")
    return 0


def read_parts(text: str) -> list[Part]:
    """Returns the parts in the order in which they ended."""
    parts = []
    for line in text.splitlines():
        seconds, kind, name = line.split("\t")
        if kind != YARDSTICK:
            parts.append(Part(name, float(seconds), kind == "background"))
    return parts


def read_yardsticks(text: str) -> list[dict[str, float]]:
    """Returns what .ci/yardstick.py printed, each time that it ran."""
    fields = [line.split("\t") for line in text.splitlines()]
    return [json.loads(printed) for _, kind, printed in fields if kind == YARDSTICK]


def read_measurement(text: str) -> Measurement:
    """Returns the committed measurement."""
    values = json.loads(text)
    del values["ratio"]
    return Measurement(**values)


def written(measured: Measurement, date: datetime.date) -> str:
    """Returns the text of .ci/yardstick.json."""
    values = {"ratio": round(measured.ratio, 2), **asdict(measured), "date": date.isoformat()}
    return json.dumps(values, indent=1) + "\n"


def measurement(
    parts: list[Part], yardsticks: list[dict[str, float]], cores: int, cpu: str
) -> Measurement | None:
    """Returns what was measured, with the mean of all yardsticks; None unless both parts of the
    README's command came to an end.
    """
    seconds = {part.name: part.seconds for part in parts}
    if not yardsticks or INSTALLATION not in seconds or TESTS not in seconds:
        return None
    return Measurement(
        installation=seconds[INSTALLATION],
        tests=seconds[TESTS],
        matmul=round(sum(each["matmul"] for each in yardsticks) / len(yardsticks), 2),
        compile=round(sum(each["compile"] for each in yardsticks) / len(yardsticks), 2),
        cores=cores,
        cpu=cpu,
    )


def report(
    parts: list[Part], seconds: float, measured: Measurement | None, committed: Measurement | None
) -> list[str]:
    """Returns the lines of the report."""
    lines = [f"CI took {seconds:.0f} s ({seconds / 60:.1f} min) on {cores()} cores. Its parts:"]
    lines += [_row(part) for part in parts]
    lines.append(f"The {min(DEAREST, len(parts))} dearest parts:")
    lines += [_row(part) for part in sorted(parts, key=lambda part: -part.seconds)[:DEAREST]]
    if measured is None:
        return lines
    lines.append(
        f"yardstick: {measured.yardstick:.2f} s ({measured.matmul:.2f} s of numpy's products of "
        f"matrices, {measured.compile:.2f} s of a compilation by XLA)"
    )
    lines.append(
        f"the README's test command: {measured.installation + measured.tests:.0f} s (installation "
        f"{measured.installation:.0f} s, tests {measured.tests:.0f} s), {measured.ratio:.1f} times "
        "the yardstick"
    )
    lines += compare(measured, committed)
    return lines


def compare(measured: Measurement, committed: Measurement | None) -> list[str]:
    """Returns what the committed ratio says of the measured one; its last line is a warning if the
    tests have become slower.
    """
    if committed is None:
        return ["no ratio is committed: .ci/yardstick.json is absent"]
    change = measured.ratio / committed.ratio
    lines = [
        (
            f"the committed ratio: {committed.ratio:.1f}, of {committed.date}, on "
            f"{committed.cores} cores of {committed.cpu}"
        )
    ]
    if measured.cores != committed.cores:
        lines.append(
            f"this machine has {measured.cores} cores, so the two ratios say little about each "
            "other"
        )
    if change > ALLOWED:
        lines.append(
            f"warning: the README's test command takes {100 * (change - 1):.0f} % more than the "
            "committed ratio says; make the tests faster, or commit the new ratio with its reason "
            "(CONTRIBUTING.md, Checks)"
        )
    return lines


def cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu() -> str:
    """Returns the name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1] if named else platform.machine()


def _row(part: Part) -> str:
    return f"{part.seconds:7.0f} s  {part.name}{' (in the background)' if part.background else ''}"


if __name__ == "__main__":
    sys.exit(main())
