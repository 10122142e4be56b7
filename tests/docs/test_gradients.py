"""docs/gradients.md: its figures are those of the newest results, and compiled steps send what its
formulas say."""

import json
import re

import pytest

from benchmarks import reductions_page
from mesh_lm.planning.closed_forms.reductions import (
    all_reduce,
    by_node,
    int8_half,
    outer_step,
    power_sgd,
    top_k,
)

PAGE = reductions_page.PAGE.read_text(encoding="utf-8")
TABLES = json.loads(reductions_page.newest("reductions").read_text(encoding="utf-8"))["tables"]
ONE, TWO = (
    {row["form"]: row for row in TABLES[title]["rows"]}
    for title in ("One replica in a node", "Two replicas in a node")
)
LOSSES = json.loads(reductions_page.newest("reduced_loss").read_text(encoding="utf-8"))["tables"]
GIB = 2**30


@pytest.mark.parametrize("name", reductions_page.MARKS)
def test_the_figures_are_those_of_the_newest_results(name: str) -> None:
    assert reductions_page.figures(name) in PAGE, "run: python benchmarks/reductions.py --page"


def gpt3(tensor: int) -> tuple[int, int]:
    """(elements of a device's layers, of the tables that every stage has), without vectors."""
    return 12 * 12288**2 * 12 // tensor, (51200 // tensor + 2048) * 12288


def test_rows_send_what_the_formulas_say() -> None:
    """Layers over 16 replicas, tables over 8 stages as well; vectors are less than 1 % of the
    rest."""
    layers, tables = gpt3(8)
    halves = [sum(int8_half([n], ways).values()) for n, ways in ((layers, 16), (tables, 128))]
    new = (15 / 16 * layers + 127 / 128 * tables) * 2
    fp32 = all_reduce(layers, 16) + all_reduce(tables, 128)
    wanted = {
        "ring, fp32": fp32, "ring, bf16": fp32 / 2, "int8": 2 * sum(halves),
        "reduce-scatter, fp32": fp32 / 2 + new,
        "reduce-scatter, bf16": fp32 / 4 + new, "reduce-scatter, int8": sum(halves) + new,
    }  # fmt: skip
    for form, bytes in wanted.items():
        assert ONE[form]["sent_gib"] == pytest.approx(bytes / GIB, rel=0.01), form
    for row in TABLES["An outer step every H steps"]["rows"]:
        assert row["parameters"] == layers + tables
        assert row["sent_gib"] == outer_step(layers + tables, 16, row["h"]) / GIB


def test_two_replicas_in_a_node_send_half_across() -> None:
    layers, tables = gpt3(4)
    inside, across = by_node([layers], 2, 16)
    row = ONE | TWO
    assert row["by node, fp32"]["across_nodes_gib"] == pytest.approx(
        (across + all_reduce(tables / 2, 128)) / GIB, rel=0.01
    )
    assert row["by node, fp32"]["inside_nodes_gib"] == pytest.approx(
        (inside + all_reduce(tables, 2)) / GIB, rel=0.01
    )
    assert TWO["ring, fp32"]["across_nodes_gib"] == pytest.approx(
        (all_reduce(layers, 32) + all_reduce(tables, 256)) / GIB, rel=0.01
    )


def test_the_page_tells_the_types_of_the_programs() -> None:
    for form, row in ONE.items():
        assert re.findall(r"\w+ \(", row["types"])[-1] == {"int8": "s8 (", "bf16": "bf16 ("}.get(
            form.rpartition(" ")[2], "f32 ("
        )


def test_what_was_declined_is_by_the_formulas() -> None:
    n, elements = 16, 10**9
    share = 1 / (4 * (n - 1))
    assert (
        top_k(elements, n, share) == pytest.approx(2 * (n - 1) * elements / (n - 1), rel=1e-9)
        and f"{100 * share:.1f} %" in PAGE
    )
    assert f"{100 / (4 * 63):.1f} % for 64" in PAGE
    small = power_sgd(12288, 49152, 32, n) / all_reduce(12288 * 49152, n)
    assert f"that is {100 * small:.1f} % of the fp32 sum" in PAGE


def test_the_loss_was_compared_with_several_seeds() -> None:
    runs = {(row["sums"], row["learning_rate"], row["seed"]): row for row in LOSSES["Runs"]["rows"]}
    assert len({seed for *_, seed in runs}) >= 3 and {row["steps"] for row in runs.values()} == {
        300
    }
    assert {sums for sums, *_ in runs} == {"float32", "float32, by node", "bfloat16", "int8"}
    for (sums, rate, seed), row in runs.items():
        assert row["heldout_loss"] == pytest.approx(
            runs["float32", rate, seed]["heldout_loss"], rel=0.05
        ), sums


def test_the_page_says_what_the_losses_say() -> None:
    said = {
        (line["learning_rate"], line["sums"]): line
        for line in LOSSES["Relative to float32"]["rows"]
        if line["loss"] == "heldout_loss"
    }
    low, high, order = said[1e-3, "int8"], said[8e-3, "int8"], said[8e-3, "float32, by node"]
    text = " ".join(PAGE.split())
    assert (
        f"int8 costs {low['mean_pct']:.2f} % of the loss, with a deviation of "
        f"{low['deviation_pct']:.2f} among the seeds"
    ) in text
    assert (
        f"int8 ({high['mean_pct']:+.2f} % on average, deviation {high['deviation_pct']:.1f})"
        in text
    )
    assert (
        f"change the loss by up to {max(abs(order[f'seed_{n}_pct']) for n in range(3)):.1f} %"
        in text
    )
    assert abs(said[1e-3, "bfloat16"]["mean_pct"]) < 0.001 and low["mean_pct"] < 1
