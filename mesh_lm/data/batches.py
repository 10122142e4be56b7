"""The batches of one run, training and held-out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import NamedSharding

from mesh_lm import distributed
from mesh_lm.config import TrainConfig, as_dict
from mesh_lm.data.dataset import Dataset
from mesh_lm.data.fim import FillInMiddle
from mesh_lm.data.loader import MODULUS, Batch, Loader, heldout
from mesh_lm.data.rows import RowReader
from mesh_lm.data.tokenizer import FORMER
from mesh_lm.errors import ConfigError
from sharding_rules import token_order

_NAMING = (
    "data.path",
    "data.text_field",
    "data.tokenizer",
    "data.tokenizer_vocab",
    "data.blend",
    "data.split",
    "data.valid_blend",
    "data.megatron",
    "data.documents",
    "model.seq_len",
    "seed",
)
"""Fields that may give the data and its order another name."""


class Batches:
    """Reads the batches of a config from a corpus.

    Attributes:
      name: identifies the sample order: the corpus, sequence length, split and seed. Positions are
        only valid within one name.
      position: global samples consumed when training starts.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Dataset,
        sharding: NamedSharding,
        saved: dict[str, Any] | None = None,
        done: int = 0,
        saved_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepares both orders without reading samples.

        Args:
          sharding: that of a [M, B, S] leaf (M microbatches of B sequences).
          saved: the `state` of a checkpoint, from which training continues.
          done: the checkpoint's step.
          saved_config: the config of the checkpoint, to name what has changed if the data is not
            its own.

        Raises:
          ConfigError: the corpus is too small for one batch, lacks what the config needs, or is not
            the data that `saved` belongs to.
        """
        data = config.data
        train = config.train
        self._config = config
        self._corpus = corpus
        self._loader: Loader | None = None
        kind = "packed sequences" if data.documents == "packed" else "sequences"
        self.name = f"{corpus.name} in {kind} of {config.model.seq_len}, seed {config.seed}"
        self.position: int = 0
        self._samples = 0
        self._tokenizer = corpus.fingerprint
        self._has_former_tokenizer = False
        if saved:
            self._restore(saved, saved_config or {})

        last = self.position + max(0, train.steps - done) * train.global_batch
        self._order = corpus.training_order(config, saved, last)
        eod = corpus.eod  # read once, because a text corpus loads its tokenizer for it
        fill_in_middle = None
        if data.fim_rate:
            fill_in_middle = FillInMiddle(
                corpus.tokenizer(), rate=data.fim_rate, spm_rate=data.fim_spm_rate, seed=config.seed
            )
        self._train = RowReader(
            self._order,
            eod=eod,
            documents=data.documents,
            mask_document_start="mask_document_start" in data.megatron,
            fill_in_middle=fill_in_middle,
        )
        self._train.require(train.global_batch)
        self._heldout = None
        if corpus.heldout_tokens:
            # Every held-out byte must count, so this split is never masked, rearranged or
            # reordered.
            documents = "separate" if data.documents == "packed" else data.documents
            order = corpus.heldout_order(config)
            self._heldout = RowReader(order, eod=eod, documents=documents)
        self._batching = {
            "global_batch": train.global_batch,
            "microbatches": train.microbatches,
            "sharding": sharding,
            "token_order": token_order(config.rules, sharding.mesh.shape, config.model.seq_len),
            "threads": data.threads,
            "prefetch": data.prefetch,
        }

    def _restore(self, saved: dict[str, Any], saved_config: Mapping[str, Any]) -> None:
        """Takes the position of a checkpoint. Raises ConfigError if it is one of other data."""
        self.position = saved["position"]
        self._samples = int(saved.get("samples") or "0", 16)
        if saved["corpus"] != self.name:
            difference = (
                f"{self._config.output} was trained on corpus {saved['corpus']}, this config reads "
                f"{self.name}"
            )
            changes = _changes(saved_config, self._config)
            if changes:
                pronoun = "it" if len(changes) == 1 else "them"
                raise ConfigError(
                    f"{difference}: {', '.join(changes)}; set {pronoun} back, or use a new output "
                    "directory"
                )
            raise ConfigError(
                f"{difference}; use a new output directory, or restore the original data"
            )

        fingerprint = saved.get("tokenizer")
        if self._tokenizer and fingerprint and fingerprint != self._tokenizer:
            tokenizer = self._corpus.tokenizer()
            if tokenizer is None or fingerprint not in tokenizer.former_fingerprints:
                raise ConfigError(
                    f"{self._config.output} was trained with another tokenizer than this data's "
                    f"(fingerprint {fingerprint[:12]}, not {self._tokenizer[:12]}): the ids have "
                    "other meanings; use a new output directory, or data of that tokenizer"
                )
            self._has_former_tokenizer = True
        self._tokenizer = self._tokenizer or fingerprint

    @property
    def has_heldout(self) -> bool:
        """Whether anything is held out."""
        return self._heldout is not None

    @property
    def changed(self) -> list[str]:
        """Messages about how the data differs from the saved state."""
        messages = list(self._corpus.changed(self._order))
        if self._has_former_tokenizer:
            messages.insert(0, FORMER.format(f"the checkpoint in {self._config.output}"))
        return messages

    def state(self, position: int) -> dict[str, Any]:
        """Returns the state of the data after `position` global samples, as JSON for a checkpoint.

        All processes must call it. Its `samples` is the certificate of all samples read so far (see
        `Loader`), 16 hex digits, the same on any mesh.
        """
        samples = self._samples
        if self._loader:
            samples += sum(distributed.gather_from_all(self._loader.certificate))
        return {
            "position": position,
            "corpus": self.name,
            "tokenizer": self._tokenizer,
            "samples": f"{samples % MODULUS:016x}",
            **self._corpus.state(self._order, position),
        }

    def train(self) -> Loader:
        """Returns an endless iterator of (position after the batch, batch), starting at
        `position`.
        """
        self._loader = Loader(self._train, position=self.position, **self._batching)
        return self._loader

    def heldout(self) -> Iterator[Batch]:
        """Returns one pass over the held-out sequences, or over a fixed subset of
        `train.eval_sequences`.

        It is empty if none are held out.
        """
        if self._heldout is None:
            return iter(())
        return heldout(self._heldout, limit=self._config.train.eval_sequences, **self._batching)


def _changes(saved: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Returns the fields that name the data and have another value than in the saved config, as
    "data.tokenizer was bytes, now a.json".
    """
    present = as_dict(config)
    changes = []
    for field in _NAMING:
        old = _value(saved, field)
        new = _value(present, field)
        if old is not None and old != new:
            changes.append(f"{field} was {_shown(old)}, now {_shown(new)}")
    return changes


def _value(config: Mapping[str, Any], field: str) -> Any:
    section, _, name = field.rpartition(".")
    return (config.get(section, {}) if section else config).get(name)


def _shown(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text or "empty"
