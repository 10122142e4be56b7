"""What one train step must send, on paper: every collective of a decoder under a preset, derived
from the design, not from a compiler.

The forms were written before any program was measured, and `lab/test_collectives.py` holds the
program to them. They follow `mesh_lm/parallel/engine.py` (manual over data, one fp32 sum per step),
`mesh_lm/model/` (what a block gathers and reduces, what remat runs again), `mesh_lm/model/loss.py`
and `TableSharding` (tables, by hand). Pure arithmetic: no jax, and nothing of the project is
imported. docs/closed_forms.md is made from here.

Sizes: D data, F fsdp, T tensor, P pipeline (devices along the mesh axes); L layers (of one stage),
M microbatches, b sequences of a microbatch on one batch shard, s sequence (of which a device has s
/ C by context parallelism), h d_model, V vocabulary with its padding. Bytes are per device.
Payload: of an all-gather its result, of a reduce-scatter its operand, of any other the array. Wire,
for a ring of n: (n-1)/n of the payload, twice that for an all-reduce, all of it for a permute.
Stages differ at the ends: of each collective it is the stage that runs it most.

A step can do no less for a matrix that replicas share than add up its gradient once, in fp32, and
give each replica the new weight in the type in which its layers use it: 4 and 2 bytes a parameter
on the wire, 2 and 2 where gradients are summed in bf16. That is the least, which preset
`distributed` sends; all else is `excess`.

Not here, because below 1 KiB or absent from the presets: scalars (loss sums, label weight, gradient
norm), attention sinks and q/k norms, documents kept separate (positions are then looked up), stages
of unequal layers, the expert axis, windows that end a ring early.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from tests.sharding_rules import closed_forms_tensor_2d as tensor_2d
from tests.sharding_rules.closed_forms_context import A2A as A2A
from tests.sharding_rules.closed_forms_context import AG, AR, CP, RS, exchanged
from tests.sharding_rules.subjects import Decoder, Strategy

REPLICAS = ("data", "sequence", "ulysses")
"""The axes along which weights are replicated, and that the engine sums gradients over."""
BYTES = {"bf16": 2, "f32": 4}
Per = Literal[
    "forward",
    "backward",
    "recompute",
    "regather",
    "microbatch",
    "chunk",
    "forward tick",
    "backward tick",
    "row",
    "step",
]
"""forward, backward: a layer's pass, in each microbatch; with stages, in each tick that has that
slot, of the layers of one chunk. recompute: a backward pass of a layer with remat=full, where not
all have it. regather: a backward pass of a layer that has not kept its matrices, or the one gather
before the first of these. row: a layer of this stage, once a step."""
_ALIGNED = 128
"""Elements: a replica's part of a flat vector is a multiple of so many."""


@dataclasses.dataclass(frozen=True)
class Term:
    """One collective of the step, with the times it runs."""

    part: str
    """layer, embedding, positions, norm, head, loss, hop, gradients or weights."""
    kind: str
    axes: tuple[str, ...]
    ways: int
    """Devices in one group."""
    dtype: str
    size: str
    """The payload's symbol: see SYMBOLS."""
    payload: float
    """Bytes of one run on one device."""
    count: int
    """Runs in each `per`."""
    per: Per
    times: int
    """Runs in the step."""
    why: str
    needed: float = 1.0
    """Part of the wire bytes that the strategy cannot do without."""
    excess: str = ""
    """Why the design sends more than that."""

    @property
    def payload_bytes(self) -> float:
        return self.times * self.payload

    @property
    def wire_bytes(self) -> float:
        return (
            self.payload_bytes
            if self.kind == CP
            else self.payload_bytes * (2 if self.kind == AR else 1) * (self.ways - 1) / self.ways
        )

    @property
    def least_wire_bytes(self) -> float:
        return self.needed * self.wire_bytes


