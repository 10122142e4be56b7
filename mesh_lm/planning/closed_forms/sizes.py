"""The bytes of each array that a step sends, by its symbol.

D data, F fsdp, T tensor, y tensor_y, P pipeline and C sequence are devices along the mesh axes; L
layers (of one stage), M microbatches, b sequences of a microbatch on one batch shard, s tokens of a
sequence, h d_model, V the vocabulary with its padding. Bytes are per device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mesh_lm.planning.closed_forms.reductions import INT8_BLOCK, int8_blocks
from mesh_lm.planning.closed_forms.subjects import Experts, Step

ALIGNED = 128
"""Elements: a replica's part of a flat vector is a multiple of it."""


class Symbol(NamedTuple):
    """An array that is sent."""

    bytes: str
    """A formula for its bytes."""
    dtype: str
    meaning: str


SYMBOLS = {
    "X": Symbol("2 b s h", "bf16", "the residual stream of one batch shard"),
    "W": Symbol(
        "2 x matrices of a layer / T", "bf16", "a layer's matrices as used; 24 h^2 / T for GPT"
    ),
    "E": Symbol("2 V h / T", "bf16", "a table (embedding, head) as used; its fp32 gradient is 2E"),
    "P": Symbol(
        "2 s h / C; / T where the sequence is sharded",
        "bf16",
        "learned positions of a device; their fp32 gradient is 2P",
    ),
    "p": Symbol(
        "4 s h / (C F)", "f32", "their gradient as it is stored, of a device's part of the sequence"
    ),
    "u": Symbol(
        "4 x vectors of a layer that tensor does not shard",
        "f32",
        "norms, and biases of the width h: 24 h for GPT",
    ),
    "v": Symbol(
        "4 x vectors of a layer that tensor shards / T",
        "f32",
        "biases of q, k, v and up: 28 h / T for GPT",
    ),
    "n": Symbol("4 h, 8 h with a bias", "f32", "the last norm"),
    "c": Symbol("4 x tokens of a loss chunk", "f32", "one number per token"),
    "H": Symbol(
        "2 b s h; / T where the sequence is sharded",
        "bf16",
        "what a stage sends to its neighbour",
    ),
    "G": Symbol(
        "4 x parameters of one device",
        "f32",
        "gradients as the weights are stored; with stages, of its layers",
    ),
    "Z": Symbol(
        "4 x those that ZeRO shards over data",
        "f32",
        "matrices and tables: all with a dimension embed; with stages, of its layers",
    ),
    "S": Symbol(
        "4 x parameters that every stage has",
        "f32",
        "with stages: tables, positions and the last norm",
    ),
    "Y": Symbol(
        "4 x those of S that ZeRO shards over data", "f32", "with stages: tables and positions"
    ),
    "R": Symbol(
        "4 x matrices of a layer / (T F), padded",
        "f32",
        "a device's flat vector of a layer's matrices; R/2 in bf16",
    ),
    "K": Symbol(
        "4 b s / C x kv heads of one device",
        "bf16",
        "keys and values of a device's tokens; their fp32 gradients are 2K",
    ),
    "Q": Symbol("2 b s / C x query heads of one device", "bf16", "the queries of those tokens"),
    "CK": Symbol("C x K", "bf16", "keys and values of all tokens"),
    "Q+K": Symbol(
        "Q + K",
        "bf16",
        "in one array; kv heads are [repeated](context.md#what-attention-sends) until they divide",
    ),
    "J": Symbol(
        "4 x tables and positions / (T F), padded", "f32", "one flat vector each; J/2 in bf16"
    ),
    "I": Symbol(
        "1 x matrices and tables of one device, padded",
        "s8",
        "their gradients in int8; i: the fp32 scales; It, it: of tables in stages; Ir, Ij: of R, J",
    ),
    "M": Symbol(
        "4 x matrices and tables of one device, padded",
        "f32",
        "their gradients in two levels; Mt: of tables in stages; M/N: a device's part in its node",
    ),
    "D": Symbol(
        "2 G C h",
        "bf16",
        "rows of C tokens for each of the G devices of `expert`; b s where all are gathered",
    ),
    "e": Symbol("4 G C k", "s32", "the numbers of the k experts of each of them"),
    "g": Symbol("4 G C k", "f32", "their weights"),
    "r": Symbol("4 x router of a layer, padded", "f32", "its flat vector, which stays in fp32"),
    "l": Symbol("4 x experts of all layers", "f32", "tokens of each expert"),
    "Ge": Symbol("4 x experts of one device", "f32", "their gradients"),
    "Re": Symbol(
        "4 x experts of a layer on one device, padded", "f32", "their flat vector; Re/2 in bf16"
    ),
    "A": Symbol(
        "4 x what tensor shards of the layers / (T D), padded",
        "f32",
        "matrices and biases of the layers that a device and its tensor group own",
    ),
    "a": Symbol(
        "4 x vectors of the layers that tensor does not shard, padded",
        "f32",
        "norms and biases, which their owners have updated",
    ),
    "O": Symbol("4 x parameters of one device", "f32", "what islands average in an outer step"),
    "X/y": Symbol("X / y", "bf16", "a device's columns of the residual stream"),
    "U": Symbol("2 b s x columns of up (and gate) / T", "bf16", "what up returns, with full rows"),
    "d": Symbol("2 b s x rows of down / T", "bf16", "the gradient of what down reads"),
    "u/y": Symbol("u / y", "f32", "gradients of norms and biases, summed over the batch"),
    "n/y": Symbol("n / y", "f32", "the gradient of the last norm"),
    "t": Symbol("4 b s", "f32", "one number per token: a sum of a norm"),
    "w": Symbol(
        "4 x biases of q, k and v / T", "f32", "gradients of biases of heads over tensor_y"
    ),
}


