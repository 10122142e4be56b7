"""Lint of a model with three segments: a finding names its segment, hides none of another's, and
respects the segment's own rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from sharding_rules import Rules
from sharding_rules.lab.lint import Finding, lint
from sharding_rules.lab.report import Argument, Collective, Location, Report
from tests.sharding_rules.lab.test_lint import (
    AXES,
    LAWFUL,
    LAYER,
    RULES,
    D,
    F,
    H,
    N,
    S,
    arguments,
    collective,
    only,
    report,
)

SEGMENTS = {"first": 2, "middle": 2, "last": 2}
OF_SEGMENTS = {
    f"{name}.{weight.removeprefix('blocks.')}": axes
    for weight, axes in AXES.items()
    if "." in weight
    for name in SEGMENTS
}
OF_SEGMENTS["embedding"] = AXES["embedding"]


def place(segment: str, part: str = "mlp", phase: Any = "forward") -> Location:
    return dataclasses.replace(LAYER, part=f"{segment}/layers/{part}", phase=phase)


def inside(segment: str, one: Collective, number: int) -> Collective:
    return dataclasses.replace(
        one,
        name=f"{segment}.{number}",
        where=dataclasses.replace(one.where, part=f"{segment}/{one.where.part}"),
    )


def three(*more: Collective, **changes: Any) -> Report:
    """A lawful step of three segments of equal layers, and more."""
    given: list[Argument] = []
    for one in arguments():
        names = (
            [one.name.replace("blocks.", f"{name}.") for name in SEGMENTS]
            if "blocks." in one.name
            else [one.name]
        )
        given += [dataclasses.replace(one, name=name) for name in names]
    lawful = [
        inside(name, one, i)
        for i, one in enumerate(LAWFUL)
        if one.where.part.startswith("layers/")
        for name in SEGMENTS
    ]
    lawful += [one for one in LAWFUL if not one.where.part.startswith("layers/")]
    made = report(**{"arguments": tuple(given), "segments": SEGMENTS, **changes})
    return dataclasses.replace(made, collectives=(*lawful, *more))


def found(made: Report, rules: Rules = RULES) -> tuple[Finding, ...]:
    scopes = rules.scopes()

    def scoped(name: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        segment = name.partition(".")[0]
        return tuple(
            axis if axis == "layers" or segment not in scopes else f"{segment}/{axis}"
            for axis in axes
        )

    return lint(made, rules, {name: scoped(name, axes) for name, axes in OF_SEGMENTS.items()})


def test_a_lawful_step_is_clean() -> None:
    assert found(three()) == ()
    scoped = RULES.replace(
        "scoped", params={"first/mlp": "tensor"}, activations={"first/mlp": "tensor"}
    )
    assert found(three(), scoped) == ()


def test_a_finding_of_one_segment_does_not_hide_that_of_another() -> None:
    """The same array from the same line of the source, which in one segment would be one
    finding."""
    sent = [
        collective(
            "all-to-all", "tensor", f"bf16[4,{S},{F}]", where=place(name), name=f"a2a.{name}"
        )
        for name in ("first", "last")
    ]
    both = found(three(*sent))
    assert [one.segments for one in both] == [("first",), ("last",)]
    assert [one.collectives for one in both] == [("a2a.first",), ("a2a.last",)]
    assert "segment first" in str(both[0])
    merged = lint(dataclasses.replace(three(*sent), segments={}), RULES, OF_SEGMENTS)
    assert only(merged).segments == (), "without segments it is one finding"


def test_what_one_segment_explains_is_not_explained_in_another() -> None:
    """A reshard in the MLP of one segment explains a residual stream that is summed in full there,
    and there only."""
    reshard = collective("all-to-all", "tensor", f"bf16[4,{S},{F}]", where=place("first"))
    full = [
        collective(
            "all-reduce", "tensor", f"bf16[4,{S},{D}]", where=place(name), name=f"sum.{name}"
        )
        for name in ("first", "middle")
    ]
    assert {(one.check, one.segments) for one in found(three(reshard, *full))} == {
        ("reshard", ("first",)),
        ("residual-not-sharded", ("middle",)),
    }


def test_a_gathered_weight_is_that_of_its_segment() -> None:
    """Weights of three segments have the same shape."""
    again = collective("all-gather", "fsdp", f"bf16[{D},{F // 4}]", where=place("middle"))
    more = [dataclasses.replace(again, name=f"again.{i}") for i in range(2)]
    one = only(found(three(*more)))
    assert (one.check, one.segments) == ("gathered-twice", ("middle",))
    assert "middle.up gathered" in one.text and "first" not in one.text and "last" not in one.text


def test_a_segment_has_its_own_row_of_the_residual_stream() -> None:
    """Where its rows shard no sequence, sums in full are lawful, and gathers are not."""
    rules = RULES.replace("last whole", activations={"last/seq_resid": None})
    sums = [
        collective("all-reduce", "tensor", f"bf16[4,{S},{D}]", where=place(name), name=name)
        for name in ("middle", "last")
    ]
    assert {(one.check, one.segments) for one in found(three(*sums), rules)} == {
        ("reshard", ("last",)),
        ("residual-not-sharded", ("middle",)),
    }


def test_a_segment_has_its_own_row_of_heads() -> None:
    rules = RULES.replace(
        "last whole", activations={"last/heads": None}, params={"last/heads": None}
    )
    kernels = tuple(
        ("flash", (f"bf16[4,{S},{N},{H}]",), place(name, "attention"))
        for name in ("middle", "last")
    )
    made = three(kernels=kernels)
    weights = tuple(
        dataclasses.replace(a, axes=("fsdp",)) if "last.out" in a.name else a
        for a in made.arguments
    )
    one = only(found(dataclasses.replace(made, arguments=weights), rules))
    assert (one.check, one.segments) == ("global-kernel", ("middle",))


def test_a_merged_collective_is_looked_at_with_all_parameters() -> None:
    """Sums that XLA has merged are in no segment."""
    where = Location("first+last+middle/layers", "backward")
    assert (
        found(
            three(collective("all-reduce", "data", "f32[7000000]", loops=(), where=where, nodes=2))
        )
        == ()
    )
