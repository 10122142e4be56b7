"""What the code makes of the pages: python -m tests.docs.made writes it, and
tests/docs/test_made.py compares.

- A table between `<!-- table NAME: python -m tests.docs.made -->` and `<!-- end of table -->` is
  that of TABLES.
- In docs/errors.md the answer below each command and each line of Python is what the program says.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import doctest
import functools
import inspect
import io
import os
import re
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "docs/closed_forms.md",
    "docs/coming_from.md",
    "docs/sharding.md",
    "docs/errors.md",
    "docs/experts.md",
    "docs/guide.md",
    "docs/hardware.md",
    "docs/lab.md",
    "docs/pipeline.md",
    "docs/memory.md",
    "docs/planner.md",
    "docs/tours/from_megatron.md",
)
ANSWERED = "docs/errors.md"
_TABLE = re.compile(
    r"(<!-- table ([\w ]+): python -m tests\.docs\.made -->\n)(.*?)(<!-- end of table -->)",
    re.DOTALL,
)
_BLOCK = re.compile(r"^```(console|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def made(page: str) -> str:
    """The page as it should be. Needs eight devices, and the repository's root as the working
    directory, where it has answers."""
    text = _TABLE.sub(
        lambda match: f"{match[1]}\n{tables()[match[2]]()}\n\n{match[4]}",
        (ROOT / page).read_text(encoding="utf-8"),
    )
    if page != ANSWERED:
        return text
    names: dict[str, Any] = {}
    return _BLOCK.sub(
        lambda match: f"```{match[1]}\n{_answered(match[1], match[2], names)}```", text
    )


def tables() -> dict[str, Any]:
    """Name -> function that returns the table."""
    from mesh_lm.commands import deepspeed_names, meanings, other_names, torch_names
    from tests.docs import (
        closed_form_tables,
        expert_tables,
        guide_tables,
        hardware_tables,
        offload_tables,
        overlap_tables,
        planner_tables,
        preset_tables,
        rate_tables,
    )

    argument_tables = {
        "arguments of Megatron": functools.partial(meanings.table, other_names.MEGATRON),
        "options of preprocess_data": functools.partial(
            meanings.table, other_names.PREPROCESS, ("preprocess_data.py", "mesh-lm prepare")
        ),
        "options of torchrun": functools.partial(
            meanings.table, other_names.TORCHRUN, ("torchrun", "mesh-lm launch")
        ),
        "keys of DeepSpeed": functools.partial(
            meanings.table, deepspeed_names.DEEPSPEED, ("DeepSpeed", "mesh_lm"), ""
        ),
        "names of DistributedDataParallel": functools.partial(
            meanings.table, torch_names.DDP, ("PyTorch", "mesh_lm"), ""
        ),
        "names of FSDP": functools.partial(
            meanings.table, torch_names.FSDP, ("FSDP", "mesh_lm"), ""
        ),
        "names of Horovod": functools.partial(
            meanings.table, torch_names.HOROVOD, ("Horovod", "mesh_lm"), ""
        ),
    }
    return {
        **closed_form_tables.TABLES,
        **preset_tables.TABLES,
        **expert_tables.TABLES,
        **overlap_tables.TABLES,
        **rate_tables.TABLES,
        **hardware_tables.TABLES,
        **planner_tables.TABLES,
        **guide_tables.TABLES,
        **offload_tables.TABLES,
        **argument_tables,
    }


def _answered(kind: str, block: str, names: dict[str, Any]) -> str:
    """A block with its inputs and what they answer."""
    if kind == "console":
        commands = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
        return "".join(f"$ {command}\n{refusal(shlex.split(command)[2:])}" for command in commands)
    examples = doctest.DocTestParser().get_examples(block)
    return (
        "".join(
            _typed(example.source) + python_answer(example.source, names) for example in examples
        )
        + "\n"
    )


def _typed(source: str) -> str:
    first, *others = source.splitlines()
    return "".join(f"{line}\n" for line in (f">>> {first}", *(f"... {line}" for line in others)))


def refusal(words: list[str]) -> str:
    """What `mesh-lm train` answers to a config that cannot run."""
    import train
    from mesh_lm.errors import ConfigError
    from sharding_rules import ShardingRuleError

    with tempfile.TemporaryDirectory() as directory:
        (corpus := Path(directory, "corpus.txt")).write_text(
            inspect.getsource(argparse), encoding="utf-8"
        )
        here = {
            "data.max_epochs": 0,
            "data.path": corpus,
            "output": directory,
            "launch.compile_cache": "",
        }
        try:
            train.main([*(f"--config.{name}={value}" for name, value in here.items()), *words])
        except (ConfigError, ShardingRuleError) as error:
            return f"error: {error}\n"
    raise AssertionError(f"{words} is not refused")


def python_answer(source: str, names: dict[str, Any]) -> str:
    """What an interactive Python prints for one statement, without the frames of a traceback."""
    printed = io.StringIO()
    statement = ast.parse(source).body[0]
    try:
        with contextlib.redirect_stdout(printed):
            if isinstance(statement, ast.Expr):
                value = eval(compile(source.strip(), "<page>", "eval"), names)
                printed.write("" if value is None else f"{value!r}\n")
            else:
                exec(compile(source, "<page>", "exec"), names)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error))
        return f"Traceback (most recent call last):\n  ...\n{said}"
    return printed.getvalue()


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    for page in PAGES:
        (ROOT / page).write_text(made(page), encoding="utf-8")


if __name__ == "__main__":
    main()
