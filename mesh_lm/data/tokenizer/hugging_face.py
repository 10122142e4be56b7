"""Hugging Face's tokenizer.json, and training of a byte-level BPE. The only file that imports
`tokenizers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mesh_lm import strict_json
from mesh_lm.data.atomic import write_files
from mesh_lm.data.tokenizer import companions as companion_files
from mesh_lm.data.tokenizer.base import EOD, MIN_VOCAB, Tokenizer, fingerprint
from mesh_lm.data.tokenizer.companions import CONFIG, Companions
from mesh_lm.errors import ConfigError

FILE = "tokenizer.json"
_EODS = (EOD, "<|end_of_text|>", "</s>", "<eos>")
_WITHOUT_MEANING = ("version", "truncation", "padding", "post_processor")
"""Parts of a tokenizer.json that do not change the ids of `encode_batch`."""
_LOSSLESS_STEPS = ("ByteLevel", "Split", "Digits")
"""Steps of a pre_tokenizer that split text, without a change of its characters."""
_LOSSY_RULES = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
"""Options of a BPE model with which ids do not spell the text."""
_BYTE_TOKEN = re.compile("<0x..>", re.DOTALL)
_SPACE = "\u2581"  # how vocabularies converted from SentencePiece spell a space


class HuggingFace(Tokenizer):
    """The tokenizer of a tokenizer.json, byte-level (GPT-2, Llama 3, Qwen) or converted from
    SentencePiece (Llama 2, Gemma).

    Its truncation, padding and templates are ignored: documents are complete, and the EOD is
    appended elsewhere.
    """

    library = "tokenizers"
    is_in_transformers = True
    kind = "a tokenizer.json"

    def __init__(
        self, text: str, path: Path, eod: str | None = None, companions: Companions = Companions()
    ) -> None:
        """Parses a tokenizer.json.

        Args:
          text: contents of the tokenizer.json.
          path: the file, for messages.
          eod: spelling of the end-of-document token; None: the first common one that the vocabulary
            has.
          companions: what `save` writes beside it.

        Raises:
          ConfigError: the file is damaged, lacks the EOD, or is of a kind whose ids do not stand
            for bytes.
        """
        self._text = text
        self._data = _parse(text, path)
        self.companions = companions
        self._added_tokens = self._data.get("added_tokens") or ()
        self._eod_name = _find_eod([token["content"] for token in self._added_tokens], eod, path)
        for token in self._added_tokens:
            if token["content"] == self._eod_name:
                token["special"] = True  # an added token that is not special is matched in text
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self._data))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ConfigError(
                f"cannot load the tokenizer {path}: the package tokenizers refuses it: {error}"
            ) from error
        # <|endoftext|> spelled in a document must not end it
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        self._vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids come from the library, which may override those of the file.
        contents = [token["content"] for token in self._added_tokens]
        self._added = {content: self._vocab[content] for content in contents}
        self._special = {token["content"] for token in self._added_tokens if token.get("special")}
        self.vocab_size = max(self._vocab.values()) + 1
        self.eod = self._added[self._eod_name]
        self.unknown = self._unknown()
        self.special_ids = frozenset(self._added[content] for content in self._special)

        self._decoders = _decoders(self._data.get("decoder"), path)
        self._leading_space = bool(self._decoders & {"Strip", "Metaspace"})
        self.joins = "ByteLevel" in self._decoders
        self.is_lossless = self._has_all_bytes() and not self._changes_text()
        meaning = {key: value for key, value in self._data.items() if key not in _WITHOUT_MEANING}
        self.fingerprint = fingerprint(
            "hugging_face", json.dumps(meaning, sort_keys=True).encode(), self.eod
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Implements `Tokenizer.encode_batch`."""
        # fast: no character offsets
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def special(self, name: str) -> int | None:
        """Implements `Tokenizer.special`."""
        return self._added.get(name)

    def save(self, directory: Path) -> Path:
        """Writes the original tokenizer.json and its companions, which name the EOD; Hugging Face's
        libraries read all of them.
        """
        files = {**self.companions.files(self._eod_name), FILE: self._text.encode()}
        write_files(directory, files)
        return directory / FILE

    def _unknown(self) -> int | None:
        """Returns the id of the unknown token, which a BPE or WordPiece model names, and a Unigram
        model numbers.
        """
        model = self._data["model"]
        if model.get("unk_token") is None:
            return model.get("unk_id")
        return self._vocab.get(model["unk_token"])

    def _has_all_bytes(self) -> bool:
        """Whether it is a BPE with a token for each byte."""
        model = self._data["model"]
        return (
            model.get("type") == "BPE"
            and "ByteLevel" in self._decoders
            and all(character in model["vocab"] for character in _byte_alphabet())
        )

    def _changes_text(self) -> bool:
        """Whether a rule of a byte-level BPE may drop or rewrite text."""
        if any(self._data["model"].get(name) for name in _LOSSY_RULES):
            return True
        if self._data.get("normalizer"):
            return True
        if any(token.get("lstrip") or token.get("rstrip") for token in self._added_tokens):
            return True
        splitter = self._data.get("pre_tokenizer") or {}
        steps = splitter.get("pretokenizers", [splitter])
        if [step.get("type") for step in steps].count("ByteLevel") != 1:
            return True
        for step in steps:
            if step["type"] not in _LOSSLESS_STEPS or step.get("behavior") == "Removed":
                return True
        return False

    def _spell(self) -> list[bytes]:
        alphabet = {character: bytes([byte]) for byte, character in enumerate(_byte_alphabet())}
        spellings = [b""] * self.vocab_size
        for token, i in self._vocab.items():
            if token in self._special or (token in self._added and self.joins):
                spellings[i] = token.encode()
            elif self.joins:
                characters = [alphabet.get(character, character.encode()) for character in token]
                spellings[i] = b"".join(characters)
            elif "ByteFallback" in self._decoders and _BYTE_TOKEN.fullmatch(token):
                spellings[i] = bytes([int(token[3:5], 16)])
            else:
                spellings[i] = token.replace(_SPACE, " ").encode()
        return spellings


