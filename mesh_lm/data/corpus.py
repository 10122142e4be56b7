"""Prepares a text corpus: a tokenizer, tokens in two splits, and how well gzip and xz compress the
held-out one.

`gzip -9` and `xz -9` are baselines: a language model that needs fewer bits per held-out byte has
learned more than repetition.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from mesh_lm import distributed, strict_json
from mesh_lm.checksums import file_digest
from mesh_lm.config import DataConfig, TrainConfig
from mesh_lm.data import lost_bytes, reading, sources
from mesh_lm.data.atomic import atomic_write, sibling
from mesh_lm.data.dataset import Dataset, stored_order
from mesh_lm.data.encoding import encode
from mesh_lm.data.epochs import Sources
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.indexed import Documents, TokenStream, write_documents
from mesh_lm.data.megatron_corpus import (
    NOT_SEALED,
    MegatronCorpus,
    stored_sources,
    stored_vocabulary,
)
from mesh_lm.data.packing import PackedSequences
from mesh_lm.data.rows import SampleOrder
from mesh_lm.data.sequences import Sequences
from mesh_lm.data.tokenizer import FORMER, MIN_VOCAB, Tokenizer, load_tokenizer, smaller_than_asked
from mesh_lm.errors import ConfigError

_FORMAT = 1
"""Incremented whenever the same text would be prepared differently; older caches are then
ignored."""
_ONE_HELD_OUT = " with one document held out"
"""Added to the name of a corpus of several documents none of which falls in the held-out share;
earlier versions then held out none."""
_FACTS = "corpus.json"
_UNCOUNTED = (
    "{} is of a version that did not count what the tokenizer loses, so that there are no bits per "
    "byte; remove it to prepare it again"
)


@dataclasses.dataclass(frozen=True)
class TextCorpus:
    """A prepared corpus: the contents of its corpus.json, and access to its files."""

    directory: Path
    documents: int
    """Documents in the training split."""
    train_tokens: int
    """Includes one EOD per document, as do all token counts here."""
    train_bytes: int | None
    """UTF-8 bytes of the training text that its tokens spell, without EOD."""
    heldout_documents: int
    heldout_tokens: int
    heldout_bytes: int | None
    """UTF-8 bytes of the held-out text that its tokens spell, without EOD."""
    vocab_size: int
    """Entries of the tokenizer; less than requested if the text is small."""
    gzip_bits_per_byte: float | None
    """gzip -9 on the concatenated held-out documents (the first 64 MiB); None if there are none."""
    xz_bits_per_byte: float | None
    settings: dict[str, Any]
    """How the corpus was prepared, and from what."""
    lost_bytes: int | None = None
    """UTF-8 bytes of both splits that their tokens do not spell; None in a corpus of a version that
    did not count them."""
    loss_of_bytes: str = ""
    """Implements `Dataset.loss_of_bytes`."""
    named: Tokenizer | None = dataclasses.field(default=None, compare=False)
    """The tokenizer that data.tokenizer names: that of the corpus, with the companions that its
    directory has now."""

    @property
    def name(self) -> str:
        """Identifies the text, vocabulary and format; data positions are only valid within one
        name.
        """
        return self.directory.name

    def train(self) -> Documents:
        """Returns the training split."""
        return self._documents("train")

    def heldout(self) -> Documents:
        """Returns the held-out split."""
        return self._documents("heldout")

    def _documents(self, split: str) -> Documents:
        return Documents(
            self.directory / split,
            cure=f"remove {self.directory}, and the next start prepares the text again",
        )

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that encoded the corpus."""
        return self.named or load_tokenizer(self.directory)

    @property
    def eod(self) -> int:
        """Id of the tokenizer's end-of-document token."""
        return self.tokenizer().eod

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokenizer."""
        return self.tokenizer().fingerprint

    @property
    def why_no_heldout(self) -> str:
        """Implements `Dataset.why_no_heldout`."""
        if self.heldout_tokens:
            return ""
        if self.documents > 1:
            return (
                f"an earlier version held out none of these {self.documents} documents; a run with "
                "a new output holds one out"
            )
        return (
            "the text is a single document; give two or more, or one .txt file as data.path, whose "
            "last twentieth is then held out"
        )

    def training_order(
        self, config: TrainConfig, saved: dict[str, Any] | None, last: int
    ) -> SampleOrder:
        """Implements `Dataset.training_order`."""
        documents, eod = self.train(), self.eod
        text = TokenStream(documents, vocab=config.model.vocab_size)
        if config.data.documents != "packed":
            return Sequences(text, config.model.seq_len, eod=eod, seed=config.seed)
        cache = IndexCache(config.data.cache, distributed.print_on_process0)
        return PackedSequences(
            text,
            config.model.seq_len,
            eod=eod,
            seed=config.seed,
            cache=cache,
            fingerprint=documents.fingerprint(),
        )

    def heldout_order(self, config: TrainConfig) -> SampleOrder:
        """Implements `Dataset.heldout_order`."""
        return stored_order(
            [TokenStream(self.heldout(), vocab=config.model.vocab_size)], config, self.eod
        )

    def sources(self) -> Sources:
        """Implements `Dataset.sources`."""
        return {f"corpus {self.name}": (self.train_tokens, 1.0)}

    def state(self, order: SampleOrder, position: int) -> dict[str, Any]:
        """Returns {}: the position is the entire state."""
        return {}

    def changed(self, order: SampleOrder) -> list[str]:
        """Returns []: other text has another name."""
        return []


def prepare(
    config: DataConfig,
    *,
    vocab: int,
    model_vocab: int | None = None,
    progress: Callable[[str], None] = lambda message: None,
    outputs: Collection[str] = (),
    trained_on: str = "",
) -> Dataset:
    """Returns the corpus of config.blend, or else of config.path, which is prepared in config.cache
    unless it is already there.

    One document in 20 is held out, by a hash of its path (directory) or line number (.jsonl,
    .parquet), or the last twentieth of a .txt; see `sources`. If the hash holds out none of several
    documents, one of them is (`reading.chosen_of`). The tokenizer is config.tokenizer, or a
    byte-level BPE trained on the training split only. Each document is stored as its tokens
    followed by EOD.

    The directory <cache>/<name>-<hash of text, tokenizer and format> is built under a temporary
    name and renamed when complete. So a killed process leaves no half-finished corpus, and of
    several processes that prepare at once the first wins and the others use its files.

    Args:
      vocab: entries of the vocabulary to train, at least 257; ignored if config.tokenizer is set.
      model_vocab: number of ids that the model has; None: no check. progress: called with a line of
      text at each stage. outputs: directories that the run writes to, and which are no text even if
      they are below config.path; config.cache always is one. trained_on: name of the corpus that
      the run's checkpoint was trained on, if there is one. If an earlier version held out none of
      its
        documents, none is held out here.

    Raises:
      ConfigError: the path is missing or not text, a split is empty, a .jsonl line is invalid,
      vocab is too small, the tokenizer cannot be
        read or has more ids than the model or loses too much of the text, or the cache is full or
        not writable.
    """
    if config.blend:
        prefixes = MegatronCorpus(config, progress)
        _require_ids(prefixes.tokenizer(), prefixes.eod, model_vocab, "the tokenizer of data.blend")
        return prefixes
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    if tokenizer is None and vocab < MIN_VOCAB:
        raise ConfigError(
            f"data.tokenizer_vocab={vocab} is too small: a byte-level vocabulary needs at least "
            f"{MIN_VOCAB}"
        )
    _require_ids(tokenizer, None, model_vocab, f"data.tokenizer={config.tokenizer}")
    source, place = _source(config, tokenizer, vocab, outputs, progress, trained_on)
    directory, made_by = place.directory, config.tokenizer or vocab
    settings = {
        "format": _FORMAT,
        "path": config.path,
        "kind": source.kind,
        "files": len(source.files),
        "tokenizer": made_by,
    }
    try:
        if not directory.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            unfinished = sibling(directory)
            unfinished.mkdir()
            try:
                if _build(
                    unfinished,
                    source,
                    tokenizer or vocab,
                    settings,
                    progress,
                    choose=place.with_chosen is not None,
                ):
                    directory = place.with_chosen or directory
                _rename(unfinished, directory)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"cannot prepare data.path={config.path} in data.cache={config.cache}: "
            f"{error.strerror} ({error.filename}); the path must be readable, and the cache "
            "writable with space left"
        ) from error
    corpus = dataclasses.replace(_load(directory), named=tokenizer)
    lost = corpus.lost_bytes or 0
    spelled = (corpus.train_bytes or 0) + (corpus.heldout_bytes or 0)
    lost_bytes.refuse(lost, spelled + lost, config.max_lost_bytes, "data.max_lost_bytes")
    if not corpus.train().is_sealed:
        progress(NOT_SEALED.format(prefix=f"{directory / 'train'} {directory / 'heldout'}"))
    return corpus  # pyright: ignore[reportReturnType]  # frozen, but attributes of a dataset are never assigned


def known_sources(config: DataConfig, outputs: Collection[str] = ()) -> Sources:
    """Returns `Dataset.sources` as far as they are known without preparing text; {} where it was
    never prepared. Uses no device.

    Of Megatron prefixes all tokens are counted, those of the held-out documents too. outputs: as
    for `prepare`.
    """
    if config.blend:
        return stored_sources(config)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    _, place = _source(config, tokenizer, config.tokenizer_vocab, outputs)
    return _load(place.directory).sources() if place.directory.exists() else {}


def vocabulary_problems(config: DataConfig, model_vocab: int) -> list[str]:
    """Returns whether the tokenizer is missing, or has ids that the model lacks. Reads no text, and
    uses no device.
    """
    try:
        if config.blend:
            _require_ids(*stored_vocabulary(config), model_vocab, "the tokenizer of data.blend")
        elif config.tokenizer:
            _require_ids(
                load_tokenizer(config.tokenizer),
                None,
                model_vocab,
                f"data.tokenizer={config.tokenizer}",
            )
    except ConfigError as error:
        return [str(error)]
    return []


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a corpus is stored."""

    directory: Path
    """The corpus if it is there; else where it belongs unless a held-out document had to be
    chosen."""
    with_chosen: Path | None
    """Where it belongs if one had to be chosen; None: none is chosen."""


