"""The tables of docs/closed_forms.md, from mesh_lm.planning.closed_forms:
tests/docs/made.py writes them into the page."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from mesh_lm.config import load
from mesh_lm.planning.closed_forms import tensor_2d
from mesh_lm.planning.closed_forms.sizes import SYMBOLS
from mesh_lm.planning.closed_forms.step import expected
from mesh_lm.planning.closed_forms.subjects import Decoder, Strategy
from mesh_lm.planning.closed_forms.terms import A2A, AG, AR, CP, RS, Term, total
from tests.docs.markdown import table

SHORT = {AG: "AG", RS: "RS", AR: "AR", CP: "CP", A2A: "A2A"}
REMATS = ("none", "save_names", "full")
AXES = ("data", "fsdp", "tensor", "tensor_y")
CONTEXTS = ("context_gather", "ulysses", "ring", "usp")
FACTORS = {
    "data": ("ddp", "zero1", "zero2", "distributed", "zero3"),
    "fsdp": ("fsdp",),
    "tensor": ("megatron", "megatron_sp"),
}
"""Mesh axis -> presets that use it, of which a product is made."""
_OF_LAYER = ("forward", "backward")


def gpt(remat: str = "full") -> Decoder:
    """An untied GPT with two rows."""
    return Decoder(
        layers=2, d_model=64, d_ff=256, heads=16, kv_heads=16, head_dim=4, vocab=128, seq=64,
        learned_positions=True, biases=True,
        norm_vectors=2, gated=False, tied=False, remat=remat, loss_chunk=32,
    )  # fmt: skip


def terms(preset: str, remat: str = "full", **fields: Any) -> list[Term]:
    """Its collectives on a mesh that uses each of AXES that the preset shards, with 4 devices along
    it."""
    used = [axis for axis in AXES if uses(preset, axis)]
    return expected(
        gpt(remat), dataclasses.replace(Strategy(preset), **(dict.fromkeys(used, 4) | fields)), 2, 4
    )


def uses(preset: str, axis: str) -> bool:
    try:
        return bool(dataclasses.replace(Strategy(preset), **{axis: 4}))
    except ValueError:
        return False


def run_counts(group: Iterable[Term]) -> str:
    """As 2 AG X + RS X; over data, what a step runs for each layer with L before it, and for each
    microbatch with M."""
    often = {"row": "L ", "forward": "L M ", "backward": "L M ", "microbatch": "M "}
    counts: dict[str, int] = {}
    for term in group:
        name = (
            f"{often.get(term.per, '') if 'data' in term.axes else ''}{SHORT[term.kind]} "
            f"{term.size}"
        )
        counts[name] = counts.get(name, 0) + term.count
    return " + ".join(f"{n if n > 1 else ''} {name}".strip() for name, n in counts.items())


def sent_over(found: Iterable[Term], axes: Sequence[str]) -> str:
    """What a step sends over data, or a layer of a microbatch over other axes."""
    return run_counts(
        t
        for t in found
        if t.axes == tuple(axes) and (tuple(axes) == ("data",) or t.per in _OF_LAYER)
    )


def symbols() -> str:
    return table(
        ["symbol", "bytes", "what"],
        ([f"`{name}`", size, what] for name, (size, _, what) in SYMBOLS.items()),
    )


def factors() -> str:
    """What each preset sends over its axis, by remat and by the type of sums; equal cells of remats
    in one line."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for axis, presets in FACTORS.items():
        for preset, remat in itertools.product(presets, REMATS):
            cells = [
                sent_over(terms(preset, remat, reduction=reduction), [axis])
                for reduction in ("auto", "bfloat16", "float32")
            ]
            changed = [cell if cell != cells[0] else "" for cell in cells[1:]]
            rows.setdefault((f"`{preset}`", f"`{axis}`", cells[0], *changed), []).append(remat)
    lines = (
        [preset, axis, _remats(remats), *cells] for (preset, axis, *cells), remats in rows.items()
    )
    return table(
        ["preset", "over", "remat", "sends", "with `reduce_bfloat16`", "with `reduce_float32`"],
        lines,
    )


