"""The interface between the trainer and a model: `train.py` trains any module with these methods
and a layer for each of its segments.

A model is embed -> segments -> loss. The trainer runs the layers of each segment
(`mesh_lm.parallel.stack`), on one device or in pipeline stages, and adds up the sums that they and
the loss return. So a model has no scan of its own, and none of its sums is lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp

from mesh_lm.errors import ConfigError
from mesh_lm.model.dropout import Dropout
from sharding_rules import Shard

Batch = Mapping[str, jax.Array]
"""tokens, labels int32 [B, S]; weights float32 [B, S], the share of each label in the loss;
sample_ids uint32 [B]; indices int32 [1, S], the number of each token in its sequence; and, when
documents are kept separate, segment_ids and positions int32 [B, S], which count from the start of
each document. `positions_of` gives the positions either way."""

Sums = dict[str, jax.Array]
"""float32 sums over the labels of the batch. "objective" is differentiated; "loss" is the
cross-entropy in nats and "weight" the sum of weights. The trainer divides all sums by the weight of
the global batch, so that unequal label counts per shard and microbatch are exact. Other scalars are
reported as metrics, divided the same way. A layer may also return arrays, such as the loads of
experts [E]. They are kept for each layer, as "moe/load" [L, E], by
`mesh_lm.parallel.engine.value_and_grad`; the step reports scalars only.

A layer that adds to "objective" has an auxiliary loss. A sum over tokens or sequences is the same
on every mesh and for any number of microbatches. A function of several sequences, such as a product
of means, depends on how the batch is divided into microbatches."""


def positions_of(batch: Batch) -> jax.Array:
    """Returns the position of each token: int32 [B, S], or [1, S] if all sequences have the same
    positions.
    """
    return batch["positions"] if "positions" in batch else batch["indices"]


def token_batch(tokens_BS: jax.Array) -> Batch:
    """Returns a batch for reading texts that begin in slot 0: the tokens, int32 [B, S], and their
    indices.
    """
    return {"tokens": tokens_BS, "indices": jnp.arange(tokens_BS.shape[1], dtype=jnp.int32)[None]}


@dataclasses.dataclass(frozen=True)
class Context:
    """The arguments of a layer besides its input."""

    batch: Batch
    dropout: Dropout | None = None
    """None in evaluation, and for models without dropout."""
    shared: Any = None
    """The result of the model's `prepare`, the same for all layers."""
    number: int | jax.Array = 0
    """The number of the layer in the whole model, from which its dropout keys derive."""
    place: int = 0
    """The number of the layer in the period of its segment."""
    cache: Any = None
    """In generation, the cache of earlier tokens. The layer returns it with the current tokens
    added."""
    start: int | jax.Array = 0
    """The slot of the cache for the first of the current tokens."""
    tokens: tuple[str, str] = ("batch", "seq")
    """The logical axes of the first two dimensions of the layer's input and output: see
    `Layer.sequence_first`."""

    @property
    def residual(self) -> tuple[str, str, str]:
        """The logical axes of the layer's input and output, as the residual stream is sharded."""
        if self.tokens == ("seq", "batch"):
            return "seq_resid", "batch", "embed"
        return "batch", "seq_resid", "embed"


class Layer(Protocol):
    """A module for one layer of a segment. It is built once, with parameters whose leading
    dimension is the segment's layers.

    A class with `sequence_first = True` of its own, not inherited, gets and returns [S, B, D], with
    `ctx.tokens == ("seq", "batch")`, where the rules shard the sequence of the residual stream. XLA
    gathers along the major dimension only, and would transpose [B, S, D] around each gather.
    """

    def __call__(self, x: jax.Array, ctx: Context, /) -> tuple[jax.Array, Any, Sums]:
        """Returns (output, cache, sums). x and the output are [B, S, D], sharded like the residual
        stream, of one dtype.
        """
        ...


