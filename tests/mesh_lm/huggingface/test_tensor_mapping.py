"""Tensor mappings in NumPy: any part of our array can be read from their tensors, and written back
unchanged."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh_lm.huggingface.families import FAMILIES, MIXTRAL, QWEN3_MOE, Family
from mesh_lm.huggingface.tensor_mapping import TensorMapping
from mesh_lm.model import DecoderConfig, SegmentConfig

ROWS = list(
    dict.fromkeys(row for family in FAMILIES for row in (*family.mappings, *family.unpublished))
)


def sizes_of(data: st.DataObject, row: TensorMapping) -> dict[str, int]:
    sizes = {d: data.draw(st.integers(1, 4), label=d) for d in row.dims}
    if "f" in sizes:
        sizes["f"] = 3 if "f" in row.hf_dims else len(row.hf_names)
    return sizes


def written(row: TensorMapping, ours: np.ndarray, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    layers = ours if "L" in row.dims else ours[None]
    return {
        name: x
        for i, layer in enumerate(layers)
        for name, x in zip(row.layer_names(i, sizes), row.write(layer, sizes), strict=True)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.param}: {row.hf_dims}")
@given(data=st.data())
def test_any_part_comes_back_and_is_read_once(row: TensorMapping, data: st.DataObject) -> None:
    if "L" in row.dims:
        row = dataclasses.replace(row, first_layer=data.draw(st.integers(0, 3)))
    sizes = sizes_of(data, row)
    ours = np.arange(math.prod(sizes.values()), dtype=np.int32).reshape(
        [sizes[d] for d in row.dims]
    )
    theirs = written(row, ours, sizes)
    assert sorted(theirs) == sorted(row.names(sizes))
    assert all(x.shape == row.shape(sizes) for x in theirs.values())

    box = tuple(
        tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)), label=d)))
        for d, n in sizes.items()
    )
    seen = []

    def read(name: str, part: tuple[slice, ...]) -> np.ndarray:
        seen.append(theirs[name][part].ravel())
        return theirs[name][part]

    wanted = ours[tuple(slice(*cut) for cut in box)]
    if wanted.size:
        np.testing.assert_array_equal(row.read(box, sizes, read, np.dtype(np.int32)), wanted)
        np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.sort(wanted.ravel()))


@given(vocab=st.integers(1, 9), padding=st.integers(0, 5), data=st.data())
def test_padding_is_zero_and_is_dropped(vocab: int, padding: int, data: st.DataObject) -> None:
    row = next(row for row in ROWS if row.param == "head")
    table, sizes = (
        np.arange(1, 2 * vocab + 1, dtype=np.int32).reshape(vocab, 2),
        {"V": vocab, "D": 2},
    )
    padded = np.concatenate([table, np.zeros((padding, 2), np.int32)])
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, vocab + padding)] * 2)))
    read = row.read(((start, stop), (0, 2)), sizes, lambda _, part: table[part], np.dtype(np.int32))
    np.testing.assert_array_equal(read, padded[start:stop])
    np.testing.assert_array_equal(row.write(padded, sizes)[0], table)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
@pytest.mark.parametrize("grouped", [True, False])
def test_each_tensor_has_one_place(family: Family, grouped: bool) -> None:
    """Uses the mappings of one model: those for grouped queries, or the one for n_kv_heads =
    n_heads."""
    left_out = (
        "blocks.attention.qkv." if grouped else ("blocks.attention.q.", "blocks.attention.kv.")
    )
    rows = [
        row
        for row in family.mappings
        if family.model_type == "gpt2" or not row.param.startswith(left_out)
    ]
    assert len({row.param for row in rows}) == len(rows)
    names = [name for row in rows for name in row.names({"L": 3, "E": 2})]
    assert len(set(names)) == len(names)
    assert all(name.startswith((family.base, "lm_head.")) for name in names)


def test_a_part_reads_the_tensors_of_its_experts_alone() -> None:
    (row,) = (row for row in MIXTRAL.mappings if row.param == "blocks.experts.up")
    sizes = {"L": 2, "E": 4, "D": 3, "f": 2, "F": 5}
    ours = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    theirs = written(row, ours, sizes)
    names = set()

    def read(name: str, part: tuple[slice, ...]) -> np.ndarray:
        names.add(name)
        return theirs[name][part]

    row.read(((0, 2), (2, 3), (0, 3), (0, 2), (1, 4)), sizes, read, np.dtype(np.int32))
    assert names == {
        f"model.layers.{layer}.block_sparse_moe.experts.2.{matrix}.weight"
        for layer in range(2)
        for matrix in ("w1", "w3")
    }


def test_layers_of_a_segment_have_their_numbers_in_the_model() -> None:
    segments = (SegmentConfig("first", 2), SegmentConfig("rest", 1, "moe"))
    config = DecoderConfig(n_layers=3, segments=segments)
    names = {row.param: row.names({"L": 1, "E": 2}) for row in QWEN3_MOE.mappings_of(config)}
    assert names["first.mlp.down.weight"] == ["model.layers.0.mlp.down_proj.weight"]
    assert names["rest.attention.out.weight"] == ["model.layers.2.self_attn.o_proj.weight"]
    assert names["rest.experts.down"] == [
        f"model.layers.2.mlp.experts.{expert}.down_proj.weight" for expert in range(2)
    ]
    assert names["embedding"] == ["model.embed_tokens.weight"]
