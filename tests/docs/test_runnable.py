"""Every Python block and every command of every page runs, in a bare process in another directory;
or its page says why it cannot."""

import argparse
import dataclasses
import importlib
import inspect
import json
import re
import shlex
import shutil
import zlib
from pathlib import Path

import pyarrow
import pytest
import runnable
import zstandard
from pyarrow import parquet
from runnable import Command

from mesh_lm.checkpoint.reader import seal
from mesh_lm.commands import main

PAGES = {str(page.relative_to(runnable.ROOT)): runnable.blocks(page) for page in runnable.pages()}
PYTHON = {
    page: [block for block in found if runnable.LANGUAGES[block.kind] == "python"]
    for page, found in PAGES.items()
}
COMMANDS = {
    page: [
        command
        for block in found
        if runnable.LANGUAGES[block.kind] == "command"
        for command in runnable.commands(block)
    ]
    for page, found in PAGES.items()
}
TRAINING = {
    "train.steps": 2, "train.global_batch": 16, "train.microbatches": 1, "train.eval_every": 0,
    "train.eval_sequences": 8,
    "train.sample_tokens": 2, "train.log_every": 1, "optimizer.warmup_steps": 1,
    "data.path": "my_text.jsonl",
    "data.tokenizer_vocab": 300, "data.max_epochs": 0,
}  # fmt: skip
SIZES = {"model.n_layers": 4, "model.d_model": 32, "model.seq_len": 32, "model.vocab_size": 512}
DECODER = {"model.n_heads": 4, "model.n_kv_heads": 4, "model.head_dim": 8, "model.d_ff": 64}
HERE = {"data.cache": "../here/cache", "launch.compile_cache": "../here/cache/xla"}
"""Options that make a page's run small, unless its command sets them: for training, for any model,
for a decoder, and the caches."""
ELSEWHERE = {
    "docs/attention.md", "docs/kernels.md", "docs/custom_model.md", "docs/lab.md", "README.md",
}  # fmt: skip
"""Pages whose Python other tests run: the lab's and the README's in a bare process, too;
custom_model's as the file that it shows."""

RULES = ("docs/sharding.md", "docs/errors.md")
"""Pages whose commands are for eight devices."""


