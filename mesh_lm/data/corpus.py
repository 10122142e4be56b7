"""Prepares a text corpus: a tokenizer, tokens in two splits, and how well gzip and xz compress the
held-out one.

`gzip -9` and `xz -9` are baselines: a language model that needs fewer bits per held-out byte has
learned more than repetition.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

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
from mesh_lm.data.tokenizer import (
    FORMER,
    MIN_VOCAB,
    Tokenizer,
    load_tokenizer,
    smaller_than_asked,
    train_tokenizer,
)
from mesh_lm.errors import ConfigError

_FORMAT = 1
"""Incremented whenever the same text would be prepared differently; older caches are then
ignored."""
_ONE_HELD_OUT = " with one document held out"
"""Hashed into the name of a corpus of several documents none of which falls in the held-out share.
Earlier versions held out none of them, and stored that corpus without this suffix."""
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
    named_tokenizer: Tokenizer | None = dataclasses.field(default=None, compare=False)
    """The tokenizer that data.tokenizer names. It has the ids of the corpus's own tokenizer, and
    the companions that its directory has today."""

    @property
    def name(self) -> str:
        """Identifies the text, vocabulary and format. Data positions are valid within one name."""
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
        return self.named_tokenizer or load_tokenizer(self.directory)

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
        documents = self.train()
        text = TokenStream(documents, vocab=config.model.vocab_size)
        if config.data.documents != "packed":
            return Sequences(text, config.model.seq_len, eod=self.eod, seed=config.seed)
        return PackedSequences(
            text,
            config.model.seq_len,
            eod=self.eod,
            seed=config.seed,
            cache=IndexCache(config.data.cache, distributed.print_on_process0),
            fingerprint=documents.fingerprint(),
        )

    def heldout_order(self, config: TrainConfig) -> SampleOrder:
        """Implements `Dataset.heldout_order`."""
        text = TokenStream(self.heldout(), vocab=config.model.vocab_size)
        return stored_order([text], config, self.eod)

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
    checkpoint_corpus: str = "",
) -> Dataset:
    """Returns the corpus of config.blend, or else of config.path, which is prepared in config.cache
    unless it is already there.

    One document in 20 is held out, by a hash of its path (directory) or line number (.jsonl,
    .parquet), or the last twentieth of a .txt; see `sources`. If the hash holds out none of several
    documents, one of them is (`reading.heldout_choice`). The tokenizer is config.tokenizer, or a
    byte-level BPE trained on the training split only. Each document is stored as its tokens
    followed by EOD.

    The directory <cache>/<name>-<hash of text, tokenizer and format> is built under a temporary
    name and renamed when complete. So a killed process leaves no half-finished corpus, and of
    several processes that prepare at once the first wins and the others use its files.

    Args:
      vocab: entries of the vocabulary to train, at least 257; ignored if config.tokenizer is set.
      model_vocab: number of ids that the model has; None: no check.
      progress: called with a line of text at each stage.
      outputs: directories that the run writes to, and which are no text even if they are below
        config.path; config.cache always is one.
      checkpoint_corpus: name of the corpus that the run's checkpoint was trained on, if there is
        one. If an earlier version held out none of its documents, none is held out here.

    Raises:
      ConfigError: the path is missing or not text, a split is empty, a .jsonl line is invalid,
        vocab is too small, the tokenizer cannot be read or has more ids than the model or loses
        too much of the text, or the cache is full or not writable.
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

    source = sources.find(config.path, config.text_field, [config.cache, *outputs])
    location = _locate(config, source, tokenizer, vocab, progress, checkpoint_corpus)
    directory = location.directory
    settings = {
        "format": _FORMAT,
        "path": config.path,
        "kind": source.kind,
        "files": len(source.files),
        "tokenizer": config.tokenizer or vocab,
    }
    try:
        if not directory.exists():
            directory = _build_at(location, source, tokenizer or vocab, settings, progress)
    except OSError as error:
        raise ConfigError(
            f"cannot prepare data.path={config.path} in data.cache={config.cache}: "
            f"{error.strerror} ({error.filename}); the path must be readable, and the cache "
            "writable with space left"
        ) from error

    corpus = dataclasses.replace(_load(directory), named_tokenizer=tokenizer)
    lost = corpus.lost_bytes or 0
    spelled = (corpus.train_bytes or 0) + (corpus.heldout_bytes or 0)
    lost_bytes.refuse(lost, spelled + lost, config.max_lost_bytes, "data.max_lost_bytes")
    if not corpus.train().is_sealed:
        progress(NOT_SEALED.format(prefix=f"{directory / 'train'} {directory / 'heldout'}"))
    # It is frozen, but attributes of a dataset are never assigned.
    return corpus  # pyright: ignore[reportReturnType]