_DTYPES = {
    **{symbol: row.dtype for symbol, row in SYMBOLS.items()},
    **dict.fromkeys(("It", "Ir", "Ij"), "s8"),
    **dict.fromkeys(("i", "it", "ir", "ij", "Mt"), "f32"),
}


def dtype_of(size: str) -> str:
    """Returns the type of a size: 2W is the fp32 form of W, R/2 the bf16 form of R, G-Z the rest of
    G, and Q/y or R/N a part of an array of the same type.
    """
    if size in _DTYPES:
        return _DTYPES[size]
    if size.endswith("/2"):
        return "bf16"
    if size.endswith(("/y", "/N")):
        return dtype_of(size[:-2])
    if size.startswith("2"):
        return "f32"
    return dtype_of(size.partition("-")[0])


def sizes(step: Step) -> dict[str, float]:
    """Returns symbol -> bytes."""
    symbols = {
        **_activations(step),
        **_heads(step, step.strategy.tensor, ""),
        **_weights(step),
        **_stored(step),
        **_flat_vectors(step),
        **_int8(step),
        **_two_levels(step),
        **_experts(step),
    }
    symbols["O"] = symbols["G"] + symbols["S"]
    if step.sums_last_norm_at_once:
        for symbol in ("G", "G-Z"):
            symbols[symbol] -= symbols["n"]
    if step.strategy.square:
        symbols |= _heads(step, step.strategy.matrix_shards, "/y")
    for symbol in ("W", "E", "P"):
        symbols[f"2{symbol}"] = 2 * symbols[symbol]
    for symbol in ("R", "J", "M", "Mt"):
        symbols[f"{symbol}/N"] = symbols[symbol] / step.strategy.node
        symbols[f"{symbol}/N/2"] = symbols[symbol] / step.strategy.node / 2
    for symbol in ("Z", "Y", "R", "Re", "J", "M", "Mt"):
        symbols[f"{symbol}/2"] = symbols[symbol] / 2
    return symbols


def padded(elements: float, replicas: int) -> int:
    """Returns the elements of a flat vector: each replica has as many, a multiple of 128."""
    return math.ceil(elements / (replicas * ALIGNED)) * replicas * ALIGNED


def _activations(step: Step) -> dict[str, float]:
    """Returns the sizes of what has a row for each token."""
    model = step.model
    strategy = step.strategy
    residual = 2.0 * step.tokens * model.d_model
    hop_shards = strategy.tensor if strategy.sp else strategy.tensor_y
    return {
        "X": residual,
        "X/y": residual / strategy.tensor_y,
        "H": residual / hop_shards,
        "U": 2.0 * step.tokens * model.d_ff * (1 + model.gated) / strategy.tensor,
        "d": 2.0 * step.tokens * model.d_ff / strategy.tensor,
        "t": 4.0 * step.tokens,
        "c": 4.0 * min(model.loss_chunk, step.tokens),
    }


