"""What goes wrong in the first hour of three users is said at once, by name, and before anything
expensive begins.

.venv/bin/python tests/newcomer/first_hour.py # in a fresh clone, after `pip install -e .`: a
minute, on a CPU

Each function is one item, and runs commands in an empty directory, with nothing of this checkout or
of the tests in their environment. tests/newcomer/newcomer.py runs all of them with the installed
wheel.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from newcomer import Newcomer

NO_DEVICE = {"JAX_PLATFORMS": "none"}
"""With this JAX finds no device, so that a command which looks for one fails otherwise than
expected."""
SMALL = (
    "--output=runs/mine", "--data.path=my_text.jsonl", "--data.tokenizer=bytes",
    "--model.n_layers=1", "--model.d_model=32",
    "--model.d_ff=64", "--model.softcap=30", "--model.seq_len=64", "--train.global_batch=8",
    "--train.sample_tokens=0",
)  # fmt: skip


def everything_that_is_missing(reader: Newcomer) -> None:
    """A login, a writable output and data are asked for together, before a device is; a script
    before a process is started."""
    said = reader.is_refused(
        "no data, output or login", "mesh-lm", "train", "gpt2_124m", "--wandb=mine",
        "--output=/proc/run", **NO_DEVICE,
        says=["this run cannot start\n  - it has no data: set data.path", "\n  - output=/proc/run cannot be written", "\n  - wandb=mine"],
    )  # fmt: skip
    assert "wandb login" in said or "pip install -e '.[wandb]'" in said, said
    said = reader.is_refused(
        "no such script",
        "mesh-lm",
        "launch",
        "trian.py",
        says=["trian.py: there is no such script in"],
    )
    assert "restart" not in said, said


def data_of_ones_own(reader: Newcomer) -> None:
    """A config of a size has no text of its own; the error names what to give, and a path that is
    not there is named."""
    says = [
        "it has no data: set data.path to a text (.txt, .jsonl, .parquet, or a directory",
        "`mesh-lm prepare`",
        "docs/data.md",
    ]
    reader.is_refused(
        "a size without data", "mesh-lm", "train", "llama3_8b", says=says, **NO_DEVICE
    )
    says = [
        (
            "data.blend=data/web: no such file: data/web.bin and data/web.idx; mesh-lm prepare "
            "--input=TEXT --output=data/web writes both"
        )
    ]
    reader.is_refused(
        "data that is not there",
        "mesh-lm",
        "train",
        "llama3_8b",
        "--data.blend=data/web",
        says=says,
        **NO_DEVICE,
    )


def too_many_epochs(reader: Newcomer) -> None:
    """A run that would learn its text by heart is refused, with the figures; `data.max_epochs=0`
    allows it."""
    says = [
        "train.steps=9000 x 512 tokens a step are 4,608,000 from corpus my_text-",
        " epochs of its ",
        "more than data.max_epochs=4",
    ]
    reader.is_refused(
        "too many epochs", "mesh-lm", "train", *SMALL, "--train.steps=9000", says=says
    )
    reader.does(
        "as many on purpose",
        "mesh-lm",
        "train",
        *SMALL,
        "--train.steps=2",
        "--data.max_epochs=0",
        says="step 2/2",
    )


def what_a_run_keeps(reader: Newcomer) -> None:
    """The output has the resolved config, which repeats the run, and the log; the same run again
    says that there is nothing to do."""
    run = reader.home / "runs" / "mine"
    kept = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert (
        kept["mesh"]["data"],
        kept["model"]["d_model"],
        kept["train"]["steps"],
        kept["data"]["max_epochs"],
    ) == (1, 32, 2, 0), kept
    says = "already finished (step 2 of 2): nothing to do; raise train.steps to train on"
    reader.does(
        "a finished run, from its config.json",
        "mesh-lm",
        "train",
        "runs/mine/config.json",
        says=says,
    )
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert (
        log.count("--- ") == 2
        and "step 2/2  loss" in log
        and "saving step 2" in log
        and says in log
    ), log


def an_export_that_cannot_be(reader: Newcomer) -> None:
    """The field that prevents it is named, before a weight is read or a device is used."""
    says = [
        (
            "no supported class of transformers can express this model; LlamaForCausalLM needs\n  "
            "- model.softcap=0.0, not 30.0\n"
        )
    ]
    reader.is_refused(
        "a model that transformers lacks",
        "mesh-lm",
        "export",
        "runs/mine",
        "--output=never",
        says=says,
        **NO_DEVICE,
    )
    assert not (reader.home / "never").exists()


def names_of_other_tools(reader: Newcomer) -> None:
    """A name of Megatron-LM is answered with what has its meaning here, in this run's numbers; a
    typo with the field."""
    says = ["= 16 / (4 x 2 x 1 x 1); did you mean --train.microbatches=2?"]
    reader.is_refused(
        "Megatron's micro-batch size",
        "mesh-lm",
        "train",
        "--micro-batch-size=4",
        "--mesh.data=2",
        says=says,
        **NO_DEVICE,
    )
    says = ["did you mean --data.blend=0.7,data/web,0.3,data/code?"]
    blend = ("--data-path", "0.7", "data/web", "0.3", "data/code")
    reader.is_refused("Megatron's data path", "mesh-lm", "train", *blend, says=says, **NO_DEVICE)
    says = ["--train.step: the config has no such field; did you mean --train.steps?"]
    reader.is_refused("a typo", "mesh-lm", "train", "--train.step=10", says=says, **NO_DEVICE)


def what_there_is(reader: Newcomer) -> None:
    """The help is short and spells options as the pages do; the configs are listed, and a file that
    is no config is told what is one."""
    told = reader.does("the help", "mesh-lm", "train", "--help", says="--data.blend")
    assert told.count("\n") < 200, f"{told.count(chr(10))} lines of help"
    listed = reader.does("the configs", "mesh-lm", "configs", says="gpt_175b")
    assert all(name in listed for name in ("gpt_tiny", "gpt2_124m", "llama3_8b")), listed
    says = [
        (
            "a config is a .py file with get_config(), or the config.json of a run; `mesh-lm "
            "configs` lists"
        )
    ]
    reader.is_refused(
        "a config of another tool",
        "mesh-lm",
        "train",
        "--config=llama.yaml",
        says=says,
        **NO_DEVICE,
    )


def a_blend_in_words(reader: Newcomer) -> None:
    """Shares and prefixes as words of their own, as the help shows them; each prefix without data
    is named."""
    says = ["data.blend=data/web: no such file", "data.blend=data/code: no such file"]
    blend = ("--data.blend", "0.7", "data/web", "0.3", "data/code")
    reader.is_refused(
        "a blend in words", "mesh-lm", "train", "gpt2_124m", *blend, says=says, **NO_DEVICE
    )


def all_problems_at_once(reader: Newcomer) -> None:
    """Of the mesh, the data and the tokenizer, in one round, before a device is used."""
    says = [
        "this run cannot start",
        "data.path=nope.txt",
        "nope.json: no such tokenizer file",
        "model.n_heads=4 is not divisible by its number of shards, mesh.tensor=3",
    ]
    mistakes = (
        "--data.path=nope.txt",
        "--data.tokenizer=nope.json",
        "--launch.cpu_devices=6",
        "--mesh.tensor=3",
        "--rules=megatron",
    )
    reader.is_refused("all problems", "mesh-lm", "train", *mistakes, says=says, **NO_DEVICE)


def plans(reader: Newcomer) -> None:
    """A report that cannot be written is refused before anything is compiled, as is the config that
    another is compared with."""
    cases = (
        {"--output=/proc/plan.html": "/proc/plan.html"},
        {"--against=gpt_nope": "gpt_nope: there is no such config"},
    )
    for case in cases:
        for option, said in case.items():
            reader.is_refused(
                f"plan {option}",
                "mesh-lm",
                "plan",
                "gpt_175b",
                "--devices=1024",
                option,
                says=[said],
                **NO_DEVICE,
            )


def a_short_run(reader: Newcomer) -> None:
    """One that ends in its warm-up is warned of, and the start of a run says where it begins."""
    small = [word for word in SMALL if not word.startswith("--output=")]
    said = reader.does(
        "a short run", "mesh-lm", "train", *small, "--output=runs/short", "--train.steps=2",
        "--optimizer.warmup_steps=8", says="step 2/2"
    )  # fmt: skip
    assert "optimizer.warmup_steps=8 is more than half of train.steps=2" in said, said


ITEMS = (
    everything_that_is_missing, data_of_ones_own, too_many_epochs, what_a_run_keeps,
    an_export_that_cannot_be, names_of_other_tools,
    what_there_is, a_blend_in_words, all_problems_at_once, plans, a_short_run,
)  # fmt: skip


def items(reader: Newcomer) -> None:
    """Runs all items, in order: some use the run of an earlier one."""
    began = time.monotonic()
    lines = [
        json.dumps({"text": f"Document {n} of a few, none of which is long."}) for n in range(400)
    ]
    (reader.home / "my_text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for item in ITEMS:
        item(reader)
    print(f"{time.monotonic() - began:6.1f} s  the first hour of three users", flush=True)


if __name__ == "__main__":
    from newcomer import Newcomer

    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        items(Newcomer(Path(sys.prefix), Path(name)))