def known_sources(config: DataConfig, outputs: Collection[str] = ()) -> Sources:
    """Returns `Dataset.sources` as far as they are known without preparing text.

    They are {} for text that was never prepared. Uses no device. Of Megatron prefixes all tokens
    are counted, those of the held-out documents too. outputs: as for `prepare`.
    """
    if config.blend:
        return stored_sources(config)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    source = sources.find(config.path, config.text_field, [config.cache, *outputs])
    location = _locate(config, source, tokenizer, config.tokenizer_vocab)
    if not location.directory.exists():
        return {}
    return _load(location.directory).sources()


def vocabulary_problems(config: DataConfig, model_vocab: int) -> list[str]:
    """Returns a message if the tokenizer is missing, or has ids that the model lacks.

    Reads no text, and uses no device.
    """
    try:
        if config.blend:
            tokenizer, eod = stored_vocabulary(config)
            _require_ids(tokenizer, eod, model_vocab, "the tokenizer of data.blend")
        elif config.tokenizer:
            tokenizer = load_tokenizer(config.tokenizer)
            _require_ids(tokenizer, None, model_vocab, f"data.tokenizer={config.tokenizer}")
    except ConfigError as error:
        return [str(error)]
    return []


def _require_ids(
    tokenizer: Tokenizer | None, eod: int | None, model_vocab: int | None, name: str
) -> None:
    """Raises ConfigError if the model lacks an id of the tokenizer or, without a tokenizer, the
    end-of-document token.
    """
    if model_vocab is None:
        return
    if tokenizer and tokenizer.vocab_size > model_vocab:
        raise ConfigError(
            f"{name} has ids up to {tokenizer.vocab_size - 1}, "
            f"which model.vocab_size={model_vocab} "
            f"does not have; set model.vocab_size={tokenizer.vocab_size} or more"
        )
    if not tokenizer and eod is not None and eod >= model_vocab:
        raise ConfigError(
            f"the data's end-of-document token is {eod}, which model.vocab_size={model_vocab} does "
            f"not have; set model.vocab_size={eod + 1} or more"
        )


class _Location(NamedTuple):
    """Where a corpus is stored."""

    directory: Path
    """The corpus, if it exists; else where it belongs unless a held-out document had to be
    chosen."""
    alternative: Path | None
    """Where it belongs if one had to be chosen; None: none is to be chosen."""


