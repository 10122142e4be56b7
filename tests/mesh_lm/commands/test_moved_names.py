"""Names of fields of release 0.1 are answered with today's."""

import pytest

from mesh_lm.commands.command_line import parse
from mesh_lm.errors import ConfigError

COMPILE_BUDGET = 0
MOVED = "this field has another name now"
DEFAULT = f"{MOVED}; its value is now the default, leave it out"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--optimizer.name=muon"], f"{MOVED}; did you mean --optimizer.rule=muon?"),
        (["--optimizer.beta1=.8"], f"{MOVED}; did you mean --optimizer.rule.beta1=.8?"),
        (["--optimizer.outer_steps=9"], f"{MOVED}; did you mean --diloco.outer_steps=9?"),
        (
            ["--data.drop_last_partial"],
            f"{MOVED}; did you mean --data.megatron=drop_last_partial?",
        ),
        (
            ["--data.add_extra_token=false"],
            f"{MOVED}; did you mean --data.megatron=no_extra_token?",
        ),
        (["--data.add_extra_token"], DEFAULT),
        (["--data.mask_document_start=False"], DEFAULT),
        (
            ["--optimizer.momentum=.9"],
            "not a hyperparameter of optimizer.rule=adamw, which has beta1, beta2, eps",
        ),
        (
            ["--optimizer.rule=lion", "--optimizer.eps=1"],
            "not a hyperparameter of optimizer.rule=lion, which has beta1, beta2",
        ),
    ],
)
def test_old_names(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["gpt_tiny", *words])
    name = words[-1].partition("=")[0]
    assert str(caught.value) == f"bad command line\n  - {name}: {said}"
