"""From a jitted function and the shapes of its arguments to a Report, without a device."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sharding_rules.lab import hlo
from sharding_rules.lab.aborts import explain_abort
from sharding_rules.lab.assembler import gpu_in_use, unassembled
from sharding_rules.lab.child import Aborted, compile_in_child, server
from sharding_rules.lab.host import host_copies
from sharding_rules.lab.ledger import (
    collectives,
    conditionals,
    copies,
    flops_by_phase,
    flops_by_stage,
    kernels,
)
from sharding_rules.lab.memory import memory
from sharding_rules.lab.origins import used_in_part, with_origins
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.rates import SUSTAINED
from sharding_rules.lab.report import Argument, LabError, Report, Slot, packed
from sharding_rules.lab.targets import TARGETS, request_of
from sharding_rules.lab.timeline import estimates, in_parallel, priced, replay
from sharding_rules.lab.vocabulary import NEUTRAL, Vocabulary
from sharding_rules.mesh import node_of
from sharding_rules.rules import axes_of
from sharding_rules.scopes import EXTRA_ROUND

PROBABILITIES: Mapping[str, float] = {EXTRA_ROUND: 0.0}
"""By named scope, the probabilities of conditionals that the lab assumes where nobody says them.

Routing is balanced: no further round of an exchange of tokens runs.
"""

# The files that a cached report depends on: all but those that only read reports.
_MAKERS = (
    "compile", "groups", "hlo", "host", "ledger", "lineage", "memory", "origins", "provenance",
    "prices", "rates", "report", "targets", "ticks",
    "timeline", "vocabulary",
)  # fmt: skip

# Words in the path of an argument, by its class.
_KINDS = {
    "moments": {"mu", "nu", "opt_state", "optimizer", "moments", "m", "v"},
    "params": {"params", "weights", "parameters", "w"},
    "batch": {"batch", "tokens", "labels", "inputs", "x"},
}

# In a warning of XLA's partitioner, with or without a capital I.
_REMATERIALIZATION = "nvoluntary full rematerialization"

# How lines of XLA's log begin.
_LOGGED = re.compile(r"[IWEF]\d{4} |WARNING: All log messages before absl")

# Held while a process's standard error, and JAX's settings, are those of one compilation.
_ONE_AT_A_TIME = threading.Lock()


def kind_of_argument(name: str) -> str:
    """Returns params, moments, batch or other, from the path of an argument.

    state['params']['embedding'] holds parameters.
    """
    # The outermost word that is known: batch['weights'] is no parameter, params['v'] no moment.
    for word in re.findall(r"\w+", name):
        for kind, words in _KINDS.items():
            if word.lower() in words:
                return kind
    return "other"


@dataclasses.dataclass(frozen=True)
class _Request:
    """The caller's description of a program, which its report repeats."""

    name: str
    target: str = ""
    """Name of the target that the mesh's devices are; empty for others."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    slots: tuple[Slot, ...] = ()
    probabilities: dict[str, float] = dataclasses.field(default_factory=lambda: dict(PROBABILITIES))
    vocabulary: Vocabulary = NEUTRAL
    model_flops: float = 0.0
    attention_flops: float = 0.0
    segments: dict[str, int] = dataclasses.field(default_factory=dict)


def compile_report(
    step: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    name: str = "",
    options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    kind_of: Callable[[str], str] = kind_of_argument,
    slots: Sequence[Slot] = (),
    probabilities: Mapping[str, float] | None = None,
    vocabulary: Vocabulary = NEUTRAL,
    kwargs: Mapping[str, Any] | None = None,
    model_flops: float = 0.0,
    attention_flops: float = 0.0,
    segments: Mapping[str, int] | None = None,
) -> Report:
    """Compiles `step` for the devices of `mesh`, which need not exist, and reports the result.

    Args:
      step: a function, jitted or not. Static arguments are named as always:
        `jax.jit(step, static_argnames="mode")`.
      args: its arguments; `jax.ShapeDtypeStruct`s with shardings are enough.
      mesh: the devices.
      name: what the report is called; default: the function's name.
      options: XLA compiler options, such as the flags of `sharding_rules.lab.flags`.
      cache: a directory that keeps reports by program, options and versions. JAX's own cache cannot
        serve absent devices.
      kind_of: the class of an argument (params, moments, batch, other) from its path.
      slots: how often conditionals run; what is in others is counted as if it always ran.
      probabilities: by the named scope directly around a conditional, how likely its branch with
        the most FLOPs runs. Collectives, FLOPs and times count that often; memory counts in full.
        They go before those of PROBABILITIES.
      vocabulary: the names that the program's trainer uses; the report keeps it, for lint and for
        what shows reports.
      kwargs: its keyword arguments.
      model_flops: FLOPs that the model needs of one device in a step, for the predicted MFU and
        `Report.model_ratio`.
      attention_flops: those of `model_flops` that are attention's.
      segments: layers of each segment of the model, by the named scope around them, for
        `by_segment` and lint.

    Raises LabError where XLA cannot compile it, slots differ in their stages, or a probability is
    not between 0 and 1; what tracing raises passes through.
    """
    if len({len(slot.stages) for slot in slots}) > 1:
        raise LabError(
            "slots with different numbers of stages: "
            f"{', '.join(f'{s.scope} {len(s.stages)}' for s in slots)}"
        )
    device = mesh.devices.flat[0]
    if request_of(device):
        server()  # gets ready while the program is traced
    kwargs = dict(kwargs or {})
    lowered, names = _lower(_jitted(step), args, kwargs)
    request = _Request(
        name=name or _name(step),
        target=_target_name(device.device_kind),
        versions={"jax": jax.__version__, "jaxlib": version("jaxlib")},
        options=dict(options or {}),
        slots=tuple(slots),
        probabilities=_checked_probabilities(probabilities),
        vocabulary=vocabulary,
        model_flops=float(model_flops),
        attention_flops=float(attention_flops),
        segments=dict(segments or {}),
    )
    arguments = _arguments(step, args, kwargs, kind_of, names)
    if not cache:
        return _compile(lowered, arguments, mesh, request)

    path = Path(cache) / f"{_key(lowered, mesh, request, arguments)}.json"
    # A cached report may be absent, torn, or of another version of the lab.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Report.from_json(path.read_text(encoding="utf-8"))
    report = _compile(lowered, arguments, mesh, request)
    _write_cached(report, path)
    return report


def compile_module(
    step: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    options: Mapping[str, Any] | None = None,
    slots: Sequence[Slot] = (),
    probabilities: Mapping[str, float] | None = None,
) -> hlo.Module:
    """Returns the compiled and scheduled program itself, for the queries of `structure`.

    It is not cached. Arguments, and errors, are those of `compile_report`.
    """
    lowered, _ = _lower(_jitted(step), args, {})
    request = _Request(
        name=_name(step),
        options=dict(options or {}),
        slots=tuple(slots),
        probabilities=_checked_probabilities(probabilities),
    )
    text = _run_compiler(lowered, mesh, request).text
    return hlo.parse(text, request.slots, request.probabilities)


def _checked_probabilities(probabilities: Mapping[str, float] | None) -> dict[str, float]:
    """Returns these probabilities before those that the lab assumes."""
    for scope, probability in (probabilities or {}).items():
        if not 0 <= probability <= 1:
            raise LabError(
                f"the probability of {scope!r} is {probability}; it must be between 0 and 1"
            )
    return {**PROBABILITIES, **(probabilities or {})}


def _jitted(step: Callable[..., Any]) -> Any:
    return step if hasattr(step, "lower") else jax.jit(step)


def _name(step: Callable[..., Any]) -> str:
    return getattr(step, "__name__", "step")


def _target_name(device_kind: str) -> str:
    for target in TARGETS.values():
        if target.description == device_kind:
            return target.name
    return ""


def _write_cached(report: Report, path: Path) -> None:
    with contextlib.suppress(OSError):  # without a cache, reports are compiled again
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8"
        ) as part:
            part.write(report.to_json())
        Path(part.name).replace(path)


def _lower(
    jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[str] | None]:
    """Returns the lowered program and the names of its parameters.

    The names are None where the jitted function does not tell them.
    """
    if not hasattr(jitted, "trace"):
        return jitted.lower(*args, **kwargs), None
    traced = jitted.trace(*args, **kwargs)
    return traced.lower(), getattr(traced.jaxpr.jaxpr.debug_info, "arg_names", None)


# Arguments.


def _arguments(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    kind_of: Callable[[str], str],
    names: Sequence[str] | None = None,
) -> tuple[Argument, ...]:
    """Returns the arrays among the arguments.

    They are named as JAX names the parameters of the program: params['w'], args[0], rest['z'].

    names: those of the parameters that the program has, which leaves out static arguments; None:
    all.
    """
    try:
        bound = inspect.signature(step).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, as some callables of C++ have none
        bound = {"args": args, **kwargs}
    arguments = []
    for parameter, value in bound.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            name = parameter + jax.tree_util.keystr(path)
            if names is None or name in names:
                arguments.append(_argument(name, kind_of(name), leaf))
    return tuple(arguments)


def _argument(name: str, kind: str, leaf: Any) -> Argument:
    shape = np.shape(leaf)
    dtype = jax.dtypes.result_type(leaf)
    sharding = getattr(leaf, "sharding", None)
    local_shape = shape
    axes = ()
    if isinstance(sharding, NamedSharding):
        local_shape = sharding.shard_shape(shape)
        axis_names = [axis for entry in sharding.spec for axis in axes_of(entry)]
        axes = tuple(axis for axis in axis_names if sharding.mesh.shape[axis] > 1)
    return Argument(
        name=name,
        kind=kind,
        shape=tuple(shape),
        dtype=str(dtype),
        bytes=math.prod(local_shape) * dtype.itemsize,
        axes=axes,
    )


# The key of a cached report.


def _key(lowered: Any, mesh: Mesh, request: _Request, arguments: tuple[Argument, ...]) -> str:
    """Returns a digest of everything that a report depends on.

    That is the program and its scopes, devices, options, versions, and the lab.

    The stack traces in the program are left out, because they contain the caller's lines. A cached
    report therefore shows the source lines of the run that made it.
    """
    devices = [(device.id, node_of(device)) for device in mesh.devices.flat]
    topology = request_of(mesh.devices.flat[0])
    platform = mesh.devices.flat[0].client.platform_version
    environment = [os.environ.get(name, "") for name in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")]
    digest = hashlib.sha256()
    for part in (
        lowered.as_text(),
        _scopes(lowered),
        arguments,
        dict(mesh.shape),
        devices,
        topology,
        platform,
        request,
        environment,
    ):
        digest.update(repr(part).encode())
    for name in _MAKERS:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:32]


def _scopes(lowered: Any) -> list[str]:
    """Returns the path of scopes of each operation, in the program's order.

    MLIR's locations also hold the stack, which is left out.
    """
    text = lowered.as_text(debug_info=True)
    # #loc7 = loc("jit(step)/mlp"(#loc3)), of which only #loc7 stands in the operation's line.
    definitions = re.findall(r'^(#loc\d+) = loc\("(.*)"(?:\((#loc\d+)\))?\)$', text, re.MULTILINE)
    names = {location: (name, inner) for location, name, inner in definitions}

    def scope(location: str) -> str:
        name, inner = names.get(location, ("", ""))
        return f"{name} {scope(inner)}" if inner else name

    operations = re.findall(r"^ .*loc\((#loc\d+)\)$", text, re.MULTILINE)
    return [scope(location) for location in operations]


# Compiling.


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """What XLA returns, logs and dumps."""

    text: str
    stats: Any
    """The result of `compiled.memory_analysis()`, or the fields of it that a report needs."""
    log: list[str]
    assignment: str
    """XLA's buffer assignment."""
    live_ranges: str
    seconds: float


