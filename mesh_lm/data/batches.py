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
    "data.path", "data.text_field", "data.tokenizer", "data.tokenizer_vocab", "data.blend",
    "data.split", "data.valid_blend",
    "data.add_extra_token", "data.documents", "model.seq_len", "seed",
)  # fmt: skip
"""Fields that may give the data and its order another name."""


class Batches:
    """Reads the batches of a config from a corpus; `sharding` is that of a [M, B, S] leaf (M
    microbatches of B sequences).

    Attributes:
      name: identifies the sample order: the corpus, sequence length, split and seed. Positions are
      only valid within one name. position: global samples consumed when training starts. changed:
      messages about how the data differs from the saved state. has_heldout: whether anything is
      held out, so that the run evaluates.
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
          saved: the `state` of a checkpoint, from which training continues. done: the checkpoint's
          step. saved_config: the config of the checkpoint, to name what has changed if the data is
          not its own.

        Raises:
          ConfigError: the corpus is too small for one batch, lacks what the config needs, or is not
          the data that `saved` belongs to.
        """
        self._config = config
        data, train = config.data, config.train
        kind = "packed sequences" if data.documents == "packed" else "sequences"
        self.name = f"{corpus.name} in {kind} of {config.model.seq_len}, seed {config.seed}"
        self.position: int = saved["position"] if saved else 0
        self._samples = int(saved.get("samples") or "0", 16) if saved else 0
        self._loader: Loader | None = None
        if saved and saved["corpus"] != self.name:
            other = (
                f"{config.output} was trained on corpus {saved['corpus']}, this config reads "
                f"{self.name}"
            )
            if changes := _changes(saved_config or {}, config):
                back = "it" if len(changes) == 1 else "them"
                raise ConfigError(
                    f"{other}: {', '.join(changes)}; set {back} back, or use a new output directory"
                )
            raise ConfigError(f"{other}; use a new output directory, or restore the original data")
        before = saved.get("tokenizer") if saved else None
        self._tokenizer = corpus.fingerprint or before
        self._former = False
        if before and self._tokenizer and before != self._tokenizer:
            used = corpus.tokenizer()
            self._former = used is not None and before in used.former_fingerprints
            if not self._former:
                raise ConfigError(
                    f"{config.output} was trained with another tokenizer than this data's "
                    f"(fingerprint {before[:12]}, not {self._tokenizer[:12]}): the ids have other "
                    "meanings; use a new output directory, or data of that tokenizer"
                )
        last = self.position + max(0, train.steps - done) * train.global_batch
        self._corpus, self._order, eod = (
            corpus,
            corpus.training_order(config, saved, last),
            corpus.eod,
        )
        fill = None
        if data.fim_rate:
            fill = FillInMiddle(
                corpus.tokenizer(), rate=data.fim_rate, spm_rate=data.fim_spm_rate, seed=config.seed
            )
        self._train = RowReader(
            self._order,
            eod=eod,
            documents=data.documents,
            mask_document_start=data.mask_document_start,
            fill_in_middle=fill,
        )
        self._train.require(train.global_batch)
        # Every held-out byte must count, so this split is never masked, rearranged or reordered.
        documents = "separate" if data.documents == "packed" else data.documents
        self._heldout = (
            RowReader(corpus.heldout_order(config), eod=eod, documents=documents)
            if corpus.heldout_tokens
            else None
        )
        self._batching = {
            "global_batch": train.global_batch, "microbatches": train.microbatches,
            "sharding": sharding,
            "token_order": token_order(config.rules, sharding.mesh.shape, config.model.seq_len),
            "threads": data.threads, "prefetch": data.prefetch,
        }  # fmt: skip

    @property
    def has_heldout(self) -> bool:
        """Whether anything is held out."""
        return self._heldout is not None

    @property
    def changed(self) -> list[str]:
        """Messages about how the data differs from the saved state."""
        former = [FORMER.format(f"the checkpoint in {self._config.output}")] if self._former else []
        return [*former, *self._corpus.changed(self._order)]

    def state(self, position: int) -> dict[str, Any]:
        """Returns the state of the data after `position` global samples, as JSON for a checkpoint.
        All processes must call it.

        Its `samples` is the certificate of all samples read so far (see `Loader`), 16 hex digits,
        the same on any mesh.
        """
        state: dict[str, Any] = {
            "position": position,
            "corpus": self.name,
            "tokenizer": self._tokenizer,
        }
        read = sum(distributed.gather_from_all(self._loader.certificate)) if self._loader else 0
        state["samples"] = f"{(self._samples + read) % MODULUS:016x}"
        return state | self._corpus.state(self._order, position)

    def train(self) -> Loader:
        """Returns an endless iterator of (position after the batch, batch), starting at
        `position`.
        """
        self._loader = Loader(self._train, position=self.position, **self._batching)
        return self._loader

    def heldout(self) -> Iterator[Batch]:
        """Returns one pass over the held-out sequences, or over a fixed subset of
        `train.eval_sequences`; empty if none are held out.
        """
        if self._heldout is None:
            return iter(())
        return heldout(self._heldout, limit=self._config.train.eval_sequences, **self._batching)


def _changes(before: Mapping[str, Any], config: TrainConfig) -> list[str]:
    """Returns which fields that name the data have another value than in the config `before`, as
    "data.tokenizer was bytes, now a.json".
    """
    now, changes = as_dict(config), []
    for field in _NAMING:
        section, name = field.split(".") if "." in field else ("", field)
        then, value = (
            each.get(section, {}).get(name) if section else each.get(name) for each in (before, now)
        )
        if then is not None and then != value:
            changes.append(f"{field} was {_shown(then)}, now {_shown(value)}")
    return changes


def _shown(value: Any) -> str:
    return (",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)) or "empty"
