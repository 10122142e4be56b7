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
from mesh_lm.data.blend_plan import BlendPlan, make_plan
from mesh_lm.data.dataset import Dataset, stored_order
from mesh_lm.data.epochs import Sources
from mesh_lm.data.gpt_dataset import SPLITS, EpochCount, GPTDataset, samples_in, split_ranges
from mesh_lm.data.index_cache import Arrays, IndexCache
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
_SLOW = 10**6
"""Tokens from which on a message says that they are counted."""


@dataclasses.dataclass(frozen=True)
class MegatronPrefix:
    """One prefix of a blend."""

    documents: Documents
    fingerprint: str
    description: dict[str, Any]
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
      members: the prefixes in the config's order.
      weights: of the members, normalized; None if the config gives none.
      fingerprint: of the tokenizer that encoded the data, if known.
      eod: id of the end-of-document token: from the tokenizer, else from <prefix>.json if all of
        them agree, else None.
      train_bytes, heldout_bytes: UTF-8 bytes of the text that its tokens spell; None without a
        tokenizer and <prefix>.json.
      loss_of_bytes: how much of the text its tokenizer lost, by <prefix>.json.
      why_no_heldout: why the split gives no document to validation, and one that does.
    """

    def __init__(
        self, config: DataConfig, progress: Callable[[str], None] = lambda message: None
    ) -> None:
        """Raises ConfigError for an invalid blend, split or prefix, and for prefixes encoded with
        different tokenizers.
        """
        prefixes, weights = parse(config.blend)
        self.weights = normalized(weights) if weights else None
        self.members = [_prefix(prefix) for prefix in prefixes]
        if config.valid_blend:
            # As in Megatron, whose blends per split are of complete prefixes. Evaluation reads each
            # token once, so weights do not matter.
            heldout_prefixes, _ = parse(config.valid_blend, "data.valid_blend")
            self._heldout_members = [_prefix(prefix) for prefix in heldout_prefixes]
            self._all_members = [*self.members, *self._heldout_members]
            self._split = None
            self.name = "Megatron prefixes, all documents"
        else:
            self._heldout_members = self.members
            self._all_members = self.members
            self._split = config.split
            self.name = f"Megatron prefixes, split {config.split}"
        if "no_extra_token" in config.megatron:
            self.name += ", no extra token"

        for member in self._all_members:
            if "bytes" not in member.description and Path(f"{member.prefix}.tokenizer").exists():
                progress(
                    f"warning: {member.prefix}.json is not there, or not what `prepare` wrote with "
                    "the tokenizer: the bytes are estimated"
                )
        self._tokenizer = _tokenizer(config, self.members[0].prefix)
        self.fingerprint = self._common_fingerprint(progress)
        self.eod = self._common_eod()
        self.cache = IndexCache(config.cache, progress)
        unsealed = [m.prefix for m in self._all_members if not m.documents.is_sealed]
        if unsealed:
            progress(NOT_SEALED.format(prefix=" ".join(unsealed)))

        train = self.train()
        heldout = self.heldout()
        self._member_tokens = [text.n_tokens for text in train]
        self.train_tokens = sum(self._member_tokens)
        self.heldout_tokens = sum(text.n_tokens for text in heldout)
        if self.heldout_tokens:
            self.heldout_bytes = self._bytes(self._heldout_members, heldout)
        if config.valid_blend or not self.heldout_tokens:
            self.train_bytes = self._bytes(self.members, train)
        elif self.heldout_bytes is not None:
            # The held-out text is of the same kind, and much shorter to count.
            estimate = self.heldout_bytes * self.train_tokens / self.heldout_tokens
            self.train_bytes = round(estimate)

        lost = sum(member.description.get("lost_bytes") or 0 for member in self._all_members)
        n_bytes = sum(member.description.get("bytes") or 0 for member in self._all_members)
        self.loss_of_bytes = described(lost, n_bytes)
        if not self.heldout_tokens and not config.valid_blend:
            most = max(len(member.documents.sequences) - 1 for member in self.members)
            self.why_no_heldout = _no_validation(config.split, most)

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
        return [self._text(member, "valid", vocab) for member in self._heldout_members]

    def sources(self) -> Sources:
        """Returns each prefix of a weighted blend; without weights they are one text."""
        prefixes = [member.prefix for member in self.members]
        return _sources(prefixes, self._member_tokens, self.weights)

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
        if self._split is None:
            return TokenStream(member.documents, vocab=vocab)
        splits = split_ranges(self._split, len(member.documents.sequences) - 1)
        numbers = splits[SPLITS.index(split)]
        return TokenStream(member.documents, numbers.start, numbers.stop, vocab=vocab)

    def _common_fingerprint(self, progress: Callable[[str], None]) -> str | None:
        """Returns the fingerprint of the members' tokenizer, if it is known.

        Raises ConfigError if their tokenizers differ.
        """
        fingerprints: dict[str, str] = {}
        for member in self._all_members:
            if "tokenizer_fingerprint" in member.description:
                fingerprints[member.prefix] = member.description["tokenizer_fingerprint"]
        if self._tokenizer:
            former = []
            for prefix, fingerprint in fingerprints.items():
                if fingerprint in self._tokenizer.former_fingerprints:
                    former.append(prefix)
            for name in (*former, "data.tokenizer"):
                fingerprints[name] = self._tokenizer.fingerprint
            if former:
                progress(FORMER.format(", ".join(former)))
        if len(set(fingerprints.values())) > 1:
            listed = "\n".join(f"  - {name}: {f[:16]}" for name, f in fingerprints.items())
            raise ConfigError(
                f"the data was encoded with different tokenizers\n{listed}\nprepare all of it with "
                "one tokenizer, and set data.tokenizer to that or leave it empty"
            )
        return next(iter(fingerprints.values()), None)

    def _common_eod(self) -> int | None:
        if self._tokenizer:
            return self._tokenizer.eod
        eods = {member.description.get("eod") for member in self._all_members}
        return eods.pop() if len(eods) == 1 else None

    def _bytes(self, members: list[MegatronPrefix], texts: list[TokenStream]) -> int | None:
        """Estimates the bytes of the members' texts; None if those of one are not known."""
        total = 0
        for member, text in zip(members, texts, strict=True):
            n_bytes = self._member_bytes(member, text)
            if n_bytes is None:
                return None
            total += n_bytes
        return total

    def _member_bytes(self, member: MegatronPrefix, text: TokenStream) -> int | None:
        """Estimates the bytes of a text from bytes per token, by <prefix>.json or else by
        decoding.
        """
        description = member.description
        # Files of older versions do not know what was lost.
        if description.get("bytes") and description.get("tokens") and "lost_bytes" in description:
            spelled = description["bytes"] - description["lost_bytes"]
            return round(spelled * text.n_tokens / description["tokens"])
        if not self._tokenizer:
            return None
        key = {
            "data": member.fingerprint,
            "documents": [text.first, len(text)],
            "tokenizer": self._tokenizer.fingerprint,
            "counted": [_COUNTED, _LONGEST],
        }

        def count() -> Arrays:
            return {"n": self._count(text)}

        return int(self.cache.get("bytes", key, count, size=text.n_tokens, slow=_SLOW)["n"])

    def _count(self, text: TokenStream) -> np.ndarray:
        """Counts bytes by decoding: exact up to _COUNTED tokens; longer text is estimated from
        evenly spaced documents.
        """
        tokenizer = self._tokenizer
        assert tokenizer is not None
        textless = [tokenizer.eod]
        if tokenizer.unknown is not None:
            textless.append(tokenizer.unknown)

        every = max(1, -(-text.n_tokens // _COUNTED))
        n_bytes = n_tokens = 0
        for start, stop in zip(text.offsets[:-1:every], text.offsets[1::every], strict=True):
            stop = min(stop, start + _LONGEST)
            ids = text.verified(start[None], stop[None])[start:stop]
            n_tokens += len(ids)
            ids = ids[~np.isin(ids, textless)]
            n_bytes += len(tokenizer.decode(ids).encode())
        return np.array(n_bytes * text.n_tokens // n_tokens if n_tokens else 0)


def _no_validation(split: str, most: int) -> str:
    """Returns why a split gives nothing to validation, and one that does.

    most: documents of the largest prefix.
    """
    advice = "name held-out text in data.valid_blend"
    if most > 1:
        advice = f"set data.split={min(most, HELDOUT) - 1},1,0, or {advice}"
    return (
        f"data.split={split} gives validation none of the documents (the largest prefix has "
        f"{most:,}); in a run with a new output, {advice}"
    )


def stored_sources(config: DataConfig) -> Sources:
    """Returns `MegatronCorpus.sources` from the sizes of the files alone, with the held-out
    documents counted too.
    """
    prefixes, weights = parse(config.blend)
    tokens = [stored_tokens(Path(prefix).expanduser()) for prefix in prefixes]
    return _sources(prefixes, tokens, normalized(weights) if weights else None)


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
    """The training order of Megatron prefixes, and the plan that it follows.

    Args:
      saved: the data's state in a checkpoint; None: a new run.
      n_samples: the expected last position.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: MegatronCorpus,
        saved: dict[str, Any] | None,
        n_samples: int,
    ) -> None:
        self.seq_len = config.model.seq_len
        texts = corpus.train(config.model.vocab_size)
        extra_token = "no_extra_token" not in config.data.megatron

        def gpt_order_size(member: int, n_requested: int) -> int:
            """Returns the samples of a GPTDataset, which has full epochs."""
            n_tokens = texts[member].n_tokens
            epochs = EpochCount.of(n_requested, n_tokens, self.seq_len, extra_token)
            return samples_in(epochs.n * n_tokens, self.seq_len, extra_token)

        packed = _packed_orders(config, corpus, texts) if config.data.documents == "packed" else []
        if packed:
            epoch_sizes = [len(order) for order in packed]
        else:
            epoch_sizes = [samples_in(text.n_tokens, self.seq_len, extra_token) for text in texts]
        self.plan = make_plan(
            [(member.prefix, member.fingerprint) for member in corpus.members],
            corpus.weights,
            n_samples=n_samples,
            epoch_sizes=epoch_sizes,
            order_size=(lambda member, n_requested: n_requested) if packed else gpt_order_size,
            saved=saved["blend"] if saved else None,
            position=saved["position"] if saved else 0,
        )
        self._order = Blend(
            packed or _gpt_orders(config, corpus, texts, self.plan),
            list(self.plan.weights or normalized(epoch_sizes)),
            max(1, n_samples - self.plan.start),
            ahead=(config.data.prefetch + 2) * config.train.global_batch,
            consumed=[member.consumed for member in self.plan.members],
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


def _packed_orders(
    config: TrainConfig, corpus: MegatronCorpus, texts: list[TokenStream]
) -> list[PackedSequences]:
    if corpus.eod is None:
        raise ConfigError(
            "data.documents=packed: the end-of-document token of this data is not known; set "
            "data.tokenizer"
        )
    orders = []
    for member, text in zip(corpus.members, texts, strict=True):
        order = PackedSequences(
            text,
            config.model.seq_len,
            eod=corpus.eod,
            seed=config.seed,
            cache=corpus.cache,
            fingerprint=member.fingerprint,
        )
        orders.append(order)
    return orders


def _gpt_orders(
    config: TrainConfig, corpus: MegatronCorpus, texts: list[TokenStream], plan: BlendPlan
) -> list[ConcatOrder]:
    """Returns each member's orders in sequence; its order number k has seed + k."""
    orders = []
    for member, text, progress in zip(corpus.members, texts, plan.members, strict=True):
        parts = []
        for k, n_samples in enumerate(progress.orders):
            part = GPTDataset(
                text,
                config.model.seq_len,
                n_samples=n_samples,
                seed=config.seed + k,
                cache=corpus.cache,
                fingerprint=member.fingerprint,
                extra_token="no_extra_token" not in config.data.megatron,
                eod=corpus.eod,
            )
            parts.append(part)
        orders.append(ConcatOrder(parts))
    return orders