def _compile(
    lowered: Any, arguments: tuple[Argument, ...], mesh: Mesh, request: _Request
) -> Report:
    compiled = _run_compiler(lowered, mesh, request)
    module = hlo.parse(compiled.text, request.slots, request.probabilities)
    provenance = Provenance(module, request.vocabulary)
    sent = with_origins(module, arguments, collectives(module, provenance, mesh))

    # Predictions, for targets that the lab knows.
    target = TARGETS.get(request.target)
    timeline = None
    sustained = None
    model_us = 0.0
    if target:
        parallel = in_parallel(request.options)
        timeline = replay(module, provenance, sent, target, parallel=parallel)
        sustained = replay(
            *(module, provenance, sent, target), parallel=parallel, rates=SUSTAINED, n_spans=0
        )
        sent = priced(sent, timeline, target)
        model_us = timeline.model_us(request.model_flops, request.attention_flops)

    return Report(
        name=request.name,
        target=request.target,
        hbm=target.usable if target else 0,
        mesh={axis: int(size) for axis, size in mesh.shape.items()},
        axis_nodes=_axis_nodes(mesh),
        collectives=sent,
        memory=memory(
            module,
            provenance,
            compiled.stats,
            compiled.assignment,
            compiled.live_ranges,
            arguments,
        ),
        arguments=used_in_part(module, arguments),
        flops=flops_by_phase(module, provenance),
        kernels=kernels(module, provenance),
        warnings=(
            *(line for line in compiled.log if _REMATERIALIZATION in line),
            *_unknown_loops(module),
            *_useless_slots(module),
            *_useless_probabilities(module),
        ),
        timeline=timeline,
        instructions=sum(map(len, module.computations.values())),
        text_bytes=len(compiled.text),
        compile_seconds=compiled.seconds,
        versions=request.versions,
        options=request.options,
        slots=request.slots,
        conditionals=conditionals(module),
        tick_loops=next((window.loops for window in module.windows.values()), ()),
        stage_flops=flops_by_stage(module),
        copies=copies(module, provenance),
        host_copies=host_copies(module, provenance, target),
        model_flops=request.model_flops,
        attention_flops=request.attention_flops,
        model_us=model_us,
        sustained=sustained,
        peak_flops=target.flops["bf16"] if target else 0.0,
        vocabulary=request.vocabulary,
        segments=request.segments,
        program=packed(compiled.text) if target else "",
    )


