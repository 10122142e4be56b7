"""Arrays that are sharded one way where they are made and another where they are used.

What the rules and the weights explain is lawful: weights are gathered along the axes of the batch,
new weights after ZeRO's update, the residual stream along those of sequence parallelism. Every
other exchange or gather that XLA's partitioner inserted is an error. What the program's author
called (lax.all_gather and its like) is left alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator

from sharding_rules.lab.lint_context import (
    EXCHANGES,
    Finding,
    LintContext,
    Piece,
    and_more,
    names_of,
    sent_fields,
    short,
)
from sharding_rules.lab.lint_state import misplaced_moments
from sharding_rules.lab.report import Argument, Collective
from sharding_rules.rules import axes_of, row_of


@dataclasses.dataclass(frozen=True)
class _Cause:
    """A mistake that explains collectives, which are then no findings of their own. With an empty
    text, another check reports it.
    """

    text: str
    fix: str
    explains: Callable[[Piece], bool]
    certain: bool = False
    """Names are swapped: a finding even where no collective comes of it. It explains all in a part
    of the model where it explains one."""


def reshards(context: LintContext) -> Iterator[Finding]:
    """One finding for each cause that is known, and for what none explains one for each part of the
    model and set of mesh axes.
    """
    pieces = (piece for piece in context.pieces if not context.in_matrix_optimizer(piece.one))
    told = [(piece, said) for piece in pieces if (said := _unexplained(context, piece))]
    for cause in (
        *_swapped_names(context),
        *_one_sided_rows(context),
        *_state_not_sharded(context),
    ):
        mine = [piece for piece, _ in told if cause.explains(piece)]
        homes = {_home(piece.one) for piece in mine} if cause.certain else set()
        mine += [piece for piece, _ in told if piece not in mine and _home(piece.one) in homes]
        told = [(piece, said) for piece, said in told if piece not in mine]
        if cause.text and (
            cause.certain or (mine and sum(piece.bytes for piece in mine) >= context.large)
        ):
            sent = sent_fields(mine, cause.text, cause.fix)
            yield Finding("swapped-names", **sent) if cause.certain else Finding("reshard", **sent)
    updates = [piece for piece, _ in told if _for_update(context, piece)]
    # one device sends nothing, and then nothing is large
    if updates and sum(piece.bytes for piece in updates) >= context.large:
        axes = [
            axis for axis in context.report.mesh if any(axis in piece.one.axes for piece in updates)
        ]
        weights = names_of(a for piece in updates for a in context.weights_of(piece))
        text = f"{weights}, sharded along {' and '.join(axes)}, are gathered in the optimizer"
        fix = (
            "update each device's own shard: pin the weights there to rules.optimizer, or leave "
            "them as they are"
        )
        yield Finding("reshard", **sent_fields(updates, text, fix))
    for found in _together([(piece, said) for piece, said in told if piece not in updates]):
        if sum(piece.bytes for piece, _ in found) >= context.large:
            largest, (text, fix) = max(found, key=lambda each: each[0].bytes)
            others = len(
                {(piece.one.name, str(piece.array)) for piece, _ in found}
                - {(largest.one.name, str(largest.array))}
            )
            yield Finding(
                "reshard",
                **sent_fields([piece for piece, _ in found], text + and_more(others, "array"), fix),
            )


def matrix_optimizers(context: LintContext) -> Iterator[Finding]:
    """What an optimizer that multiplies matrices moves for it: the price of what was asked for, and
    worth knowing.
    """
    pieces = [
        p for p in context.pieces if context.in_matrix_optimizer(p.one) and _unexplained(context, p)
    ]
    if pieces and sum(piece.bytes for piece in pieces) >= context.large:
        axes = [
            axis for axis in context.report.mesh if any(axis in piece.one.axes for piece in pieces)
        ]
        text = (
            f"the optimizer multiplies matrices, and XLA moves {len(pieces)} arrays over "
            f"{' and '.join(axes)} for it"
        )
        fix = (
            "an optimizer that works on each element (AdamW), or gradients, moments and update "
            "pinned to one sharding for it"
        )
        yield Finding("optimizer-matmuls", severity="notice", **sent_fields(pieces, text, fix))


def _together(
    told: list[tuple[Piece, tuple[str, str]]],
) -> list[list[tuple[Piece, tuple[str, str]]]]:
    """What is said of one set of mesh axes, and of one part of the model, one line of the source,
    or one weight.
    """
    groups: list[tuple[set[object], list[tuple[Piece, tuple[str, str]]]]] = []
    for each in told:
        one = each[0].one
        keys: set[object] = {
            (one.axes, word)
            for word in (one.where.part, one.where.source, *each[0].made_of)
            if word
        } or {(one.axes, "")}
        mine = [each]
        for group in [group for group in groups if group[0] & keys]:
            groups.remove(group)
            keys |= group[0]
            mine = group[1] + mine
        groups.append((keys, mine))
    return [mine for _, mine in groups]


def _home(one: Collective) -> str:
    """The part of the model, however often it runs; in a program without named scopes the line of
    the source.
    """
    return one.where.part or one.where.source


def _unexplained(context: LintContext, piece: Piece) -> tuple[str, str] | None:
    """What is wrong with one array of a collective that neither rules nor weights explain, and the
    fix.
    """
    one, axes = piece.one, set(piece.one.axes)
    if one.by_hand or not axes or axes & context.manual_axes:
        return None
    if one.partial:
        fix = _pin(context, one, "along dimensions whose sizes divide")
        return (
            (
                f"{one.kind} of {_called(context, piece)} between a part of the devices along "
                f"{piece.along}"
            ),
            fix,
        )
    if one.kind in EXCHANGES:
        text = (
            f"{one.kind} of {_called(context, piece)} along {piece.along}: it is sharded along one "
            "dimension where it is made and "
        )
        return text + f"another where it is used{_between(context, one)}", _pin(
            context, one, "the same way before and after it"
        )
    return _unexplained_gather(context, piece) if one.kind == "all-gather" else None


def _unexplained_gather(context: LintContext, piece: Piece) -> tuple[str, str] | None:
    one, axes, weights = piece.one, set(piece.one.axes), context.weights_of(piece)
    in_update = one.where.phase == "optimizer" or not one.loops
    if (
        in_update
        and axes & context.gathers_updates
        and axes <= context.gathers_updates | context.gathers_weights
    ):
        return None
    if _for_update(context, piece):
        return "", ""
    if weights and axes <= context.gathers_weights:
        return None
    if weights:
        row = context.row(weights[0], one.axes)
        acts, here = (
            row.replace("params", "activations") if context.rules else "a constraint",
            one.where.source or one.where.part,
        )
        fix = (
            f"shard what it is multiplied with along {piece.along} too, by {acts}; and pin the "
            f"weight at {here}: shard.weight(w, ...)"
        )
        return (
            (
                f"{names_of(weights)} is gathered over {piece.along}, along which {row} shards it "
                "for good"
            ),
            fix,
        )
    if axes <= _gathers_operands(context, context.beside(one)):
        return None
    if axes <= context.gathers_residual | {
        *context.shards_activation("embed")
    } and context.is_residual(piece.array):
        return None
    if not context.is_activation(piece.array, one.axes) and (
        context.rules is None or (in_update and axes <= context.gathers_weights)
    ):
        return None  # nothing says what it is; an optimizer may work on whole matrices
    return _gathered_activation(context, piece)


def _gathers_operands(context: LintContext, weights: list[Argument]) -> set[str]:
    """Axes that shard these weights, and what they are multiplied with along another dimension, as
    heads in preset megatron_2d.

    Without weights, as where layers gather theirs from flat vectors: those of any weight, by the
    rules.
    """
    used = context.rules.column("gathered") if context.rules else {}
    named = [axis for weight in weights for axis in context.logical(weight)] or used
    rows = {row for axis in named if axis and (row := row_of(used, axis))}
    found = (
        {*context.shards_activation(row.rpartition("/")[2])} - {*axes_of(used[row])} for row in rows
    )
    sharded = (
        {a for weight in weights for a in weight.axes}
        if weights
        else {a for entry in used.values() for a in axes_of(entry)}
    )
    return set().union(*found) & sharded


def _for_update(context: LintContext, piece: Piece) -> bool:
    """Whether it gathers weights, and nothing but weights, in the optimizer. Before the update:
    what is gathered after it is new.
    """
    return (
        piece.one.where.phase == "optimizer"
        and bool(piece.made_of)
        and bool(context.weights_of(piece))
    )


def _gathered_activation(context: LintContext, piece: Piece) -> tuple[str, str]:
    one, batch = piece.one, set(piece.one.axes) & context.shards_batch
    text = f"{_called(context, piece)} is gathered over {piece.along}"
    if batch:
        fix = _pin(
            context,
            one,
            "with its batch sharded ('batch' in its row, not None)"
            if context.rules
            else "with its batch sharded",
        )
        return (
            (
                f"{text}, {'which shards' if len(one.axes) == 1 else 'which shard'} the "
                f"batch{_between(context, one)}"
            ),
            fix,
        )
    row = _row_of_gather(context, piece)
    why = (
        f", along which rules.activations[{row!r}] shards it"
        if row
        else ", which is not the residual stream entering a block"
    )
    fix = _pin(context, one, "the same way before and after it")
    fix += (
        "; where it is a reshape of a sharded dimension, store the weight unjoined: [D, 3, N, H], "
        "not [D, 3N, H]"
    )
    return text + why + _between(context, one), fix


def _called(context: LintContext, piece: Piece) -> str:
    """An array in words: "activation bf16[4,512,8192] (batch, seq, vocab)", a weight's name, or its
    shape alone.
    """
    if weights := context.weights_of(piece):
        return f"{names_of(weights)} {piece.array}"
    if not context.is_activation(piece.array, piece.one.axes):
        return str(piece.array)
    (b, s), found = context.local_batch, []
    for size in piece.array.dims:
        names = [name for name, sizes in _activation_sizes(context).items() if size in sizes]
        if size == s:
            found.append("seq")
        elif size in (b, b * context.ways(set(piece.one.axes) & context.shards_batch)):
            found.append("batch")
        elif names:
            found.append(names[0])
    dims = f" ({', '.join(found)})" if context.axes and len(found) == len(piece.array.dims) else ""
    return f"activation {piece.array}{dims}"


def _activation_sizes(context: LintContext) -> dict[str, set[int]]:
    """The full sizes of the logical axes of activations: those of weights of the same name, which
    may differ.
    """
    known, sizes = context.rules.activations if context.rules else {}, {}
    for a in context.params:
        for axis, n in zip(context.logical(a), a.shape, strict=False):
            if axis and row_of(known, axis):
                sizes.setdefault(axis, set()).add(n)
    return sizes


def _row_of_gather(context: LintContext, piece: Piece) -> str:
    """The row of rules.activations whose dimension was gathered, where its size says so."""
    activations = context.rules.activations if context.rules else {}
    for name, sizes in _activation_sizes(context).items():
        row = row_of(activations, name)
        if (
            row
            and sizes & {*piece.array.dims}
            and set(axes_of(activations[row])) & set(piece.one.axes)
        ):
            return row
    return ""


def _between(context: LintContext, one: Collective) -> str:
    beside = context.beside(one)
    return f", next to the matmul with {names_of(beside)}" if beside else ""


def _pin(context: LintContext, one: Collective, how: str) -> str:
    here = one.where.source or one.where.part or "its maker"
    call = (
        "by rules.activations: shard(x, ...)"
        if context.rules
        else "with jax.lax.with_sharding_constraint"
    )
    return f"at {here} pin the array {how}, {call}"


# Causes that are known before any collective is looked at.


def _swapped_names(context: LintContext) -> Iterator[_Cause]:
    """Weights whose dimensions are named in the wrong order: their sizes are each other's."""
    sizes: dict[str, Counter[int]] = {}
    for a in context.params:
        for axis, n in zip(context.logical(a), a.shape, strict=False):
            if axis and axis != "layers":
                sizes.setdefault(axis, Counter())[n] += 1
    usual = {axis: counts.most_common(1)[0][0] for axis, counts in sizes.items()}
    found: dict[tuple[str, str], list[Argument]] = {}
    for a in context.params:
        named = [
            (axis, n)
            for axis, n in zip(context.logical(a), a.shape, strict=False)
            if axis and axis != "layers"
        ]
        wrong = [(axis, n) for axis, n in named if n != usual[axis]]
        for axis, _ in wrong:
            for other, n in named:
                if other != axis and n == usual[axis] and len(sizes[axis]) > 1:
                    found.setdefault((axis, other), []).append(a)
    told: set[str] = set()
    for (axis, other), weights in found.items():
        weights = [a for a in weights if a.name not in told]
        told |= {a.name for a in weights}
        if weights:
            shown = ", ".join(f"{short(a)} {list(a.shape)}" for a in weights[:2])
            text = (
                f"the names {axis!r} and {other!r} are swapped in {shown}: {axis!r} has "
                f"{usual[axis]} elsewhere"
            )
            fix = (
                f"name the dimensions in the order in which the weight has them: {other!r} where "
                f"{axis!r} stands, and the reverse"
            )
            yield _Cause(text, fix, _about(context, weights), certain=True)


