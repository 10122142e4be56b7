"""What to say where XLA ended its process: the check that failed, the operation and line of the
program, the likely cause, and a fix.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from sharding_rules.lab.provenance import INSTALLED, read
from sharding_rules.lab.report import Location, location_text
from sharding_rules.lab.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class _Cause:
    name: str
    """A key of Vocabulary.fixes."""
    words: str
    """A pattern of the log."""
    text: str
    fix: str


_CAUSES = (
    _Cause(
        "abort-lookup",
        r"partition_group_list|ExpandDeviceGroups",
        "XLA cannot partition a lookup in a sharded table, or the gradient of one, in a region "
        "that is manual over other mesh axes (jax.shard_map with axis_names): embedding[tokens], "
        "and a cross entropy that picks the label's logit",
        "replicate the table first (jax.lax.with_sharding_constraint), or look it up inside "
        "jax.shard_map: each device takes the rows that it holds, zeros for the others, and a psum "
        "over the axis that shards the rows adds them up",
    ),
    _Cause(
        "abort-manual",
        r"IsManual|manual_subgroup|ManualSubgroup",
        (
            "XLA cannot partition an operation in a region that is manual over some of the mesh "
            "axes (jax.shard_map with axis_names)"
        ),
        (
            "constrain the operands of the operation (jax.lax.with_sharding_constraint), or make "
            "the region manual over all mesh axes"
        ),
    ),
    _Cause(
        "abort-memory",
        r"\AXLA's process ended with SIGKILL",
        "the system killed the compiler, most likely because this machine ran out of memory",
        "compile fewer programs at once, or on a machine with more memory",
    ),
)
_HANDLER = re.compile(r"::Handle([A-Z]\w+)\(\)")
_WARNED = re.compile(r"HLO operation %[\w.\-]+ = \S+ ([\w\-]+)\(")
_FAILED = re.compile(r"^F\d{4} \S+ +\d+ (\S+)\] (.*)$")
_MOST = 3
"""Places that are listed."""


def explain_abort(
    name: str, ended: str, log: Sequence[str], program: str, vocabulary: Vocabulary
) -> str:
    """The whole message. The operation comes from XLA's stack trace, its line from the program.

    Args:
      name: of the program.
      ended: how the process ended: "XLA's process ended with SIGABRT".
      log: what XLA wrote before.
      program: the lowered program's text with its locations: `lowered.as_text(debug_info=True)`.
    """
    failed = next(
        (
            f": {match[2].strip()} ({match[1]})"
            for line in reversed(log)
            if (match := _FAILED.match(line))
        ),
        "",
    )
    lines = [f"{ended} while it compiled {name}{failed}"]
    if operation := _operation(log):
        places = list(dict.fromkeys(map(location_text, _locations(program, operation, vocabulary))))
        more = f" or {len(places) - _MOST} others" if len(places) > _MOST else ""
        lines.append(
            f"  - it was partitioning: {operation}"
            + (f" in {', or in '.join(places[:_MOST])}{more}" if places else "")
        )
    text = "\n".join([ended, *log])
    for cause in (cause for cause in _CAUSES if re.search(cause.words, text)):
        lines += [
            f"  - likely cause: {cause.text}",
            f"  - fix: {vocabulary.fix(cause.name, cause.fix)}",
        ]
        break
    else:
        lines += [f"  - XLA's log: {line}" for line in log[:_MOST]]
        lines.append(
            "  - this cause is not known; constrain the arrays around that operation "
            "(jax.lax.with_sharding_constraint)"
        )
    return "\n".join(lines)


def _operation(log: Iterable[str]) -> str:
    """The HLO opcode that the partitioner was at: from the innermost handler in the stack trace,
    else from its last warning.
    """
    warned = ""
    for line in log:
        if match := _HANDLER.search(line):
            return re.sub(r"(?<!^)(?=[A-Z])", "-", match[1]).lower()
        if match := _WARNED.search(line):
            warned = match[1]
    return warned


def _locations(program: str, operation: str, vocabulary: Vocabulary) -> Iterator[Location]:
    """Where the program has the operation, in its order. JAX names a location after its scopes and
    the primitive: jvp(embed)/gather.
    """
    table = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", program, re.MULTILINE))
    primitive = operation.replace("-", "_")
    for text in table.values():
        if not (match := re.match(r'"([^"]*)"\((#loc\d+)\)$', text)) or "/" not in match[1]:
            continue
        if re.match(rf"{primitive}(?![a-z0-9])", match[1].rsplit("/", 1)[1].replace("-", "_")):
            location = read(match[1], vocabulary)
            sources = [
                file
                for file in _files(table, match[2])
                if not any(folder in file for folder in INSTALLED)
            ]
            yield dataclasses.replace(
                location,
                source="/".join(sources[0].split("/")[-2:]) if sources else "",
                op=operation,
            )


def _files(table: dict[str, str], location: str) -> Iterator[str]:
    """file:line of a location, innermost first: those of the callee before those of the call."""
    text = table.get(location, "")
    if match := re.match(r'"([^"]+)":(\d+):', text):
        yield f"{match[1]}:{match[2]}"
    else:
        for inner in re.findall(r"#loc\d+", text):
            yield from _files(table, inner)
