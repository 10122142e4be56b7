"""Exports a model as a Hugging Face directory.

Gathers one layer of one parameter at a time, and writes one file at a time.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm import checksums, distributed
from mesh_lm.data.atomic import sibling
from mesh_lm.data.tokenizer.companions import GENERATION, TOKEN_IDS
from mesh_lm.errors import ConfigError
from mesh_lm.huggingface import files, model_card
from mesh_lm.huggingface.configs import CONFIG, family_for, to_json
from mesh_lm.huggingface.tensor_mapping import Sizes, TensorMapping
from mesh_lm.model import DecoderConfig

if TYPE_CHECKING:
    from mesh_lm.data.tokenizer import Tokenizer
    from mesh_lm.parallel.layout import ModelLayout, Params

DType = Literal["bfloat16", "float16", "float32"]


def save(
    directory: Path | str,
    model: ModelLayout | DecoderConfig,
    params: Params,
    *,
    dtype: DType = "bfloat16",
    max_shard_bytes: int = 2 * 2**30,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a directory that transformers loads: config.json, .safetensors, SHA256SUMS, a model
    card (README.md), and with a tokenizer its files and generation_config.json. A line says so if
    transformers cannot load the tokenizer.

    The directory is renamed into place once complete. All processes must call this; process 0
    writes and returns last. It holds one file (`max_shard_bytes`) and several copies of it in host
    memory (measured in benchmarks/huggingface.py).

    Args:
      params: layers in model order, as in `TrainedModel.load` (`ModelLayout.to_model_order`).

    Raises:
      ConfigError: no class of transformers can express the model (lists the fields), a number is
        not finite in dtype, or the directory is not empty or not writable.
    """
    config = model if isinstance(model, DecoderConfig) else model.config
    family = family_for(config)
    assert isinstance(config, DecoderConfig)
    if dtype not in get_args(DType):
        raise ConfigError(f"dtype={dtype}: expected one of the types {', '.join(get_args(DType))}")
    directory = Path(directory).expanduser().absolute()
    mappings = [mapping for mapping in family.mappings_of(config) if mapping.param in params]
    sizes = {mapping.param: _sizes(mapping, config, params) for mapping in mappings}
    itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    tensor_bytes = []
    for mapping in mappings:
        n_bytes = itemsize * math.prod(mapping.shape(sizes[mapping.param]))
        tensor_bytes += [(name, n_bytes) for name in mapping.names(sizes[mapping.param])]
    shards = _split_into_files(tensor_bytes, max_shard_bytes)
    tensors = _tensors(mappings, sizes, params, dtype)

    with distributed.collective_errors():
        partial = _begin(directory) if jax.process_index() == 0 else None
    if partial is None:
        for _ in tensors:  # the gathers need every process
            pass
        return
    try:
        _write(partial, tensors, shards)
        token_ids = _save_tokenizer(partial, tokenizer, config) if tokenizer else {}
        _write_json(partial / CONFIG, to_json(config, dtype, token_ids))
        checksums.write(partial)
        # Without a digest, because a card is there to be edited.
        name = os.fsencode(directory.name).decode(errors="backslashreplace")
        card = model_card.model_card(name, family.architecture, config, dtype, tokenizer)
        (partial / model_card.FILE).write_text(card, encoding="utf-8")
        for path in partial.iterdir():
            _sync(path)
        os.replace(partial, directory)
        _sync(directory.parent)
    except OSError as error:
        raise ConfigError(
            f"cannot write the export to {directory}: {error.strerror or error}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sizes(mapping: TensorMapping, config: DecoderConfig, params: Params) -> Sizes:
    """Returns the sizes of the tensors' dimensions, without padding of the vocabulary."""
    sizes = dict(zip(mapping.dims, params[mapping.param].shape, strict=True))
    sizes["V"] = config.vocab_size
    return sizes


def _split_into_files(tensors: list[tuple[str, int]], limit: int) -> list[dict[str, int]]:
    """Groups (name, bytes), in order, into files of at most `limit` bytes, or one tensor."""
    shards: list[dict[str, int]] = [{}]
    for name, size in tensors:
        if shards[-1] and sum(shards[-1].values()) + size > limit:
            shards.append({})
        shards[-1][name] = size
    return shards


def _tensors(
    mappings: list[TensorMapping], sizes: dict[str, Sizes], params: Params, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (their name, tensor) on process 0 in the order of `TensorMapping.names`. All processes
    must iterate: each tensor is gathered.
    """

    # The cast comes before the gather, which halves its bytes.
    def layer(x: jax.Array, i: int, stacked: bool) -> jax.Array:
        return (lax.dynamic_index_in_dim(x, i, keepdims=False) if stacked else x).astype(dtype)

    for mapping in mappings:
        x = params[mapping.param]
        stacked = "L" in mapping.dims
        n_layers = sizes[mapping.param]["L"] if stacked else 1
        gather = jax.jit(layer, static_argnums=2, out_shardings=_gathered(x, stacked))
        for i in range(n_layers):
            gathered = gather(x, i, stacked)
            if jax.process_index() == 0:
                tensors = mapping.write(np.asarray(gathered), sizes[mapping.param])
                names = mapping.layer_names(i, sizes[mapping.param])
                yield from zip(names, tensors, strict=True)
            else:
                jax.block_until_ready(gathered)


def _gathered(x: jax.Array, stacked: bool) -> NamedSharding | None:
    """Returns the sharding of a layer of x for its copy to the host: unchanged, or replicated if
    other processes hold shards.
    """
    if not isinstance(x.sharding, NamedSharding):
        return None
    if not x.is_fully_addressable:
        return NamedSharding(x.sharding.mesh, PartitionSpec())
    spec = x.sharding.spec[1:] if stacked else x.sharding.spec
    return NamedSharding(x.sharding.mesh, PartitionSpec(*spec))


def _begin(directory: Path) -> Path:
    """Creates a hidden directory next to `directory`, which must be missing or empty."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not an empty directory; name another one")
    partial = sibling(directory)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create a directory beside {directory}: {error.strerror or error}"
        ) from error
    return partial