def _remats(remats: Sequence[str]) -> str:
    return "any" if tuple(remats) == REMATS else ", ".join(remats)


def contexts() -> str:
    """What attention exchanges in a layer of a microbatch, over 4 shards of the sequence (usp: 2 x
    2)."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for preset, remat in itertools.product(CONTEXTS, REMATS):
        shards = {"sequence": 2, "ulysses": 2} if preset == "usp" else {"sequence": 4}
        found = [
            t
            for t in terms(preset, remat, **shards)
            if t.part == "layer" and set(t.axes) & shards.keys()
        ]
        cells = [
            run_counts(t for t in found if t.axes == (axis,)) for axis in ("sequence", "ulysses")
        ]
        rows.setdefault((f"`{preset}`", *cells), []).append(remat)
    lines = ([preset, _remats(remats), *cells] for (preset, *cells), remats in rows.items())
    return table(["preset", "remat", "`sequence`, of 4 (2)", "`ulysses`, of 2"], lines)


def stages() -> str:
    """What a layer of a microbatch sends on a stage that keeps inputs, and on one that keeps
    residuals."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for preset, remat in itertools.product(("megatron", "megatron_sp", "hsdp"), REMATS):
        cells = [
            run_counts(
                t
                for t in terms(preset, remat, pipeline=2, stash=stash)
                if t.part == "layer" and t.size in "XW" and t.kind != CP
            )
            for stash in ("input", "residuals")
        ]
        rows.setdefault((f"`{preset}`", *cells), []).append(remat)
    lines = ([preset, _remats(remats), *cells] for (preset, *cells), remats in rows.items())
    return table(["preset", "remat", "`stash=input`", "`stash=residuals`"], lines)


def outside() -> str:
    """What a microbatch sends outside the layers, by part of the model."""
    parts = ("embedding", "head", "positions", "norm", "loss")
    rows = []
    for preset in ("fsdp", "megatron", "megatron_sp", "megatron_2d"):
        found = [term for term in terms(preset, data=1) if term.part in parts]
        named = preset == "megatron_2d"
        rows.append(
            [
                f"`{preset}`",
                *(_by_axes([term for term in found if term.part == part], named) for part in parts),
            ]
        )
    return table(["preset", "embedding", "head", "positions", "last norm", "loss"], rows)


def _by_axes(found: Sequence[Term], named: bool) -> str:
    """The counts over each set of axes, named or not, and how often where that is not each
    microbatch."""
    often = {"microbatch": "", "chunk": " a chunk", "step": " a step"}
    groups = dict.fromkeys((term.axes, often[term.per]) for term in found)
    return ", ".join(
        run_counts(t for t in found if (t.axes, often[t.per]) == (axes, per))
        + (f" over {' x '.join(axes)}" if named else "")
        + per
        for axes, per in groups
    )


def shared() -> str:
    """What all stages have: the gradients that a step sums over stages and replicas."""
    rows = []
    for preset in ("ddp", "zero2+megatron_sp", "distributed+megatron_sp"):
        found = [term for term in terms(preset, pipeline=2) if term.axes == ("pipeline", "data")]
        rows.append(
            [f"`{preset}`", run_counts([dataclasses.replace(term, per="step") for term in found])]
        )
    return table(["preset", "`pipeline` x `data`, a step"], rows)