def _source(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    vocab: int,
    outputs: Collection[str],
    progress: Callable[[str], None] = lambda message: None,
    trained_on: str = "",
) -> tuple[sources.Source, _Place]:
    """Returns the text of config.path, and the place of its corpus, which may not exist yet.

    A corpus that one of the tokenizer's former fingerprints names is used where there is no other,
    and `progress` says so. One of several documents of which an earlier version held out none is
    used by the runs that were trained on it (`trained_on`), and by no others.
    """
    source = sources.find(config.path, config.text_field, [config.cache, *outputs])
    made_by, digest = (
        [tokenizer.fingerprint, *tokenizer.former_fingerprints] if tokenizer else [vocab],
        source.digest(),
    )

    def directories(rule: str) -> list[Path]:
        keys = [
            hashlib.sha256(f"{_FORMAT} {each} {digest}{rule}".encode()).hexdigest()[:16]
            for each in made_by
        ]
        return [Path(config.cache).expanduser() / f"{source.name}-{key}" for key in keys]

    plain, chosen = directories(""), directories(_ONE_HELD_OUT)
    if trained_on in [directory.name for directory in plain]:
        chosen = []
    there = [directory for directory in (*chosen, *plain) if directory.exists()]
    # where it exists, it is one that holds out too little
    absent = chosen[0] if chosen and plain[0].exists() else plain[0]
    found = next(
        (
            directory
            for directory in there
            if not chosen or directory in chosen or not _holds_out_too_little(directory)
        ),
        absent,
    )
    if found not in (plain[0], *chosen[:1]):
        progress(FORMER.format(found))
    return source, _Place(found, chosen[0] if chosen else None)


