"""docs/glossary.md has every word of ours, and says truly which mesh axes no preset uses yet."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

from mesh_lm.config import PipelineConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from mesh_lm.model.experts_config import ExpertsConfig
from sharding_rules import AXES, MANUAL, PRESETS
from sharding_rules.rules import Kind

PAGE = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
TABLE, REST = PAGE.split("\n## ", 1)
REST = " ".join(REST.split())


def words(text: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", text)


def test_every_axis_preset_and_column_is_there() -> None:
    ours = re.findall(r"^\| `(\w+)`", TABLE, re.MULTILINE)
    assert {*AXES, *PRESETS} <= set(ours)
    assert set(get_args(Kind)) <= set(words(REST))


def test_fields_exist() -> None:
    """The first column's field names are those of the configs."""
    first = "\n".join(line.split("|")[1] for line in TABLE.splitlines() if line.startswith("|"))
    fields = {
        field.name
        for config in (DecoderConfig, TrainLoop, PipelineConfig)
        for field in dataclasses.fields(config)
    }
    fields |= {f"experts.{field.name}" for field in dataclasses.fields(ExpertsConfig)}
    named = {word.removeprefix("train.").removeprefix("pipeline.") for word in words(first)} - {
        *AXES,
        *PRESETS,
        "seq_resid",
        "flat",
    }
    assert named and named <= fields


def test_lists_are_complete_and_in_order() -> None:
    def after(start: str, end: str) -> list[str]:
        return words(REST[REST.index(start) : REST.index(end, REST.index(start))])

    assert after("to the fastest", "A mesh axis of size 1") == list(AXES)
    assert after("Rules with a name", "A **product**") == list(PRESETS)
    assert after("one **column** per kind", "See [the cookbook]") == [
        "params",
        "gathered",
        "gradients",
        "optimizer",
        "activations",
    ]
    used = {axis for rules in PRESETS.values() for axis in rules.mesh_axes()}
    assert used >= set(AXES), "the page names no axis that no preset uses"
    assert set(after("The step is manual over", "sums over those axes")) == MANUAL
