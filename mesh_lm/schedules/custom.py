"""Reads and writes custom schedules as files. Imports no jax.

CSV: a row is a stage, a cell is a tick. A cell is empty, or has at most one op of each kind. Lines
that start with # are comments:

    # 2 stages, 2 microbatches
    0F0, 0F1, 0B0, 0B1
       , 1F0;1B0, 1F1;1B1,

An op is its virtual stage, its kind and its microbatch, as in the tables of PyTorch
(torch.distributed.pipelining), which can be read unchanged: F forward, B backward; if the backward
pass is split, B or I for the gradient of the input and W for that of the weights.

JSON: {"ticks": rows of cells as above}, or {"order": each stage's ops in order}, which run as early
as their inputs allow; with "packed": false, one op a tick.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeGuard

from mesh_lm import strict_json
from mesh_lm.errors import ConfigError
from mesh_lm.schedules.schedule import Op, Schedule, ScheduleError, assign_ticks, make_schedule

SUFFIXES = (".csv", ".json")
Unit = Literal["tick", "position"]
_OP = re.compile(r"(\d+)([FBW])(\d+)")
_SPLIT_INPUT = re.compile(r"(?<=\d)I(?=\d)")
_JSON = (
    '{"ticks": [["0F0", "0F1;0B0", ...], ...]} with a list for each stage, or "order" for ops '
    "without ticks"
)


def find_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns the named schedule, or the one in a .csv or .json file.

    A file must have these sizes; 0 stands for any size.

    Raises ConfigError as `make_schedule` and `load` do, and for a file with other sizes.
    """
    if Path(name).suffix not in SUFFIXES:
        return make_schedule(name, stages, microbatches, chunks)
    schedule = load(name)
    sizes = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    different = {
        field: size for field, size in sizes.items() if size not in (0, getattr(schedule, field))
    }
    if different:
        file_sizes = [f"{field}={getattr(schedule, field)}" for field in different]
        run_sizes = [f"{field}={size}" for field, size in different.items()]
        raise ConfigError(
            f"{name} is a schedule for {' and '.join(file_sizes)}; "
            f"the sizes of this run are {' and '.join(run_sizes)}"
        )
    return schedule


def load(file: str) -> Schedule:
    """Returns the schedule in a .csv or .json file, checked, with the file's stem as its name.

    Raises ConfigError, which names file, line, tick and op, for a file that cannot be read and for
    a schedule that cannot run.
    """
    path = Path(file).expanduser()
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{file}: expected a file that ends in .csv or .json")
    try:
        with open(path, "rb") as stream:
            text = stream.read(strict_json.FILE).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{file}: cannot read the schedule: {reason}") from error
    text = _SPLIT_INPUT.sub("B", text)
    try:
        if path.suffix == ".csv":
            return _parse_csv(path.stem, text)
        return _parse_json(path.stem, text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: this line is not JSON: {error.msg}") from error
    except ScheduleError as error:
        raise ConfigError(f"{file}{_line_suffix(text, error.word)}: {error}") from error


def write_csv(schedule: Schedule, file: str) -> None:
    """Writes a schedule as `load` reads it, with aligned columns.

    Raises ConfigError if the file cannot be written.
    """
    cells = [["" for _ in range(schedule.n_ticks)] for _ in range(schedule.stages)]
    for op, tick in schedule.in_order():
        stage = op.virtual % schedule.stages
        cells[stage][tick] = f"{cells[stage][tick]};{op}".lstrip(";")
    widths = [max(len(row[tick]) for row in cells) for tick in range(schedule.n_ticks)]

    chunks = f", {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    lines = [
        f"# {schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches"
        f"{chunks}. A row is a stage, a cell a tick; an op is its virtual stage, F, B or W, and "
        "its microbatch"
    ]
    for row in cells:
        aligned = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(", ".join(aligned).rstrip())
    try:
        Path(file).expanduser().write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot write the schedule: {error.strerror}") from error


def _parse_csv(name: str, text: str) -> Schedule:
    lines = ["" if line.lstrip().startswith("#") else line for line in text.splitlines()]
    rows = [row for row in csv.reader(lines) if row]
    return _parse_rows(name, rows, "tick")


