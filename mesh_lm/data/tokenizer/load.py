"""Any tokenizer by its name: a file, a directory, or the word `bytes`."""

from __future__ import annotations

from pathlib import Path

from mesh_lm.data.tokenizer import plain_bytes, ranks, sentence_piece
from mesh_lm.data.tokenizer.base import Tokenizer
from mesh_lm.errors import ConfigError, hub_hint

KINDS = "a tokenizer.json or the directory that holds one, a SentencePiece .model, a .tiktoken rank file, or the word bytes"


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """The tokenizer that `spec` names.

    - a tokenizer.json of Hugging Face. Its end-of-document token is the eos_token of the tokenizer_config.json beside it, else the first
      of <|endoftext|>, <|end_of_text|>, </s>, <eos> that it has;
    - a SentencePiece .model; a tiktoken rank file, .tiktoken or Llama 3's tokenizer.model: the contents decide. A rank file holds neither
      pattern nor special tokens; see `ranks` for those that are assumed;
    - a directory with one of these, such as a Hugging Face model's or one that `Tokenizer.save` wrote; tokenizer.json goes first;
    - `bytes`: 256 bytes and <|endoftext|>.

    Raises:
      ConfigError: missing, damaged, of another kind, or without an end-of-document token; the text names the file.
    """
    if str(spec) == "bytes":
        return plain_bytes.Bytes()
    path = Path(spec).expanduser()
    if path.is_dir():
        path = _inside(path)
    if not path.is_file():
        raise ConfigError(f"tokenizer {spec}: no such file or directory; give {KINDS}{hub_hint(str(spec))}")
    if path.suffix == ".json":
        from mesh_lm.data.tokenizer import hugging_face

        return hugging_face.load(path)
    if path.name == plain_bytes.FILE:
        return plain_bytes.Bytes()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    if path.suffix == ".tiktoken" or ranks.looks_like_ranks(data):
        return ranks.Ranks(data, path)
    if path.suffix == ".model":
        return sentence_piece.SentencePiece(data, path)
    raise ConfigError(f"tokenizer {spec}: files of type {path.suffix or '(none)'} are not read; give {KINDS}")


def _inside(directory: Path) -> Path:
    for name in ("tokenizer.json", sentence_piece.FILE, ranks.FILE, plain_bytes.FILE):
        if (directory / name).is_file():
            return directory / name
    found = sorted([*directory.glob("*.model"), *directory.glob("*.tiktoken")])
    if len(found) == 1:
        return found[0]
    what = f"several: {', '.join(path.name for path in found)}; name one" if found else f"none; give {KINDS}"
    raise ConfigError(f"tokenizer {directory}: expected one tokenizer in this directory, found {what}")