def _run_compiler(lowered: Any, mesh: Mesh, request: _Request) -> _Compiled:
    device = mesh.devices.flat[0]
    with tempfile.TemporaryDirectory(prefix="sharding_lab_") as name:
        folder = Path(name)
        dump = folder / "dump"
        dump.mkdir()
        options = {
            **estimates(TARGETS.get(request.target)),
            **unassembled(device, f"{folder}/cuda"),
            "xla_dump_to": str(dump),
            **request.options,
        }
        started_at = time.monotonic()
        try:
            topology = request_of(device)
            if topology and not gpu_in_use():
                text, stats, log = compile_in_child(lowered, options, topology, folder)
            else:
                text, stats, log = _compile_here(lowered, options)
        except Aborted as error:
            program = lowered.as_text(debug_info=True)
            raise LabError(
                explain_abort(request.name, str(error), error.log, program, request.vocabulary)
            ) from error
        except (LabError, jax.errors.JaxRuntimeError) as error:
            raise LabError(f"XLA cannot compile {request.name}: {error}") from error
        seconds = time.monotonic() - started_at
        return _Compiled(
            text=text,
            stats=stats,
            log=log,
            assignment=_read_dump(dump, "buffer-assignment"),
            live_ranges=_read_dump(dump, "live-range"),
            seconds=seconds,
        )


