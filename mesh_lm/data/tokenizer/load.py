"""Loads a tokenizer from a file, a directory, or the word `bytes`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mesh_lm import checksums
from mesh_lm.data.tokenizer import companions, plain_bytes, ranks, sentence_piece
from mesh_lm.data.tokenizer.base import Tokenizer
from mesh_lm.errors import ConfigError, hub_hint

_BY_PRECEDENCE = ("tokenizer.json", sentence_piece.FILE, ranks.FILE, plain_bytes.FILE)
_FILES = (*_BY_PRECEDENCE, *companions.FILES)
KINDS = (
    "a tokenizer.json or the directory that holds one, a SentencePiece .model, a .tiktoken rank "
    "file, or the word bytes"
)


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """Returns the tokenizer that `spec` names.

    - a tokenizer.json of Hugging Face. Its end-of-document token is the eos_token of the
      tokenizer_config.json next to it, else the first of <|endoftext|>, <|end_of_text|>, </s>,
      <eos> in the vocabulary;
    - a SentencePiece .model, or a tiktoken rank file (.tiktoken, or Llama 3's tokenizer.model); the
      contents decide which. A rank file has neither pattern nor special tokens; see `ranks` for the
      assumed ones;
    - a directory with one of these, such as a Hugging Face model or one written by
      `Tokenizer.save`; tokenizer.json takes precedence;
    - `bytes`: 256 bytes and <|endoftext|>.

    Raises:
      ConfigError: the file is missing, damaged, of an unknown kind, or without an end-of-document
        token; the message names it.
    """
    if str(spec) == "bytes":
        return plain_bytes.Bytes()
    path = Path(spec).expanduser()
    checksums.require(path if path.is_dir() else path.parent, *_FILES, path.name)
    if path.is_dir():
        path = _file_in_directory(path)
    if not path.is_file():
        raise ConfigError(
            f"tokenizer {spec}: no such tokenizer file or directory; give {KINDS}"
            f"{hub_hint(str(spec))}"
        )
    if path.suffix == ".json":
        from mesh_lm.data.tokenizer import hugging_face  # imports `tokenizers`

        return hugging_face.load(path)
    if path.name == plain_bytes.FILE:
        return plain_bytes.Bytes(companions.generation_of(path.parent))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    if path.suffix == ".tiktoken" or ranks.looks_like_ranks(data):
        return ranks.Ranks(data, path, companions.generation_of(path.parent))
    if path.suffix == ".model":
        return sentence_piece.SentencePiece(data, path, companions.read(path.parent))
    raise ConfigError(
        f"tokenizer {spec}: files of type {path.suffix or '(none)'} "
        f"are not read as tokenizers; give {KINDS}"
    )


def _file_in_directory(directory: Path) -> Path:
    for name in _BY_PRECEDENCE:
        if (directory / name).is_file():
            return directory / name
    candidates = sorted([*directory.glob("*.model"), *directory.glob("*.tiktoken")])
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(path.name for path in candidates)
        problem = f"several: {names}; name one"
    else:
        problem = f"none; give {KINDS}"
    raise ConfigError(
        f"tokenizer {directory}: expected one tokenizer in this directory, found {problem}"
    )


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Returns a byte-level BPE (Radford et al. 2019, GPT-2) of at most `vocab` entries, trained on
    the texts; see `hugging_face.train`.

    Raises ConfigError if vocab < 257.
    """
    from mesh_lm.data.tokenizer import hugging_face

    return hugging_face.train(texts, vocab)