SYMBOLS = {
    "X": ("2 b s h", "bf16", "the residual stream of one batch shard"),
    "W": ("2 x matrices of a layer / T", "bf16", "a layer's matrices as used; 24 h^2 / T for GPT"),
    "E": ("2 V h / T", "bf16", "a table (embedding, head) as used; its fp32 gradient is 2E"),
    "P": (
        "2 s h; / T where the sequence is sharded",
        "bf16",
        "learned positions of a device; their fp32 gradient is 2P",
    ),
    "p": ("4 s h / F", "f32", "the positions' gradient as it is stored"),
    "u": (
        "4 x vectors of a layer that tensor does not shard",
        "f32",
        "norms, and biases of the width h: 24 h for GPT",
    ),
    "v": (
        "4 x vectors of a layer that tensor shards / T",
        "f32",
        "biases of q, k, v and up: 28 h / T for GPT",
    ),
    "n": ("4 h, 8 h with a bias", "f32", "the last norm"),
    "c": ("4 x tokens of a loss chunk", "f32", "one number per token"),
    "H": (
        "2 b s h; / T where the sequence is sharded",
        "bf16",
        "what a stage sends to its neighbour",
    ),
    "G": (
        "4 x parameters of one device",
        "f32",
        "gradients as the weights are stored; with stages, of its layers",
    ),
    "Z": (
        "4 x those that ZeRO shards over data",
        "f32",
        "matrices and tables: all with a dimension embed; with stages, of its layers",
    ),
    "S": (
        "4 x parameters that every stage has",
        "f32",
        "with stages: tables, positions and the last norm",
    ),
    "Y": ("4 x those of S that ZeRO shards over data", "f32", "with stages: tables and positions"),
    "R": (
        "4 x matrices of a layer / (T F), padded",
        "f32",
        "a device's flat vector of a layer's matrices; R/2 in bf16",
    ),
    "K": (
        "4 b s / C x kv heads of one device",
        "bf16",
        "keys and values of a device's tokens; their fp32 gradients are 2K",
    ),
    "Q": ("2 b s / C x query heads of one device", "bf16", "the queries of those tokens"),
    "CK": ("C x K", "bf16", "keys and values of all tokens"),
    "Q+K": (
        "Q + K",
        "bf16",
        "in one array; kv heads are [repeated](context.md#what-attention-sends) until they divide",
    ),
    "J": ("4 x tables and positions / (T F), padded", "f32", "one flat vector each; J/2 in bf16"),
    **tensor_2d.SYMBOLS,
}
"""Symbol -> (bytes, dtype, what it is)."""


