"""The batches of one run, training and held-out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.sharding import NamedSharding

from mesh_lm import distributed
from mesh_lm.config import TrainConfig
from mesh_lm.data.blend import Blend, normalized
from mesh_lm.data.blend_plan import make_plan
from mesh_lm.data.corpus import TextCorpus
from mesh_lm.data.fim import FillInMiddle
from mesh_lm.data.gpt_dataset import EpochCount, GPTDataset, samples_in
from mesh_lm.data.index_cache import IndexCache
from mesh_lm.data.indexed import TokenStream
from mesh_lm.data.loader import MODULUS, Batch, Loader, heldout
from mesh_lm.data.megatron_corpus import MegatronCorpus
from mesh_lm.data.packing import PackedSequences
from mesh_lm.data.rows import ConcatOrder, RowReader, SampleOrder
from mesh_lm.data.sequences import Sequences
from mesh_lm.errors import ConfigError


class Batches:
    """Reads the batches of a config from a corpus; `sharding` is that of a [M, B, S] leaf (M microbatches of B sequences).

    Attributes:
      name: identifies the sample order: the corpus, sequence length, split and seed. Positions are only valid within one name.
      position: global samples consumed when training starts.
      changed: messages about how the data differs from the saved state.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: TextCorpus | MegatronCorpus,
        sharding: NamedSharding,
        saved: dict[str, Any] | None = None,
        done: int = 0,
    ) -> None:
        """Prepares both orders without reading samples.

        Args:
          saved: the `state` of a checkpoint, from which training continues.
          done: the checkpoint's step.

        Raises:
          ConfigError: the corpus is too small for one batch, lacks what the config needs, or is not the data that `saved` belongs to.
        """
        self._config = config
        data, train = config.data, config.train
        kind = "packed sequences" if data.documents == "packed" else "sequences"
        self.name = f"{corpus.name} in {kind} of {config.model.seq_len}, seed {config.seed}"
        self.position: int = saved["position"] if saved else 0
        self._samples = int(saved.get("samples") or "0", 16) if saved else 0
        self._loader: Loader | None = None
        if saved and saved["corpus"] != self.name:
            raise ConfigError(
                f"{config.output} was trained on corpus {saved['corpus']}, this config reads {self.name}; use a new output directory, "
                "or restore the original data"
            )
        tokenizer_fingerprint = corpus.fingerprint if isinstance(corpus, MegatronCorpus) else corpus.tokenizer().fingerprint
        before = saved.get("tokenizer") if saved else None
        self._tokenizer = tokenizer_fingerprint or before
        if before and self._tokenizer and before != self._tokenizer:
            raise ConfigError(
                f"{config.output} was trained with another tokenizer than this data's (fingerprint {before[:12]}, not "
                f"{self._tokenizer[:12]}): the ids have other meanings; use a new output directory, or data of that tokenizer"
            )
        self._blended = None
        if isinstance(corpus, MegatronCorpus):
            eod, held = corpus.eod, corpus.heldout(config.model.vocab_size)
            left = max(0, train.steps - done) * train.global_batch
            self._blended = BlendedOrder(config, corpus, saved, self.position + left)
            order: SampleOrder = self._blended.order
        else:
            eod, held = corpus.tokenizer().eod, [TokenStream(corpus.heldout(), vocab=config.model.vocab_size)]
            order = _text_order(config, corpus, eod)
        fill = None
        if data.fim_rate:
            fill = FillInMiddle(corpus.tokenizer(), rate=data.fim_rate, spm_rate=data.fim_spm_rate, seed=config.seed)
        self._train = RowReader(order, eod=eod, documents=data.documents, mask_document_start=data.mask_document_start, fill_in_middle=fill)
        self._train.require(train.global_batch)
        # Every held-out byte must count, so this split is never masked, rearranged or reordered.
        orders = [Sequences(text, config.model.seq_len, eod=eod, seed=None, pad=True) for text in held if len(text.tokens)]
        self._heldout = RowReader(ConcatOrder(orders), eod=eod, documents="joined" if data.documents == "joined" else "separate")
        self._batching = {
            "global_batch": train.global_batch, "microbatches": train.microbatches, "sharding": sharding,
            "threads": data.threads, "prefetch": data.prefetch,
        }  # fmt: skip

    @property
    def changed(self) -> list[str]:
        """Messages about how the data differs from the saved state."""
        return list(self._blended.plan.changed) if self._blended else []

    def state(self, position: int) -> dict[str, Any]:
        """Returns the state of the data after `position` global samples, as JSON for a checkpoint. All processes must call it.

        Its `samples` is the certificate of all samples read so far (see `Loader`), 16 hex digits, the same on any mesh.
        """
        state: dict[str, Any] = {"position": position, "corpus": self.name, "tokenizer": self._tokenizer}
        read = sum(distributed.from_all(self._loader.certificate)) if self._loader else 0
        state["samples"] = f"{(self._samples + read) % MODULUS:016x}"
        if self._blended:
            state["blend"] = self._blended.plan.state(self._blended.order.consumed(position))
        return state

    def train(self) -> Loader:
        """Returns an endless iterator of (position after the batch, batch), starting at `position`."""
        self._loader = Loader(self._train, position=self.position, **self._batching)
        return self._loader

    def heldout(self) -> Iterator[Batch]:
        """Yields one pass over the held-out sequences, or over a fixed subset of `train.eval_sequences`."""
        return heldout(self._heldout, limit=self._config.train.eval_sequences, **self._batching)


