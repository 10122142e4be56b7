"""What is wrong with a compiled program: each check names the place, the bytes, and the rule or line to change.

A check is silent where it cannot be sure. Collectives with less than 1 % of the step's wire bytes, and arrays with less than 5 % of the
memory at the peak, are never worth a finding (`subject.LARGE_WIRE`, `subject.LARGE_MEMORY`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from sharding_rules.lab import lint_pipeline, lint_reductions
from sharding_rules.lab.hlo import arrays
from sharding_rules.lab.report import SCALAR, Argument, Collective, Location, Report
from sharding_rules.lab.subject import LARGE_MEMORY, SUMS, Finding, LogicalAxes, Subject, customary, short
from sharding_rules.lab.targets import TARGETS
from sharding_rules.presets import PRESETS
from sharding_rules.rules import Kind, Rules, axes_of, row_of

_MOVES = ("all-to-all", "ragged-all-to-all", "collective-permute")
_TABLES: tuple[Kind, ...] = ("params", "activations")
_LONG = 0.1
"""Of a step's time: how long a reduction that nothing hides must be to be told of."""


def lint(report: Report, rules: Rules | None = None, axes: LogicalAxes | None = None) -> tuple[Finding, ...]:
    """Everything that CHECKS find, errors before notices, most bytes first.

    Args:
      rules: those that the program was written for. Without them promises are read from how the arguments are cut.
      axes: logical axes of each parameter by name (a trainer knows them: {name: axes}). With them findings name the row of the rules.
    """
    subject = Subject(report, rules, axes or {})
    found = (found for check in CHECKS for found in check(subject))
    return tuple(sorted(found, key=lambda one: (one.severity != "error", one.check != "rematerialization", -one.bytes)))


def reshards(subject: Subject) -> Iterator[Finding]:
    """Arrays cut one way where they are made and another where they are used: exchanges, parts of axes, and gathers nobody asked for."""
    for (one, text, fix), bytes in _grouped(subject, _reshard):
        yield Finding("reshard", bytes, one, text, fix)


def _reshard(subject: Subject, one: Collective, array: Any) -> tuple[str, str] | None:
    along, axes = " and ".join(one.axes), set(one.axes)
    here = one.where.source or one.where.part or "its maker"
    pin = f"pin the array before and after {here} to one row of rules.activations: shard(x, ...)"
    if axes & subject.manual_axes or not axes:
        return None
    if one.partial:
        return f"{one.kind} of {array} between a part of the devices along {along}", f"{pin}, whose cut the sizes divide"
    if one.kind in _MOVES:
        return f"{one.kind} of {array} along {along}: it is cut along one dimension where it is made and another where it is used", pin
    if one.kind != "all-gather":
        return None
    weights = subject.weights(one.axes, array)
    after_update = axes <= subject.gathers_updates | subject.gathers_weights and (not one.loops or one.where.phase == "optimizer")
    if after_update or (axes <= subject.gathers_weights and (weights or not subject.is_activation(array))):
        return None
    if weights and not subject.is_activation(array):
        names, row = _names(weights), subject.row(weights[0], one.axes)
        acts = row.replace("params", "activations")
        fix = f"cut what it is multiplied with along {along} too, by {acts}: shard(x, ...) before {here}; and pin it: shard.weight(w, ...)"
        return f"{names} is gathered over {along}, along which {row} cuts it for good", fix
    if not subject.is_activation(array) or (axes <= subject.gathers_residual and subject.is_residual(array)):
        return None
    fix = f"{pin}; where it is a reshape of a cut dimension, store the weight unjoined: [D, 3, N, H], not [D, 3N, H]"
    return f"activation {array} is gathered over {along}, which is not the residual stream entering a block", fix


def rematerializations(subject: Subject) -> Iterator[Finding]:
    """The partitioner gave up: it replicates an array and cuts it again."""
    for line in dict.fromkeys(line for line in subject.report.warnings if "rematerialization" in line):
        neutral = "pin that array (jax.lax.with_sharding_constraint); look a sharded table up by hand, in a shard_map"
        fix = subject.vocabulary.fix("rematerialization", neutral)
        yield Finding("rematerialization", 0, Location(), line.strip()[:400], fix)


def unknown_loops(subject: Subject) -> Iterator[Finding]:
    """A loop whose trips XLA does not know: what it sends and computes is counted once."""
    for line in subject.report.warnings:
        if "how often this loop runs" in line:
            yield Finding(
                "unknown-loop", 0, Location(), line, "a loop of fixed length: lax.scan, or fori_loop with Python bounds", "notice"
            )


