"""The tokenizer interface, and decoding, which all kinds share: each id stands for some bytes."""

from __future__ import annotations

import codecs
import functools
import hashlib
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mesh_lm.data.tokenizer.companions import Companions

EOD = "<|endoftext|>"
"""The end-of-document token of tokenizers trained here."""
MIN_VOCAB = 257
"""256 bytes and the end-of-document token: enough to encode every text."""
FORMER = (
    "warning: {} is of an older version, which split white space at the end of a text otherwise; "
    "all other ids are the same, and it is read as it is"
)
"""Warning about data or weights with a former fingerprint of a tokenizer."""
_REPLACEMENT = "\ufffd".encode()


class Tokenizer(ABC):
    """Encodes text to token ids and decodes them.

    Attributes:
      vocab_size: ids are 0 to vocab_size - 1; some may be unused.
      eod: id of the end-of-document token. No text encodes to it, not even its spelling.
      fingerprint: SHA-256 (hex) of the vocabulary, its rules and the EOD. Tokenizers with equal
        fingerprints give equal ids.
      former_fingerprints: fingerprints that older versions gave this tokenizer, whose ids differed
        in white space at the ends of texts only. Data and weights that were made with them are
        still accepted.
      joins: whether decode(a + b) == decode(a) + decode(b) for encodings a and b of two texts, so
        that a long text can be encoded in pieces. True for byte-level vocabularies; others may put
        a space at the start of each piece.
      is_lossless: whether it is known that decode(encode(text)) has every character of any text: it
        has a token for each byte, and no rule that drops or rewrites text.
      library: the package whose version may affect the ids; "" for none.
      unknown: id of the token that stands for text outside the vocabulary, such as <unk>; None if
        there is none.
      special_ids: ids of all special tokens, the EOD among them, which stand for no text.
      companions: the files of transformers beside the tokenizer in the directory that it was loaded
        from.
      is_in_transformers: whether transformers can load what `save` writes.
      kind: its format in a few words, for messages.
    """

    vocab_size: int
    eod: int
    fingerprint: str
    former_fingerprints: tuple[str, ...] = ()
    joins: bool = True
    is_lossless: bool = False
    library: str = ""
    unknown: int | None = None
    special_ids: frozenset[int] = frozenset()
    companions: Companions = Companions()
    is_in_transformers: bool = False
    kind: str = "another tokenizer"

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 [tokens], using all cores.

        Special tokens are neither added nor parsed: a text that spells one is encoded as text.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids, with special tokens spelled out.

        Invalid UTF-8 becomes U+FFFD, as does an id outside the vocabulary, which a model with a
        padded vocabulary may produce.
        """
        stream = self.stream()
        return stream.push(*ids) + stream.flush()

    def lost_bytes(self, text: str, ids: np.ndarray) -> int:
        """Returns the UTF-8 bytes of a text's characters that its `ids` do not spell; 0 if decoding
        gives the text back.

        Both are compared in Unicode's form NFC, by how often each character occurs: a tokenizer
        that writes a character in a canonically equivalent way loses nothing. A tokenizer that
        drops, folds or replaces characters does, and so does one that has an id for "unknown".
        """
        data = text.encode()
        spelled = self._spelled(ids)
        if spelled == data:
            return 0
        if self.unknown is not None:
            spelled = self._spelled(ids[ids != self.unknown])
        characters = Counter(unicodedata.normalize("NFC", text))
        spelled_text = spelled.decode(errors="replace")
        missing = characters - Counter(unicodedata.normalize("NFC", spelled_text))
        n_lost = sum(n * len(character.encode()) for character, n in missing.items())
        return min(len(data), n_lost)

    def token_ids(self) -> dict[str, int]:
        """Returns "eos_token_id", and "bos_token_id" and "pad_token_id" where the tokenizer has
        these tokens.
        """
        ids = {"eos_token_id": self.eod}
        for name in ("bos_token_id", "pad_token_id"):
            role = name.removesuffix("_id")
            spelling = self.companions.token(role)
            token_id = self.special(spelling) if spelling else None
            if token_id is None and role in self.companions.implied:
                token_id = self.eod
            if token_id is not None:
                ids[name] = token_id
        return ids

    def stream(self) -> DecodeStream:
        """Returns an incremental decoder. To continue a text, push its ids first."""
        return DecodeStream(self._spellings, self._leading_space)

    @abstractmethod
    def special(self, name: str) -> int | None:
        """Returns the id of the special token `name`, such as <|fim_prefix|>, or None if there is
        none.
        """

    @abstractmethod
    def save(self, directory: Path) -> Path:
        """Saves the tokenizer atomically to an existing directory. Returns the file;
        `load_tokenizer` accepts either path.
        """

    @abstractmethod
    def _spell(self) -> list[bytes]:
        """Returns the bytes of each id, [vocab_size]."""

    _leading_space: bool = False
    """Whether encoding puts a space before the text, which decoding removes."""

    def _spelled(self, ids: np.ndarray) -> bytes:
        """Returns the bytes of ids that `encode_batch` returned."""
        spelled = b"".join(map(self._spellings.__getitem__, ids.tolist()))
        return spelled.removeprefix(b" ") if self._leading_space else spelled

    @functools.cached_property
    def _spellings(self) -> list[bytes]:
        return self._spell()


class DecodeStream:
    """Decodes ids incrementally: the results of `push` and `flush` add up to `decode` of all ids,
    and never split a character.
    """

    def __init__(self, spellings: list[bytes], leading_space: bool) -> None:
        self._spellings = spellings
        self._drop_space = leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *ids: int) -> str:
        """Returns the text that these ids complete; "" inside a character."""
        return self._text(b"".join(map(self._spelling, ids)))

    def flush(self) -> str:
        """Returns U+FFFD for an unfinished character, else "". Resets the decoder."""
        return self._text(b"", final=True)

    def _spelling(self, token_id: int) -> bytes:
        i = int(token_id)
        return self._spellings[i] if 0 <= i < len(self._spellings) else _REPLACEMENT

    def _text(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if text and self._drop_space:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


def smaller_than_asked(tokenizer: Tokenizer, requested_size: int) -> str:
    """Returns a message about a tokenizer with fewer entries than were asked for; "" if it has all
    of them.
    """
    if tokenizer.vocab_size >= requested_size:
        return ""
    return (
        f"the tokenizer has {tokenizer.vocab_size} entries instead of {requested_size}, because "
        "no other pair of tokens occurs often enough in the text to become one; "
        f"model.vocab_size={tokenizer.vocab_size} would be enough"
    )


def fingerprint(kind: str, meaning: bytes, eod: int) -> str:
    """Returns the SHA-256 (hex) of a tokenizer."""
    return hashlib.sha256(f"{kind}\0{eod}\0".encode() + meaning).hexdigest()