def train(texts: Iterable[str], vocab: int) -> HuggingFace:
    """Trains a byte-level BPE of at most `vocab` entries; fewer if the text has too few repeated
    pairs.

    The same texts give the same tokenizer on any number of cores, and decode(encode(text)) == text.

    Raises:
      ConfigError: vocab < 257.
    """
    if vocab < MIN_VOCAB:
        raise ConfigError(
            f"data.tokenizer_vocab={vocab} is too small; a byte-level vocabulary has at least "
            f"{MIN_VOCAB}: 256 bytes and {EOD}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return HuggingFace(tokenizer.to_str(), Path(FILE), EOD)


def load(path: Path) -> HuggingFace:
    """Loads the tokenizer.json at `path`. Its EOD is the eos_token of a tokenizer_config.json or
    special_tokens_map.json next to it.

    Raises:
      ConfigError: the file is missing, damaged or has no EOD.
    """
    companions = companion_files.read(path.parent)
    try:
        text = path.read_text(encoding="utf-8")
        return HuggingFace(text, path, companions.token("eos_token"), companions)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot load the tokenizer {path}: its file is unreadable: {error}"
        ) from error


def _find_eod(added: list[str], eod: str | None, path: Path) -> str:
    """Returns `eod`, or the first common end-of-document token among the added ones."""
    if eod is not None:
        if eod in added:
            return eod
        raise ConfigError(
            f"{path} has no token {eod!r}, which the files beside it name as eos_token; fetch "
            "all files of one model"
        )
    for name in _EODS:
        if name in added:
            return name
    raise ConfigError(
        f"{path} has no end-of-document token among its added_tokens: none of {', '.join(_EODS)}; "
        f"name one of them as eos_token in a {CONFIG} beside it"
    )


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        data = strict_json.loads(text, size=strict_json.LARGE_FILE, depth=0)
        merges = data["model"].get("merges")
        if merges and isinstance(merges[0], str):  # older files write a pair as "a b"
            data["model"]["merges"] = [merge.split(" ") for merge in merges]
        return data
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"cannot load the tokenizer {path}: it is not a tokenizer.json of Hugging Face "
            f"({type(error).__name__}: {error})"
        ) from error


def _decoders(decoder: dict[str, Any] | None, path: Path) -> set[str]:
    """Returns the types of the decoder's steps; Strip and Metaspace only if they remove a leading
    space.
    """
    if decoder and decoder["type"] == "Sequence":
        steps = decoder["decoders"]
    else:
        steps = [decoder or {"type": "none"}]
    kinds = set()
    for step in steps:
        kind = step["type"]
        if not _is_supported(step):
            raise ConfigError(
                f"{path}: a tokenizer with decoder step {kind} is not supported; byte-level ones "
                "(GPT-2, Llama 3, Qwen) and those converted from SentencePiece (Llama 2, Gemma) are"
            )
        if kind == "Strip" and step.get("start") != 1:
            continue
        if kind == "Metaspace" and step.get("prepend_scheme", "always") == "never":
            continue
        kinds.add(kind)
    return kinds


def _is_supported(step: dict[str, Any]) -> bool:
    """Whether `_spell` and `Tokenizer.decode` do the same as a step of a decoder."""
    kind = step["type"]
    if kind == "Replace":
        return step.get("pattern") == {"String": _SPACE} and step.get("content") == " "
    if kind == "Strip":
        return step.get("content") == " " and step.get("stop") == 0
    return kind in ("ByteLevel", "ByteFallback", "Fuse", "Metaspace")


def _byte_alphabet() -> list[str]:
    """Returns the character for each byte (Radford et al. 2019): itself if it is printable, else
    the next one from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