def _text_order(config: TrainConfig, corpus: TextCorpus, eod: int) -> SampleOrder:
    text = TokenStream(corpus.train(), vocab=config.model.vocab_size)
    if config.data.documents != "packed":
        return Sequences(text, config.model.seq_len, eod=eod, seed=config.seed)
    cache = IndexCache(config.data.cache, distributed.say)
    return PackedSequences(text, config.model.seq_len, eod=eod, seed=config.seed, cache=cache, fingerprint=corpus.train().fingerprint())


class BlendedOrder:
    """The training order of Megatron prefixes and the plan that it follows; n_samples: expected last position."""

    def __init__(self, config: TrainConfig, corpus: MegatronCorpus, saved: dict[str, Any] | None, n_samples: int) -> None:
        self._config, self._corpus = config, corpus
        self._texts = corpus.train(config.model.vocab_size)
        packed = self._packed() if config.data.documents == "packed" else None
        seq_len, tokens = config.model.seq_len, [len(text.tokens) for text in self._texts]
        epoch_sizes = [len(order) for order in packed] if packed else [samples_in(n, seq_len) for n in tokens]
        self.plan = make_plan(
            [(member.prefix, member.fingerprint) for member in corpus.members],
            corpus.weights,
            n_samples=n_samples,
            epoch_sizes=epoch_sizes,
            order_size=lambda i, n: n if packed else samples_in(EpochCount.of(n, tokens[i], seq_len).n * tokens[i], seq_len),
            saved=saved["blend"] if saved else None,
            position=saved["position"] if saved else 0,
        )
        orders = packed or [self._appended(i) for i in range(len(tokens))]
        weights = list(self.plan.weights or normalized(epoch_sizes))
        consumed = [member.consumed for member in self.plan.members]
        size = max(1, n_samples - self.plan.start)
        ahead = (config.data.prefetch + 2) * config.train.global_batch
        self.order = Blend(orders, weights, size, ahead=ahead, consumed=consumed, start=self.plan.start, cache=corpus.cache)

    def _packed(self) -> list[PackedSequences]:
        config, corpus = self._config, self._corpus
        if corpus.eod is None:
            raise ConfigError("data.documents=packed: the end-of-document token of this data is not known; set data.tokenizer")
        return [
            PackedSequences(
                text, config.model.seq_len, eod=corpus.eod, seed=config.seed, cache=corpus.cache, fingerprint=member.fingerprint
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
                )
                for k, n in enumerate(progress.orders)
            ]
        )  # fmt: skip