def shrunk(command: Command) -> list[str]:
    """The command's words, with options that make its run small."""
    words = [re.sub(r"train:\d+", "train:300", word) for word in command.words]
    if {"generate", "evaluate"} & {*words[:2]}:
        return [*words, "--compile-cache="]
    if "plan" in words[:2]:
        options = HERE
    elif command.answer:
        options = HERE | {
            "data.path": "my_text.jsonl",
            "data.max_epochs": 0,
            "output": "runs/refused",
        }
    elif "train" in words:
        config = [*words[words.index("train") + 1 :], "--"][0]
        # another run's checkpoints are of another model
        fresh = {"output": f"runs/{zlib.crc32(command.text.encode())}"}
        sizes = SIZES | ({} if "custom_model" in config else DECODER) | fresh
        options = (
            HERE
            | TRAINING
            | (sizes if config != "finetune.py" else {"model.seq_len": 32, "launch.cpu_devices": 1})
        )
        if any("blend=" in word for word in words):
            options |= {"data.split": "8,2,0"}
        if command.block.page in RULES or ("launch" in words and "--devices" not in command.text):
            options |= {"launch.cpu_devices": 8}
    else:
        return words
    if command.answer and command.block.page in RULES:
        options = options | {"launch.cpu_devices": 8}
    given = {word.split("=")[0].removeprefix("--") for word in words}
    return [*words, *(f"--{name}={value}" for name, value in options.items() if name not in given)]


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that pages speak of, most of them made by the commands themselves."""
    here = runnable.scene(tmp_path_factory.mktemp("reader") / "here")
    text = inspect.getsource(argparse)
    documents = [json.dumps({"text": part, "content": part}) for part in text.split("\n\n")]
    (here / "my_text.jsonl").write_text("\n".join(documents), encoding="utf-8")
    for name in ("notes.jsonl", "pages.jsonl"):
        (here / name).write_text("\n".join(documents[:8]), encoding="utf-8")
    for name in ("notes.txt", "README.md"):
        (here / name).write_text(text[:2000], encoding="utf-8")
    (here / "books.jsonl.zst").write_bytes(
        zstandard.compress((here / "my_text.jsonl").read_bytes())
    )
    parquet.write_table(pyarrow.table({"content": [text]}), here / "part-0.parquet")
    for name in ("web", "code"):
        (here / name).mkdir()
        shutil.copy(here / "my_text.jsonl", here / name)
    (here / "prompts.txt").write_text("def \nclass ", encoding="utf-8")
    sizes = " ".join(
        f"--{name}={value}"
        for name, value in (HERE | TRAINING | SIZES | DECODER).items()
        if "seq_len" not in name
    )
    llama = "--model.seq_len=256"
    for command in (
        f"mesh-lm train --output=runs/gpt_tiny {llama} {sizes}",
        "mesh-lm export runs/gpt_tiny --output=Llama-3.2-1B --dtype=float32",
        "mesh-lm prepare code/ --output=data/web --tokenizer=Llama-3.2-1B",
        "mesh-lm prepare web/ --output=data/code --tokenizer=Llama-3.2-1B",
    ):
        runnable.must_succeed(shlex.split(command), here)
    shutil.copytree(here / "Llama-3.2-1B", here / "Qwen3-0.6B")
    for name, page in (("sgd.py", "docs/optimizers.md"), ("finetune.py", "docs/huggingface.md")):
        (here / name).write_text(PYTHON[page][0].text, encoding="utf-8")
    page = (runnable.ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    json_block = page.partition("```json\n")[2].partition("```")[0]
    (here / "ds_config.json").write_text(json_block, encoding="utf-8")
    (here / "mlp.py").write_text(
        next(block.text for block in PYTHON["docs/lab.md"] if block.text.startswith("# mlp.py")),
        encoding="utf-8",
    )
    for name in ("gpt2_124m", "other_seed", "again"):
        shutil.copytree(here / "runs/gpt_tiny", here / "runs" / name)
    for step in (
        "gpt_tiny/checkpoints/750",
        "gpt_tiny/checkpoints/1000.damaged",
        "again/checkpoints/750",
    ):
        shutil.copytree(here / "runs/gpt_tiny/checkpoints/2", here / "runs" / step)
        renumber(here / "runs" / step)
    return here


def renumber(checkpoint: Path) -> None:
    """Writes the step of the directory's name into its description, which a copy of another step
    does not have."""
    path = checkpoint / "metadata" / "metadata"
    data, metadata = (
        json.loads((checkpoint / item / "metadata").read_text(encoding="utf-8"))
        for item in ("data", "metadata")
    )
    metadata["step"] = int(checkpoint.name.partition(".")[0])
    path.write_text(json.dumps(metadata | {"seal": seal(data, metadata)}), encoding="utf-8")


def here(scene: Path, page: str) -> Path:
    """A page's own copy of the scene."""
    copy = scene.parent / page.replace("/", "_")
    shutil.copytree(scene, copy, symlinks=True)
    return copy


OURS = [
    command
    for found in COMMANDS.values()
    for command in found
    if "mesh-lm" in command.text and not command.answer
]


@pytest.mark.parametrize(
    "command", OURS, ids=lambda command: f"{command.block.page}: {command.text[:60]}"
)
def test_options_exist(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every command of mesh-lm, those that cannot run here included: its words are read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(runnable.ROOT / "docs")
    (tmp_path / "finetune.py").write_text(
        "from configs.gpt_tiny import get_config", encoding="utf-8"
    )
    example = PYTHON["docs/optimizers.md"][0].text
    (tmp_path / "sgd.py").write_text(example, encoding="utf-8")
    # which a command of docs/coming_from.md writes
    shutil.copy(runnable.ROOT / "configs" / "gpt2_124m.py", tmp_path / "gpt2_zero2.py")
    words = (
        command.words[command.words.index("mesh-lm") + 1 :] if "mesh-lm" in command.words else []
    )
    while words:
        name, *arguments = words
        reader = main.COMMANDS[name]
        module = importlib.import_module(f"mesh_lm.commands.{reader.module}")
        read = getattr(module, f"parse{reader.suffix}")(arguments, f"mesh-lm {name}")
        words = read[1][2:] if name == "launch" else []  # after -m mesh_lm


def test_every_page_is_read() -> None:
    assert len(OURS) > 60 and sum(map(len, PYTHON.values())) > 60


LONG = {
    "docs/coming_from.md", "docs/context.md", "docs/gradients.md", "docs/lab.md", "docs/multi_host.md",
    "docs/operations.md", "docs/optimizers.md",
    "docs/pipeline.md", "docs/python.md",
}  # fmt: skip
"""Pages that take longer than half a minute."""
TYPED = {
    "docs/custom_model.md": "test_custom_model.py",
    "docs/evaluation.md": "test_generation.py",
    "docs/generation.md": "test_generation.py",
    "docs/huggingface.md": "test_huggingface.py",
}
"""Pages whose commands another file of this directory runs, without processes of their own."""


def on_ci(pages: list[str]) -> list[object]:
    """The pages as parameters. Those of LONG and TYPED, and the tours, are exhaustive."""
    left_out = {page for page in pages if page in LONG or page in TYPED or "/tours/" in page}
    return [
        pytest.param(page, marks=pytest.mark.exhaustive) if page in left_out else page
        for page in pages
    ]


def test_pages_that_others_type_are_read_there() -> None:
    for page, file in TYPED.items():
        assert Path(page).name in (Path(__file__).parent / file).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", on_ci([page for page, found in PYTHON.items() if found and page not in ELSEWHERE])
)
def test_python(page: str, scene: Path) -> None:
    found = [block for block in PYTHON[page] if not block.needs]
    where = here(scene, f"{page}.python")
    # which a command of the page made
    shutil.copytree(where / "runs" / "gpt_tiny", where / "runs" / "mine")
    done = runnable.run_python(page, found, where)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "Error" not in done.stderr and "ERROR" not in done.stderr, done.stderr