def _about(context: LintContext, weights: list[Argument]) -> Callable[[Piece], bool]:
    """Whether a collective moves one of these weights, its gradient, or what is multiplied with
    it.
    """
    words = {word for a in weights for word in short(a).split(".")}
    names = {a.name for a in weights}
    sizes = {math.prod(a.shape) // context.depth.get(a.name, 1) for a in weights}

    def explains(piece: Piece) -> bool:
        near = names & {*piece.made_of, *piece.one.beside}
        here = words & set(re.split(r"[/+]", piece.one.where.part))
        elements = math.prod(piece.array.dims)
        own = not context.is_activation(piece.array) and any(
            n % elements == 0 and n // elements <= context.report.n_devices for n in sizes
        )
        return bool(near or here) or own

    return explains


def _one_sided_rows(context: LintContext) -> Iterator[_Cause]:
    """Rows by which weights are sharded for good, and activations of the same name are not."""
    if context.rules is None:
        return
    params, activations = context.rules.column("params"), context.rules.column("activations")
    for row, entry in params.items():
        here = row_of(activations, row)
        missing = {
            a
            for a in axes_of(entry)
            if context.report.mesh.get(a, 1) > 1
            and a not in context.shards_batch | context.manual_axes
        }
        missing -= set(axes_of(activations[here])) if here else set()
        weights = [
            a
            for a in context.params
            if row in {row_of(params, axis) for axis in context.logical(a) if axis}
        ]
        for axis in sorted(missing):
            text = (
                f"rules.params[{row!r}] shards {names_of(weights)} along {axis}, and "
                f"rules.activations[{row!r}] does not: what they are "
            )
            text += "multiplied with is gathered, or they are"
            fix = f"rules.activations[{row!r}] = {axis!r}, or None in both columns"
            yield _Cause(text, fix, _multiplies(weights, axis))


def _multiplies(weights: list[Argument], axis: str) -> Callable[[Piece], bool]:
    names = {a.name for a in weights}
    return lambda piece: (
        axis in piece.one.axes and bool(names & {*piece.made_of, *piece.one.beside})
    )


def _state_not_sharded(context: LintContext) -> Iterator[_Cause]:
    """Moments that are not sharded as they should be: gradients and weights are then gathered for
    the update.
    """
    if misplaced_moments(context):
        yield _Cause("", "", lambda piece: piece.one.where.phase == "optimizer")


CHECKS = (reshards, matrix_optimizers)
