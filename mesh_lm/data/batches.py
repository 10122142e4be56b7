"""The batches of one run, training and held-out."""

from __future__ import annotations

from collections.abc import Iterator

from jax.sharding import NamedSharding

from mesh_lm.config import TrainConfig
from mesh_lm.data.corpus import Corpus
from mesh_lm.data.loader import Batch, Loader, heldout
from mesh_lm.data.sequences import Sequences


class Batches:
    """Cuts a corpus into the batches that a config asks for; `sharding` is that of a [M, B, S] leaf (M microbatches of B sequences)."""

    def __init__(self, config: TrainConfig, corpus: Corpus, sharding: NamedSharding) -> None:
        """Raises ConfigError where the corpus is too small for one batch."""
        self._config = config
        self.name = f"{corpus.name} in sequences of {config.model.seq_len}, seed {config.seed}"
        """What a position in the data is a position in: another corpus, length or seed is another order."""
        data, train, seq_len = config.data, config.train, config.model.seq_len
        documents = {"documents_mode": data.documents, "mask_document_start": data.mask_document_start, "eod": corpus.tokenizer().eod}
        self._train = Sequences(corpus.train(), seq_len, seed=config.seed, shuffle=True, **documents)
        self._train.require(train.global_batch)
        # Every held-out byte must cost its bits, so nothing of that split is masked.
        documents["mask_document_start"] = False
        self._heldout = Sequences(corpus.heldout(), seq_len, seed=0, shuffle=False, pad=True, **documents)
        self._batching = {
            "global_batch": train.global_batch, "microbatches": train.microbatches, "sharding": sharding,
            "threads": data.threads, "prefetch": data.prefetch,
        }  # fmt: skip

    def train(self, position: int) -> Loader:
        """Endless (position after the batch, batch) from a global sample position on."""
        return Loader(self._train, position=position, **self._batching)

    def heldout(self) -> Iterator[Batch]:
        """One pass over the held-out sequences, or over the config's `train.eval_sequences` of them, always the same."""
        return heldout(self._heldout, limit=self._config.train.eval_sequences, **self._batching)