def _write(
    directory: Path, tensors: Iterator[tuple[str, np.ndarray]], shards: list[dict[str, int]]
) -> None:
    """Writes one file for each shard, and their index if they are several."""
    if len(shards) == 1:
        file_names = [files.SINGLE]
    else:
        n = len(shards)
        file_names = [f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
    weight_map = {}
    for file_name, shard in zip(file_names, shards, strict=True):
        files.write(directory / file_name, _take(tensors, len(shard)))
        weight_map |= dict.fromkeys(shard, file_name)
    assert next(tensors, None) is None
    if len(shards) > 1:
        total_bytes = sum(sum(shard.values()) for shard in shards)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (directory / files.INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _take(tensors: Iterator[tuple[str, np.ndarray]], n: int) -> dict[str, np.ndarray]:
    """Returns the next n tensors. Raises ConfigError if a number is not finite."""
    arrays = {}
    for name, tensor in itertools.islice(tensors, n):
        n_bad = tensor.size - int(np.isfinite(tensor).sum())
        if n_bad:
            raise ConfigError(
                f"{name} has {n_bad:,} numbers that are not finite as {tensor.dtype}; if the "
                "checkpoint has them, export an earlier step, else choose --dtype=bfloat16 or "
                "--dtype=float32, whose range is that of the checkpoint"
            )
        arrays[name] = tensor
    return arrays


def _save_tokenizer(directory: Path, tokenizer: Tokenizer, config: DecoderConfig) -> dict[str, Any]:
    """Writes the tokenizer and generation_config.json. Returns the ids of special tokens for
    config.json. Raises OSError.
    """
    tokenizer.save(directory)
    generation = tokenizer.companions.generation
    token_ids: dict[str, Any] = dict(tokenizer.token_ids())
    for name in TOKEN_IDS:
        if generation.get(name) is not None:
            token_ids[name] = generation[name]
    if not generation:  # else the tokenizer has saved them
        _write_json(directory / GENERATION, token_ids)
    if not tokenizer.is_in_transformers:
        distributed.print_on_process0(
            f"warning: transformers cannot load the tokenizer of this export ({tokenizer.kind}), "
            "only the model; mesh_lm.data.tokenizer.load_tokenizer reads it"
        )
    # transformers refuses a padding id that the embedding does not have.
    if not 0 <= token_ids.get("pad_token_id", 0) < config.vocab_size:
        del token_ids["pad_token_id"]
    return token_ids


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
