"""What mesh_lm has written below a directory of text is no text: outputs of runs, the cache,
prepared tokens, the log."""

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mesh_lm.config import DataConfig, TrainConfig, load, resolved
from mesh_lm.data import sources
from mesh_lm.data.corpus import known_sources, prepare
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.prepare.run import prepare as prepare_tokens
from mesh_lm.errors import ConfigError
from mesh_lm.training.ready import require_ready

ROOT = Path(__file__).parents[3]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with 40 documents in two levels."""
    root = tmp_path / "text"
    (root / "data").mkdir(parents=True)
    for number in range(40):
        (root / ("data" if number % 2 else "") / f"{number}.txt").write_text(
            f"document {number}\n", encoding="utf-8"
        )
    monkeypatch.chdir(root)
    return root


def files() -> list[str]:
    return list(sources.find(".").files)


def configured(**changes: object) -> TrainConfig:
    data = DataConfig(path=".", cache="cache", tokenizer_vocab=257)
    return dataclasses.replace(load("gpt_tiny"), data=data, output="out/run", **changes)  # pyright: ignore[reportArgumentType]


def write_output(directory: Path, config: TrainConfig | None) -> None:
    """What a run leaves; without a config what it leaves if it is killed at once."""
    (directory / "tokenizer").mkdir(parents=True)
    (directory / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    (directory / "log.txt").write_text("step 1\n", encoding="utf-8")
    (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n', encoding="utf-8")
    if config:
        (directory / "config.json").write_text(resolved.to_json(config), encoding="utf-8")


@pytest.mark.parametrize("is_link", [False, True])
def test_a_run_finds_the_text_that_it_began_with(text: Path, tmp_path: Path, is_link: bool) -> None:
    """Its own output by its path, though its config.json was never written, and that of others by
    theirs."""
    config = configured()
    first = prepare(config.data, vocab=257, outputs=config.outputs.values())
    assert first.documents + first.heldout_documents == 40
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        (text / "out").mkdir()
        (text / "out" / "run").symlink_to(tmp_path / "elsewhere")
    write_output(text / "out" / "run", None)
    write_output(text / "out" / "another", config)
    assert prepare(config.data, vocab=257, outputs=config.outputs.values()).name == first.name
    assert known_sources(config.data, config.outputs.values()) == first.sources()


def test_what_is_known_by_its_contents(text: Path) -> None:
    """Other runs, corpora of any cache, prepared tokens of any prefix, finished or not: the
    documents are the 40 texts."""
    text_files = files()
    prepare(DataConfig(path=".", cache="former_cache"), vocab=257)
    write_output(text / "run", configured())
    for _ in range(2):  # the second time it is there already, from the same inputs
        facts = prepare_tokens((".",), "tokens/web", "bytes", workers=1, output=io.StringIO())
        assert facts["documents"] == 40
        prepare_tokens((".",), "web", "bytes", workers=1, output=io.StringIO())
    (text / "new.parts").mkdir()
    (text / "new.parts" / "plan.json").write_text("{}", encoding="utf-8")
    (text / "new.parts" / "journal.jsonl").write_text("{}\n", encoding="utf-8")
    assert files() == text_files
    # Files with such names that mesh_lm did not write are text.
    (text / "notes.idx").write_text("an index", encoding="utf-8")
    (text / "notes.bin").write_text("a bin", encoding="utf-8")
    (text / "model").mkdir()
    (text / "model" / "config.json").write_text('{"text": "not of a run"}', encoding="utf-8")
    assert files() == sorted([*text_files, "notes.idx", "notes.bin", "model/config.json"])


def put(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text('{"a": {"b": 1}}\n', encoding="utf-8")


def test_what_has_no_config_of_a_run(text: Path) -> None:
    """What `import` and `export` write, a run that was killed early, a checkpoint that was moved,
    local ones, a former cache's indices."""
    text_files = files()
    put(
        text / "base",
        "checkpoints/0/_CHECKPOINT_METADATA",
        "checkpoints/0/metadata/metadata",
        "tokenizer/tokenizer.json",
    )
    put(text / "killed", "tokenizer/tokenizer.json", "log.txt")
    (text / "killed" / ".lease").write_text('{"pid": 1, "life": "01234567"}', encoding="utf-8")
    put(text / "moved" / "500", "_CHECKPOINT_METADATA", "metadata/metadata")
    put(
        text / "local" / "0123456789abcdef-01234567" / "5" / "0-of-1",
        "state.raw",
        "description.json",
    )
    put(
        text / "export",
        "config.json",
        "tokenizer.json",
        "SHA256SUMS",
        "README.md",
        "model.safetensors",
    )
    IndexCache("former_cache").get("packed", {"seq_len": 8}, lambda: {"bounds": np.arange(3)})
    assert files() == text_files
    # None of these alone says that mesh_lm wrote it.
    put(
        text / "others",
        ".lease",
        "checkpoints/0/notes",
        "SHA256SUMS",
        "README.md",
        "description.txt",
    )
    assert len(files()) == len(text_files) + 4


