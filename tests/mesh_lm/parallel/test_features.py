"""Features that different changes built, together: each row of a covering array equals one device.

Rows run in a separate process, because XLA aborts the process on some programs. A failure shows the
command that reproduces it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import covering
import feature_rows
import pytest
from covering import Row
from example_runner import Runner
from processes import ROOT

SCRIPT = ROOT / "tests" / "feature_rows.py"
_IN_CI = 3
"""Rows of the array that CI runs, the first, which cover the most pairs; two minutes on two slow
cores."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    one = Runner(SCRIPT, tmp_path_factory.mktemp("features"), feature_rows.N_DEVICES)
    yield one
    one.close()


def _short(row: Row) -> Row:
    """What a row has that differs from one device."""
    return {name: value for name, value in row.items() if value != feature_rows.PLAIN[name]}


def _assert_all(runner: Runner, rows: Sequence[Row], verdicts: Sequence[str]) -> None:
    """Runs all rows, and raises AssertionError for each verdict that is not among these."""
    problems = []
    for row in rows:
        verdict, text = runner.judged(_short(row))
        if verdict not in verdicts:
            problems.append(f"{verdict}: {_short(row)}\n{text}")
    assert not problems, "\n\n".join(problems)


@pytest.mark.slow
def test_every_two_values_of_two_features_are_in_a_row() -> None:
    fitting, others = feature_rows.array()
    pairs = {
        (a, first, b, second)
        for i, a in enumerate(feature_rows.FACTORS)
        for b in list(feature_rows.FACTORS)[i + 1 :]
        for first in feature_rows.FACTORS[a]
        for second in feature_rows.FACTORS[b]
    }
    covered = {pair for row in (*fitting, *others) for pair in covering.pairs_of(row)}
    assert covered == pairs
    assert all(list(row) == list(feature_rows.FACTORS) for row in (*fitting, *others))


def test_a_pair_that_breaks_a_constraint_is_in_a_row_of_its_own() -> None:
    factors = {"a": (1, 2), "b": (1, 2), "c": (1, 2)}
    fitting, others = covering.array(factors, [(("a", "b"), lambda a, b: a == 1 or b == 1)])
    assert covering.array(factors) == covering.array(factors)
    assert all(row["a"] == 1 or row["b"] == 1 for row in fitting)
    assert [(row["a"], row["b"]) for row in others] == [(2, 2)]


@pytest.mark.slow
def test_stages_gather_the_layers_of_several_segments(runner: Runner) -> None:
    """The row that found the kind: each segment has flat vectors of its own."""
    _assert_all(
        runner,
        [
            feature_rows.PLAIN
            | {"replicas": "zero3", "stages": 2, "segments": "two", "microbatches": 2}
        ],
        ["same"],
    )


@pytest.mark.slow
def test_the_first_rows_equal_one_device(runner: Runner) -> None:
    _assert_all(runner, feature_rows.array()[0][:_IN_CI], ["same"])


@pytest.mark.exhaustive
def test_all_rows_equal_one_device(runner: Runner) -> None:
    _assert_all(runner, feature_rows.array()[0], ["same"])


@pytest.mark.slow
def test_what_does_not_fit_together_is_refused(runner: Runner) -> None:
    """By `check`, in one line for each reason, or says nothing, as chunks without stages. None is
    wrong or crashes."""
    _assert_all(runner, feature_rows.array()[1], ["refused", "same"])
