"""Weights of a Hugging Face directory straight onto a mesh, one device's part of one array at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import files
from mesh_lm.huggingface.configs import differences, family_of
from mesh_lm.huggingface.families import Family
from mesh_lm.huggingface.tensor_mapping import Box, Sizes, TensorMapping
from mesh_lm.model import DecoderConfig

if TYPE_CHECKING:
    from mesh_lm.parallel.layout import ModelLayout, Params

SHOWN = 12
"""Problems that one message lists."""


def load(directory: Path | str, layout: ModelLayout) -> Params:
    """What `reader` reads, at once."""
    return reader(directory, layout)()


def reader(directory: Path | str, layout: ModelLayout) -> Callable[[], Params]:
    """The weights of a directory as the parameters of `layout`, in its types (fp32 masters, whatever the files hold) and on its mesh;
    layers in model order.

    What can be wrong is found here; the weights are read when the result is called.

    Each process reads what its own devices need, each part once, however many replicas there are. Rows that pad the vocabulary are 0, and a
    table of learned positions longer than seq_len gives its first rows.

    Raises ConfigError, with every problem, before any weight is read: another model, files that are missing or cut off, tensors that are
    missing, unexpected or of another shape. ShardingRuleError where the rules do not fit the model.
    """
    directory, config = Path(directory).expanduser(), layout.config
    if not isinstance(config, DecoderConfig):
        raise ConfigError(f"{directory} cannot become a {type(config).__name__}: mesh_lm reads Hugging Face weights into a DecoderConfig")
    family = family_of(directory)
    if problems := differences(directory, config):
        raise _refusal(directory, "is another model than this config's", problems)
    tensors, problems = files.scan(directory)
    tensors = {_full(name, family): stored for name, stored in tensors.items() if not name.endswith(family.ignored)}
    rows = {row.ours: (row, _sizes(row, config, layout, tensors)) for row in family.mappings if row.ours in layout.shapes}
    if tensors or not problems:
        problems += _mismatches(rows, tensors, config)
    if problems:
        raise _refusal(directory, "cannot be read", problems)

    def part(name: str) -> Callable[[Box], np.ndarray]:
        (row, sizes), dtype = rows[name], layout.shapes[name].dtype
        return lambda box: row.read(box, sizes, lambda theirs, where: tensors[theirs].read(where), dtype)

    shardings = layout.canonical_shardings("params")
    return lambda: {name: _place(shape.shape, shardings[name], part(name)) for name, shape in layout.shapes.items()}


def _place(shape: tuple[int, ...], sharding: jax.NamedSharding, read: Callable[[Box], np.ndarray]) -> jax.Array:
    """An array of which `read` gives any part. One part is in host memory at a time; it goes to all devices here that hold it."""
    holders: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        holders.setdefault(box, []).append(device)
    arrays = {}
    for box, devices in holders.items():
        part = read(box)
        arrays |= {device: jax.device_put(part, device) for device in devices}
        jax.block_until_ready(list(arrays.values()))
    return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays.values()))


def _full(name: str, family: Family) -> str:
    """A tensor's name in the model with its head."""
    return name if name.startswith((family.base, "lm_head.")) else family.base + name


def _sizes(row: TensorMapping, config: DecoderConfig, layout: ModelLayout, tensors: dict[str, files.StoredTensor]) -> Sizes:
    """Of the dimensions of theirs: no padding of the vocabulary, and as many positions as were learned."""
    sizes = dict(zip(row.dims, layout.shapes[row.ours].shape, strict=True)) | {"V": config.vocab_size}
    if "S" in row.dims and (stored := tensors.get(row.theirs[0])) and stored.shape:
        sizes["S"] = max(sizes["S"], stored.shape[0])
    return sizes


def _mismatches(rows: dict[str, tuple[TensorMapping, Sizes]], tensors: dict[str, files.StoredTensor], config: DecoderConfig) -> list[str]:
    """Tensors that are missing, of another shape, or not of this model."""
    wanted = {name: (row, row.shape(sizes)) for row, sizes in rows.values() for name in row.names(sizes)}
    problems = [f"{name} is missing ({row.ours})" for name, (row, _) in wanted.items() if name not in tensors]
    for name, (row, shape) in wanted.items():
        if (stored := tensors.get(name)) and stored.shape not in (None, shape):
            problems.append(f"{stored.file.name}: {stored.name} is {stored.shape}, and {row.ours} of this config needs {shape}")
    spare = {"lm_head.weight"} if config.tied else set()  # a copy of the embedding
    extra = tensors.keys() - wanted.keys() - spare
    return problems + [f"{tensors[n].file.name}: {tensors[n].name} is not a tensor of this model" for n in tensors if n in extra]


def _refusal(directory: Path, what: str, problems: list[str]) -> ConfigError:
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return ConfigError("\n  - ".join([f"{directory} {what}", *problems[:SHOWN], *more]))
