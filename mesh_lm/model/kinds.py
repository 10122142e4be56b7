"""The kinds of layers that a decoder's segments can have: one file each, and one line here."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mesh_lm.errors import ConfigError
from mesh_lm.user_code import imported
from sharding_rules import did_you_mean

if TYPE_CHECKING:
    from mesh_lm.model.config import DecoderConfig

KINDS = {"dense": "mesh_lm.model.dense", "moe": "mesh_lm.model.moe"}
"""Name -> the module that has what `Kind` asks for; it is imported when a model is measured or
built, so that configs load without Flax."""

_COUNTS = ("n_params", "flops_per_token", "attention_flops_per_token")


class Kind(Protocol):
    """The names that a file about a kind of layer has.

    A layer that mixes tokens other than by `mesh_lm.model.attention.Attention` does by itself what
    attention does there: it masks other documents (`segment_ids` of the batch), expects tokens in
    the order of `sharding_rules.token_order` where rules shard sequences, and keeps what
    generation needs of earlier tokens in `mesh_lm.model.cache`.
    """

    @property
    def Layer(self) -> Any:
        """A `mesh_lm.model.Layer`, made by Layer(config, weights, shard): of one segment, with all
        its layers stacked by `weights`.
        """
        ...

    def n_params(self, config: DecoderConfig, /) -> int:
        """Returns the number of parameters of one layer."""
        ...

    def flops_per_token(self, config: DecoderConfig, /) -> float:
        """Returns the matmul FLOPs of one token in one layer, forward and backward."""
        ...

    def attention_flops_per_token(self, config: DecoderConfig, /) -> float:
        """Returns attention's share of them. Where a kind lacks this name, a dense layer's is
        counted.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OwnKind:
    """A kind of layer that is a class of the user's."""

    Layer: Any
    n_params: Callable[[DecoderConfig], int]
    flops_per_token: Callable[[DecoderConfig], float]
    attention_flops_per_token: Callable[[DecoderConfig], float]


def kind(name: str, field: str = "model.segments") -> Kind:
    """Returns the kind of layer of this name: one of KINDS, or a layer class of the user's own as
    module:class or FILE.py:class.

    Where such a class has no static methods n_params, flops_per_token and
    attention_flops_per_token, as in `Kind`, the counts are those of the kind that it derives from
    (`base`). field: the field that has the name, for errors. Raises ConfigError for a name that
    leads to no class.
    """
    if name in KINDS:
        return importlib.import_module(KINDS[name])  # pyright: ignore[reportReturnType]
    problem = f"{field}: no kind of layer {name!r}"
    path, colon, class_name = name.rpartition(":")
    if not colon:
        suggestion = did_you_mean(name, KINDS)
        if not suggestion.endswith("?"):
            suggestion += ", or module:class for one of your own"
        raise ConfigError(problem + suggestion)
    layer = getattr(imported(path, problem), class_name, None)
    if not isinstance(layer, type):
        raise ConfigError(f"{problem}: {class_name!r} is not a class of the module {path!r}")
    inherited = importlib.import_module(KINDS[_base_of(layer)])
    counts = {count: getattr(layer, count, getattr(inherited, count)) for count in _COUNTS}
    return OwnKind(layer, **counts)


def base(name: str) -> str:
    """Returns which of KINDS a kind of layer is, or the class of a user's own derives from; dense
    if it derives from none, and for a name that leads to no class.
    """
    if name in KINDS:
        return name
    try:
        return _base_of(kind(name).Layer)
    except ConfigError:
        return "dense"


def _base_of(layer: type) -> str:
    layers = {importlib.import_module(module).Layer: name for name, module in KINDS.items()}
    # The most derived class comes first: a layer with experts is also a dense one.
    return next((layers[cls] for cls in layer.__mro__ if cls in layers), "dense")


def attention_flops_per_token(name: str, config: DecoderConfig) -> float:
    """Returns attention's FLOPs of one token in one layer of this kind, both directions; a dense
    layer's where the kind has no such count.
    """
    dense = importlib.import_module(KINDS["dense"])
    return getattr(kind(name), "attention_flops_per_token", dense.attention_flops_per_token)(config)
