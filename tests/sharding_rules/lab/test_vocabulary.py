"""The lab knows no trainer: what one calls its scopes, folders and options comes to it as data, and
stays in the report."""

from pathlib import Path

from lab_report import report

from mesh_lm.planning.vocabulary import VOCABULARY
from sharding_rules.lab.report import Report
from sharding_rules.lab.vocabulary import NEUTRAL

HOME = Path(__file__).parents[3] / "sharding_rules"


def test_sharding_rules_names_no_trainer() -> None:
    files = [path for path in HOME.rglob("*") if path.suffix in (".py", ".css", ".js")]
    assert len(files) > 25
    assert [
        str(path)
        for path in files
        if "mesh_lm" in path.read_text(encoding="utf-8").replace("-", "_")
    ] == []


def test_a_kept_report_speaks_as_the_one_that_made_it() -> None:
    kept = Report.from_json(report(vocabulary=VOCABULARY).to_json())
    assert kept.vocabulary == VOCABULARY
    assert (
        Report.from_json(report(vocabulary=NEUTRAL).to_json()).vocabulary == NEUTRAL != VOCABULARY
    )


def test_a_fix_is_in_the_trainers_words() -> None:
    neutral = "at most {node} devices along {axis}"
    assert NEUTRAL.fix("leaves-nvlink", neutral, node=8, axis="tp") == "at most 8 devices along tp"
    assert VOCABULARY.fix("leaves-nvlink", neutral, node=8, axis="tensor").startswith(
        "mesh.tensor=8 at most"
    )


def test_slots() -> None:
    assert NEUTRAL.slots == () and VOCABULARY.slots == ("forward_slot", "backward_slot")