def dead_rules(subject: Subject) -> Iterator[Finding]:
    """A row that names no dimension of the model, but nearly so: a typo leaves the right row as it was."""
    if not (subject.rules and subject.axes):
        return
    known = dict.fromkeys(axis for axes in subject.axes.values() for axis in axes if axis)
    known |= dict.fromkeys(row for rules in PRESETS.values() for kind in _TABLES for row in rules.column(kind))
    rows = {(row, entry): kind for kind in reversed(_TABLES) for row, entry in subject.rules.column(kind).items() if not row_of(known, row)}
    for (row, entry), kind in rows.items():
        ways, near = subject.ways(axes_of(entry)), difflib.get_close_matches(row, sorted(known), n=1)
        if ways == 1 or not near:
            continue
        held = [a for a in subject.report.arguments if near[0] in subject.logical(a) and not set(axes_of(entry)) & set(a.axes)]
        text = f"rules.{kind}[{row!r}] = {entry!r} cuts nothing: no parameter has a dimension {row!r}"
        text += f"; {_names(held)} stay whole" if held else ""
        wasted = sum(a.bytes for a in held) * (ways - 1) // ways
        yield Finding("dead-rule", wasted, Location(), text, f"did you mean rules.{kind}[{near[0]!r}]?")


def replicated(subject: Subject) -> Iterator[Finding]:
    """Parameters and moments that are whole along an axis that cuts others of their kind, and take memory for it."""
    groups: dict[tuple[str, str], list[Argument]] = {}
    for kind in ("params", "moments"):
        held = [a for a in subject.report.arguments if a.kind == kind]
        for axis in sorted({axis for a in held for axis in a.axes}):
            for a in held:
                if axis not in a.axes and (row := _could_cut(subject, a, axis)) is not None:
                    groups.setdefault((axis, row), []).append(a)
    for (axis, row), held in groups.items():
        n = subject.report.mesh[axis]
        wasted = sum(a.bytes for a in held) * (n - 1) // n
        if wasted < LARGE_MEMORY * subject.report.peak_bytes:
            continue
        promised = row and subject.rules and axis in axes_of(subject.rules.params.get(row))
        says = f", although rules.params[{row!r}] cuts it" if promised else f", which cuts others of their kind {n} ways"
        table = f"rules.params[{row!r}] and rules.activations[{row!r}]" if row else "a row of rules.params"
        fix = "give the array the sharding of its rules (rules.sharding)" if promised else f"put {axis!r} into {table}"
        text = f"{_names(held)} {'is' if len({short(a) for a in held}) == 1 else 'are'} whole along {axis}{says}"
        yield Finding("replicated", wasted, Location(), text, fix, "error" if row else "notice")


def _could_cut(subject: Subject, a: Argument, axis: str) -> str | None:
    """The row that could cut it along `axis`; "" where dimensions have no names, and one is wide enough; None: there is none."""
    logical = subject.logical(a)
    n = subject.report.mesh[axis]
    if not logical:
        # What is outside of the layers (embedding, head) is whole on every stage.
        return "" if axis != subject.vocabulary.pipeline_axis and any(d % n == 0 and d >= 1024 * n for d in a.shape) else None
    column = subject.rules.column("params" if a.kind == "params" else "optimizer") if subject.rules else {}
    usual = customary("params") | (customary("optimizer") if a.kind == "moments" else set())
    for row, size in zip(logical, a.shape, strict=False):
        promised = axis in axes_of(column.get(row or ""))
        if row and (promised or (row, axis) in usual) and size % (n * subject.ways(set(axes_of(column.get(row))) - {axis})) == 0:
            return row
    return None


def gathered_twice(subject: Subject) -> Iterator[Finding]:
    """More gathers of a weight than one for the forward and one for the backward (or for what it computes again)."""
    seen: dict[tuple[Any, ...], list[tuple[Collective, float]]] = {}
    served: dict[tuple[Any, ...], list[Argument]] = {}
    for one, array, bytes in subject.pieces():
        if one.kind != "all-gather" or not one.where.phase or one.where.phase == "optimizer":
            continue
        if not set(one.axes) <= subject.gathers_weights or not (weights := subject.weights(one.axes, array)):
            continue
        # Weights outside the stack may serve two parts: the embedding and the head.
        stacked = any(map(subject.stacked, weights))
        key = (tuple(sorted(array.dims)), one.where.phase == "forward", "" if stacked else one.where.part, one.axes)
        seen.setdefault(key, []).append((one, bytes))
        served[key] = weights
    for key, found in seen.items():
        (_, forward, part, axes), weights = key, served[key]
        stacked = any(map(subject.stacked, weights))
        wanted = subject.microbatches * sum(subject.depth.get(a.name, 1) for a in weights) * (1 + part.count("+"))
        # A pipeline's backward slot runs the stage again before it goes back through it.
        wanted *= 1 + (subject.staged and stacked and not forward)
        times = sum(one.times for one, _ in found)
        wasted = sum(bytes for _, bytes in found) * (times - wanted) / max(1, times)
        if times <= wanted or wasted < subject.large:
            continue
        where = max((one for one, _ in found), key=lambda one: one.times).where
        run = "forward" if forward else "backward"
        text = f"{_names(weights)} gathered {times} times over {' and '.join(axes)} in the {run}, {wanted} would do"
        fix = f"cast the weight, pin it as it is used, use that: shard.weight(w.astype(x.dtype), ...) before {where.source or 'its matmul'}"
        yield Finding("gathered-twice", int(wasted), where, text, fix)


