"""What goes wrong in the first hour of three users is said at once, by name, and before anything expensive begins.

.venv/bin/python tests/newcomer/first_hour.py        # in a fresh clone, after `pip install -e .`: half a minute, on a CPU

Each function is one item, and runs commands in an empty directory, with nothing of this checkout or of the tests in their environment.
tests/newcomer/newcomer.py runs all of them with the installed wheel.
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
"""With this JAX finds no device, so that a command which looks for one fails otherwise than expected."""
SMALL = (
    "--output=runs/mine", "--data.path=my_text.jsonl", "--data.tokenizer=bytes", "--model.n_layers=1", "--model.d_model=32",
    "--model.d_ff=64", "--model.softcap=30", "--model.seq_len=64", "--train.global_batch=8", "--train.sample_tokens=0",
)  # fmt: skip


def everything_that_is_missing(reader: Newcomer) -> None:
    """A login, a writable output and data are asked for together, before a device is; a script before a process is started."""
    said = reader.is_refused(
        "no data, output or login", "mesh-lm", "train", "gpt2_124m", "--wandb=mine", "--output=/proc/run", **NO_DEVICE,
        says=["this run cannot start\n  - it has no data: set data.path", "\n  - output=/proc/run cannot be written", "\n  - wandb=mine"],
    )  # fmt: skip
    assert "wandb login" in said or "pip install -e '.[wandb]'" in said, said
    said = reader.is_refused("no such script", "mesh-lm", "launch", "trian.py", says=["trian.py: no such script in"])
    assert "restart" not in said, said


def data_of_ones_own(reader: Newcomer) -> None:
    """A config of a size has no text of its own; the error names what to give, and a path that is not there is named."""
    says = ["it has no data: set data.path to a text (.txt, .jsonl, .parquet, or a directory", "`mesh-lm prepare`", "docs/data.md"]
    reader.is_refused("a size without data", "mesh-lm", "train", "llama3_8b", says=says, **NO_DEVICE)
    says = ["data.blend=data/web: no such file: data/web.bin and data/web.idx; mesh-lm prepare --input=TEXT --output=data/web writes both"]
    reader.is_refused("data that is not there", "mesh-lm", "train", "llama3_8b", "--data.blend=data/web", says=says, **NO_DEVICE)


def too_many_epochs(reader: Newcomer) -> None:
    """A run that would learn its text by heart is refused, with the figures; `data.max_epochs=0` allows it."""
    says = ["train.steps=9000 x 512 tokens a step are 4,608,000 from corpus my_text-", " epochs of its ", "more than data.max_epochs=4"]
    reader.is_refused("too many epochs", "mesh-lm", "train", *SMALL, "--train.steps=9000", says=says)
    reader.does("as many on purpose", "mesh-lm", "train", *SMALL, "--train.steps=2", "--data.max_epochs=0", says="step 2/2")


def what_a_run_keeps(reader: Newcomer) -> None:
    """The output has the resolved config, which repeats the run, and the log; the same run again says that there is nothing to do."""
    run = reader.home / "runs" / "mine"
    kept = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert (kept["mesh"]["data"], kept["model"]["d_model"], kept["train"]["steps"], kept["data"]["max_epochs"]) == (1, 32, 2, 0), kept
    says = "already finished (step 2 of 2): nothing to do; raise train.steps to train on"
    reader.does("a finished run, from its config.json", "mesh-lm", "train", "runs/mine/config.json", says=says)
    log = (run / "log.txt").read_text(encoding="utf-8")
    assert log.count("--- ") == 2 and "step 2/2  loss" in log and "saving step 2" in log and says in log, log


def an_export_that_cannot_be(reader: Newcomer) -> None:
    """The field that prevents it is named, before a weight is read or a device is used."""
    says = ["no supported class of transformers can express this model; LlamaForCausalLM needs\n  - model.softcap=0.0, not 30.0\n"]
    reader.is_refused("a model that transformers lacks", "mesh-lm", "export", "runs/mine", "--output=never", says=says, **NO_DEVICE)
    assert not (reader.home / "never").exists()


ITEMS = (everything_that_is_missing, data_of_ones_own, too_many_epochs, what_a_run_keeps, an_export_that_cannot_be)


def items(reader: Newcomer) -> None:
    """Runs all items, in order: some use the run of an earlier one."""
    began = time.monotonic()
    lines = [json.dumps({"text": f"Document {n} of a few, none of which is long."}) for n in range(400)]
    (reader.home / "my_text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for item in ITEMS:
        item(reader)
    print(f"{time.monotonic() - began:6.1f} s  the first hour of three users", flush=True)


if __name__ == "__main__":
    from newcomer import Newcomer

    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        items(Newcomer(Path(sys.prefix), Path(name)))