def _heads(step: Step, shards: int, suffix: str) -> dict[str, float]:
    """Returns the sizes of queries, keys and values whose heads have `shards` shards."""
    model = step.model
    strategy = step.strategy
    head = 2.0 * step.tokens * model.head_dim
    kv_heads: float = model.kv_heads
    if model.kv_heads % shards == 0:
        kv_heads = model.kv_heads // shards
    # With the sequence first, attention sees the heads of all sequences as those of one, and
    # Ulysses divides them together.
    together = step.sequences if strategy.sp and strategy.tensor > 1 else 1
    ulysses = strategy.sequence if "ulysses" in strategy.parts else strategy.ulysses
    exchanged_kv_heads = math.lcm(together * int(kv_heads), ulysses) / together
    if "usp" in strategy.parts:
        # Its ring is around the exchange of Ulysses.
        kv_heads = exchanged_kv_heads
    queries = head * model.heads / shards
    keys_values = 2 * head * kv_heads
    return {
        f"Q{suffix}": queries,
        f"K{suffix}": keys_values,
        f"2K{suffix}": 2 * keys_values,
        f"CK{suffix}": strategy.sequence * keys_values,
        f"Q+K{suffix}": queries + 2 * head * exchanged_kv_heads,
    }


def _weights(step: Step) -> dict[str, float]:
    """Returns the sizes of weights as the layers use them, and of gradients as these make them."""
    model = step.model
    strategy = step.strategy
    whole = 4.0 * model.whole_vectors
    last_norm = 4.0 * model.norm_vectors * model.d_model
    head_biases = 4.0 * model.head_biases / strategy.tensor
    mlp_biases = 4.0 * model.cut_vectors / strategy.tensor - head_biases
    positions = step.local_seq * model.d_model * model.learned_positions
    return {
        "W": 2.0 * model.matrices / strategy.matrix_shards,
        "E": 2.0 * model.vocab * model.d_model / strategy.matrix_shards,
        "P": 2.0 * positions / (strategy.tensor if strategy.sp else 1),
        "p": 4.0 * positions / strategy.fsdp,
        "u": whole,
        "u/y": whole / strategy.tensor_y,
        "v": mlp_biases + head_biases / strategy.tensor_y,
        "w": head_biases,
        "n": last_norm,
        "n/y": last_norm / strategy.tensor_y,
    }


def _tables(step: Step) -> list[float]:
    """Returns the elements of each table that one device stores: embedding, head, positions."""
    model = step.model
    strategy = step.strategy
    table = model.vocab * model.d_model / (strategy.matrix_shards * strategy.fsdp)
    positions = model.learned_positions * model.seq * model.d_model / strategy.fsdp
    return [table, positions] if model.tied else [table, table, positions]


def _stored(step: Step) -> dict[str, float]:
    """Returns the sizes of gradients as the weights are stored.

    Z is what ZeRO shards over data: what has a dimension embed, or, by layers, the layers' arrays.
    Y is that of what every stage has.
    """
    model = step.model
    strategy = step.strategy
    tables = 4 * sum(_tables(step))
    last_norm = 4.0 * model.norm_vectors * model.d_model
    matrix = 4 * model.matrices / (strategy.matrix_shards * strategy.fsdp)
    vectors = 4 * (model.whole_vectors + model.cut_vectors / strategy.tensor)
    if strategy.owner:
        cut = step.owned_rows * (matrix + vectors)
        whole = 0.0
        if strategy.tensor > 1:
            # Two mesh axes divide the layers of vectors that tensor does not shard, which XLA sums
            # in full.
            whole = step.owned_rows * 4.0 * model.whole_vectors
            cut -= whole
    elif strategy.zero_by == "embed":
        cut = step.stage_layers * matrix
        whole = step.stage_layers * vectors
    else:
        cut = step.stage_layers * (matrix + vectors)
        whole = 0.0
    if strategy.staged:
        shared = {"S": tables + last_norm, "Y": tables, "S-Y": last_norm}
    else:
        shared = {"S": 0.0, "Y": 0.0, "S-Y": 0.0}
        whole += last_norm
        if strategy.zero_by == "embed" or strategy.owner:
            cut += tables
        else:
            whole += tables
    owned = {
        "A": step.owned_rows / strategy.data * (matrix + 4 * model.cut_vectors / strategy.tensor),
        "a": step.owned_rows * 4.0 * model.whole_vectors,
    }
    return {"G": cut + whole, "Z": cut, "G-Z": whole, **shared, **owned}


