"""The tables of docs/hardware.md: tests/docs/made.py writes them into the page."""

from __future__ import annotations

from typing import Any

from sharding_rules.lab.machine import CONSTANTS, constants_of
from sharding_rules.lab.targets import TARGETS
from tests.docs.markdown import table
from tests.docs.planner_tables import tables_of

_ROWS = 5
"""The most constants that a row of the what-ifs names."""


def targets() -> str:
    """Returns a row for each constant of a target: its values and where they are from."""
    by_target = {name: list(constants_of(target)) for name, target in TARGETS.items()}
    rows = []
    for row in zip(*by_target.values(), strict=True):
        name, _, origin = row[0]
        rows.append([f"`{name}`", *(value for _, value, _ in row), origin])
    return table(["constant", *by_target, "from"], rows)


def constants() -> str:
    """Returns a row for each constant that --hw takes."""
    rows = []
    for constant in CONSTANTS:
        unit = constant.unit.strip() or "share"
        needs = "compiled" if constant.is_compiled else "replayed"
        rows.append([f"`{constant.name}`", unit, constant.meaning, needs])
    return table(["constant", "unit", "meaning", "another value is"], rows)


def what_ifs() -> str:
    """Returns a row for each config: the constants that move its predicted step most."""
    rows = []
    for title, effects in tables_of("what_if").items():
        large = sorted(effects, key=lambda row: -row["effect"])[:_ROWS]
        rows.append([f"`{title.partition(' ')[0]}`", title.partition(" on ")[2], _words(large)])
    return table(["config", "GPUs", "effect on the predicted step"], rows)


def _words(effects: list[dict[str, Any]]) -> str:
    words = []
    for row in effects:
        words.append(f"{row['constant']} {row['from']} to {row['to']}: {row['effect']:.1%}")
    return "; ".join(words)


def slow_link() -> str:
    """Returns a row for each collective over a throttled link: what the fit found."""
    rows = []
    for row in tables_of("comm_slow_link")["Latency and bandwidth"]:
        bandwidth = 1e3 * row["bandwidth_gb_per_s"]
        rows.append([
            row["collective"], f"{bandwidth:.2f}", f"{bandwidth / _LINK - 1:+.0%}",
            f"{row['error']:.0%}",
        ])  # fmt: skip
    return table(["collective", "fitted, MB/s", "against the link", "error of the fit"], rows)


_LINK = 50 / 8 * 1448 / 1514
"""MB/s of 50 Mb/s without the headers of TCP and Ethernet."""

TABLES = {
    "targets": targets,
    "constants of hardware": constants,
    "what ifs": what_ifs,
    "slow link": slow_link,
}