def expected(model: Decoder, strategy: Strategy, sequences: int, microbatches: int) -> list[Term]:
    """The collectives of one step, without groups of one device. sequences: b, of one microbatch on
    one batch shard."""
    size, P = _sizes(model, strategy, sequences), strategy.pipeline
    if model.layers % (P * strategy.virtual):
        raise ValueError(
            f"no closed form for {model.layers} layers on {P} x {strategy.virtual} virtual stages: "
            "they differ"
        )
    chunks = -(-sequences * model.seq // (model.loss_chunk * strategy.sequence * strategy.ulysses))
    forward, backward = strategy.ticks(microbatches)
    of_chunk = model.layers // (P * strategy.virtual)
    runs = {
        "forward": of_chunk * forward, "backward": of_chunk * backward, "microbatch": microbatches,
        "chunk": chunks * microbatches,
        "recompute": microbatches * (model.layers if model.recomputed is None else model.recomputed),
        "regather": microbatches * (model.layers - model.kept + (0 < model.kept < model.layers)),
        "forward tick": forward, "backward tick": backward, "row": model.layers // P, "step": 1,
    }  # fmt: skip
    terms = []
    for part, kind, axes, dtype, symbol, count, per, why, *rest in _terms(
        model, strategy, sequences, microbatches
    ):
        if P > 1 and per in ("forward", "backward"):
            needed = (
                (rest or [1.0])[0]
                * microbatches
                * strategy.virtual
                / (forward if per == "forward" else backward)
            )
            rest = [needed, *(rest[1:] or ["idle slots compute, too"])]
        axes = tuple(a for a in axes if getattr(strategy, a) > 1)
        if axes and count:
            ways = math.prod(getattr(strategy, a) for a in axes)
            terms.append(
                Term(
                    part,
                    kind,
                    axes,
                    ways,
                    dtype,
                    symbol,
                    size[symbol],
                    count,
                    per,
                    count * runs[per],
                    why,
                    *rest,
                )
            )
    return [t for t in terms if t.payload]


def expected_of(config: Any) -> list[Term]:
    """The same of a `mesh_lm.config.TrainConfig`, whose mesh has no axis of -1. Raises ValueError
    for rules that have no form."""
    mesh, rules, loop, pipeline = config.mesh, config.rules, config.train, config.pipeline
    if mesh.pipeline > 1 and (
        pipeline.schedule != "1f1b" or pipeline.layers or pipeline.balance != "equal"
    ):
        raise ValueError(
            f"no closed form for pipeline schedule {pipeline.schedule} with layers "
            f"{pipeline.layers or pipeline.balance}"
        )
    if rules.reduction == "int8" or rules.node_axis:
        raise ValueError(f"no closed form here for {rules.name}; see closed_forms_reductions.py")
    by = "layers" if rules.column("optimizer").get("layers") == "data" else "embed"
    strategy = Strategy(
        "+".join(part for part in rules.name.replace(" by layers", "").split("+") if not part.startswith("reduce_")),
        mesh.data, mesh.fsdp, mesh.tensor, by, mesh.pipeline, pipeline.chunks, pipeline.stash,
        rules.reduction,
        mesh.sequence, mesh.sizes().get("ulysses", 1), mesh.sizes().get("tensor_y", 1),
    )  # fmt: skip
    return expected(
        Decoder.of(config.model),
        strategy,
        loop.global_batch // (loop.microbatches * mesh.data * mesh.fsdp),
        loop.microbatches,
    )


def total(terms: Iterable[Term], axis: str = "", field: str = "wire_bytes") -> float:
    """Bytes per device and step. axis: those whose groups run along it (a group over two axes
    counts for both); empty: all."""
    return sum(getattr(t, field) for t in terms if not axis or axis in t.axes)


def by_axes(terms: Iterable[Term], field: str = "wire_bytes") -> dict[tuple[str, ...], float]:
    """Bytes per device and step by the mesh axes that a group spans."""
    out: dict[tuple[str, ...], float] = {}
    for t in terms:
        out[t.axes] = out.get(t.axes, 0) + getattr(t, field)
    return out


def _sizes(model: Decoder, strategy: Strategy, b: int) -> dict[str, float]:
    """Symbol -> bytes."""
    L, h, T, F = model.layers // strategy.pipeline, model.d_model, strategy.tensor, strategy.fsdp
    TY = strategy.matrix_shards
    each_table = [model.vocab * h / (TY * F)] * (1 if model.tied else 2) + [
        model.learned_positions * model.seq * h / F
    ]
    tables = sum(each_table)
    layers = L * model.matrices / (TY * F)
    last = model.norm_vectors * h
    vectors = L * (model.whole_vectors + model.cut_vectors / T)
    cut, whole = (layers, vectors) if strategy.zero_by == "embed" else (layers + vectors, 0)
    if not (staged := strategy.pipeline > 1):
        cut, whole = (
            (cut + tables, whole + last)
            if strategy.zero_by == "embed"
            else (cut, whole + tables + last)
        )
    seq = model.seq / (strategy.sequence * strategy.ulysses)
    E, P = (
        2.0 * model.vocab * h / TY,
        2.0 * seq * h * model.learned_positions / (T if strategy.sp else 1),
    )
    X = 2.0 * b * seq * h
    kv_heads = model.kv_heads // (1 if model.kv_heads % T else T)
    # With the sequence first, attention sees the heads of all sequences as those of one, and
    # Ulysses divides them together.
    together = b if strategy.sp and T > 1 else 1
    ulysses = strategy.sequence if "ulysses" in strategy.parts else strategy.ulysses
    exchanged_kv_heads = math.lcm(together * kv_heads, ulysses) / together
    # the ring of usp is around that exchange
    kv_heads = exchanged_kv_heads if "usp" in strategy.parts else kv_heads
    kv = 4.0 * b * seq * kv_heads * model.head_dim
    return {
        "X": X,
        "W": 2.0 * model.matrices / TY,
        "2W": 4.0 * model.matrices / TY,
        "E": E,
        "2E": 2 * E,
        "P": P,
        "2P": 2 * P,
        "p": 4.0 * model.seq * h * model.learned_positions / F,
        "u": 4.0 * model.whole_vectors,
        "n": 4.0 * last,
        "c": 4.0 * min(model.loss_chunk, b * seq),
        "H": X / (T if strategy.sp else strategy.tensor_y),
        "G": 4 * (cut + whole),
        "Z": 4 * cut,
        "Z/2": 2 * cut,
        "G-Z": 4 * whole,
        "S": 4 * staged * (tables + last),
        "Y": 4 * staged * tables,
        "Y/2": 2 * staged * tables,
        "S-Y": 4 * staged * last,
        "K": kv,
        "2K": 2 * kv,
        "CK": strategy.sequence * kv,
        "Q": (q := 2.0 * b * seq * model.heads // T * model.head_dim),
        "Q+K": q + 4.0 * b * seq * exchanged_kv_heads * model.head_dim,
        "R": (row := 4 * padded(model.matrices / (TY * F), strategy.replicas)),
        "R/2": row / 2,
        "J": (
            flat := 4 * sum(padded(n, strategy.replicas * strategy.pipeline) for n in each_table)
        ),
        "J/2": flat / 2,
        **tensor_2d.sizes(model, strategy, b),
    }


def padded(elements: float, replicas: int) -> int:
    """Elements of a flat vector: each replica has as many, a multiple of 128."""
    return math.ceil(elements / (replicas * _ALIGNED)) * replicas * _ALIGNED


def _terms(
    model: Decoder, strategy: Strategy, sequences: int, microbatches: int
) -> Iterator[tuple]:
    """(part, kind, axes, dtype, size, count, per, why[, needed, excess]) on any mesh."""
    if strategy.square:
        yield from tensor_2d.terms(model, strategy, sequences)
    elif strategy.is_tensor:
        yield from _tensor(model, strategy, sequences)
    yield from exchanged(model, strategy)
    yield from _fsdp(model, strategy)
    if strategy.pipeline > 1:
        yield from _pipeline(strategy, microbatches)
    yield from _once_a_step(model, strategy)


def _tensor(model: Decoder, strategy: Strategy, sequences: int) -> Iterator[tuple]:
    again = {"none": (0, 0), "save_names": (2, 0), "full": (2, 1)}[model.remat]
    t, twice, slot = (
        ("tensor",),
        strategy.again,
        "backward slot: the forward pass again, from the stage's input",
    )
    if strategy.sp:
        yield (
            "layer",
            AG,
            t,
            "bf16",
            "X",
            2,
            "forward",
            "forward: attention and the MLP need full sequences",
        )
        yield (
            "layer",
            RS,
            t,
            "bf16",
            "X",
            2,
            "forward",
            "forward: out and down sum over tensor, into a sharded sequence",
        )
        yield "layer", AG, t, "bf16", "X", 2 * twice, "backward", slot
        yield "layer", RS, t, "bf16", "X", 2 * twice, "backward", slot
        yield (
            "layer",
            AG,
            t,
            "bf16",
            "X",
            again[0],
            "backward",
            "recompute: inputs of qkv and up, which their weight gradients need in full",
        )
        why = "recompute: out, for the residual between the halves; down's result is not needed"
        yield (
            "layer",
            RS,
            t,
            "bf16",
            "X",
            again[1],
            "backward" if model.recomputed is None else "recompute",
            why,
        )
        yield (
            "layer",
            AG,
            t,
            "bf16",
            "X",
            2,
            "backward",
            "backward: dy of out and of down, once for both of their gradients",
        )
        yield "layer", RS, t, "bf16", "X", 2, "backward", "backward: dx of qkv and of up"
        yield (
            "embedding",
            RS,
            t,
            "bf16",
            "X",
            1,
            "microbatch",
            "each device looks up its ids; summed into a sharded sequence",
        )
        yield "embedding", RS, t, "bf16", "X", int(twice), "microbatch", slot
        yield (
            "embedding",
            AG,
            t,
            "bf16",
            "X",
            1,
            "microbatch",
            "backward: the full dx, for the rows that a device holds",
        )
        yield (
            "head",
            AG,
            t,
            "bf16",
            "X",
            1,
            "microbatch",
            "full sequences are multiplied by this device's rows of the head",
        )
        yield (
            "head",
            RS,
            t,
            "bf16",
            "X",
            1,
            "microbatch",
            "dx is partial over the vocabulary; formed in the forward",
        )
        if sequences > 1 or strategy.fsdp > 1:  # else it is the dx that the embedding has gathered
            why = (
                "backward: each device has its part of the sequence, and the table is replicated "
                "over tensor"
            )
            yield "positions", AG, t, "f32", "p", 1, "microbatch", why
    else:
        yield "layer", AR, t, "bf16", "X", 2, "forward", "forward: out and down sum over tensor"
        yield "layer", AR, t, "bf16", "X", 2 * twice, "backward", slot
        per = "backward" if model.recomputed is None else "recompute"
        yield (
            "layer",
            AR,
            t,
            "bf16",
            "X",
            again[1],
            per,
            "recompute: out, for the residual between the halves",
        )
        yield "layer", AR, t, "bf16", "X", 2, "backward", "backward: dx of qkv and of up"
        yield (
            "embedding",
            AR,
            t,
            "bf16",
            "X",
            1,
            "microbatch",
            "each device looks up its ids; summed",
        )
        yield "embedding", AR, t, "bf16", "X", int(twice), "microbatch", slot
        yield "head", AR, t, "bf16", "X", 1, "microbatch", "dx is partial over the vocabulary"
    yield (
        "loss",
        AR,
        t,
        "f32",
        "c",
        3,
        "chunk",
        "of each token: the greatest logit, the sum of exponentials, the label's logit",
    )


def _fsdp(model: Decoder, strategy: Strategy) -> Iterator[tuple]:
    """What a microbatch gathers and reduces where fsdp cuts weights; and vectors, which are whole
    but see a part of the batch."""
    f, by_batch = ("fsdp",), ("fsdp", "tensor") if strategy.sp else ("fsdp",)
    staged, twice, slot = (
        strategy.pipeline > 1,
        int(strategy.again),
        "backward slot: again, for the forward pass from the stage's input",
    )
    yield "layer", AG, f, "bf16", "W", 1, "forward", "forward: the layer's matrices, cast first"
    yield "layer", AG, f, "bf16", "W", twice, "backward", slot
    yield (
        "layer",
        AG,
        f,
        "bf16",
        "W",
        1,
        "backward",
        "backward: again, also with remat=none; kept, every device would hold the model",
    )
    if strategy.reduction == "float32":
        yield "layer", RS, f, "f32", "2W", 1, "backward", "backward: weight gradients, as asked for"
    else:
        yield (
            "layer",
            RS,
            f,
            "bf16",
            "W",
            1,
            "backward",
            "backward: weight gradients, in the matmul's type",
        )
    why = "backward: norms and biases of the width h; under SP also over parts of the sequence"
    vectors, last = ("u/y", "n/y") if strategy.square else ("u", "n")
    yield "layer", AR, by_batch, "f32", vectors, 1, "backward", why
    yield (
        "layer",
        AR,
        f,
        "f32",
        "v",
        1,
        "backward",
        "backward: biases that tensor shards, which see full sequences",
    )
    if staged:
        yield (
            "norm",
            AR,
            by_batch,
            "f32",
            last,
            1,
            "microbatch",
            "backward: the last norm, in the last stage's branch",
        )
    else:
        yield (
            "norm",
            AR,
            by_batch,
            "f32",
            last,
            1,
            "step",
            "backward: the last norm, summed after the last microbatch",
        )
    yield "embedding", AG, f, "bf16", "E", 1, "microbatch", "the table, for the lookup"
    yield "embedding", AG, f, "bf16", "E", twice, "microbatch", slot
    fp32 = (
        "rows are summed in fp32, because a common token's row has many addends; bf16 would be half"
    )
    yield "embedding", RS, f, "f32", "2E", 1, "microbatch", "backward: its gradient", 0.5, fp32
    tied = model.tied and not staged  # else no device has both the first stage and the last
    if not tied:  # else it is the table that the lookup has gathered
        yield "head", AG, f, "bf16", "E", 1, "microbatch", "the head, before the chunks"
    shared = (0.0, "tied, but reduced once as a table and once as a head") if tied else (0.5, fp32)
    yield "head", RS, f, "f32", "2E", 1, "microbatch", "its gradient, after the last chunk", *shared
    yield "positions", AG, f, "bf16", "P", 1, "microbatch", "this device's part of the sequence"
    yield "positions", AG, f, "bf16", "P", twice, "microbatch", slot
    yield (
        "positions",
        RS,
        f,
        "f32",
        "2P",
        1,
        "microbatch",
        "backward: summed over the batch",
        0.5,
        "summed in fp32; bf16 would be half",
    )


def _pipeline(strategy: Strategy, microbatches: int) -> Iterator[tuple]:
    """Hops around the ring of stages; and what every stage has of the model, which is summed over
    stages and replicas at once."""
    P, D, work = strategy.pipeline, strategy.data, microbatches * strategy.virtual
    forward, backward = (
        (work if P > 2 else work - microbatches / 2) / ticks
        for ticks in strategy.ticks(microbatches)
    )
    idle = "idle stages send, too"
    yield (
        "hop",
        CP,
        ("pipeline",),
        "bf16",
        "H",
        1,
        "forward tick",
        "forward: a stage's output, to the next one",
        forward,
        idle,
    )
    why = "backward: the gradient of a stage's input, to the one before"
    yield "hop", CP, ("pipeline",), "bf16", "H", 1, "backward tick", why, backward, idle
    both, why = (
        ("pipeline", "data"),
        "gradients of what every stage has, summed once after the last microbatch",
    )
    tables, new = f"{why}: tables and positions", "new tables and positions, on every stage"
    if strategy.distributed:
        yield from _flat(strategy, both, "J", "step", f"{tables}, each part where its moments are")
        yield "gradients", AR, both, "f32", "S-Y", 1, "step", f"{why}: the last norm"
        return
    if strategy.reduction != "bfloat16" and not (strategy.zero and strategy.zero_by == "embed"):
        yield "gradients", AR, both, "f32", "S", 1, "step", why, 0.75, _WHOLE
        return
    # Of an all-reduce half is the reduce-scatter; the other half gives all replicas what was
    # summed, and if ZeRO has cut it, in vain.
    half = strategy.reduction == "bfloat16"
    if not strategy.zero or D == 1:
        needed = () if half else (0.75, _WHOLE)
    else:
        needed = 0.5, "reduce-scattered over stages and replicas, it would be half"
    yield (
        "gradients",
        AR,
        both,
        "bf16" if half else "f32",
        "Y/2" if half else "Y",
        1,
        "step",
        tables,
        *needed,
    )
    yield "gradients", AR, both, "f32", "S-Y", 1, "step", f"{why}: the last norm"
    cut = 0.5 * (1 - 1 / (P * D)) / (1 - 1 / D) if D > 1 else 1.0
    yield "weights", AG, ("data",), "f32", "Y", int(strategy.zero > 0), "step", new, cut, _FP32


_WHOLE = "each replica gets the full sum, in fp32; the new weights, in bf16, are half of that"
"""Of an all-reduce in fp32: 8 bytes a parameter, and 6 is the least."""
_FP32 = "fp32, because the stored weights are replicated; the layers use bf16"


def _flat(
    strategy: Strategy, axes: tuple[str, ...], size: str, per: Per, why: str
) -> Iterator[tuple]:
    """The gradients of flat vectors to where they are kept, and the new weights from there."""
    narrow = strategy.reduction == "bfloat16"
    yield (
        "gradients",
        RS,
        axes,
        "bf16" if narrow else "f32",
        f"{size}/2" if narrow else size,
        1,
        per,
        why,
    )
    yield (
        "weights",
        AG,
        axes,
        "bf16",
        f"{size}/2",
        1,
        per,
        "new weights, from the device that has their moments, as the layers use them",
    )


def _gathered(model: Decoder, strategy: Strategy) -> Iterator[tuple]:
    """What layers gather of their flat vectors, and the sums of their gradients, in each
    microbatch."""
    d, dtype, size = (
        REPLICAS,
        *(("bf16", "R/2") if strategy.reduction == "bfloat16" else ("f32", "R")),
    )
    yield (
        "layer",
        AG,
        d,
        "bf16",
        "R/2",
        1,
        "forward",
        "forward: the next layer's matrices; in the last layer, its own for the backward",
    )
    per = "regather" if model.kept else "backward"
    yield (
        "layer",
        AG,
        d,
        "bf16",
        "R/2",
        1,
        per,
        "backward: the matrices of the layer before; in the first layer, in vain",
    )
    yield (
        "layer",
        AG,
        d,
        "bf16",
        "R/2",
        1,
        "microbatch",
        "forward: the first layer's matrices, before the loop",
        0.0,
        _ENDS,
    )
    yield (
        "layer",
        RS,
        d,
        dtype,
        size,
        1,
        "backward",
        "backward: the gradients of the layer after, and at the end those of the first layer",
    )
    yield (
        "layer",
        RS,
        d,
        dtype,
        size,
        1,
        "microbatch",
        "backward: in the last layer, of zeros",
        0.0,
        _ENDS,
    )


_ENDS = "one more than there are layers, so that all iterations of a loop are the same"


def _once_a_step(model: Decoder, strategy: Strategy) -> Iterator[tuple]:
    d, new = REPLICAS, "new weights, from the device that has their moments"
    whole = "gradients, summed once after the last microbatch"
    cut = RS if strategy.zero == 2 else AR
    if strategy.distributed:
        if strategy.gathered and strategy.pipeline == 1:
            yield from _gathered(model, strategy)
        else:
            yield from _flat(
                strategy, d, "R", "row", f"{whole}, layer by layer, each part where its moments are"
            )
        if strategy.pipeline == 1:
            yield from _flat(
                strategy,
                d,
                "J",
                "step",
                f"{whole}: tables and positions, each part where its moments are",
            )
        yield "gradients", AR, d, "f32", "G-Z", 1, "step", f"{whole}: norms and biases"
    elif strategy.reduction == "bfloat16":
        excess = (0.5, _TWICE) if strategy.zero == 1 else ()
        yield (
            "gradients",
            cut,
            d,
            "bf16",
            "Z/2",
            1,
            "step",
            f"{whole}: matrices and tables, as asked for",
            *excess,
        )
        yield "gradients", AR, d, "f32", "G-Z", 1, "step", f"{whole}: norms and biases"
        yield "weights", AG, d, "f32", "Z", int(strategy.zero > 0), "step", new, 0.5, _FP32
    elif strategy.zero == 0:
        yield "gradients", AR, d, "f32", "G", 1, "step", whole, 0.75, _WHOLE
    else:
        if strategy.zero == 1:
            yield (
                "gradients",
                AR,
                d,
                "f32",
                "Z",
                1,
                "step",
                f"{whole}, of those with sharded moments",
                0.5,
                _TWICE,
            )
        else:
            yield (
                "gradients",
                RS,
                d,
                "f32",
                "Z",
                1,
                "step",
                f"{whole}, each part where its moments are",
            )
        tables = (0.75, _WHOLE) if strategy.zero_by == "layers" else ()
        yield (
            "gradients",
            AR,
            d,
            "f32",
            "G-Z",
            1,
            "step",
            f"{whole}, of those with replicated moments: norms and biases",
            *tables,
        )
        yield "weights", AG, d, "f32", "Z", 1, "step", new, 0.5, _FP32


_TWICE = "zero1 keeps gradients replicated by its definition; zero2 reduce-scatters them"
