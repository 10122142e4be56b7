"""Imports weights of a Hugging Face directory onto a mesh, one device's shard of one array at a
time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

_SHOWN = 12
"""Maximum number of problems in one message."""
_EXPERT = re.compile(r"(.+\.layers\.(\d+)\..+\.experts\.(\d+))\.")
"""Matches the names of an expert's tensors: (the prefix that they share, layer, expert)."""


class _Source(NamedTuple):
    """The tensors that have the numbers of a parameter."""

    mapping: TensorMapping
    sizes: Sizes
    """Sizes of the tensors' dimensions, which have no padding of the vocabulary, and all learned
    positions."""


def load(directory: Path | str, layout: ModelLayout) -> Params:
    """Returns the weights of a directory; see `reader`."""
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
        missing, unexpected or of another shape or type. The returned function raises it for numbers
        that are not finite.
      ShardingRuleError: the rules do not fit the model.
    """
    directory = Path(directory).expanduser()
    config = layout.config
    if not isinstance(config, DecoderConfig):
        raise ConfigError(
            f"{directory} cannot be imported into a {type(config).__name__}; only a DecoderConfig "
            "can hold Hugging Face weights"
        )
    family = family_of(directory)
    problems = differences(directory, config)
    if problems:
        raise _refusal(f"{directory} is a different model from this config's", problems)

    tensors, problems = files.scan(directory)
    file_names = {stored.file.name for stored in tensors.values()}
    problems += _damaged(directory, file_names | {files.INDEX})
    tensors = {
        name: stored for name, stored in tensors.items() if not name.endswith(family.ignored)
    }
    problems += _duplicates(family, tensors)
    tensors = {family.full_name(name): stored for name, stored in tensors.items()}
    if config.tied and family.embedding not in tensors and HEAD in tensors:
        # transformers, too, takes the only one of the two
        tensors[family.embedding] = tensors[HEAD]
    sources = _sources(family, layout, config, tensors)
    # Without any tensor and with a problem, that problem is why none was found.
    if tensors or not problems:
        problems += _missing_or_different(sources, tensors)
        problems += _unexpected(sources, tensors, config)
    if problems:
        raise _refusal(f"{directory} cannot be read as this model", problems)
    if not config.tied and declares_tied(directory):
        distributed.print_on_process0(
            f"warning: {directory}/config.json ties the head to the embedding, but the files have "
            f"another {HEAD}: the head is not tied, as in transformers"
        )

    def read_tensor(name: str, part: tuple[slice, ...]) -> np.ndarray:
        return tensors[name].read(part)

    shardings = layout.canonical_shardings("params")

    def read_params() -> Params:
        params = {}
        for name, shape in layout.shapes.items():
            mapping, sizes = sources[name]
            read = partial(mapping.read, sizes=sizes, read=read_tensor, dtype=shape.dtype)
            params[name] = _place(shape.shape, shardings[name], read)
        return params

    return read_params


def _sources(
    family: Family,
    layout: ModelLayout,
    config: DecoderConfig,
    tensors: dict[str, files.StoredTensor],
) -> dict[str, _Source]:
    """Returns the source of each parameter: in the published form, or in another one of which there
    is a tensor.
    """
    sources = {}
    for mapping in family.mappings_of(config):
        if mapping.param in layout.shapes:
            sources[mapping.param] = _Source(mapping, _sizes(mapping, layout, tensors))
    for mapping in family.mappings_of(config, family.unpublished):
        if mapping.param in layout.shapes:
            source = _Source(mapping, _sizes(mapping, layout, tensors))
            if not tensors.keys().isdisjoint(mapping.names(source.sizes)):
                sources[mapping.param] = source
    return sources


def _sizes(
    mapping: TensorMapping, layout: ModelLayout, tensors: dict[str, files.StoredTensor]
) -> Sizes:
    """Returns the sizes of a `_Source`."""
    sizes = dict(zip(mapping.dims, layout.shapes[mapping.param].shape, strict=True))
    sizes["V"] = layout.config.vocab_size
    if "S" in mapping.dims:
        stored = tensors.get(mapping.hf_names[0])
        if stored and stored.shape:
            sizes["S"] = max(sizes["S"], stored.shape[0])
    return sizes


def _damaged(directory: Path, names: set[str]) -> list[str]:
    """Returns problems with the files' digests. Each process reads some of them."""
    share = sorted(names)[jax.process_index() :: jax.process_count()]
    try:
        problems = checksums.problems(directory, share)
    except OSError as error:
        problems = [f"{error.filename} cannot be read: {error.strerror}"]
    gathered = distributed.gather_from_all(problems)
    return sorted(set(itertools.chain(*gathered)))


