"""The closed forms of attention over sequences that mesh axes shard (`closed_forms.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.sharding_rules.subjects import CONTEXT, Decoder, Strategy

AG, RS, AR, CP, A2A = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "collective-permute",
    "all-to-all",
)


def exchanged(model: Decoder, strategy: Strategy) -> Iterator[tuple]:
    """What attention exchanges where sequences are sharded. With remat=full, the layer's forward
    pass again."""
    again, per = model.remat == "full", "backward" if model.recomputed is None else "recompute"
    for axis in {"ulysses": ("sequence",), "usp": ("ulysses",)}.get(
        next(iter(strategy.parts & CONTEXT), ""), ()
    ):
        for size, what in (
            ("Q+K", "queries, keys and values of all tokens for a part of the heads"),
            ("Q", "the output, back"),
        ):
            yield "layer", A2A, (axis,), "bf16", size, 1, "forward", f"forward: {what}"
            yield "layer", A2A, (axis,), "bf16", size, int(again), per, f"recompute: {what}"
            yield (
                "layer",
                A2A,
                (axis,),
                "bf16",
                size,
                1,
                "backward",
                f"backward: gradients of {what.replace(', back', '')}",
            )
    if strategy.parts & {"ring", "usp"}:
        hops = strategy.sequence - 1
        yield (
            "layer",
            CP,
            ("sequence",),
            "bf16",
            "K",
            hops,
            "forward",
            "forward: keys and values go around",
        )
        # The backward pass reads what the recomputation has received, except in the loop over
        # steps, which a ring of 5 or more has.
        in_loop = hops - 2 if hops > 3 else 0
        why = (
            "recompute: keys and values go around; the backward pass reads those of the hops "
            "outside of the loop"
        )
        yield "layer", CP, ("sequence",), "bf16", "K", again * in_loop, per, why
        yield (
            "layer",
            CP,
            ("sequence",),
            "bf16",
            "K",
            hops,
            "backward",
            "backward: keys and values go around again",
        )
        yield (
            "layer",
            CP,
            ("sequence",),
            "f32",
            "2K",
            hops,
            "backward",
            "backward: their gradients, summed in fp32 on the way",
        )
    elif "context_gather" in strategy.parts:
        yield (
            "layer",
            AG,
            ("sequence",),
            "bf16",
            "CK",
            1,
            "forward",
            "forward: keys and values of all tokens",
        )
        if model.remat != "none":
            yield (
                "layer",
                AG,
                ("sequence",),
                "bf16",
                "CK",
                1,
                "backward",
                "recompute: again; kept, each device would hold those of all layers",
            )
        yield "layer", RS, ("sequence",), "bf16", "CK", 1, "backward", "backward: their gradients"
