"""Which part of a few documents is held out, and what a run without a held-out part says."""

import dataclasses
import hashlib
import os
from pathlib import Path

from mesh_lm.config import DataConfig
from mesh_lm.data import corpus, sources
from mesh_lm.data.corpus import prepare


def is_heldout(key: str) -> bool:
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % 20 == 0


def config(path: Path | str, tmp_path: Path) -> DataConfig:
    return DataConfig(path=str(path), cache=str(tmp_path / "cache"))


def six_files(tmp_path: Path) -> Path:
    """A directory of six documents none of which falls in the held-out share."""
    root = tmp_path / "six"
    root.mkdir()
    names = [f"{i}.txt" for i in range(30) if not is_heldout(f"{i}.txt")][:6]
    for name, size in zip(names, (5, 200, 900, 60, 300, 500), strict=True):
        (root / name).write_text(f"{name} " + "the cat sat " * size, encoding="utf-8")
    return root


def test_of_few_documents_one_is_held_out(tmp_path: Path):
    """That of nearest to a twentieth of the text, neither a scrap nor the largest; the vocabulary
    is trained without it."""
    root = six_files(tmp_path)
    messages = []
    made = prepare(config(root, tmp_path), vocab=280, progress=messages.append)
    assert (made.documents, made.heldout_documents) == (5, 1)
    assert made.train_bytes + made.heldout_bytes == sum(
        path.stat().st_size for path in root.iterdir()
    )
    assert made.heldout_bytes == sorted(path.stat().st_size for path in root.iterdir())[1]
    assert any("held out one of 6 documents, 3.1% of the text" in line for line in messages)
    assert (
        prepare(config(root, tmp_path), vocab=280).name == made.name
        and len(os.listdir(tmp_path / "cache")) == 1
    )
    assert (
        corpus.known_sources(dataclasses.replace(config(root, tmp_path), tokenizer_vocab=280))
        == made.sources()
    )


def test_a_run_on_few_documents_of_an_earlier_version_keeps_its_corpus(tmp_path: Path):
    """With its cache and without; other runs read a corpus of which one document is held out."""
    root = six_files(tmp_path)
    digest = sources.find(str(root)).digest()
    old_name = f"six-{hashlib.sha256(f'1 280 {digest}'.encode()).hexdigest()[:16]}"
    for _ in range(3):
        old = prepare(config(root, tmp_path), vocab=280, checkpoint_corpus=old_name)
        made = prepare(config(root, tmp_path), vocab=280)
        assert (old.name, old.documents, old.heldout_documents) == (old_name, 6, 0)
        assert "an earlier version held out none of these 6 documents" in old.why_no_heldout
    for checkpoint_corpus in ("", "another", made.name):
        assert (
            prepare(config(root, tmp_path), vocab=280, checkpoint_corpus=checkpoint_corpus) == made
        )
    assert (made.documents, made.heldout_documents, made.why_no_heldout) == (5, 1, "")


def test_a_single_document_says_why_none_is_held_out(tmp_path: Path):
    root = tmp_path / "one"
    root.mkdir()
    (root / "1.txt").write_text("the cat sat\n" * 9, encoding="utf-8")
    assert not is_heldout("1.txt")
    assert prepare(config(root, tmp_path), vocab=280).why_no_heldout.startswith(
        "the text is a single document; give two or more"
    )