def _flat_vectors(step: Step) -> dict[str, float]:
    """Returns the sizes of flat vectors: one for each layer's matrices, one for each table."""
    strategy = step.strategy
    compute_matrices = step.model.matrices - step.model.router
    matrices = compute_matrices / (strategy.matrix_shards * strategy.fsdp)
    table_shards = strategy.replicas * strategy.pipeline
    tables = sum(padded(elements, table_shards) for elements in _tables(step))
    return {"R": 4.0 * padded(matrices, strategy.replicas), "J": 4.0 * tables}


def _layer_matrices(step: Step) -> list[float]:
    """Returns the elements of each stacked array of the layers' matrices on one device."""
    model = step.model
    strategy = step.strategy
    head_width = model.d_model * model.head_dim
    queries = head_width * model.heads
    keys_values = 2 * head_width * model.kv_heads
    is_fused = model.heads == model.kv_heads
    attention = [queries + keys_values] if is_fused else [queries, keys_values]
    mlp = [model.d_model * model.d_ff * (1 + model.gated), model.d_model * model.d_ff]
    shards = strategy.matrix_shards * strategy.fsdp
    return [step.stage_layers * elements / shards for elements in (*attention, queries, *mlp)]


def _array_families(step: Step) -> dict[str, list[float]]:
    """Returns the arrays that are summed over the replicas, "", and those that are summed over
    stages and replicas, "t".
    """
    tables = [elements for elements in _tables(step) if elements]
    if step.strategy.staged:
        return {"": _layer_matrices(step), "t": tables}
    return {"": [*_layer_matrices(step), *tables], "t": []}


def _int8(step: Step) -> dict[str, float]:
    """Returns the sizes of int8 sums: a replica's part of each array is padded to whole blocks."""
    strategy = step.strategy
    n_replicas = {"": strategy.replicas, "t": strategy.replicas * strategy.pipeline}
    symbols = {}
    for family, arrays in _array_families(step).items():
        n = n_replicas[family]
        blocks = sum(int8_blocks(elements, n) for elements in arrays)
        symbols[f"I{family}"] = 1.0 * INT8_BLOCK * blocks
        symbols[f"i{family}"] = 4.0 * blocks

    matrices = step.model.matrices / (strategy.matrix_shards * strategy.fsdp)
    row = padded(matrices, strategy.replicas)
    row_blocks = int8_blocks(row, strategy.replicas)
    table_shards = strategy.replicas * strategy.pipeline
    table_blocks = 0
    for elements in _tables(step):
        table_blocks += int8_blocks(padded(elements, table_shards), table_shards)
    vectors = {"Ir": 1.0 * INT8_BLOCK * row_blocks, "ir": 4.0 * row_blocks}
    tables = {"Ij": 1.0 * INT8_BLOCK * table_blocks, "ij": 4.0 * table_blocks}
    return {**symbols, **vectors, **tables}


def _two_levels(step: Step) -> dict[str, float]:
    """Returns the sizes of sums in two levels: each array is padded to the devices of a node."""
    node = step.strategy.node
    symbols = {}
    for family, arrays in _array_families(step).items():
        symbols[f"M{family}"] = 4.0 * sum(node * math.ceil(elements / node) for elements in arrays)
    return symbols


def _experts(step: Step) -> dict[str, float]:
    """Returns the sizes of the exchange of tokens, and of experts."""
    experts = step.model.experts
    if not experts:
        return dict.fromkeys(("D", "e", "g", "l", "r", "Ge", "Re"), 0.0)
    strategy = step.strategy
    group = strategy.expert
    rows = group * _tokens_of_pair(step, experts)
    choices = 4.0 * rows * experts.active
    local = step.model.expert_matrices / group
    return {
        "D": 2.0 * rows * step.model.d_model,
        "e": choices,
        "g": choices,
        "l": 4.0 * step.model.layers * experts.number,
        "r": 4.0 * padded(step.model.router, strategy.replicas),
        "Ge": 4.0 * step.model.layers * local,
        "Re": 4.0 * padded(local, strategy.replicas // group),
    }


def _tokens_of_pair(step: Step, experts: Experts) -> float:
    """Returns C, the tokens that a device sends to another: all of them where they are gathered,
    else `factor` times those that choose one of its experts by uniform routing, in eights.
    """
    if step.strategy.exchange == "gather" or not experts.factor:
        return step.tokens
    others = experts.number - experts.number // step.strategy.expert
    none_chosen = math.comb(others, experts.active) / math.comb(experts.number, experts.active)
    sent = experts.factor * (1 - none_chosen) * step.tokens
    return min(step.tokens, 8 * math.ceil(math.ceil(sent) / 8))