def _read_dump(folder: Path, kind: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in folder.glob(f"*-{kind}.txt"))


def _compile_here(lowered: Any, options: dict[str, Any]) -> tuple[str, Any, list[str]]:
    """Returns what `compile_in_child` does, but compiles in this process.

    This is for real devices, and where XLA tunes kernels on a real GPU.
    """
    with _ONE_AT_A_TIME, _standard_error() as log, _uncached():
        compiled = lowered.compile(compiler_options=options)
    return compiled.as_text(), compiled.memory_analysis(), log


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Keeps what is compiled inside the block out of JAX's cache.

    JAX would write it and then fail to read it.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    old_value = jax.config.values[name]
    jax.config.update(name, 1e9)
    try:
        yield
    finally:
        jax.config.update(name, old_value)


@contextlib.contextmanager
def _standard_error() -> Iterator[list[str]]:
    """Collects the lines that C++ code logs inside the block.

    They are printed if the block raises, other output always.
    """
    lines: list[str] = []
    sys.stderr.flush()
    failed = True
    with tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
            for line in lines:
                if failed or not _LOGGED.match(line):
                    print(line, file=sys.stderr)


def _unknown_loops(module: hlo.Module) -> Iterator[str]:
    for instruction in module.by_name.values():
        if instruction.opcode == "while" and instruction.trips is None:
            yield (
                f"{instruction.name}: XLA does not know how often this loop runs; what is in it is "
                "counted once"
            )


def _useless_slots(module: hlo.Module) -> Iterator[str]:
    """Yields a warning for each slot that fits no conditional, or a loop of another length."""
    unused = {slot.scope for slot in module.slots}
    for name, window in module.windows.items():
        slot = module.named_slot(module.by_name[name])
        if slot is None:
            continue
        unused.discard(slot.scope)
        if sum(window.loops) != slot.trips:
            yield (
                f"slot {slot.scope!r} has {slot.trips} trips, and the loop of {name} has "
                f"{window.end - window.begin}"
            )
    for scope in sorted(unused):
        yield f"slot {scope!r} fits no conditional in a loop, and counts nothing"


def _useless_probabilities(module: hlo.Module) -> Iterator[str]:
    """Yields a warning for each probability, but those that the lab assumes, without effect."""
    used = {conditional.scope for conditional in conditionals(module)}
    for scope in sorted(module.probabilities.keys() - PROBABILITIES.keys() - used):
        yield f"probability {scope!r} fits no conditional, and counts nothing"


def _axis_nodes(mesh: Mesh) -> dict[str, int]:
    """Returns the nodes (processes) that the devices along each axis span, the most of all lines.

    A line is the devices along one axis, with the other coordinates fixed.
    """
    node = {device: node_of(device) for device in mesh.devices.flat}
    spans = {}
    for dim, axis in enumerate(mesh.axis_names):
        lines = mesh.devices.swapaxes(dim, -1).reshape(-1, mesh.devices.shape[dim])
        spans[axis] = max(len({node[device] for device in line}) for line in lines)
    return spans
