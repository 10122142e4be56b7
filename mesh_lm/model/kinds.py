"""The kinds of layers that a decoder's segments can have: one file each, and one line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from mesh_lm.errors import ConfigError
from sharding_rules import did_you_mean

if TYPE_CHECKING:
    from mesh_lm.model.config import DecoderConfig

KINDS = {"dense": "mesh_lm.model.dense"}
"""Name -> the module that has what `Kind` asks for; it is imported when a model is measured or built, so that configs load without Flax."""


class Kind(Protocol):
    """What a file about a kind of layer offers."""

    @property
    def Layer(self) -> Any:
        """A `mesh_lm.model.Layer`, made by Layer(config, weights, shard): of one segment, with all its layers stacked by `weights`."""
        ...

    def n_params(self, config: DecoderConfig) -> int:
        """Parameters of one layer."""
        ...

    def flops_per_token(self, config: DecoderConfig) -> float:
        """Matmul FLOPs of one token in one layer, forward and backward."""
        ...


def kind(name: str) -> Kind:
    """Raises ConfigError for a name that is not in KINDS."""
    if name not in KINDS:
        raise ConfigError(f"model.segments: no kind of layer {name!r}{did_you_mean(name, KINDS)}")
    return importlib.import_module(KINDS[name])  # pyright: ignore[reportReturnType]