def _holds_out_too_little(directory: Path) -> bool:
    """Whether an earlier version held out none of several documents; False for a corpus that cannot
    be read.
    """
    try:
        facts = strict_json.read(directory / _FACTS)
        return not facts["heldout_documents"] and facts["documents"] > 1
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _require_ids(
    tokenizer: Tokenizer | None, eod: int | None, model_vocab: int | None, name: str
) -> None:
    """Raises ConfigError if the model lacks an id of the tokenizer or, without a tokenizer, the
    end-of-document token.
    """
    last = tokenizer.vocab_size - 1 if tokenizer else -1 if eod is None else eod
    if model_vocab is not None and last >= model_vocab:
        what = (
            f"{name} has ids up to {last}"
            if tokenizer
            else f"the data's end-of-document token is {last}"
        )
        raise ConfigError(
            f"{what}, which model.vocab_size={model_vocab} does not have; set "
            f"model.vocab_size={last + 1} or more"
        )


def _rename(unfinished: Path, directory: Path) -> None:
    try:
        os.rename(unfinished, directory)
    except OSError:
        if not directory.exists():
            raise  # otherwise another process was faster, with the same contents


def _load(directory: Path) -> TextCorpus:
    try:
        facts = strict_json.read(directory / _FACTS)
        sealed = facts.pop("sealed", {})  # earlier versions sealed nothing
        for name in sealed:
            if sealed[name] != _digest(directory / name, facts):
                raise ValueError(f"{name} is not as it was written (SHA-256)")
        lost, made_by = facts.get("lost_bytes"), facts["settings"]["tokenizer"]
        # A vocabulary that was trained on the text loses nothing.
        if lost is None and isinstance(made_by, str) and not load_tokenizer(directory).is_lossless:
            facts |= {
                "train_bytes": None,
                "heldout_bytes": None,
                "loss_of_bytes": _UNCOUNTED.format(directory),
            }
        elif lost:
            facts["loss_of_bytes"] = lost_bytes.described(
                lost, facts["train_bytes"] + facts["heldout_bytes"] + lost
            )
        return TextCorpus(directory=directory, **facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{directory} is not a complete corpus ({error}); remove it to prepare it again"
        ) from error