def _locate(
    config: DataConfig,
    source: sources.Source,
    tokenizer: Tokenizer | None,
    vocab: int,
    progress: Callable[[str], None] = lambda message: None,
    checkpoint_corpus: str = "",
) -> _Location:
    """Returns the location of a text's corpus, which may not exist yet.

    A corpus that one of the tokenizer's former fingerprints names is used if there is no other, and
    `progress` says so. If an earlier version held out none of several documents, that corpus is
    used by the runs that were trained on it (`checkpoint_corpus`), and by no others.
    """
    if tokenizer:
        vocabularies = [tokenizer.fingerprint, *tokenizer.former_fingerprints]
    else:
        vocabularies = [vocab]
    text_digest = source.digest()

    def directories(rule: str) -> list[Path]:
        paths = []
        for vocabulary in vocabularies:
            key = hashlib.sha256(f"{_FORMAT} {vocabulary} {text_digest}{rule}".encode())
            name = f"{source.name}-{key.hexdigest()[:16]}"
            paths.append(Path(config.cache).expanduser() / name)
        return paths

    plain = directories("")
    alternatives = directories(_ONE_HELD_OUT)
    if checkpoint_corpus in [directory.name for directory in plain]:
        alternatives = []
    usable = [path for path in alternatives if path.exists()]
    for path in plain:
        if path.exists() and not (alternatives and _holds_out_too_little(path)):
            usable.append(path)
    if usable:
        directory = usable[0]
    else:  # plain[0] may exist nevertheless: then it holds out too little
        directory = alternatives[0] if alternatives and plain[0].exists() else plain[0]
    if directory not in (plain[0], *alternatives[:1]):
        progress(FORMER.format(directory))
    return _Location(directory, alternatives[0] if alternatives else None)


def _holds_out_too_little(directory: Path) -> bool:
    """Whether none of several documents is held out; False for a corpus that cannot be read."""
    try:
        facts = strict_json.read(directory / _FACTS)
        return not facts["heldout_documents"] and facts["documents"] > 1
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _load(directory: Path) -> TextCorpus:
    """Returns the corpus in a directory. Raises ConfigError unless it is as it was written."""
    try:
        facts = strict_json.read(directory / _FACTS)
        sealed = facts.pop("sealed", {})  # earlier versions sealed nothing
        for name, digest in sealed.items():
            if digest != _digest(directory / name, facts):
                raise ValueError(f"{name} has another SHA-256 than when it was written")

        lost = facts.get("lost_bytes")
        # A vocabulary that was trained on the text loses nothing; its setting is its size.
        is_named = isinstance(facts["settings"]["tokenizer"], str)
        if lost is None and is_named and not load_tokenizer(directory).is_lossless:
            facts["train_bytes"] = None
            facts["heldout_bytes"] = None
            facts["loss_of_bytes"] = _UNCOUNTED.format(directory)
        elif lost:
            n_bytes = facts["train_bytes"] + facts["heldout_bytes"] + lost
            facts["loss_of_bytes"] = lost_bytes.described(lost, n_bytes)
        return TextCorpus(directory=directory, **facts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{directory} is not a complete corpus ({error}); remove it to prepare it again"
        ) from error


def _digest(path: Path, facts: dict[str, Any]) -> str:
    """Returns the SHA-256 of a file of the corpus; that of corpus.json is of its facts."""
    if path.name == _FACTS:
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return file_digest(path)