class Model(Protocol):
    """A Flax NNX module whose every `nnx.Param` names its dimensions: `nnx.Param(value,
    out_sharding=("embed", "mlp"))`.

    A matrix that is cast before it is used declares that type: `nnx.Param(...,
    compute_dtype="bfloat16")`. With a distributed optimizer the layers then get it in that type,
    and the fp32 master is sharded over the replicas.

    Its config's `stack` names its segments. For each of them the module has a `Layer` in the
    attribute of that name. All other parameters are replicated on every pipeline stage, and any
    layer may use them through `prepare`.
    """

    shard: Shard

    def prepare(self, batch: Batch, /) -> Any:
        """Values that all layers share, computed once per pass, such as rotary angles: a tree of
        arrays, or None.
        """
        ...

    def embed(self, batch: Batch, dropout: Dropout | None, /) -> jax.Array:
        """The input of the first layer, [B, S, D], sharded like the residual stream."""
        ...

    def loss(self, x: jax.Array, batch: Batch, dropout: Dropout | None, /) -> Sums:
        """The sums, from the output of the last layer. Heads that predict more than the next token
        belong here, too.
        """
        ...


_PAGE = "docs/custom_model.md"
_MEMBERS = ("shard", "prepare", "embed", "loss")
_SUMS = ("objective", "loss", "weight")


def require_model(module: Any) -> None:
    """Raises ConfigError unless a module has the members of `Model`."""
    missing = [name for name in _MEMBERS if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"{type(module).__name__} has no {', '.join(missing)}; "
            f"a model needs the members {', '.join(_MEMBERS)} ({_PAGE})"
        )


def require_sums(model: Any, sums: Any) -> None:
    """Raises ConfigError unless these are sums that a model's loss may return: scalars, and those
    that the trainer reads among them.
    """
    loss = f"{type(model).__name__}.loss"
    if not isinstance(sums, Mapping):
        raise ConfigError(
            f"{loss} returns {_described(sums)}, but must return a dict of sums ({_PAGE})"
        )
    missing = [name for name in _SUMS if name not in sums]
    if missing:
        raise ConfigError(
            f"{loss} returns no {', '.join(missing)}; its sums are {', '.join(_SUMS)}"
            f", and metrics of your own ({_PAGE})"
        )
    for name, value in cast("Sums", sums).items():
        if jnp.ndim(value):
            raise ConfigError(
                f"{loss} returns {name!r} {jnp.shape(value)}; each sum of a loss is a scalar"
            )


def layer_output(layer: Any, x: jax.Array, output: Any) -> tuple[jax.Array, Any, Sums]:
    """Returns the output of a layer. Raises ConfigError unless it is (activations, cache, sums),
    the activations like the input `x`.
    """
    name = type(layer).__name__
    if not (isinstance(output, tuple) and len(output) == 3):
        raise ConfigError(
            f"{name} returns {_described(output)}; a layer returns (x, cache, sums) ({_PAGE})"
        )
    y = output[0]
    if (jnp.shape(y), jnp.result_type(y)) != (x.shape, x.dtype):
        raise ConfigError(
            f"{name} returns x as {_described(y)}, and got it as {_described(x)}"
            f": a layer keeps the shape and the type ({_PAGE})"
        )
    return output


def _described(value: Any) -> str:
    """Returns an array as float32[8, 64, 128], and of anything else the type."""
    if isinstance(value, jax.Array):
        return f"{value.dtype}{[*value.shape]}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


class Generative(Protocol):
    """Optional methods for generation with a cache (`mesh_lm.inference`).

    The texts of a batch end in the same slot: `segment_ids` are 0 for the padding before them,
    which no other token may see, and 1 for the text; `positions` count from its first token. A
    model without these methods can offer `logits(batch)`, float32 [B, S, V], instead.
    """

    def empty_cache(self, rows: int, length: int) -> Any:
        """A cache for `rows` texts of at most `length` tokens, padding included: a tree of
        arrays.
        """
        ...

    def extend(self, batch: Batch, cache: Any, start: int | jax.Array) -> tuple[jax.Array, Any]:
        """Returns the logits after the last token, float32 [B, V], and the new cache, with the
        shapes of the old one.

        batch: tokens, positions and segment_ids, int32 [B, S], for the slots from `start` on.
        start: 0 as an int if the cache is empty.
        """
        ...
