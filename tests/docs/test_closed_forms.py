"""docs/closed_forms.md: what its prose says of the forms, beside its tables, which
tests/docs/test_made.py compares."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest

from mesh_lm.commands.main import main
from mesh_lm.planning.closed_forms import tensor_2d
from mesh_lm.planning.closed_forms.step import expected
from mesh_lm.planning.closed_forms.subjects import Strategy
from mesh_lm.planning.closed_forms.terms import AR, total
from tests.docs.closed_form_tables import FACTORS, REMATS, dimensions, gpt, sent_over, terms

PRODUCTS = (
    "zero1+megatron", "zero1+megatron_sp", "zero2+megatron_sp", "distributed+megatron_sp",
    "zero3+megatron_sp", "hsdp", "hsdp+megatron",
    "hsdp+megatron_sp", "zero1+hsdp+megatron_sp",
)  # fmt: skip
COUNTS = (4, 8, 16, 32)
PAGE = (Path(__file__).parents[2] / "docs" / "closed_forms.md").read_text(encoding="utf-8")


def factors(product: str) -> dict[str, str]:
    """The mesh axis -> the preset of the page's table that uses it."""
    parts = product.replace("hsdp", "ddp+fsdp").split("+")
    strategies = (
        [part for part in parts if part != "ddp"]
        if any(part.startswith("zero") for part in parts)
        else parts
    )
    by_axis = {
        axis: [part for part in strategies if part in presets] for axis, presets in FACTORS.items()
    }
    return {axis: those[0] for axis, those in by_axis.items() if those} | (
        {} if by_axis["data"] else {"data": "ddp"}
    )


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("remat", REMATS)
def test_a_product_sends_what_its_presets_send(product: str, remat: str) -> None:
    """Along each axis, except that u is summed once over fsdp x tensor where both would sum it."""
    found, parts = terms(product, remat), factors(product)
    wanted = {axis: sent_over(terms(preset, remat), [axis]) for axis, preset in parts.items()}
    if {"fsdp", "tensor"} <= parts.keys() and parts["tensor"] == "megatron_sp":
        assert all(" + AR u" in wanted[axis] for axis in ("fsdp", "tensor"))
        wanted |= {axis: wanted[axis].replace(" + AR u", "") for axis in ("fsdp", "tensor")}
        assert sent_over(found, ("fsdp", "tensor")) == "AR u"
    else:
        assert not sent_over(found, ("fsdp", "tensor"))
    assert {axis: sent_over(found, [axis]) for axis in parts} == wanted


def test_every_collective_is_in_a_table() -> None:
    """A layer's and the step's are in the first one, those outside the layers in the second."""
    presets = [*itertools.chain(*FACTORS.values()), "megatron_2d"]
    parts = {term.part for preset in presets for term in terms(preset)}
    assert parts == {
        "layer",
        "gradients",
        "weights",
        "embedding",
        "head",
        "positions",
        "norm",
        "loss",
    }
    once = [
        t
        for t in terms("megatron_2d")
        if t.part == "layer" and t.per == "row" and t.axes == ("tensor_y",)
    ]
    assert [t.size for t in once] == ["u", "w"]


def test_bytes_of_each_parameter() -> None:
    """4 bytes a parameter in the stored weights; on many replicas the wire has as many bytes as the
    page says."""

    def sent(preset: str, per_parameter: float, remat: str = "none") -> None:
        model = dataclasses.replace(gpt(remat), d_model=1024, d_ff=4096)
        found = expected(model, Strategy(preset, data=512), 1, 1)
        of_matrices = [t for t in found if t.size in ("G", "Z", "R", "R/2", "J", "J/2")]
        of_parameters = (
            model.layers * model.matrices
            + 2 * model.vocab * model.d_model
            + model.seq * model.d_model
        )
        assert total(of_matrices) / of_parameters == pytest.approx(per_parameter, rel=0.02), preset

    for preset, bytes in {"ddp": 8, "zero1": 12, "zero2": 8, "distributed": 6}.items():
        sent(preset, bytes)


def test_a_ring_repeats_nothing_up_to_four_devices() -> None:
    for ways, repeated in ((2, 0), (4, 0), (5, 2), (8, 5)):
        hops = {
            remat: sum(
                t.times
                for t in expected(gpt(remat), Strategy("ring", sequence=ways), 2, 4)
                if t.size == "K"
            )
            for remat in REMATS
        }
        assert hops["none"] == hops["save_names"] == hops["full"] - repeated * 2 * 4


def test_two_dimensions_pay_from_eight_devices_on() -> None:
    assert all(tensor_2d.two(1, t // 2, 2) < tensor_2d.one(1, t) for t in COUNTS[1:])
    assert tensor_2d.two(1, 2, 2) > tensor_2d.one(1, 4)
    assert math.isclose(tensor_2d.two(1, 4, 2) / tensor_2d.one(1, 8), 49 / 56)


@pytest.mark.parametrize("devices", [8, 64, 512])
def test_the_rules_send_no_more_than_any_other_form(devices: int) -> None:
    for ratio in (1 / 8, 1 / 2, 1.0, 2.0, 8.0, 32.0):
        sent, _ = dimensions(devices, ratio)
        assert sent["rules"] == min(sent.values()), (ratio, sent)


def test_one_sequence_needs_no_second_gather_of_positions() -> None:
    for sequences, gathered in ((1, 0), (2, 1)):
        found = expected(gpt(), Strategy("megatron_sp", tensor=4), sequences, 4)
        assert len([t for t in found if t.part == "positions" and t.kind != AR]) == gathered


def test_the_command_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bytes", "gpt_175b", "--devices=1024"]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(["$ mesh-lm plan bytes gpt_175b --devices=1024", *printed, "```"]) in PAGE
