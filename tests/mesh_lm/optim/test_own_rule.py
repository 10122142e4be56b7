"""optimizer.rule=module:class: a custom rule is found, also in the config file, and missing members
are reported."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from support import GPT, shard_on

from mesh_lm.commands.command_line import parse
from mesh_lm.config import OptimizerConfig, load
from mesh_lm.config.resolved import to_json
from mesh_lm.errors import ConfigError
from mesh_lm.optim import ArraySpec, Muon, Optimizer, is_matrix, make_rule, rule_name
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import masters, parts
from mesh_lm.state.disk_form import from_disk, to_disk
from mesh_lm.state.initial import init_state
from mesh_lm.training.check import check

COMPILE_BUDGET = 60

RULES = """
import dataclasses
from typing import ClassVar

from mesh_lm.config import option
from mesh_lm.optim import is_matrix


@dataclasses.dataclass(frozen=True)
class Plain:
    elementwise: ClassVar[bool] = True
    scale: float = option(1.0, above=0)

    def slots(self, leaves):
        return {}

    def direction(self, grads, slots, params, *, count, leaves):
        return grads, {}


class Rough(Plain):
    def slots(self, leaves):
        return {"kept": {name: leaf.like("bfloat16") for name, leaf in leaves.items() if is_matrix(name, leaf.axes)}}


class Whole(Plain):
    elementwise = False


class Half:
    elementwise = "yes"

    def slots(self, leaves):
        return {}


class Alone:
    direction = None

    def __init__(self, scale):
        pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an importable module with RULES."""
    (tmp_path / "rules_of_my_own.py").write_text(RULES, encoding="utf-8")
    (tmp_path / "broken_rules.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "rules_of_my_own"


def test_its_fields_are_options(module: str, tmp_path: Path) -> None:
    """On the command line, with their bounds, and in the config.json of the run."""
    name = f"{module}:Plain"
    config = parse(["gpt_tiny", f"--optimizer.rule={name}", "--optimizer.rule.scale=0.5"])
    assert rule_name(config.optimizer.rule) == name and vars(config.optimizer.rule)["scale"] == 0.5
    file = tmp_path / "config.json"
    file.write_text(to_json(config), encoding="utf-8")
    assert load(str(file)).optimizer == config.optimizer
    for words, said in (
        (["--optimizer.rule.scale=fast"], "--optimizer.rule.scale=fast: expected float"),
        (
            ["--optimizer.rule.beta1=1"],
            f"not a hyperparameter of optimizer.rule={name}, which has scale",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            parse(["gpt_tiny", f"--optimizer.rule={name}", *words])
    below = parse(["gpt_tiny", f"--optimizer.rule={name}", "--optimizer.rule.scale=0"])
    with pytest.raises(ConfigError, match=r"optimizer\.rule\.scale=0\.0 must be above 0$"):
        check(below, 1)


def test_a_config_may_import_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "my_own_helpers.py").write_text("STEPS = 7\n", encoding="utf-8")
    file = tmp_path / "with_helpers.py"
    text = """
import dataclasses

import my_own_helpers
from configs.gpt_tiny import get_config as tiny