def test_the_output_as_text(text: Path) -> None:
    write_output(text / "run", configured())
    with pytest.raises(
        ConfigError,
        match=r"^run is what a run of mesh_lm has written, not text; name the directory or",
    ):
        sources.find("run")


@pytest.mark.parametrize("field", ["output", "data.cache"])
def test_a_run_that_would_write_among_the_text(text: Path, field: str) -> None:
    config = configured()
    require_ready(config)
    if field == "output":
        config = dataclasses.replace(config, output=str(text))
    else:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, cache=str(text)))
    with pytest.raises(ConfigError) as refused:
        require_ready(config)
    assert str(refused.value) == (
        f"this run cannot start\n  - {field}={text} is the directory of data.path=., and what the "
        f"run writes there would become text to train on; set {field} to another directory, which "
        "may be one below it"
    )


def test_an_output_with_text(text: Path) -> None:
    """The run would silently train on less."""
    config = configured()
    # of a start that failed
    put(text / "out" / "run", "tokenizer/tokenizer.json", "log.txt", "checkpoints/note.txt")
    require_ready(config)
    config = dataclasses.replace(config, output="./data")
    with pytest.raises(ConfigError) as refused:
        require_ready(config)
    assert str(refused.value) == (
        "this run cannot start\n  - output=./data has text (1.txt), which data.path=. would leave "
        "out, because a directory that the run writes to is not text to train on; set output to "
        "another directory"
    )
    write_output(text / "data", config)
    require_ready(config)


def test_logs_of_slurm(text: Path) -> None:
    text_files = files()
    put(text, "slurm-123.out", "slurm-123_4.out", "slurm-123.err", "slurm-notes.out")
    assert files() == sorted([*text_files, "slurm-notes.out"])


def test_the_log_of_this_process(text: Path) -> None:
    text_files = files()
    script = "from mesh_lm.data import sources; print(*sources.find('.').files, flush=True)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(2):
        with open("log", "a", encoding="utf-8") as log:
            subprocess.run(
                [sys.executable, "-c", script], stdout=log, stderr=log, env=environment, check=True
            )
    assert (text / "log").read_text(encoding="utf-8").splitlines() == [" ".join(text_files)] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who reads a pipe")
@pytest.mark.parametrize("relay", ["tee -a log", "cat | cat >> log"])
def test_a_log_behind_a_pipe(text: Path, relay: str) -> None:
    """By way of tee, and of programs such as our launcher, which write what they read into the next
    pipe or into a file."""
    text_files = files()
    script = "from mesh_lm.data import sources; print(*sources.find('.').files, flush=True)"
    command = f'"{sys.executable}" -c "{script}" | {relay}'
    for _ in range(2):
        subprocess.run(
            ["sh", "-c", command],
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=True,
        )
    assert (text / "log").read_text(encoding="utf-8").splitlines() == [" ".join(text_files)] * 2


def test_a_name_is_the_same_in_every_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a file is held out, and the digest of a text, depend on the bytes of names, which
    Latin-1 reads as other characters."""
    source = sources.Source(
        "text",
        "directory",
        tmp_path,
        tuple(f"\xe9{number}.txt" for number in range(100)),
        1,
        "text",
    )
    expected = [sources.is_heldout(name) for name in source.files], source.digest()
    monkeypatch.setattr(os, "fsencode", lambda name: name.encode("latin-1"))
    source = dataclasses.replace(
        source, files=tuple(name.encode().decode("latin-1") for name in source.files)
    )
    assert expected == ([sources.is_heldout(name) for name in source.files], source.digest())