def _build_at(
    location: _Location,
    source: sources.Source,
    tokenizer: Tokenizer | int,
    settings: dict[str, Any],
    progress: Callable[[str], None],
) -> Path:
    """Builds a corpus under a temporary name, renames it and returns its directory."""
    location.directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = sibling(location.directory)
    unfinished.mkdir()
    try:
        may_choose = location.alternative is not None
        has_chosen = _build(
            unfinished, source, tokenizer, settings, progress, may_choose=may_choose
        )
        directory = location.directory
        if has_chosen and location.alternative:
            directory = location.alternative
        try:
            os.rename(unfinished, directory)
        except OSError:
            if not directory.exists():
                raise  # otherwise another process was faster, with the same contents
        return directory
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _build(
    directory: Path,
    source: sources.Source,
    tokenizer: Tokenizer | int,
    settings: dict[str, Any],
    progress: Callable[[str], None],
    *,
    may_choose: bool,
) -> bool:
    """Fills `directory`, corpus.json last.

    tokenizer: a number is the size of a vocabulary to train on the text. may_choose: hold out one
    of several documents if the hash holds out none.

    Returns whether a document was chosen.
    """
    # 1. Read all text once, or twice if a document had to be chosen.
    progress(f"reading {len(source.files)} files, {source.size / 1e6:.1f} MB")
    chosen = None
    survey = reading.survey(source.documents(), settings["path"])
    sizes = survey.sizes
    if may_choose and not survey.heldout and len(sizes) > 1:
        chosen = reading.heldout_choice(sizes)
        share = sizes[chosen] / sum(sizes)
        progress(
            f"held out one of {len(sizes)} documents, {share:.1%} of the text: the hash that holds "
            "out one in 20 held out none"
        )
        settings = {**settings, "held_out": chosen}
        survey = reading.survey(reading.documents(source, chosen), settings["path"])

    # 2. gzip and xz release the GIL and run beside the tokenizer.
    with reading.threads(2) as pool:
        gzip_size = pool.submit(reading.gzip_size, survey.heldout)
        xz_size = pool.submit(reading.xz_size, survey.heldout)
        if isinstance(tokenizer, int):
            tokenizer = _train_tokenizer(survey.sample, tokenizer, progress)
        tokenizer.save(directory)
        survey.sample.clear()  # tens of millions of characters, which encoding does not need

        progress("encoding")
        texts = (d.text for d in reading.documents(source, chosen) if not d.heldout)
        train, train_lost = _write(directory / "train", texts, tokenizer, progress)
        texts = (d.text for d in reading.documents(source, chosen) if d.heldout)
        heldout, heldout_lost = _write(directory / "heldout", texts, tokenizer, progress)

        gzip_bits = xz_bits = None
        if survey.heldout:
            gzip_bits = 8 * gzip_size.result() / len(survey.heldout)
            xz_bits = 8 * xz_size.result() / len(survey.heldout)

    # 3. The description and its digests.
    facts = {
        "documents": len(train),
        "train_tokens": len(train.unverified),
        "heldout_documents": len(heldout),
        "heldout_tokens": len(heldout.unverified),
        "train_bytes": survey.train_bytes - train_lost,
        "heldout_bytes": survey.heldout_bytes - heldout_lost,
        "lost_bytes": train_lost + heldout_lost,
        "vocab_size": tokenizer.vocab_size,
        "gzip_bits_per_byte": gzip_bits,
        "xz_bits_per_byte": xz_bits,
        "settings": settings,
    }
    # The tokens have digests of their own.
    files = [path for path in sorted(directory.iterdir()) if path.suffix not in (".bin", ".idx")]
    files.append(directory / _FACTS)
    facts["sealed"] = {path.name: _digest(path, facts) for path in files}
    with atomic_write(directory / _FACTS) as (file,):
        file.write(json.dumps(facts, indent=1).encode())
    progress(f"{facts['train_tokens']:,} training and {facts['heldout_tokens']:,} held-out tokens")
    return chosen is not None


def _train_tokenizer(sample: list[str], size: int, progress: Callable[[str], None]) -> Tokenizer:
    progress(
        f"training a byte-level BPE of {size} entries on "
        f"{sum(map(len, sample)) / 1e6:.1f} M characters"
    )
    tokenizer = train_tokenizer(sample, size)
    warning = smaller_than_asked(tokenizer, size)
    if warning:
        progress(warning)
    return tokenizer


def _write(
    prefix: Path, texts: Iterable[str], tokenizer: Tokenizer, progress: Callable[[str], None]
) -> tuple[Documents, int]:
    """Writes the tokens of texts; returns them, and the bytes of text that they do not spell."""
    n_lost = 0

    def count_lost(n_bytes: int) -> None:
        nonlocal n_lost
        n_lost += n_bytes

    report = reading.Reporter(progress).add
    tokens = encode(tokenizer, texts, report=report, lost=count_lost)
    return write_documents(prefix, tokens, vocab=tokenizer.vocab_size), n_lost