def wide_collectives(subject: Subject) -> Iterator[Finding]:
    """fp32 activations or weights on the wire of a bf16 program. Gradients are summed in fp32 on purpose; new weights are fp32."""
    report = subject.report
    shapes = [shape for one in report.collectives if one.payload > SCALAR for shape in one.shapes]
    shapes += [buffer.shape for buffer in report.memory.buffers] + [shape for _, operands, _ in report.kernels for shape in operands]
    if not any(array.dtype == "bf16" and array.bytes > SCALAR for shape in shapes for array in arrays(shape)):
        return

    def wide(subject: Subject, one: Collective, array: Any) -> tuple[str, str] | None:
        if array.dtype not in ("f32", "f64") or one.kind in _MOVES or one.where.phase in ("optimizer", "") or not one.loops:
            return None
        weights = subject.weights(one.axes, array)
        gradient = weights or (set(one.axes) <= subject.cuts_batch and subject.is_gradient(array))
        if (one.kind in SUMS and gradient) or not (weights or subject.is_activation(array)):
            return None
        what = _names(weights) or f"activation {array}"
        here = one.where.source or one.where.part
        fix = f"cast to bf16 before {here}, then lax.optimization_barrier, or XLA moves the cast behind the {one.kind}"
        return f"{one.kind} of {what} in {array.dtype} over {' and '.join(one.axes)}", fix

    for (one, text, fix), bytes in _grouped(subject, wide):
        yield Finding("f32-collective", bytes, one, text, fix)


def microbatch_reductions(subject: Subject) -> Iterator[Finding]:
    """Sums of gradients inside the loop over microbatches, along an axis that cuts no parameter: one after the loop would do."""
    M = subject.microbatches
    whole = {axis for axis in subject.cuts_batch - subject.cuts_params if axis not in subject.manual_axes}

    def inside(subject: Subject, one: Collective, array: Any) -> tuple[str, str] | None:
        axes = [axis for axis in one.axes if axis in whole]
        if M == 1 or one.kind not in SUMS or not subject.each_microbatch(one) or not axes:
            return None
        along = " and ".join(axes)
        fix = (
            f"make {along} manual around the loop over microbatches and sum once after it "
            f"(sharding_rules/mesh.py: MANUAL), or cut parameters along it: rules.params"
        )
        return f"gradients are summed over {along} in each of {M} microbatches ({one.kind} over {' and '.join(one.axes)})", fix

    for (one, text, fix), bytes in _grouped(subject, inside):
        yield Finding("microbatch-reduction", bytes, one, text, fix)


def global_kernels(subject: Subject) -> Iterator[Finding]:
    """A kernel whose operands have the whole batch, or all heads: under plain jit XLA gathers a custom call's operands."""
    (B, _), (b, s) = subject.batch, subject.local_batch
    sizes = {axis: a.shape[dim] for a in subject.params for dim, axis in enumerate(subject.logical(a)) if axis}
    N, H = sizes.get("heads", 0), sizes.get("head_dim", 0)
    cut = subject.rules is not None and subject.ways(axes_of(subject.rules.activations.get("heads"))) > 1
    for target, shapes, where in subject.report.kernels:
        held = [array for shape in shapes for array in arrays(shape) if len(array.dims) > 2 and s and s in array.dims]
        batch = [array for array in held if b < B == array.dims[0]]
        heads = [array for array in held if cut and N and _left(array.dims, s, H).count(N)]
        for found, row in ((batch, "batch"), (heads, "heads")):
            if found:
                text = f"{target} runs on {', '.join(map(str, found))}: the whole {row}, which rules.activations[{row!r}] cuts"
                fix = f"call it on local shards: shard.shard_map(kernel, in_specs, out_specs) at {where.source or where.part}"
                yield Finding("global-kernel", sum(array.bytes for array in found), where, text, fix)