def _digest(path: Path, facts: dict[str, Any]) -> str:
    """Returns the SHA-256 of a file of the corpus; that of corpus.json is of its facts."""
    return (
        hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        if path.name == _FACTS
        else file_digest(path)
    )


def _build(
    directory: Path,
    source: sources.Source,
    tokenizer: Tokenizer | int,
    settings: dict[str, Any],
    progress: Callable[[str], None],
    *,
    choose: bool,
) -> bool:
    """Fills `directory`, corpus.json last. If `tokenizer` is a number, a vocabulary of that size is
    trained.

    choose: hold out one of several documents where the hash holds out none. Returns whether that
    was necessary.
    """
    progress(f"reading {len(source.files)} files, {source.size / 1e6:.1f} MB")
    sample, heldout, n_bytes, sizes = reading.read(source.documents(), settings["path"])
    chosen = reading.chosen_of(sizes) if choose and not heldout and len(sizes) > 1 else None
    if chosen is not None:
        share = sizes[chosen] / sum(sizes)
        progress(
            f"held out one of {len(sizes)} documents, {share:.1%} of the text: the hash that holds "
            "out one in 20 held out none"
        )
        settings = {**settings, "held_out": chosen}
        sample, heldout, n_bytes, _ = reading.read(
            reading.documents(source, chosen), settings["path"]
        )
    with reading.threads(2) as pool:  # both release the GIL
        compressed = [pool.submit(f, bytes(heldout)) for f in (reading.gzip_size, reading.xz_size)]
        if isinstance(tokenizer, int):
            progress(
                f"training a byte-level BPE of {tokenizer} entries on "
                f"{sum(map(len, sample)) / 1e6:.1f} M characters"
            )
            asked = tokenizer
            tokenizer = Tokenizer.train(sample, asked)
            if smaller := smaller_than_asked(tokenizer, asked):
                progress(smaller)
        tokenizer.save(directory)
        del sample
        progress("encoding")
        splits, lost = [], []
        for name, is_heldout in (("train", False), ("heldout", True)):
            texts = (
                document.text
                for document in reading.documents(source, chosen)
                if document.heldout == is_heldout
            )
            lost.append(0)
            tokens = encode(
                tokenizer,
                texts,
                report=reading.Reporter(progress).done,
                lost=functools.partial(reading.add, lost),
            )
            splits.append(write_documents(directory / name, tokens, vocab=tokenizer.vocab_size))
        gzip, xz = (
            8 * future.result() / len(heldout) if heldout else None for future in compressed
        )
    facts = {
        "documents": len(splits[0]),
        "train_tokens": len(splits[0].unverified),
        "heldout_documents": len(splits[1]),
        "heldout_tokens": len(splits[1].unverified),
        "train_bytes": n_bytes["training"] - lost[0],
        "heldout_bytes": n_bytes["held-out"] - lost[1],
        "lost_bytes": sum(lost),
        "vocab_size": tokenizer.vocab_size,
        "gzip_bits_per_byte": gzip,
        "xz_bits_per_byte": xz,
        "settings": settings,
    }
    # The tokens have digests of their own.
    sealed = [
        path for path in sorted(directory.iterdir()) if path.suffix not in (".bin", ".idx")
    ] + [directory / _FACTS]
    facts |= {"sealed": {path.name: _digest(path, facts) for path in sealed}}
    with atomic_write(directory / _FACTS) as (file,):
        file.write(json.dumps(facts, indent=1).encode())
    progress(f"{facts['train_tokens']:,} training and {facts['heldout_tokens']:,} held-out tokens")
    return chosen is not None
