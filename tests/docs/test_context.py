"""docs/context.md: its figures are those of the newest results, which send what its formulas
say."""

import json
import re
from typing import Any

import pytest
from PIL import Image

from benchmarks import context_page
from benchmarks.context_chart import digest
from mesh_lm.config import load
from mesh_lm.model.context import repeats
from tests.mesh_lm.parallel.test_context import CASES

PAGE = context_page.PAGE.read_text(encoding="utf-8")
SOURCE = context_page.newest()
DATA = json.loads(SOURCE.read_text(encoding="utf-8"))
TABLES = {title: table["rows"] for title, table in DATA["tables"].items() if title != "Crossovers"}
ROWS = {row["name"]: row for rows in TABLES.values() for row in rows}
MODEL, TOKENS = load("llama3_8b_128k").model, 16_384
ANEW = "run: python benchmarks/context_lengths.py --page"


def sent(form: str, ways: int, ulysses: int = 1) -> tuple[float, float, float]:
    """Bytes that a device sends in one layer by the page's formulas: forward, recomputed with
    remat=save_names, backward."""
    q, k, t = 2 * MODEL.n_heads * MODEL.d_head, 4 * MODEL.kv_heads * MODEL.d_head, TOKENS

    def by_ring(n: int, k: int) -> int:
        return (n - 1) * t * k

    def by_ulysses(n: int) -> float:
        return (n - 1) / n * t * (2 * q + k * repeats(MODEL.kv_heads, n))

    match form:
        case "context_gather":
            return (by_ring(ways, k),) * 3
        case "ulysses":
            return by_ulysses(ways), 0, by_ulysses(ways)
        case "ring":
            return by_ring(ways, k), 0, 3 * by_ring(ways, k)
    ring, inner = (
        by_ring(ways // ulysses, k * repeats(MODEL.kv_heads, ulysses)),
        by_ulysses(ulysses),
    )
    return ring + inner, 0, 3 * ring + inner


def test_what_is_equal_to_one_device() -> None:
    """The page names each strategy and each feature of the cases that are compared, and no
    other."""
    text = " ".join(PAGE.split())
    text = text[
        text.index("Loss and gradients equal those of one device.") : text.index(
            "compared with a model in PyTorch"
        )
    ]
    assert f"Tests compare {len(CASES)} combinations" in text
    parts = {part for case in CASES for part in case.rules.split("+")}
    assert parts >= {*context_page.FORMS} and any("pipeline" in case.mesh for case in CASES)
    assert set(re.findall(r"`(\w+)`", text)) == parts - {*context_page.FORMS}
    configs = [case.config for case in CASES]
    has = {
        "dropout": any(c.dropout for c in configs),
        "grouped heads": any(0 < c.n_kv_heads < c.n_heads for c in configs),
        "windows": any(any(c.window) for c in configs), "sinks": any(c.sinks for c in configs),
        "soft caps": any(c.softcap for c in configs),
        "rematerialisation": any(c.remat != "none" for c in configs),
        "separate documents": any(case.separate for case in CASES),
    }  # fmt: skip
    assert all(has.values()) and f"with {', '.join([*has][:-1])} and {[*has][-1]}." in text


def test_the_figures_are_those_of_the_newest_results() -> None:
    assert context_page.figures(DATA, SOURCE.name) in PAGE, ANEW
    with Image.open(context_page.CHART) as image:
        assert image.info["Source"] == digest(DATA), ANEW


@pytest.mark.parametrize("name", ROWS)
def test_a_row_sends_what_the_formulas_say(name: str) -> None:
    """Besides, ids of documents are gathered: at most 4 bytes of each token and axis, once more
    where they are recomputed."""
    row = ROWS[name]
    ulysses = int((re.findall(r"ulysses (\d+)", row["mesh"]) or [1])[0])
    said = (
        0
        if row["form"] == "none"
        else MODEL.n_layers * sum(sent(row["form"], row["ways"], ulysses)) / 2**30
    )
    assert said <= row["sent_gib"] <= said * 1.006
    assert row["fits"] and row["peak_gib"] <= row["usable_gib"]


def test_every_form_is_compared_up_to_a_million_tokens() -> None:
    few = next(iter(TABLES.values()))
    assert {row["form"] for row in few} == {"none", *context_page.FORMS}
    assert {row["tokens"] for row in few} == {1024 * 2**n for n in range(3, 11)}


def test_the_example_is_by_the_formulas() -> None:
    for form in context_page.FORMS:
        example = " + ".join(f"{n / 2**20:g}" for n in sent(form, 8, 4))
        (line,) = re.findall(rf"^\| `{form}`.*MiB|^\| `{form}`.*\+ \d+ \|$", PAGE, re.MULTILINE)
        assert line.endswith(f"| {example} |"), f"{form}: {example}"


def test_a_million_tokens_fit() -> None:
    peaks = {
        form: f"{ROWS[f'{form} {2**20} 64']['peak_gib']:.1f}"
        for form in ("usp", "ring", "context_gather")
    }
    text = " ".join(PAGE.split())
    assert (
        f"needs {peaks['usp']} of the {ROWS[f'usp {2**20} 64']['usable_gib']:.1f} GiB that a run "
        "may use on each GPU"
    ) in text
    assert f"`--rules=zero3+ring --mesh.sequence=64` {peaks['ring']} GiB" in text
    assert f"`context_gather` fits too, with {peaks['context_gather']} GiB" in text


def test_what_a_longer_context_gains() -> None:
    """The newest results of extend_context.py, and the sentences about them."""
    source = max(context_page.RESULTS.glob("extend_context_*.json"))
    rows: dict[str, dict[str, Any]] = {
        row["model"]: row
        for row in json.loads(source.read_text(encoding="utf-8"))["tables"]["Loss on long texts"][
            "rows"
        ]
    }
    short, more, long = (
        rows[name]["bits_per_byte"] for name in ("short", "short, continued", "long")
    )
    text = " ".join(PAGE.split())
    assert long < short and source.name.replace(".json", ".md") in PAGE
    assert (
        f"the short model {short:.3f}, the long one {long:.3f}" in text
        and f"in short sequences give {more:.3f}" in text
    )


def test_the_recipe_is_what_was_run() -> None:
    """Each option of the page's commands is one of the recorded commands."""
    source = max(context_page.RESULTS.glob("extend_context_*.json"))
    rows = {
        row["model"]: row["command"]
        for row in json.loads(source.read_text(encoding="utf-8"))["tables"]["Loss on long texts"][
            "rows"
        ]
    }
    block = next(
        text for text in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "--init-from" in text
    ).replace("\\\n", " ")
    for line, name in zip(block.splitlines(), ("short", "long"), strict=True):
        assert set(line.split()) <= set(rows[name].split()), name