def _left(dims: tuple[int, ...], *known: int) -> list[int]:
    left = list(dims[1:])
    for size in known:
        if size in left:
            left.remove(size)
    return left


def idle_axes(subject: Subject) -> Iterator[Finding]:
    """A mesh axis along which all devices do the same."""
    report = subject.report
    for axis, n in report.mesh.items():
        cut = [a for a in report.arguments if axis in a.axes]
        works = any(axis in one.axes and one.payload >= SCALAR and (one.kind in (*SUMS, *_MOVES)) for one in report.collectives)
        if n == 1 or works or any(a.kind == "batch" for a in cut) or (cut and not subject.batch[0]):
            continue
        does = f"only stores ({_names(cut)}): all devices along it compute the same" if cut else "cuts nothing"
        name = subject.rules.name if subject.rules else "of yours"
        neutral = "give {axis} one device, or name it in rules {rules!r}: in activations['batch'], or in rows of params and activations"
        fix = subject.vocabulary.fix("idle-axis", neutral, axis=axis, rules=name)
        yield Finding("idle-axis", report.memory.arguments * (n - 1) // n, Location(), f"mesh axis {axis} ({n}) {does}", fix)


def placement(subject: Subject) -> Iterator[Finding]:
    """Groups along an axis that span more NVLink domains than they need, and tensor groups that span any two."""
    report = subject.report
    if report.target not in TARGETS:
        return
    node, inner = TARGETS[report.target].node, 1
    for axis, n in reversed(report.mesh.items()):
        least = math.ceil(n * inner / max(inner, node))
        spans = report.axis_nodes.get(axis, 1)
        bytes = int(sum(one.times * one.wire for one in report.select(axis=axis) if one.nodes > 1))
        inner *= n
        if spans > least:
            text = f"groups of {n} along {axis} span {spans} nodes; {least} would hold them"
            fix = "order the devices by node, innermost mesh axis fastest: sharding_rules.make_mesh does"
            yield Finding("device-order", bytes, Location(), text, fix)
        elif axis == subject.vocabulary.tensor_axis and spans > 1:
            text = f"{axis}={n} leaves its node of {node}: each matmul pair waits for the network between nodes"
            neutral = "at most {node} devices along {axis}; give the rest to an axis that shards the batch"
            fix = subject.vocabulary.fix("leaves-nvlink", neutral, node=node, axis=axis)
            yield Finding("leaves-nvlink", bytes, Location(), text, fix)


def exposed(subject: Subject) -> Iterator[Finding]:
    """Reductions between nodes with no matmul between their start and their done, where they take a tenth of the predicted step."""
    report = subject.report
    if report.timeline is None or report.timeline.step <= 0:
        return
    spans = {span.name: span for span in report.timeline.spans if span.stream == "network"}
    for one in report.collectives:
        span = spans.get(one.name)
        if span is None or one.kind not in SUMS or one.nodes == 1 or one.flops_hidden_behind:
            continue
        share = span.duration * one.times / report.timeline.step
        if share >= _LONG:
            text = f"{one.kind} over {' and '.join(one.axes)} takes {share:.0%} of the predicted step with no matmul to hide behind"
            neutral = "more work per reduction (a larger batch, fewer sums), or a smaller mesh axis between nodes"
            fix = subject.vocabulary.fix("exposed-reduction", neutral)
            yield Finding("exposed-reduction", int(one.times * one.wire), one.where, text, fix, "notice")


CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    reshards, rematerializations, unknown_loops, dead_rules, replicated, gathered_twice, wide_collectives, microbatch_reductions,
    global_kernels, idle_axes, placement, exposed, *lint_reductions.CHECKS, *lint_pipeline.CHECKS,
)  # fmt: skip


def _grouped(
    subject: Subject, check: Callable[[Subject, Collective, Any], tuple[str, str] | None]
) -> Iterator[tuple[tuple[Location, str, str], int]]:
    """What `check` says of every array of every collective, the same said of several arrays once, and only of many bytes."""
    total: dict[Hashable, float] = {}
    for one, array, bytes in subject.pieces():
        if said := check(subject, one, array):
            key = (one.where, *said)
            total[key] = total.get(key, 0) + bytes
    for key, bytes in total.items():
        if bytes >= subject.large:
            yield key, int(bytes)  # pyright: ignore[reportReturnType]


def _names(arguments: Iterable[Argument]) -> str:
    """At most three of them by their own names."""
    names = list(dict.fromkeys(map(short, arguments)))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