def get_config():
    config = tiny()
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=my_own_helpers.STEPS))
"""
    file.write_text(text, encoding="utf-8")
    assert load(str(file)).train.steps == 7


def test_it_may_be_in_the_file_of_the_config(tmp_path: Path) -> None:
    file = tmp_path / "experiment.py"
    file.write_text(
        (
            "import dataclasses\n\nfrom configs.gpt_tiny import get_config as tiny\nfrom "
            "mesh_lm.config import OptimizerConfig\n"
        )
        + RULES
        + (
            "\n\ndef get_config():\n    return dataclasses.replace(tiny(), "
            "optimizer=OptimizerConfig(Plain(scale=2.0)))\n"
        ),
        encoding="utf-8",
    )
    config = check(load(str(file)), 1)
    assert rule_name(config.optimizer.rule) == f"{file}:Plain"
    written = tmp_path / "config.json"
    written.write_text(to_json(config), encoding="utf-8")
    assert vars(load(str(written)).optimizer.rule) == {"scale": 2.0}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adamv", "there is no such optimizer; did you mean 'adamw'?"),
        (
            "sgd",
            "there is no such optimizer; known: adafactor, adamw, adamw8, lion, muon, or module:class for a "
            "custom one",
        ),
        (
            "no_such_file:Sgd",
            "cannot import the module 'no_such_file' (ModuleNotFoundError: No module named "
            "'no_such_file')",
        ),
        (
            "rules_of_my_own:Plane",
            "'rules_of_my_own' has no optimizer of the name 'Plane'; did you mean 'Plain'?",
        ),
        (
            "rules_of_my_own:",
            "'rules_of_my_own' has no optimizer of the name ''; known: Alone, Plain, Rough, Whole",
        ),
        ("rules_of_my_own:Half", "lacks elementwise, direction; implement mesh_lm.optim.Rule"),
        (
            "rules_of_my_own:Alone",
            "cannot be constructed without arguments (TypeError: Alone.__init__() missing 1 required "
            "positional argument: 'scale'); give its fields defaults",
        ),
        (
            "broken_rules:Plain",
            "cannot import the module 'broken_rules' (ZeroDivisionError: division by zero)",
        ),
        (":Plain", "cannot import the module '' (ValueError: Empty module name)"),
    ],
)
def test_what_it_lacks_is_said(module: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["gpt_tiny", f"--optimizer.rule={name}"])
    assert str(caught.value) == f"bad command line\n  - --optimizer.rule={name}: {said}"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            "muon",
            "optimizer.rule='muon' is not an update rule: it is a name or a class; give a rule,",
        ),
        (
            Muon,
            "optimizer.rule=<class 'mesh_lm.optim.muon.Muon'> is not an update rule: it is a name",
        ),
        (
            {1: 2},
            "optimizer.rule=builtins:dict is not an update rule: it lacks elementwise, slots, direction",
        ),
        (Muon(momentum=1.0), "optimizer.rule.momentum=1.0 must be at least 0 and below 1"),
    ],
)
def test_what_is_no_rule_in_a_config(rule: Any, said: str) -> None:
    config = dataclasses.replace(load("configs/gpt_tiny.py"), optimizer=OptimizerConfig(rule))
    with pytest.raises(ConfigError, match=re.escape(said)):
        check(config, 1)


def test_a_file_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_me.py").write_text(RULES, encoding="utf-8")
    with pytest.raises(
        ConfigError,
        match=r"No module named 'beside_me'\); a file is named by its path: beside_me\.py$",
    ):
        make_rule("beside_me:Plain")
    assert type(make_rule("beside_me.py:Plain")).__name__ == "Plain"


def test_flat_vectors_are_refused_where_a_rule_takes_matrices(module: str) -> None:
    leaves = {
        "blocks": ArraySpec((2, 96), jnp.float32, ("layers", "flat"), "flat"),
        "norm.scale": ArraySpec((32,), jnp.float32, ("norm",)),
    }
    for name, works in (
        (f"{module}:Plain", True),
        (f"{module}:Whole", False),
        ("adamw", True),
        ("lion", True),
        ("adamw8", False),
        ("muon", False),
        ("adafactor", False),
    ):
        optimizer = Optimizer(OptimizerConfig(make_rule(name)), 1)
        if works:
            assert all(kept == leaves for kept in optimizer.slots(leaves).values())
            continue
        with pytest.raises(ConfigError) as caught:
            optimizer.slots(leaves)
        assert (
            str(caught.value)
            == f"optimizer.rule={name} works on whole matrices, and blocks is kept as flat vectors"
        )


@pytest.mark.parametrize("rules", ["ddp", "distributed"])
def test_a_slot_of_matrices_in_another_type(module: str, rules: str) -> None:
    """A flat vector counts as a matrix; a slot has its type on disk and after a restore."""
    layout, optimizer = (
        ModelLayout.of(GPT, shard_on(rules, data=2)),
        Optimizer(OptimizerConfig(make_rule(f"{module}:Rough")), 9),
    )
    kept = parts(layout, optimizer)["kept"].leaves
    assert (
        kept.keys()
        == {name for name, leaf in masters(layout).items() if is_matrix(name, leaf.axes)}
        and kept
    )
    state = init_state(layout, optimizer, seed=0)
    tree, digests = to_disk(layout, optimizer, state)
    assert tree["kept"].keys() == {
        name for name, leaf in layout.leaves.items() if is_matrix(name, leaf.axes)
    }
    back, wrong = from_disk(layout, optimizer, tree, digests)
    assert not wrong and {
        str(x.dtype) for part in (tree["kept"], back["kept"]) for x in part.values()
    } == {"bfloat16"}