def excesses() -> str:
    """Each collective of which a strategy could do with less, with the reason; those of stages at
    the end."""
    rows: dict[tuple[str, ...], list[str]] = {}
    plain = [
        (preset, term)
        for presets in FACTORS.values()
        for preset in presets
        for term in terms(preset)
    ]
    staged = [(preset, term) for preset in ("ddp", "zero2") for term in terms(preset, pipeline=2)]
    for preset, term in (*plain, *((f"{preset}, stages", term) for preset, term in staged)):
        slots = "forward" if term.per.startswith("forward") else "backward"
        share = (
            f"M V / {slots[0].upper()} ticks"
            if term.excess.startswith("idle")
            else f"{term.needed:.3g}"
        )
        if term.needed < 1 and not ("stages" in preset and "pipeline" not in term.axes):
            names = rows.setdefault(
                (f"{SHORT[term.kind]} {term.size}", " x ".join(term.axes), share, term.excess), []
            )
            names += (
                [name]
                if (name := f"`{preset}`".replace(", stages`", "` in stages")) not in names
                else []
            )
    lines: dict[tuple[str, ...], list[str]] = {}
    for (sends, *reason), presets in rows.items():
        lines.setdefault((", ".join(presets), *reason), []).append(sends)
    together = ([presets, ", ".join(sends), *reason] for (presets, *reason), sends in lines.items())
    return table(["preset", "sends", "over", "least", "why"], together)


def square_layer() -> str:
    """What a layer of a microbatch sends under megatron_2d over each of its two axes."""
    rows = [
        [
            remat,
            *(
                sent_over(terms("megatron_2d", remat, data=1), [axis])
                for axis in ("tensor", "tensor_y")
            ),
        ]
        for remat in REMATS
    ]
    return table(["remat", "`tensor`", "`tensor_y`"], rows)


def square_bytes() -> str:
    """MiB that a device sends for a layer of one sequence of GPT-3 in one dimension, and in two on
    the best mesh."""
    model = dataclasses.replace(
        Decoder.of(load("configs/gpt_175b.py").model), remat="save_names", recomputed=None, kept=0
    )
    rows = []
    for t in (4, 8, 16, 32):
        one = _of_layer(model, Strategy("megatron", tensor=t))
        two = {
            y: _of_layer(model, Strategy("megatron_2d", tensor=t // y, tensor_y=y))
            for y in (2, 4, 8, 16)
            if t % y == 0 and y < t
        }
        y = min(two, key=lambda y: two[y])
        rows.append(
            [
                str(t),
                f"{one:.1f}",
                f"{t // y} x {y}",
                f"{two[y]:.1f}",
                f"{100 * (two[y] / one - 1):+.0f} %",
            ]
        )
    return table(
        ["devices", "`megatron`", "tensor x tensor_y", "`megatron_2d`", "difference"], rows
    )


def _of_layer(model: Decoder, strategy: Strategy) -> float:
    """MiB of a layer of one sequence, activations and norms."""
    return (
        total(t for t in expected(model, strategy, 1, 1) if t.part == "layer" and t.per != "row")
        / model.layers
        / 2**20
    )


def dimensions(devices: int, ratio: float) -> tuple[dict[str, float], tuple[int, ...]]:
    """In h^2 elements per device, the least that each form sends for `ratio` h tokens; and the best
    mesh of the rules' axes."""
    powers = [2**n for n in range(devices.bit_length())]
    meshes = [
        (d, z, x, devices // (d * z * x))
        for d in powers
        for z in powers
        for x in powers
        if devices % (d * z * x) == 0
    ]
    best = min(meshes, key=lambda mesh: tensor_2d.with_fsdp(ratio, *mesh))
    sent = {
        "1D": tensor_2d.one(ratio, devices),
        "2D": min(tensor_2d.two(ratio, devices // y, y) for y in powers),
        "2.5D": min(
            tensor_2d.two_and_a_half(ratio, q, devices // q**2)
            for q in powers
            if q > 1 and devices % q**2 == 0
        ),
        "3D": tensor_2d.three(ratio, round(devices ** (1 / 3))),
        "rules": tensor_2d.with_fsdp(ratio, *best),
    }
    return {form: elements / devices for form, elements in sent.items()}, best


TABLES = {
    "symbols": symbols,
    "strategies": factors,
    "context parallelism": contexts,
    "stages": stages,
    "outside the layers": outside,
    "what all stages have": shared,
    "more than the least": excesses,
    "two dimensions": square_layer,
    "bytes of two dimensions": square_bytes,
}
"""Name between the marks of the page -> what makes the table."""
