"""The closed forms against bytes that they gave when they were first held to compiled programs: a
change of the code that changes what a preset sends on paper shows here.

A number of closed_forms_frozen.json is changed by hand, together with the program that sends it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh_lm.planning.closed_forms.step import expected
from mesh_lm.planning.closed_forms.subjects import EXPERTS, PARTS, Decoder, Strategy
from mesh_lm.planning.closed_forms.terms import by_axes, total

FILE = Path(__file__).parent / "closed_forms_frozen.json"
FROZEN = json.loads(FILE.read_text(encoding="utf-8"))
"""models: name -> a decoder's sizes. cases: a decoder with changes, a strategy, and its bytes by
axes."""


def title(case: dict[str, Any]) -> str:
    mesh = [f"{name}={value}" for name, value in case["strategy"].items()]
    return "-".join([case["preset"], case["model"], case["decoder"]["remat"], *mesh])


@pytest.mark.parametrize("case", FROZEN["cases"], ids=title)
def test_bytes_by_axes_are_as_they_were(case: dict[str, Any]) -> None:
    decoder = Decoder(**(FROZEN["models"][case["model"]] | case["decoder"]))
    strategy = Strategy(case["preset"], **case["strategy"])
    terms = expected(decoder, strategy, case["sequences"], case["microbatches"])
    sent = {"+".join(axes): n_bytes for axes, n_bytes in by_axes(terms).items()}
    assert sent == pytest.approx(case["sent"], rel=1e-12)
    assert total(terms, field="least_wire_bytes") == pytest.approx(case["least"], rel=1e-12)


def test_every_preset_remat_and_stash_is_frozen() -> None:
    cases = FROZEN["cases"]
    presets = {part for case in cases for part in case["preset"].split("+")}
    assert presets == PARTS - EXPERTS - {"by_node", "diloco"}
    assert {case["decoder"]["remat"] for case in cases} == {"none", "save_names", "full"}
    staged = [case["strategy"] for case in cases if "pipeline" in case["strategy"]]
    assert {strategy["stash"] for strategy in staged} == {"input", "residuals"}
