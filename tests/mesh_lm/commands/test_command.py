"""Command lines that are one flat dataclass: accepted forms, and error messages."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from mesh_lm.commands.command_line import command
from mesh_lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Bake:
    """Bread."""

    output: str
    """Where the bread goes."""
    flour: tuple[str, ...]
    """What it is made of."""
    degrees: int = 220
    """Heat, in Celsius."""
    times: tuple[float, ...] = ()
    """Minutes on each side."""
    crust: Literal["soft", "hard"] = "hard"
    seed: int | None = None
    steam: bool = False

    def __post_init__(self) -> None:
        if self.degrees > 300:
            raise ValueError(f"--degrees={self.degrees} burns; at most 300")


REQUIRED = ["--output=oven", "--flour=rye"]


def bake(*argv: str) -> Bake:
    return command(Bake, [*REQUIRED, *argv], "Bakes bread.")


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        command(Bake, list(argv), "")
    first, *problems = str(caught.value).split("\n  - ")
    assert first == "bad command line"
    return problems


@pytest.mark.parametrize(
    ("argv", "changes"),
    [
        ([], {}),
        (["--degrees=200"], {"degrees": 200}),
        (["--degrees", "200", "--degrees", "-5"], {"degrees": -5}),
        (
            ["--flour", "wheat, fine", "spelt", "--crust=soft"],
            {"flour": ("rye", "wheat, fine", "spelt"), "crust": "soft"},
        ),
        (["--times=1.5", "--times", "2"], {"times": (1.5, 2.0)}),
        (["--steam", "--seed=3"], {"steam": True, "seed": 3}),
        (["--steam=false"], {"steam": False}),
        (["--steam", "true"], {"steam": True}),
        (["--output="], {"output": ""}),
    ],
)
def test_values(argv: list[str], changes: dict):
    assert bake(*argv) == dataclasses.replace(Bake("oven", ("rye",)), **changes)


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        ([], ["--output: missing; Where the bread goes", "--flour: missing; What it is made of"]),
        ([*REQUIRED, "--degres=3"], ["--degres: there is no such option; did you mean --degrees?"]),
        ([*REQUIRED, "--sauce=3"], ["--sauce: there is no such option; see --help"]),
        ([*REQUIRED, "--config=x.py"], ["--config: there is no such option; see --help"]),
        ([*REQUIRED, "--degrees=hot"], ["--degrees=hot: expected int"]),
        ([*REQUIRED, "--times=1,2"], ["--times=1,2: expected float"]),
        ([*REQUIRED, "--degrees"], ["--degrees: this option needs a value; expected int"]),
        (
            ["stray", *REQUIRED, "--degrees=1", "x.py"],
            ["stray: belongs to no option", "x.py: belongs to no option"],
        ),
        (
            [*REQUIRED, "--crust=sotf"],
            ["--crust=sotf: expected one of soft, hard; did you mean soft?"],
        ),
        ([*REQUIRED, "--degrees=400"], ["--degrees=400 burns; at most 300"]),
    ],
)
def test_mistakes(argv: list[str], problems: list[str]):
    assert problems_of(*argv) == problems


def test_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        command(Bake, ["--help"], "Bakes bread.")
    out = capsys.readouterr().out
    assert end.value.code == 0
    for text in (
        "Bakes bread.",
        "Where the bread goes.",
        "--degrees",
        "220",
        "{true,false}",
        "required",
    ):
        assert text in out