DONE: list[str] = []
"""Commands that an earlier page had."""


def runs(command: Command) -> bool:
    return not command.block.needs and not command.answer.startswith("error:")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", on_ci([page for page, found in COMMANDS.items() if any(map(runs, found))])
)
def test_commands(page: str, scene: Path) -> None:
    directory = here(scene, page)
    for command in filter(runs, COMMANDS[page]):
        if command.text in DONE:
            continue
        DONE.append(command.text)
        words = shrunk(command)
        if "prepare" in words and "seal" not in words:  # where the scene has a corpus already
            (output,) = (word.partition("=")[2] for word in words if word.startswith("--output="))
            for file in directory.glob(f"{output}.*"):
                shutil.rmtree(file) if file.is_dir() else file.unlink()
        runnable.must_succeed(words, directory, command.block.status)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page, found in COMMANDS.items()
        if any(command.answer.startswith("error:") for command in found)
    ],
)
def test_refusals(page: str, scene: Path) -> None:
    """Commands that are answered with an error, all of a page in one process, as they make the same
    devices."""
    refused = [
        command
        for command in COMMANDS[page]
        if command.answer.startswith("error:") and not command.block.needs
    ]
    assert all(command.words[:2] == ["mesh-lm", "train"] for command in refused)
    answers = runnable.run_each(
        [shrunk(command) for command in refused], here(scene, f"{page}.refusals")
    )
    for command, (status, printed) in zip(refused, answers, strict=True):
        assert (status, printed) == (1, command.answer), command.text


def test_a_failure_is_seen(tmp_path: Path) -> None:
    """Of a block, of an example, and of a command; what the tests have set is not in its
    environment, and what is imported is installed."""
    here, block = (
        runnable.scene(tmp_path / "here"),
        runnable.Block(
            "page", 7, "python", "import os\nassert 'JAX_PLATFORMS' not in os.environ\n"
        ),
    )
    assert runnable.run_python("page", [block], here).returncode == 0
    for kind, text, shown in (
        ("python", "1 / 0\n", 'File "page", line 8'),
        ("pycon", ">>> 1 + 1\n3\n", "Got:\n    2"),
    ):
        done = runnable.run_python("page", [dataclasses.replace(block, kind=kind, text=text)], here)
        assert done.returncode == 1 and shown in done.stderr
    with pytest.raises(AssertionError, match="ended with 1"):
        runnable.must_succeed(["python", "-c", "import tests"], here)


def test_a_need_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runnable, "ROOT", tmp_path)
    page, block = tmp_path / "page.md", "```sh\nls\nls -l \\\n    -a  # all\n```\n"
    page.write_text(f"<!-- needs: gpu, none is here -->\n{block}", encoding="utf-8")
    (found,) = runnable.blocks(page)
    assert (found.needs, found.why) == ("gpu", "none is here")
    assert [command.words for command in runnable.commands(found)] == [["ls"], ["ls", "-l", "-a"]]
    for mark in ("<!-- needs: gpu -->", "<!-- needs: luck, as always -->"):
        page.write_text(f"{mark}\n{block}", encoding="utf-8")
        with pytest.raises(AssertionError, match="expected one of"):
            runnable.blocks(page)
