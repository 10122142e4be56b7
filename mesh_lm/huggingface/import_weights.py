"""Imports weights of a Hugging Face directory onto a mesh, one device's shard of one array at a
time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mesh_lm import checksums, distributed
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import files
from mesh_lm.huggingface.configs import declares_tied, differences, family_of
from mesh_lm.huggingface.families import HEAD, Family
from mesh_lm.huggingface.tensor_mapping import Box, Sizes, TensorMapping
from mesh_lm.model import DecoderConfig

if TYPE_CHECKING:
    from mesh_lm.parallel.layout import ModelLayout, Params

SHOWN = 12
"""Maximum number of problems in one message."""


def load(directory: Path | str, layout: ModelLayout) -> Params:
    """Reads the weights of a directory immediately; see `reader`."""
    return reader(directory, layout)()


def reader(directory: Path | str, layout: ModelLayout) -> Callable[[], Params]:
    """Returns a function that reads a directory's weights as the parameters of `layout`, layers in
    model order, on its mesh.

    Problems are found here, before any weight is read. Weights have the dtypes of the layout (fp32
    masters, whatever the files hold).

    Each process reads the shards of its own devices, each once for all replicas. Padding rows of
    the vocabulary are 0; a table of learned positions longer than seq_len is truncated.

    Raises:
      ConfigError: lists all problems: another model, missing or truncated files, tensors that are
      missing, unexpected or of another
        shape or type. The returned function raises it for numbers that are not finite.
      ShardingRuleError: the rules do not fit the model.
    """
    directory, config = Path(directory).expanduser(), layout.config
    if not isinstance(config, DecoderConfig):
        raise ConfigError(
            f"{directory} cannot be imported into a {type(config).__name__}; only a DecoderConfig "
            "can hold Hugging Face weights"
        )
    family = family_of(directory)
    if problems := differences(directory, config):
        raise _refusal(directory, "is a different model from this config's", problems)
    tensors, problems = files.scan(directory)
    problems += _damaged(
        directory, {stored.file.name for stored in tensors.values()} | {files.INDEX}
    )
    tensors = {
        name: stored for name, stored in tensors.items() if not name.endswith(family.ignored)
    }
    problems += _duplicates(family, tensors)
    tensors = {family.full_name(name): stored for name, stored in tensors.items()}
    if config.tied and family.embedding not in tensors and HEAD in tensors:
        # transformers, too, takes the only one of the two
        tensors[family.embedding] = tensors[HEAD]
    mappings = {
        m.param: (m, _sizes(m, config, layout, tensors))
        for m in family.mappings
        if m.param in layout.shapes
    }
    if tensors or not problems:
        problems += _mismatches(mappings, tensors, config)
    if problems:
        raise _refusal(directory, "cannot be read", problems)
    if not config.tied and declares_tied(directory):
        distributed.print_on_process0(
            f"warning: {directory}/config.json ties the head to the embedding, but the files have "
            f"another {HEAD}: the head is not tied, as in transformers"
        )

    def part(name: str) -> Callable[[Box], np.ndarray]:
        (mapping, sizes), dtype = mappings[name], layout.shapes[name].dtype
        return lambda box: mapping.read(
            box, sizes, lambda tensor, index: tensors[tensor].read(index), dtype
        )

    shardings = layout.canonical_shardings("params")
    return lambda: {
        name: _place(shape.shape, shardings[name], part(name))
        for name, shape in layout.shapes.items()
    }


def _duplicates(family: Family, tensors: dict[str, files.StoredTensor]) -> list[str]:
    """Returns messages about tensors that are there twice, with and without the family's prefix.
    They may differ.
    """
    short = [
        name
        for name in tensors
        if family.full_name(name) != name and family.full_name(name) in tensors
    ]
    return [
        f"{tensors[name].file.name}: {name} is also there as {family.full_name(name)}"
        for name in short
    ]


def _damaged(directory: Path, names: set[str]) -> list[str]:
    """Returns problems with the files' digests. Each process reads some of them, in its turn."""
    try:
        found = checksums.problems(
            directory, sorted(names)[jax.process_index() :: jax.process_count()]
        )
    except OSError as error:
        found = [f"{error.filename} cannot be read: {error.strerror}"]
    return sorted({line for each in distributed.gather_from_all(found) for line in each})


def _place(
    shape: tuple[int, ...], sharding: jax.NamedSharding, read: Callable[[Box], np.ndarray]
) -> jax.Array:
    """Returns an array from `read`, which returns any part of it. One part at a time is in host
    memory, and goes to all its replicas.
    """
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


def _sizes(
    mapping: TensorMapping,
    config: DecoderConfig,
    layout: ModelLayout,
    tensors: dict[str, files.StoredTensor],
) -> Sizes:
    """Returns the sizes of their dimensions: without padding of the vocabulary, and with all
    learned positions.
    """
    sizes = dict(zip(mapping.dims, layout.shapes[mapping.param].shape, strict=True)) | {
        "V": config.vocab_size
    }
    if "S" in mapping.dims and (stored := tensors.get(mapping.hf_names[0])) and stored.shape:
        sizes["S"] = max(sizes["S"], stored.shape[0])
    return sizes


def _mismatches(
    mappings: dict[str, tuple[TensorMapping, Sizes]],
    tensors: dict[str, files.StoredTensor],
    config: DecoderConfig,
) -> list[str]:
    """Returns messages about tensors that are missing, of another shape, or not of this model."""
    wanted = {
        name: (mapping, mapping.shape(sizes))
        for mapping, sizes in mappings.values()
        for name in mapping.names(sizes)
    }
    problems = [
        f"{name} is missing ({mapping.param})"
        for name, (mapping, _) in wanted.items()
        if name not in tensors
    ]
    for name, (mapping, shape) in wanted.items():
        if (stored := tensors.get(name)) and stored.dtype not in (None, *files.FLOATS):
            problems.append(
                f"{stored.file.name}: {stored.name} has type {stored.dtype}; "
                f"{', '.join(files.FLOATS)} are read: fetch the weights that are not quantized, or "
                "dequantize them with transformers"
            )
        elif stored and stored.shape not in (None, shape):
            problems.append(
                f"{stored.file.name}: {stored.name} has shape {stored.shape}, but {mapping.param} "
                f"of this config needs {shape}"
            )
    spare = {HEAD} if config.tied else set()  # a copy of the embedding, as `config_of` has seen
    extra = tensors.keys() - wanted.keys() - spare
    return problems + [
        f"{tensors[n].file.name}: {tensors[n].name} is not a tensor of this model"
        for n in tensors
        if n in extra
    ]


def _refusal(directory: Path, what: str, problems: list[str]) -> ConfigError:
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return ConfigError("\n  - ".join([f"{directory} {what}", *problems[:SHOWN], *more]))
