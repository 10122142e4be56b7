"""The benchmark of context lengths: crossovers are where they should be, and its quick form
runs."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.test_benchmarks import run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def context_lengths() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module("context_lengths")


def rows(**by_form: list[float | None]) -> list[dict]:
    return [
        {"form": form, "tokens": 1024 * 2**n, "step_s": value}
        for form, values in by_form.items()
        for n, value in enumerate(values)
        if value is not None
    ]


def test_crossovers(context_lengths: ModuleType) -> None:
    """Halfway between 2k and 4k in logarithms; none where a form is missing at either length, and
    none between equals."""
    found = context_lengths.crossovers(rows(ring=[3, 3, 3], ulysses=[1, 2, 4]), "step_s")
    assert found == [
        {"of": "step_s", "from": "ulysses", "to": "ring", "tokens": round(1024 * 2**1.5)}
    ]
    assert not context_lengths.crossovers(rows(ring=[3, 3], ulysses=[1, None]), "step_s")
    assert not context_lengths.crossovers(rows(ring=[3, 3], ulysses=[3, 3]), "step_s")


def test_every_subject_is_a_config_that_can_run(context_lengths: ModuleType) -> None:
    from mesh_lm.training.check import check

    subjects = [*context_lengths.subjects()]
    assert len({(one.table, one.name) for one in subjects}) == len(subjects) > 40
    for subject in subjects:
        config = check(context_lengths.prepared(subject, False), context_lengths.DEVICES)
        assert config.tokens_per_step == context_lengths.DEVICES * context_lengths.TOKENS, subject


@pytest.mark.exhaustive
@pytest.mark.deviceless
def test_it_runs(tmp_path: Path) -> None:
    tables = run("context_lengths", tmp_path)
    (measured,) = (table for title, table in tables.items() if title != "Crossovers")
    assert len(measured) == 4 and all(row["sent_gib"] > 0 and row["fits"] for row in measured)
