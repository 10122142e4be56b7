"""Small files that are too deep, of another type or endless: one error that names the file, at
every door through which JSON comes in."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh_lm import distributed
from mesh_lm.checkpoint.reader import DamagedCheckpoint, descriptions
from mesh_lm.commands.generate import _from_file
from mesh_lm.data.corpus import _load
from mesh_lm.data.prepare.run import _finished
from mesh_lm.data.tokenizer import hugging_face
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import configs, files
from mesh_lm.schedules import custom
from mesh_lm.training.goodput import _read as read_life

READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "a schedule": ("s.json", lambda path: custom.load(str(path))),
    "a model's config": ("config.json", lambda path: configs.config_of(path.parent)),
    "a tokenizer": ("tokenizer.json", hugging_face.load),
    "a prepared corpus": ("corpus.json", lambda path: _load(path.parent)),
    "a finished preparation": (
        "p.json",
        lambda path: _finished(str(path.with_suffix("")), "identity"),
    ),
    "prompts": ("p.jsonl", lambda path: [*_from_file(str(path))]),
}
DEEP = {
    "lists": "[" * 200_000,
    "objects": '{"a":' * 200_000,
    "closed lists": '{"model": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "another type": "[1]",
    "a number": "1" * 10_000,
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_file_that_is_not_what_it_should_be(
    tmp_path: Path, name: str, read: Callable[[Path], Any], text: str
) -> None:
    (path := tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert name in str(caught.value) or str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 1000, "it does not repeat the file"


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_what_is_left_out_or_answered_by_no(tmp_path: Path, text: str) -> None:
    for name in (configs.CONFIG, files.INDEX):
        (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    assert not configs.is_huggingface(tmp_path) and read_life(tmp_path / configs.CONFIG) is None
    found, (problem,) = files.scan(tmp_path)
    assert not found and "is not an index of tensors" in problem


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_a_checkpoint_with_such_a_description_is_damaged(tmp_path: Path, text: str) -> None:
    """So the checkpoint before it is used."""
    for item in ("data", "metadata"):
        (tmp_path / item).mkdir()
        (tmp_path / item / "metadata").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(DamagedCheckpoint, match="data/metadata cannot be read"):
        descriptions(tmp_path)


def test_a_failing_disk_is_no_mistake() -> None:
    """Whatever an error of a full or lost disk was wrapped in: status 75, so that launcher, Slurm
    and Kubernetes try again."""

    def main(number: int) -> int:
        try:
            raise OSError(number, os.strerror(number), "/data/run")
        except OSError as error:
            try:
                raise ConfigError(f"cannot write metrics to /data/run: {error.strerror}") from error
            except ConfigError:
                raise ConfigError("while another was handled")  # noqa: B904

    wanted = {
        errno.ENOSPC: 75,
        errno.EDQUOT: 75,
        errno.EIO: 75,
        errno.ESTALE: 75,
        errno.EACCES: 1,
        errno.ENOENT: 1,
    }
    assert {number: distributed.run(main, number) for number in wanted} == wanted


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "..", ""])
def test_an_index_names_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": {"a": name}}), encoding="utf-8")
    assert files.scan(tmp_path) == (
        {},
        [f"{files.INDEX} names {name}, which is not a file of this directory"],
    )