def _parse_json(name: str, text: str) -> Schedule:
    try:
        data = strict_json.loads(text, size=strict_json.FILE)
    except json.JSONDecodeError:
        raise  # it is a ValueError, too, and `load` reports its line
    except ValueError as error:
        raise ScheduleError(f"this is not the JSON of a schedule; expected {_JSON}") from error
    forms = [form for form in ("ticks", "order") if form in data]
    rows = data[forms[0]] if len(forms) == 1 else None
    if not _is_table(rows):
        raise ScheduleError(f"the JSON has no rows of a schedule; expected {_JSON}")
    unknown = sorted(data.keys() - {*forms, "packed"})
    if unknown:
        raise ScheduleError(
            f"the schedule has an unknown key {unknown[0]!r}; expected {_JSON}", f'"{unknown[0]}"'
        )
    unit = "tick" if forms == ["ticks"] else "position"
    return _parse_rows(name, rows, unit, packed=bool(data.get("packed", True)))


def _is_table(value: object) -> TypeGuard[list[list[str]]]:
    return isinstance(value, list) and all(
        isinstance(row, list) and all(isinstance(cell, str) for cell in row) for row in value
    )


def _parse_rows(
    name: str, rows: Sequence[Sequence[str]], unit: Unit, *, packed: bool = True
) -> Schedule:
    """Returns the schedule of a row of cells for each stage, checked.

    unit: what a cell's index in its row means, a tick or a position in the order.
    """
    ops = _parse_ops(rows, unit)
    if not ops:
        raise ScheduleError(
            "the schedule has no ops; write a row for each stage, as in 0F0, 0F1;0B0, 0B1"
        )
    stages = len(rows)
    n_virtual = 1 + max(op.virtual for op in ops)
    if n_virtual % stages:
        below = n_virtual // stages * stages
        multiples = f"{below} or {below + stages}" if below else f"{stages}"
        raise ScheduleError(
            f"{stages} rows are {stages} stages, which must have equally many virtual stages: "
            f"{multiples} in all, not {n_virtual}"
        )
    ticks = ops
    if unit == "position":
        orders: list[list[Op]] = [[] for _ in range(stages)]
        for op in ops:
            orders[op.virtual % stages].append(op)
        ticks = assign_ticks(orders, packed)
    microbatches = 1 + max(op.microbatch for op in ops)
    schedule = Schedule(name, stages, microbatches, n_virtual // stages, ticks)
    schedule.check()
    return schedule


def _parse_ops(rows: Sequence[Sequence[str]], unit: Unit) -> dict[Op, int]:
    """Returns each op of a table -> the index of its cell, row by row."""
    ops: dict[Op, int] = {}
    for stage, row in enumerate(rows):
        for index, cell in enumerate(row):
            for word in re.split(r"[;\s]+", cell):
                if not word:
                    continue
                location = f"{unit} {index}, stage {stage}"
                match = _OP.fullmatch(word)
                if match is None:
                    raise ScheduleError(
                        f"{location}: {word!r} is not an op; write virtual stage, F, B or W, and "
                        "microbatch, as in 2F3",
                        word,
                    )
                op = Op(match[2], int(match[3]), int(match[1]))
                if op.virtual % len(rows) != stage:
                    raise ScheduleError(
                        f"{location}: {op} is in the wrong row: virtual stage {op.virtual} is on "
                        f"stage {op.virtual % len(rows)} of {len(rows)}",
                        op,
                    )
                if op in ops:
                    raise ScheduleError(
                        f"{location}: {op} occurs twice; the first is at {unit} {ops[op]}", op
                    )
                ops[op] = index
    return ops


def _line_suffix(text: str, word: str) -> str:
    """`:7` if the last occurrence of the word in a file is in line 7; empty if there is none."""
    if not word:
        return ""
    matches = list(re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", text))
    if not matches:
        return ""
    n_newlines = text.count("\n", 0, matches[-1].start())
    return f":{n_newlines + 1}"
