"""In which type a program sums gradients over devices, and where that is not what its rules ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from sharding_rules.lab.hlo import Array
from sharding_rules.lab.report import SCALAR, Argument, Collective, Location, Report
from sharding_rules.lab.subject import SUMS, Finding, Subject, short
from sharding_rules.lab.summary import size
from sharding_rules.rules import Rules

_HALF = ("bf16", "f16")
_VECTOR = 32
"""Times the model's width: a parameter with fewer elements in a layer is no matrix, whatever its shape; the largest bias has seven."""
_SMALL = 0.02
"""Of the bytes of all sums of gradients: along axes with less, and in types with less, they are not worth a word."""


def gradient_sums(subject: Subject) -> Iterator[tuple[Collective, Array, float]]:
    """Every array of every sum over devices that have other parts of the batch, with its share of the wire bytes of a step."""
    tokens = subject.cuts_batch | {subject.vocabulary.sequence_axis}
    for one, array, bytes in subject.pieces():
        if one.kind in SUMS and tokens & set(one.axes) and array.bytes > SCALAR and subject.is_gradient(array):
            yield one, array, bytes


def reduction_dtype(subject: Subject) -> Iterator[Finding]:
    """Gradients of matrices that are summed in another type than rules.reduction asks for. Without rules nothing is asked for."""
    asked = subject.rules.reduction if subject.rules else None
    if asked == "bfloat16":
        yield from _too_wide(subject)
    elif asked:
        yield from _too_narrow(subject, asked)


def _too_narrow(subject: Subject, asked: str) -> Iterator[Finding]:
    """Of what auto asks for only sums after all loops can be told: those in a loop are the microbatches', in the type of the matmul."""
    total: dict[tuple[Location, str, tuple[str, ...], str], float] = {}
    for one, array, bytes in gradient_sums(subject):
        if array.dtype in _HALF and (asked == "float32" or (_once(subject, one) and not one.loops)):
            key = (one.where, _names(subject.weights(one.axes, array)), one.axes, array.dtype)
            total[key] = total.get(key, 0) + bytes
    fix = "let the gradient leave its matmul in float32: shard.einsum(equation, x, w, axes), with the weight as it is stored"
    if asked == "auto":
        fix = "cast gradients to float32 before they are summed, or say that it is meant: rules.replace(reduction='bfloat16')"
    for (where, whose, axes, dtype), bytes in total.items():
        if bytes >= subject.large:
            text = f"gradients{whose} are summed in {dtype} over {' and '.join(axes)}; rules.reduction={asked!r} asks for float32"
            yield Finding("reduction-dtype", int(bytes), where, text, fix, "notice" if asked == "auto" else "error")


def _too_wide(subject: Subject) -> Iterator[Finding]:
    """Vectors are summed in fp32: what is more than those is of matrices. XLA may have joined all of them in one array."""
    found: dict[tuple[str, ...], list[tuple[Collective, Array, float]]] = {}
    for one, array, bytes in gradient_sums(subject):
        if _once(subject, one) and array.dtype == "f32":
            found.setdefault(one.axes, []).append((one, array, bytes))
    vectors = sum(a.bytes / 4 for a in subject.params if math.prod(a.shape[subject.stacked(a) :]) < _VECTOR * subject.width)
    for axes, each in found.items():
        elements = sum(one.times * math.prod(array.dims) for one, array, _ in each)
        bytes = sum(bytes for *_, bytes in each) * max(0.0, 1 - vectors / elements)
        if bytes >= subject.large:
            where, along = max(each, key=lambda piece: piece[2])[0].where, " and ".join(axes)
            text = f"gradients of matrices are summed in f32 over {along}; rules.reduction='bfloat16' asks for bfloat16"
            fix = f"cast them to bfloat16 before they are summed over {along}, or ask for float32: rules.replace(reduction='auto')"
            yield Finding("reduction-dtype", int(bytes), where, text, fix)


def _names(weights: list[Argument]) -> str:
    """Those that the array may be of: two with the same dimensions cannot be told apart."""
    return f" of {' or '.join(dict.fromkeys(map(short, weights)))}" if weights else ""


def _once(subject: Subject, one: Collective) -> bool:
    """Along an axis that a step sums over once."""
    return subject.rules is not None and bool(subject.rules.manual_axes() & set(one.axes))


def reduced(report: Report, rules: Rules | None = None) -> str:
    """In words, by mesh axes: "f32 (24.20 GiB) over data, bf16 (1.12 GiB) and f32 (0.39 GiB) over fsdp". Empty where nothing is summed.

    Bytes are those that a device sends in a step; along an axis the type with most of them comes first.
    """
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for one, array, bytes in gradient_sums(Subject(report, rules, {})):
        by_type = found.setdefault(one.axes, {})
        by_type[array.dtype] = by_type.get(array.dtype, 0) + bytes
    least = _SMALL * sum(sum(by_type.values()) for by_type in found.values())
    order = list(report.mesh)
    words = []
    for axes, by_type in sorted(found.items(), key=lambda item: [order.index(axis) for axis in item[0]]):
        kept = sorted(((bytes, dtype) for dtype, bytes in by_type.items() if bytes >= least), reverse=True)
        if kept:
            words.append(f"{' and '.join(f'{dtype} ({size(bytes)})' for bytes, dtype in kept)} over {' and '.join(axes)}")
    return ", ".join(words)


CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (reduction_dtype,)
