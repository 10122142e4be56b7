"""tiktoken rank files: one line of `base64-of-bytes rank` per token, as OpenAI and Meta publish
them. Imports tiktoken.

Such a file has neither the pattern that splits text into words nor the special tokens. Both are
known for published files, which are recognised by their number of ranks:

  50256 (GPT-2, r50k) and 50280 (p50k): GPT-2's pattern, <|endoftext|> = 50256
  100256 (cl100k): its pattern, <|endoftext|> = 100257, and the fill-in-the-middle tokens
  128000 (Llama 3): Meta's pattern, which splits white space at the end of a text differently than
    cl100k's, and 256 special tokens; the EOD is <|end_of_text|> = 128001
  199998 (o200k): its pattern, <|endoftext|> = 199999

For any other number the pattern is that of cl100k, and <|endoftext|> is the id after the highest
rank.

Sources: tiktoken_ext/openai_public.py of tiktoken; llama/tokenizer.py of meta-llama/llama3.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesh_lm.data.atomic import write_files
from mesh_lm.data.tokenizer.base import EOD, Tokenizer, fingerprint
from mesh_lm.data.tokenizer.companions import Companions
from mesh_lm.errors import ConfigError

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Possessive (++), that is without backtracking, so that a long run of one character does not
# overflow the stack.
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| "
    r"?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
# The pattern of llama/tokenizer.py: an early cl100k, without its special case of white space at the
# end ("\n " is two words, not one).
_META = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_RESERVED = [f"<|reserved_special_token_{i}|>" for i in range(251)]
_LLAMA3 = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *_RESERVED[:4],
    "<|start_header_id|>",
    "<|end_header_id|>",
    _RESERVED[4],
    "<|eot_id|>",
    *_RESERVED[5:],
]
_FIM = {
    "<|fim_prefix|>": 100258,
    "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260,
    "<|endofprompt|>": 100276,
}
FILE = "tokenizer.tiktoken"


class _Published(NamedTuple):
    """The part of a published tokenizer that its rank file lacks."""

    pattern: str
    special_tokens: dict[str, int]


_PUBLISHED = {
    50256: _Published(_GPT2, {EOD: 50256}),
    50280: _Published(_GPT2, {EOD: 50256}),
    100256: _Published(_CL100K, {EOD: 100257, **_FIM}),
    128000: _Published(_META, {name: 128000 + i for i, name in enumerate(_LLAMA3)}),
    199998: _Published(_O200K, {EOD: 199999, "<|endofprompt|>": 200018}),
}
"""Published files by their number of ranks."""
_FORMER_PATTERNS = {_META: _CL100K}
"""Patterns that older versions had for the same files."""


class Ranks(Tokenizer):
    """A tiktoken tokenizer.

    Raises:
      ConfigError: the rank file is damaged, or tiktoken is not installed.
    """

    is_lossless = True  # `_parse` requires all bytes, and the patterns skip nothing
    library = "tiktoken"
    kind = "a tiktoken rank file"

    def __init__(self, data: bytes, path: Path, companions: Companions = Companions()) -> None:
        """data: contents of the rank file. path: the file, for messages."""
        self.companions = companions
        self._data = data
        self._ranks = _parse(data, path)
        unpublished = _Published(_CL100K, {EOD: max(self._ranks.values()) + 1})
        pattern, self._specials = _PUBLISHED.get(len(self._ranks), unpublished)
        self._encoding = _tiktoken().Encoding(
            "ranks", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens=self._specials
        )
        self.eod = self._specials.get(EOD, self._specials.get("<|end_of_text|>", -1))
        self.vocab_size = self._encoding.n_vocab
        self.special_ids = frozenset(self._specials.values())
        self.fingerprint = self._fingerprint(pattern)
        if pattern in _FORMER_PATTERNS:
            self.former_fingerprints = (self._fingerprint(_FORMER_PATTERNS[pattern]),)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Implements `Tokenizer.encode_batch`."""
        if len(texts) == 1:  # avoids starting threads
            return [np.array(self._encoding.encode_ordinary(texts[0]), np.int32)]
        encodings = self._encoding.encode_ordinary_batch(
            list(texts), num_threads=os.cpu_count() or 1
        )
        return [np.array(ids, np.int32) for ids in encodings]

    def special(self, name: str) -> int | None:
        """Implements `Tokenizer.special`."""
        return self._specials.get(name)

    def save(self, directory: Path) -> Path:
        """Implements `Tokenizer.save`."""
        write_files(directory, {**self.companions.generation_file(), FILE: self._data})
        return directory / FILE

    def _spell(self) -> list[bytes]:
        spellings = [b""] * self.vocab_size
        special_tokens = {name.encode(): i for name, i in self._specials.items()}
        for token, rank in (self._ranks | special_tokens).items():
            spellings[rank] = token
        return spellings

    def _fingerprint(self, pattern: str) -> str:
        """Returns the fingerprint of this tokenizer with a pattern."""
        special_tokens = sorted(self._specials.items())
        ranks = sorted((rank, token.hex()) for token, rank in self._ranks.items())
        meaning = repr((pattern, special_tokens, ranks)).encode()
        return fingerprint("ranks", meaning, self.eod)


def looks_like_ranks(data: bytes) -> bool:
    """Whether the first line is base64 and a number, which no SentencePiece model starts with."""
    first_line = data[:4096].split(b"\n", 1)[0]
    try:
        token, rank = first_line.split()
        return bool(base64.b64decode(token, validate=True)) and int(rank) >= 0
    except ValueError:
        return False


def _parse(data: bytes, path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}: expected a token in base64 and its rank, got "
                f"{line[:60]!r}; fetch it again"
            ) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(
            f"{path} has no rank for {len(missing)} of the 256 bytes, such as {missing[0]}: it is "
            "truncated; fetch it again"
        )
    if len(set(ranks.values())) < len(ranks):
        raise ConfigError(
            f"{path} has {len(ranks)} tokens, but only {len(set(ranks.values()))} "
            "of their ranks are different; fetch it again"
        )
    return ranks


def _tiktoken() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise ConfigError(
            "a tiktoken rank file needs tiktoken: pip install -e '.[data]'"
        ) from error
    return tiktoken