def _duplicates(family: Family, tensors: dict[str, files.StoredTensor]) -> list[str]:
    """Returns messages about tensors that are stored with and without the family's prefix. They
    may differ.
    """
    problems = []
    for name, stored in tensors.items():
        full_name = family.full_name(name)
        if full_name != name and full_name in tensors:
            problems.append(f"{stored.file.name}: {name} is also there as {full_name}")
    return problems


def _missing_or_different(
    sources: dict[str, _Source], tensors: dict[str, files.StoredTensor]
) -> list[str]:
    """Returns messages about tensors that are missing, or of another type or shape."""
    params_by_name = {}
    different = []
    for mapping, sizes in sources.values():
        shape = mapping.shape(sizes)
        for name in mapping.names(sizes):
            params_by_name[name] = mapping.param
            stored = tensors.get(name)
            if stored is None:
                continue
            if stored.dtype not in (None, *files.FLOATS):
                different.append(
                    f"{stored.file.name}: {stored.name} has type {stored.dtype}; "
                    f"{', '.join(files.FLOATS)} are read: fetch the weights that are not "
                    "quantized, or dequantize them with transformers"
                )
            elif stored.shape not in (None, shape):
                different.append(
                    f"{stored.file.name}: {stored.name} has shape {stored.shape}, but "
                    f"{mapping.param} of this config needs {shape}"
                )
    return _missing(params_by_name, tensors.keys()) + different


def _missing(params_by_name: dict[str, str], stored: Collection[str]) -> list[str]:
    """Returns messages about tensors that are missing: one for all of an expert.

    params_by_name: our parameter of each tensor.
    """
    lines = {}
    stored_experts = {match[1] for match in map(_EXPERT.match, stored) if match}
    for name, param in params_by_name.items():
        if name in stored:
            continue
        match = _EXPERT.match(name)
        if match and match[1] not in stored_experts:
            expert, layer, number = match.groups()
            lines[expert] = f"{expert} is missing: expert {number} of layer {layer}"
        else:
            lines[name] = f"{name} is missing ({param})"
    return list(lines.values())


def _unexpected(
    sources: dict[str, _Source], tensors: dict[str, files.StoredTensor], config: DecoderConfig
) -> list[str]:
    """Returns messages about tensors that are not of this model."""
    expected = {HEAD} if config.tied else set()  # a copy of the embedding, as `config_of` has seen
    for mapping, sizes in sources.values():
        expected.update(mapping.names(sizes))
    return [
        f"{stored.file.name}: {stored.name} is not a tensor of this model"
        for name, stored in tensors.items()
        if name not in expected
    ]


def _refusal(head: str, problems: list[str]) -> ConfigError:
    """Returns an error that lists the first problems."""
    lines = problems[:_SHOWN]
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more")
    return ConfigError("\n  - ".join([head, *lines]))


def _place(
    shape: tuple[int, ...], sharding: jax.NamedSharding, read: Callable[[Box], np.ndarray]
) -> jax.Array:
    """Returns an array from `read`, which returns any part of it."""
    devices_by_box: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        devices_by_box.setdefault(box, []).append(device)
    arrays = []
    for box, devices in devices_by_box.items():
        part = read(box)
        arrays += [jax.device_put(part, device) for device in devices]
        # One part at a time is in host memory.
        jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)
