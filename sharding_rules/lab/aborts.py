"""Explains why XLA ended its process.

The check that failed, the operation and line of the program, the likely cause, and a fix.
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
    pattern: str
    """It is searched for in the log, which begins with how the process ended."""
    text: str
    fix: str


_CAUSES = (
    _Cause(
        name="abort-lookup",
        pattern=r"partition_group_list|ExpandDeviceGroups",
        text=(
            "XLA cannot partition a lookup in a sharded table, or the gradient of one, in a region "
            "that is manual over other mesh axes (jax.shard_map with axis_names): "
            "embedding[tokens], and a cross entropy that picks the label's logit"
        ),
        fix=(
            "replicate the table first (jax.lax.with_sharding_constraint), or look it up inside "
            "jax.shard_map: each device takes the rows that it holds, zeros for the others, and a "
            "psum over the axis that shards the rows adds them up"
        ),
    ),
    _Cause(
        name="abort-manual",
        pattern=r"IsManual|manual_subgroup|ManualSubgroup",
        text=(
            "XLA cannot partition an operation in a region that is manual over some of the mesh "
            "axes (jax.shard_map with axis_names)"
        ),
        fix=(
            "constrain the operands of the operation (jax.lax.with_sharding_constraint), or make "
            "the region manual over all mesh axes"
        ),
    ),
    _Cause(
        name="abort-memory",
        pattern=r"\AXLA's process ended with SIGKILL",
        text="the system killed the compiler, most likely because this machine ran out of memory",
        fix="compile fewer programs at once, or on a machine with more memory",
    ),
)

# Lines of the log:
# @ 0x7f... xla::spmd::SpmdPartitioningVisitor::HandleDynamicSlice()
_HANDLER = re.compile(r"::Handle([A-Z]\w+)\(\)")
# ... for HLO operation %gather.3 = f32[8,4]{1,0} gather(...)
_WARNED = re.compile(r"HLO operation %[\w.\-]+ = \S+ ([\w\-]+)\(")
# F0000 00:00:1700000000.000000   12345 spmd_partitioner.cc:123] Check failed: ...
_FAILED = re.compile(r"^F\d{4} \S+ +\d+ (\S+)\] (.*)$")

# Lines of the lowered program:
# #loc7 = loc("jit(step)/jvp(embed)/gather"(#loc3))
_LOCATION = re.compile(r"^(#loc\d+) = loc\((.*)\)$", re.MULTILINE)
_NAMED_LOCATION = re.compile(r'"([^"]*)"\((#loc\d+)\)$')
# "/home/me/train.py":107:4 to :12
_FILE_LOCATION = re.compile(r'"([^"]+)":(\d+):')

# Places of the program, or lines of the log, that are listed.
_MAX_LISTED = 3


def explain_abort(
    name: str, ended: str, log: Sequence[str], program: str, vocabulary: Vocabulary
) -> str:
    """Returns the whole message.

    The operation comes from XLA's stack trace, its line from the program.

    Args:
      name: of the program.
      ended: how the process ended: "XLA's process ended with SIGABRT".
      log: what XLA wrote before.
      program: the lowered program's text with its locations: `lowered.as_text(debug_info=True)`.
      vocabulary: the names that the program's trainer uses.
    """
    lines = [f"{ended} while it compiled {name}{_failed_check(log)}"]
    operation = _operation(log)
    if operation:
        lines.append(
            f"  - it was partitioning: {operation}{_places(program, operation, vocabulary)}"
        )
    text = "\n".join([ended, *log])
    for cause in _CAUSES:
        if re.search(cause.pattern, text):
            lines.append(f"  - likely cause: {cause.text}")
            lines.append(f"  - fix: {vocabulary.fix(cause.name, cause.fix)}")
            return "\n".join(lines)
    lines += [f"  - XLA's log: {line}" for line in log[:_MAX_LISTED]]
    lines.append(
        "  - this cause is not known; constrain the arrays around that operation "
        "(jax.lax.with_sharding_constraint)"
    )
    return "\n".join(lines)


def _failed_check(log: Sequence[str]) -> str:
    """Returns ": Check failed: ... (file:line)" of the last check in the log; "" if none failed."""
    for line in reversed(log):
        match = _FAILED.match(line)
        if match:
            source, message = match.groups()
            return f": {message.strip()} ({source})"
    return ""


def _operation(log: Iterable[str]) -> str:
    """Returns the HLO opcode that the partitioner was at.

    It is that of the innermost handler in the stack trace, else of the partitioner's last warning.
    """
    operation = ""
    for line in log:
        match = _HANDLER.search(line)
        if match:
            # dynamic-slice for HandleDynamicSlice
            return re.sub(r"(?<!^)(?=[A-Z])", "-", match[1]).lower()
        match = _WARNED.search(line)
        if match:
            operation = match[1]
    return operation


def _places(program: str, operation: str, vocabulary: Vocabulary) -> str:
    """Returns the places of an operation in words: " in a, or in b or 2 others"."""
    locations = _locations(program, operation, vocabulary)
    location_texts = list(dict.fromkeys(location_text(location) for location in locations))
    if not location_texts:
        return ""
    text = f" in {', or in '.join(location_texts[:_MAX_LISTED])}"
    if len(location_texts) > _MAX_LISTED:
        text += f" or {len(location_texts) - _MAX_LISTED} others"
    return text


def _locations(program: str, operation: str, vocabulary: Vocabulary) -> Iterator[Location]:
    """Yields the places where the program has the operation, in its order.

    JAX names a location after its scopes and the primitive: jvp(embed)/gather.
    """
    table: dict[str, str] = dict(_LOCATION.findall(program))
    primitive = re.compile(rf"{operation.replace('-', '_')}(?![a-z0-9])")
    for text in table.values():
        match = _NAMED_LOCATION.match(text)
        if not match or "/" not in match[1]:
            continue
        path, call_site = match.groups()
        if not primitive.match(path.rsplit("/", 1)[1].replace("-", "_")):
            continue
        source = ""
        for file in _files(table, call_site):
            if not any(folder in file for folder in INSTALLED):
                source = "/".join(file.split("/")[-2:])
                break
        yield dataclasses.replace(read(path, vocabulary), source=source, op=operation)


def _files(table: dict[str, str], location: str) -> Iterator[str]:
    """Yields file:line of a location, innermost first: callees before their callers."""
    text = table.get(location, "")
    match = _FILE_LOCATION.match(text)
    if match:
        yield f"{match[1]}:{match[2]}"
        return
    for inner in re.findall(r"#loc\d+", text):
        yield from _files(table, inner)
