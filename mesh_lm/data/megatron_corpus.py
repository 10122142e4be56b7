"""A corpus of Megatron .bin/.idx prefixes, as `data.blend` names them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mesh_lm import strict_json
from mesh_lm.config import DataConfig, TrainConfig
from mesh_lm.data.blend import Blend, normalized, parse
from mesh_lm.data.blend_plan import make_plan
from mesh_lm.data.dataset import Dataset, stored_order
from mesh_lm.data.epochs import Sources
from mesh_lm.data.gpt_dataset import SPLITS, EpochCount, GPTDataset, samples_in, split_ranges
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.indexed import Documents, TokenStream, stored_tokens
from mesh_lm.data.lost_bytes import described
from mesh_lm.data.packing import PackedSequences
from mesh_lm.data.rows import ConcatOrder, SampleOrder, TokenWindows
from mesh_lm.data.sources import HELDOUT
from mesh_lm.data.tokenizer import FORMER, Tokenizer, load_tokenizer
from mesh_lm.errors import ConfigError

NOT_SEALED = (
    "data without digests is read unverified; if it is as it should be, seal it: mesh-lm prepare "
    "seal {prefix}"
)
_COUNTED = 10**7
"""Approximate number of tokens that are decoded to estimate the bytes of held-out text."""
_LONGEST = 10**6
"""Most tokens of one document that are decoded."""


@dataclasses.dataclass(frozen=True)
class MegatronPrefix:
    """One prefix of a blend."""

    documents: Documents
    fingerprint: str
    about: dict[str, Any]
    """Contents of <prefix>.json, which `mesh_lm.data.prepare` writes; empty if there is none, as
    for files made by Megatron."""

    @property
    def prefix(self) -> str:
        """Path of the files without their suffix."""
        return self.documents.prefix


class MegatronCorpus(Dataset):
    """The corpus of a blend; it shares the attributes of `TextCorpus`, with None for unknown
    numbers.

    Attributes:
      members, weights: in the config's order; weights are normalized, or None. fingerprint:
      fingerprint of the tokenizer that encoded the data, if known. eod: id of the end-of-document
      token: from the tokenizer, else from <prefix>.json if all of them agree, else None.
      train_bytes, heldout_bytes: UTF-8 bytes of the text that its tokens spell; None without a
      tokenizer and <prefix>.json. loss_of_bytes: how much of the text its tokenizer lost, by
      <prefix>.json. why_no_heldout: why the split gives no document to validation, and one that
      does.
    """

    def __init__(
        self, config: DataConfig, progress: Callable[[str], None] = lambda message: None
    ) -> None:
        """Raises ConfigError for an invalid blend, split or prefix, and for prefixes encoded with
        different tokenizers.
        """
        prefixes, weights = parse(config.blend)
        self.members = [_prefix(prefix) for prefix in prefixes]
        # As in Megatron, whose blends per split are of complete prefixes. Evaluation reads each
        # token once, so weights do not matter.
        self._held = (
            [_prefix(prefix) for prefix in parse(config.valid_blend, "data.valid_blend")[0]]
            if config.valid_blend
            else self.members
        )
        self._all = [*self.members, *([] if self._held is self.members else self._held)]
        for member in self._all:
            if "bytes" not in member.about and Path(f"{member.prefix}.tokenizer").exists():
                progress(
                    f"warning: {member.prefix}.json is not there, or not what `prepare` wrote with "
                    "the tokenizer: the bytes are estimated"
                )
        self.weights = normalized(weights) if weights else None
        self._split, self._tokenizer = config.split, _tokenizer(config, self.members[0].prefix)
        self.fingerprint, self.eod = self._tokenizer_of_all(progress)
        self.cache = IndexCache(config.cache, progress)
        if unsealed := [member.prefix for member in self._all if not member.documents.is_sealed]:
            progress(NOT_SEALED.format(prefix=" ".join(unsealed)))
        self.name = f"Megatron prefixes, {'all documents' if config.valid_blend else f'split {config.split}'}"
        self.name += "" if config.add_extra_token else ", no extra token"
        training, heldout = self.train(), self.heldout()
        self._of_members = [text.n_tokens for text in training]
        self.train_tokens, self.heldout_tokens = (
            sum(self._of_members),
            sum(text.n_tokens for text in heldout),
        )
        if self.heldout_tokens:
            self.heldout_bytes = self._bytes(self._held, heldout)
        # text of the same kind, which is much shorter to count
        if self.heldout_tokens and not config.valid_blend:
            self.train_bytes = self.heldout_bytes and round(
                self.heldout_bytes * self.train_tokens / self.heldout_tokens
            )
        else:
            self.train_bytes = self._bytes(self.members, training)
        lost, n_bytes = (
            sum(member.about.get(key) or 0 for member in self._all)
            for key in ("lost_bytes", "bytes")
        )
        self.loss_of_bytes = described(lost, n_bytes)
        if not self.heldout_tokens and not config.valid_blend:
            self.why_no_heldout = _no_validation(
                config.split, max(len(member.documents.sequences) - 1 for member in self.members)
            )

    def tokenizer(self) -> Tokenizer | None:
        """Returns data.tokenizer, else the one that `mesh_lm.data.prepare` stored next to the first
        prefix, else None.
        """
        return self._tokenizer

    def train(self, vocab: int | None = None) -> list[TokenStream]:
        """Returns the training split of each member; vocab: number of ids that the model has."""
        return [self._text(member, "train", vocab) for member in self.members]

    def heldout(self, vocab: int | None = None) -> list[TokenStream]:
        """Returns the validation split of each member, or data.valid_blend."""
        return [self._text(member, "valid", vocab) for member in self._held]

    def sources(self) -> Sources:
        """Returns each prefix of a weighted blend; without weights they are one text."""
        return _sources([member.prefix for member in self.members], self._of_members, self.weights)

    def training_order(
        self, config: TrainConfig, saved: dict[str, Any] | None, last: int
    ) -> BlendedOrder:
        """Implements `Dataset.training_order`."""
        return BlendedOrder(config, self, saved, last)

    def heldout_order(self, config: TrainConfig) -> SampleOrder:
        """Implements `Dataset.heldout_order`."""
        return stored_order(self.heldout(config.model.vocab_size), config, self.eod)

    def state(self, order: BlendedOrder, position: int) -> dict[str, Any]:
        """Returns the plan of the blend, and the samples drawn from each member."""
        return {"blend": order.plan.state(order.consumed(position))}

    def changed(self, order: BlendedOrder) -> list[str]:
        """Implements `Dataset.changed`."""
        return list(order.plan.changed)

    def _text(self, member: MegatronPrefix, split: str, vocab: int | None) -> TokenStream:
        if self._held is not self.members:
            return TokenStream(member.documents, vocab=vocab)
        numbers = split_ranges(self._split, len(member.documents.sequences) - 1)[
            SPLITS.index(split)
        ]
        return TokenStream(member.documents, numbers.start, numbers.stop, vocab=vocab)

    def _tokenizer_of_all(self, progress: Callable[[str], None]) -> tuple[str | None, int | None]:
        """Returns the tokenizer's fingerprint and EOD; raises ConfigError if the members'
        tokenizers differ.
        """
        known = {
            member.prefix: member.about["tokenizer_fingerprint"]
            for member in self._all
            if "tokenizer_fingerprint" in member.about
        }
        if self._tokenizer:
            former = [
                name
                for name, fingerprint in known.items()
                if fingerprint in self._tokenizer.former_fingerprints
            ]
            known |= dict.fromkeys([*former, "data.tokenizer"], self._tokenizer.fingerprint)
            if former:
                progress(FORMER.format(", ".join(former)))
        if len(set(known.values())) > 1:
            listed = "\n".join(
                f"  - {name}: {fingerprint[:16]}" for name, fingerprint in known.items()
            )
            fix = (
                "prepare all of it with one tokenizer, and set data.tokenizer to that or leave it "
                "empty"
            )
            raise ConfigError(f"the data was encoded with different tokenizers\n{listed}\n{fix}")
        fingerprint = next(iter(known.values()), None)
        if self._tokenizer:
            return fingerprint, self._tokenizer.eod
        eods = {member.about.get("eod") for member in self._all}
        return fingerprint, eods.pop() if len(eods) == 1 else None

    def _bytes(self, members: list[MegatronPrefix], texts: list[TokenStream]) -> int | None:
        """Estimates the bytes of the members' texts from bytes per token, by <prefix>.json or else
        by decoding (`_count`).
        """
        total = 0
        for member, text in zip(members, texts, strict=True):
            about = member.about
            # files of older versions do not know what was lost
            if about.get("bytes") and about.get("tokens") and "lost_bytes" in about:
                total += round(
                    (about["bytes"] - about["lost_bytes"]) * text.n_tokens / about["tokens"]
                )
            elif self._tokenizer:
                key = {
                    "data": member.fingerprint,
                    "documents": [text.first, len(text)],
                    "tokenizer": self._tokenizer.fingerprint,
                }
                key["counted"] = [_COUNTED, _LONGEST]
                counted = self.cache.get(
                    "bytes",
                    key,
                    lambda text=text: {"n": self._count(text)},
                    size=text.n_tokens,
                    slow=10**6,
                )
                total += int(counted["n"])
            else:
                return None
        return total

    def _count(self, text: TokenStream) -> np.ndarray:
        """Counts bytes by decoding: exact up to _COUNTED tokens; longer text is estimated from
        evenly spaced documents.
        """
        tokenizer, total = self._tokenizer, text.n_tokens
        assert tokenizer is not None
        every = max(1, -(-total // _COUNTED))
        n_bytes = n_tokens = 0
        for start, stop in zip(text.offsets[:-1:every], text.offsets[1::every], strict=True):
            stop = min(stop, start + _LONGEST)
            ids = text.verified(start[None], stop[None])[start:stop]
            n_tokens += len(ids)
            ids = (
                ids[(ids != tokenizer.eod) & (ids != tokenizer.unknown)]
                if tokenizer.unknown is not None
                else ids[ids != tokenizer.eod]
            )
            n_bytes += len(tokenizer.decode(ids).encode())
        return np.array(n_bytes * total // n_tokens if n_tokens else 0)


def _no_validation(split: str, most: int) -> str:
    """Returns why a split gives nothing to validation, and one that does; most: documents of the
    largest prefix.
    """
    own = "name held-out text in data.valid_blend"
    fix = f"set data.split={min(most, HELDOUT) - 1},1,0, or {own}" if most > 1 else own
    return (
        f"data.split={split} gives validation none of the documents (the largest prefix has "
        f"{most:,}); in a run with a new output, {fix}"
    )


def stored_sources(config: DataConfig) -> Sources:
    """Returns as `MegatronCorpus.sources`, from the sizes of the files alone, with the held-out
    documents counted too.
    """
    prefixes, weights = parse(config.blend)
    return _sources(
        prefixes,
        [stored_tokens(Path(prefix).expanduser()) for prefix in prefixes],
        normalized(weights) if weights else None,
    )


def stored_vocabulary(config: DataConfig) -> tuple[Tokenizer | None, int | None]:
    """Returns the tokenizer of config.blend and its end-of-document token, as far as they are known
    without opening the data.
    """
    prefixes, _ = parse(config.blend)
    first = Path(prefixes[0]).expanduser()
    tokenizer = _tokenizer(config, str(first))
    if tokenizer:
        return tokenizer, tokenizer.eod
    return None, _about(first).get("eod")


def _sources(prefixes: list[str], tokens: list[int], weights: list[float] | None) -> Sources:
    if weights is None:
        return {f"data.blend={','.join(prefixes)}": (sum(tokens), 1.0)}
    return dict(zip(prefixes, zip(tokens, weights, strict=True), strict=True))


def _tokenizer(config: DataConfig, first: str) -> Tokenizer | None:
    """Returns data.tokenizer, or the one beside the first prefix, or None."""
    if config.tokenizer:
        return load_tokenizer(config.tokenizer)
    beside = Path(f"{first}.tokenizer")
    return load_tokenizer(str(beside)) if beside.exists() else None


def _prefix(prefix: str) -> MegatronPrefix:
    documents = Documents(Path(prefix).expanduser())
    return MegatronPrefix(documents, documents.fingerprint(), _about(documents.prefix))


def _about(prefix: str | Path) -> dict[str, Any]:
    """Returns the contents of <prefix>.json; empty without it. Raises ConfigError if it cannot be
    read.
    """
    try:
        return strict_json.read(Path(f"{prefix}.json"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{prefix}.json cannot be read ({error}); prepare the data again, or remove it"
        ) from error


class BlendedOrder:
    """The training order of Megatron prefixes and the plan that it follows; n_samples: expected
    last position.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: MegatronCorpus,
        saved: dict[str, Any] | None,
        n_samples: int,
    ) -> None:
        self._config, self._corpus = config, corpus
        self._texts = corpus.train(config.model.vocab_size)
        packed, extra = (
            self._packed() if config.data.documents == "packed" else None,
            config.data.add_extra_token,
        )
        seq_len, tokens = config.model.seq_len, [text.n_tokens for text in self._texts]
        epoch_sizes = (
            [len(order) for order in packed]
            if packed
            else [samples_in(n, seq_len, extra) for n in tokens]
        )
        self.plan = make_plan(
            [(member.prefix, member.fingerprint) for member in corpus.members],
            corpus.weights,
            n_samples=n_samples,
            epoch_sizes=epoch_sizes,
            order_size=lambda i, n: (
                n
                if packed
                else samples_in(
                    EpochCount.of(n, tokens[i], seq_len, extra).n * tokens[i], seq_len, extra
                )
            ),
            saved=saved["blend"] if saved else None,
            position=saved["position"] if saved else 0,
        )
        orders = packed or [self._appended(i) for i in range(len(tokens))]
        weights = list(self.plan.weights or normalized(epoch_sizes))
        consumed = [member.consumed for member in self.plan.members]
        size = max(1, n_samples - self.plan.start)
        ahead = (config.data.prefetch + 2) * config.train.global_batch
        self.seq_len = seq_len
        self._order = Blend(
            orders,
            weights,
            size,
            ahead=ahead,
            consumed=consumed,
            start=self.plan.start,
            cache=corpus.cache,
        )

    def __len__(self) -> int:
        """Returns the number of sequences in one epoch."""
        return len(self._order)

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Implements `SampleOrder.read`."""
        return self._order.read(indices)

    def consumed(self, position: int) -> list[int]:
        """Returns the samples drawn from each member before the position."""
        return self._order.consumed(position)

    def _packed(self) -> list[PackedSequences]:
        config, corpus = self._config, self._corpus
        if corpus.eod is None:
            raise ConfigError(
                "data.documents=packed: the end-of-document token of this data is not known; set "
                "data.tokenizer"
            )
        return [
            PackedSequences(
                text,
                config.model.seq_len,
                eod=corpus.eod,
                seed=config.seed,
                cache=corpus.cache,
                fingerprint=member.fingerprint,
            )
            for member, text in zip(corpus.members, self._texts, strict=True)
        ]

    def _appended(self, i: int) -> ConcatOrder:
        """Returns a member's orders in sequence; order k has seed + k."""
        progress, text, member = self.plan.members[i], self._texts[i], self._corpus.members[i]
        return ConcatOrder(
            [
                GPTDataset(
                    text, self._config.model.seq_len, n_samples=n, seed=self._config.seed + k,
                    cache=self._corpus.cache, fingerprint=member.fingerprint,
                    extra_token=self._config.data.add_extra_token,
                    eod=self._corpus.eod,
                )
                for k, n in enumerate(progress.orders)
            ]
        )  # fmt: skip
