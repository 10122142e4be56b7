"""Schedules from a user's own file."""

from pathlib import Path

import pytest
from hypothesis import given
from pipeline_schedules import schedules

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.custom import find_schedule, load, write_csv
from mesh_lm.schedules.schedule import Op, Schedule, make_schedule

GOOD = """# two stages
0F0, 0F1, 0B0, 0B1
   , 1F0;1B0, 1F1 1B1
"""
JSON = (
    'expected {"ticks": [["0F0", "0F1;0B0", ...], ...]} with a list for each stage, or "order" for '
    "ops without ticks"
)


def written(folder: Path, text: str, name: str = "mine.csv") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@given(schedule=schedules())
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule
) -> None:
    file = tmp_path_factory.getbasetemp() / f"{schedule.name}.csv"
    write_csv(schedule, str(file))
    assert load(str(file)) == schedule
    rows = file.read_text(encoding="utf-8").splitlines()[1:]
    commas = {tuple(i for i, letter in enumerate(row) if letter == ",") for row in rows}
    assert len(commas) == 1, "columns are not aligned"


def test_the_cells_of_a_table_are_its_ticks(tmp_path: Path) -> None:
    text = GOOD.replace("0B0, 0B1", " , , 0B0, , 0B1")
    schedule = load(written(tmp_path, text))
    assert schedule.name == "mine"
    assert (schedule.stages, schedule.microbatches, schedule.chunks) == (2, 2, 1)
    assert schedule.n_ticks == 7
    assert schedule.ticks == {
        Op("F", 0, 0): 0,
        Op("F", 1, 0): 1,
        Op("F", 0, 1): 1,
        Op("B", 0, 1): 1,
        Op("F", 1, 1): 2,
        Op("B", 1, 1): 2,
        Op("B", 0, 0): 4,
        Op("B", 1, 0): 6,
    }


def test_json_holds_the_same_table_or_only_the_order(tmp_path: Path) -> None:
    table = '{"ticks": [["0F0", "0F1", "0B0", "0B1"], ["", "1F0;1B0", "1F1;1B1"]]}'
    order = '{"order": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]'
    ticks = load(written(tmp_path, GOOD)).ticks
    assert load(written(tmp_path, table, "ticks.json")).ticks == ticks
    assert load(written(tmp_path, order + "}", "order.json")).ticks == ticks
    single = load(written(tmp_path, order + ', "packed": false}', "single.json"))
    assert sorted(tick for op, tick in single.ticks.items() if op.virtual) == [1, 2, 3, 4]


def test_tables_of_pytorch_can_be_read(tmp_path: Path) -> None:
    """PyTorch's zero bubble schedules write I for the gradient of the input."""
    schedule = load(written(tmp_path, "0F0,,,0I0,0W0\n,1F0,1I0,1W0,\n"))
    assert schedule.kinds == "FBW"
    assert schedule.ticks[Op("B", 0, 1)] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD.replace("1B0", "").replace("1B1", "1B1, 1B0"),
            ":2: tick 2, stage 0: 0B0 needs 1B0, which comes only at tick 3; {hop}",
        ),
        (
            GOOD.replace(", 0B0", ";0B0,"),
            ":2: tick 1, stage 0: 0B0 needs 1B0, which comes only at tick 1; {hop}",
        ),
        (
            GOOD.replace("two stages", "1B0 soon").replace("1F0;", ""),
            ":3: tick 1, stage 1: 1B0 needs 1F0, which the schedule lacks",
        ),
        (GOOD.replace(", 0B1", ""), ": 0B1 (backward on stage 0) is missing from the schedule"),
        (
            GOOD.replace("0B1", "0B0"),
            ":2: tick 3, stage 0: 0B0 occurs twice; the first is at tick 2",
        ),
        (
            GOOD.replace("1F1", "0F2"),
            ":3: tick 2, stage 1: 0F2 is in the wrong row: virtual stage 0 is on stage 0 of 2",
        ),
        (
            GOOD.replace("0B1", "0X1"),
            (
                ":2: tick 3, stage 0: '0X1' is not an op; write virtual stage, F, B or W, and "
                "microbatch, as in 2F3"
            ),
        ),
        (
            GOOD.replace("0F0, 0F1,", "0F0;0F1,,"),
            ":2: tick 0, stage 0: 0F1 and 0F0 share a tick: a stage does one forward a tick",
        ),
        (
            "# nothing\n\n",
            ": the schedule has no ops; write a row for each stage, as in 0F0, 0F1;0B0, 0B1",
        ),
        (
            "0F0,,,0F2\n,0F1\n".replace("0F1", "1F0").replace("0F2", "2F0"),
            ": {rows} 2 or 4 in all, not 3",
        ),
        ("0F0,\n,\n", ": {rows} 2 in all, not 1"),
        (
            "0F0,,0F99999999\n,1F0,\n",
            ": 0F1 (forward on stage 0) and 199999996 more ops are missing from the schedule",
        ),
    ],
)
def test_mistakes_name_line_tick_and_op(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load(file)
    expected = message.format(
        hop="a stage's output arrives one tick later",
        rows="2 rows are 2 stages, which must have equally many virtual stages:",
    )
    assert str(error.value) == file + expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n"order": [', ":2: this line is not JSON: Expecting value"),
        ('{"order": 3}', f": the JSON has no rows of a schedule; {JSON}"),
        ('{"ticks": [[1]]}', f": the JSON has no rows of a schedule; {JSON}"),
        ("[]", f": this is not the JSON of a schedule; {JSON}"),
        ('{"order": [],\n"pack": 1}', f":2: the schedule has an unknown key 'pack'; {JSON}"),
        (
            '{"order": [["0F0", "0B0", "0F1", "0B1"],\n["1F1", "1B1", "1F0", "1B0"]]}',
            ":1: deadlock at tick 1: every stage waits for another: stage 0 at 0B0, stage 1 at 1F1",
        ),
        (
            '{"order": [["0F0", "0B0"],\n["1F0", "1C0"]]}',
            ":2: position 1, stage 1: '1C0' is not an op; write {op}",
        ),
    ],
)
def test_mistakes_in_json(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text, "mine.json")
    with pytest.raises(ConfigError) as error:
        load(file)
    assert str(error.value) == file + message.replace(
        "{op}", "virtual stage, F, B or W, and microbatch, as in 2F3"
    )


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nope\.csv: cannot read the schedule: No such file or directory"
    ):
        load("nope.csv")
    with pytest.raises(
        ConfigError, match=r"mine\.txt: expected a file that ends in \.csv or \.json"
    ):
        load("mine.txt")
    (tmp_path / "mine.csv").write_bytes(b"\xff\xfe0")
    with pytest.raises(ConfigError, match=r"mine\.csv: cannot read the schedule: not UTF-8"):
        load(str(tmp_path / "mine.csv"))
    with pytest.raises(ConfigError, match="cannot write the schedule: Is a directory"):
        write_csv(make_schedule("1f1b", 2, 2), str(tmp_path))


def test_a_file_must_be_for_the_run(tmp_path: Path) -> None:
    file = written(tmp_path, GOOD)
    assert find_schedule(file, 2, 2, 1) == find_schedule(file, 0, 0, 0) == load(file)
    assert find_schedule("1f1b", 2, 4, 2) == make_schedule("1f1b", 2, 4, 2)
    with pytest.raises(ConfigError) as error:
        find_schedule(file, 2, 4, 2)
    assert str(error.value) == (
        f"{file} is a schedule for microbatches=2 and chunks=1; the sizes of this run are microbatches=4 and chunks=2"
    )
