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
from sharding_rules.lab.ledger import collectives, copies, flops_by_phase, flops_by_stage, kernels
from sharding_rules.lab.memory import memory
from sharding_rules.lab.origins import used_in_part, with_origins
from sharding_rules.lab.prices import model_us
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.report import Argument, LabError, Report, Slot
from sharding_rules.lab.targets import TARGETS, request_of
from sharding_rules.lab.timeline import estimates, in_parallel, priced, replay
from sharding_rules.lab.vocabulary import NEUTRAL, Vocabulary
from sharding_rules.mesh import node_of
from sharding_rules.rules import axes_of

_MAKERS = (
    "compile", "groups", "hlo", "ledger", "lineage", "memory", "origins", "provenance", "prices",
    "report", "targets", "ticks",
    "timeline", "vocabulary",
)  # fmt: skip
"""The files that a kept report depends on: all but those that only read reports."""
_WARNING = "nvoluntary full rematerialization"
_ONE_AT_A_TIME = threading.Lock()
"""Held while a process's standard error, and JAX's settings, are those of one compilation."""
_LOGGED = re.compile(r"[IWEF]\d{4} |WARNING: All log messages before absl")


def kind_of_argument(name: str) -> str:
    """params, moments, batch or other, from the path of an argument: state['params']['embedding']
    holds parameters.
    """
    # The outermost word that is known: batch['weights'] is no parameter, params['v'] no moment.
    return next(
        (
            kind
            for word in re.findall(r"\w+", name)
            for kind, known in _KINDS.items()
            if word.lower() in known
        ),
        "other",
    )


_KINDS = {
    "moments": {"mu", "nu", "opt_state", "optimizer", "moments", "m", "v"},
    "params": {"params", "weights", "parameters", "w"},
    "batch": {"batch", "tokens", "labels", "inputs", "x"},
}


def compile_report(
    step: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    name: str = "",
    options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    kind_of: Callable[[str], str] = kind_of_argument,
    slots: Sequence[Slot] = (),
    vocabulary: Vocabulary = NEUTRAL,
    kwargs: Mapping[str, Any] | None = None,
    model_flops: float = 0.0,
    attention_flops: float = 0.0,
    segments: Mapping[str, int] | None = None,
) -> Report:
    """Compiles `step` for the devices of `mesh`, which need not exist, and reports what XLA made of
    it.

    Args:
      step: a function, jitted or not. Static arguments are named as always: `jax.jit(step,
      static_argnames="mode")`. args: its arguments; `jax.ShapeDtypeStruct`s with shardings are
      enough. kwargs: its keyword arguments. model_flops: FLOPs that the model needs of one device
      in a step, for the predicted MFU and `Report.model_ratio`. attention_flops: those of them that
      are attention's. segments: layers of each segment of the model, by the named scope around
      them, for `by_segment` and lint. name: what the report is called; default: the function's
      name. options: XLA compiler options, such as the flags of `sharding_rules.lab.flags`. cache: a
      directory that keeps reports by program, options and versions. JAX's own cache cannot serve
      absent devices. kind_of: the class of an argument (params, moments, batch, other) from its
      path. slots: how often conditionals run; what is in others is counted as if it always ran.
      vocabulary: the names that the program's trainer uses; the report keeps it, for lint and for
      what shows reports.

    Raises LabError where XLA cannot compile it, or slots differ in their stages; what tracing
    raises passes through.
    """
    if len({len(slot.stages) for slot in slots}) > 1:
        raise LabError(
            "slots with different numbers of stages: "
            f"{', '.join(f'{s.scope} {len(s.stages)}' for s in slots)}"
        )
    if request_of(mesh.devices.flat[0]):
        server()  # gets ready while the program is traced
    kwargs = dict(kwargs or {})
    lowered, names = _lower(step if hasattr(step, "lower") else jax.jit(step), args, kwargs)
    about = {
        "name": name or getattr(step, "__name__", "step"),
        "target": next(
            (t.name for t in TARGETS.values() if t.description == mesh.devices.flat[0].device_kind),
            "",
        ),
        "versions": {"jax": jax.__version__, "jaxlib": version("jaxlib")},
        "options": dict(options or {}),
        "slots": tuple(slots),
        "vocabulary": vocabulary,
        "model_flops": float(model_flops),
        "attention_flops": float(attention_flops),
        "segments": dict(segments or {}),
    }
    arguments = _arguments(step, args, kwargs, kind_of, names)
    kept = Path(cache) / f"{_key(lowered, mesh, about, arguments)}.json" if cache else None
    if kept:
        # absent, torn, or of another version of the lab
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return Report.from_json(kept.read_text(encoding="utf-8"))
    report = _compile(lowered, arguments, mesh, about)
    if kept:
        _keep(report, kept)
    return report


def _keep(report: Report, path: Path) -> None:
    with contextlib.suppress(OSError):  # without a cache, reports are compiled again
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8"
        ) as beside:
            beside.write(report.to_json())
        Path(beside.name).replace(path)


def _lower(
    jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[str] | None]:
    """The lowered program, and the names of its parameters where the jitted function tells them."""
    if not hasattr(jitted, "trace"):
        return jitted.lower(*args, **kwargs), None
    traced = jitted.trace(*args, **kwargs)
    return traced.lower(), getattr(traced.jaxpr.jaxpr.debug_info, "arg_names", None)


def compile_module(
    step: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    options: Mapping[str, Any] | None = None,
    slots: Sequence[Slot] = (),
) -> hlo.Module:
    """Returns the compiled and scheduled program itself, for the queries of `structure`. It is not
    kept.

    Arguments, and errors, are those of `compile_report`.
    """
    lowered, _ = _lower(step if hasattr(step, "lower") else jax.jit(step), args, {})
    about = {
        "name": getattr(step, "__name__", "step"),
        "target": "",
        "options": dict(options or {}),
        "vocabulary": NEUTRAL,
    }
    return hlo.parse(_compiled(lowered, mesh, about).text, tuple(slots))


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """What XLA returns, logs and dumps."""

    text: str
    stats: Any
    log: list[str]
    assignment: str
    live: str
    seconds: float


def _compiled(lowered: Any, mesh: Mesh, about: Mapping[str, Any]) -> _Compiled:
    device = mesh.devices.flat[0]
    with tempfile.TemporaryDirectory(prefix="sharding_lab_") as folder:
        asked = estimates(TARGETS.get(about["target"])) | unassembled(device, f"{folder}/cuda")
        options = {**asked, "xla_dump_to": f"{folder}/dump", **about["options"]}
        (Path(folder) / "dump").mkdir()
        begin = time.monotonic()
        try:
            if (request := request_of(device)) and not gpu_in_use():
                text, stats, log = compile_in_child(lowered, options, request, Path(folder))
            else:
                text, stats, log = _compile_here(lowered, options)
        except Aborted as error:
            raise LabError(
                explain_abort(
                    about["name"],
                    str(error),
                    error.log,
                    lowered.as_text(debug_info=True),
                    about["vocabulary"],
                )
            ) from error
        except (LabError, jax.errors.JaxRuntimeError) as error:
            raise LabError(f"XLA cannot compile {about['name']}: {error}") from error
        seconds = time.monotonic() - begin
        kinds = ("buffer-assignment", "live-range")
        assignment, live = (
            "".join(
                path.read_text(encoding="utf-8") for path in Path(folder).glob(f"dump/*-{kind}.txt")
            )
            for kind in kinds
        )
    return _Compiled(text, stats, log, assignment, live, seconds)


def _compile(
    lowered: Any, arguments: tuple[Argument, ...], mesh: Mesh, about: dict[str, Any]
) -> Report:
    made = _compiled(lowered, mesh, about)
    module = hlo.parse(made.text, about["slots"])
    provenance = Provenance(module, about["vocabulary"])
    sent = with_origins(module, arguments, collectives(module, provenance, mesh))
    target = TARGETS.get(about["target"])
    line = (
        replay(module, provenance, sent, target, parallel=in_parallel(about["options"]))
        if target
        else None
    )
    return Report(
        **about,
        hbm=target.usable if target else 0,
        tick_loops=next((window.loops for window in module.windows.values()), ()),
        peak_flops=target.flops["bf16"] if target else 0.0,
        model_us=model_us(about["model_flops"], about["attention_flops"], target)
        if target
        else 0.0,
        mesh={axis: int(size) for axis, size in mesh.shape.items()},
        axis_nodes=_axis_nodes(mesh),
        collectives=priced(sent, line, target) if line and target else sent,
        memory=memory(module, provenance, made.stats, made.assignment, made.live, arguments),
        arguments=used_in_part(module, arguments),
        flops=flops_by_phase(module, provenance),
        stage_flops=flops_by_stage(module),
        copies=copies(module, provenance),
        kernels=kernels(module, provenance),
        warnings=(
            *(line for line in made.log if _WARNING in line),
            *_unknown_loops(module),
            *_useless_slots(module),
        ),
        timeline=line,
        instructions=sum(map(len, module.computations.values())),
        text_bytes=len(made.text),
        compile_seconds=made.seconds,
    )


def _compile_here(lowered: Any, options: dict[str, Any]) -> tuple[str, Any, list[str]]:
    """Returns what `compile_in_child` does, but compiles in this process: for real devices, and
    where XLA tunes kernels on a real GPU.
    """
    with _ONE_AT_A_TIME, _standard_error() as log, _unkept():
        compiled = lowered.compile(compiler_options=options)
    return compiled.as_text(), compiled.memory_analysis(), log


def _unknown_loops(module: hlo.Module) -> Iterator[str]:
    for one in module.by_name.values():
        if one.opcode == "while" and one.trips is None:
            yield (
                f"{one.name}: XLA does not know how often this loop runs; what is in it is counted "
                "once"
            )


def _useless_slots(module: hlo.Module) -> Iterator[str]:
    useless = {slot.scope for slot in module.slots}
    for name, window in module.windows.items():
        if slot := module.named_slot(module.by_name[name]):
            useless.discard(slot.scope)
            if sum(window.loops) != slot.trips:
                yield (
                    f"slot {slot.scope!r} has {slot.trips} trips, and the loop of {name} has "
                    f"{window.end - window.begin}"
                )
    yield from (
        f"slot {scope!r} fits no conditional in a loop, and counts nothing"
        for scope in sorted(useless)
    )


def _arguments(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    kind_of: Callable[[str], str],
    names: Sequence[str] | None = None,
) -> tuple[Argument, ...]:
    """The arrays among the arguments, named as JAX names the parameters of the program:
    params['w'], args[0], rest['z'].

    names: those of the parameters that the program has, which leaves out static arguments; None:
    all.
    """
    try:
        given = inspect.signature(step).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, as some callables of C++ have none
        given = {"args": args, **kwargs}
    arguments = []
    for parameter, value in given.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            name = parameter + jax.tree_util.keystr(path)
            if names is not None and name not in names:
                continue
            shape, dtype = np.shape(leaf), jax.dtypes.result_type(leaf)
            sharding = getattr(leaf, "sharding", None)
            local, axes = shape, ()
            if isinstance(sharding, NamedSharding):
                local = sharding.shard_shape(shape)
                axes = tuple(
                    axis
                    for entry in sharding.spec
                    for axis in axes_of(entry)
                    if sharding.mesh.shape[axis] > 1
                )
            arguments.append(
                Argument(
                    name,
                    kind_of(name),
                    tuple(shape),
                    str(dtype),
                    math.prod(local) * dtype.itemsize,
                    axes,
                )
            )
    return tuple(arguments)


def _axis_nodes(mesh: Mesh) -> dict[str, int]:
    """How many nodes (processes) the devices along each axis span, the other axes fixed: the most
    of all lines.
    """
    node = {device: node_of(device) for device in mesh.devices.flat}
    spans = {}
    for dim, axis in enumerate(mesh.axis_names):
        lines = mesh.devices.swapaxes(dim, -1).reshape(-1, mesh.devices.shape[dim])
        spans[axis] = max(len({node[device] for device in line}) for line in lines)
    return spans


def _key(lowered: Any, mesh: Mesh, about: dict[str, Any], arguments: tuple[Argument, ...]) -> str:
    """Returns a digest of everything that a report depends on: the program and its scopes, devices,
    options, versions, the lab.

    The stack traces in the program are left out, because they contain the caller's lines. A cached
    report therefore shows the source lines of the run that made it.
    """
    digest = hashlib.sha256()
    order = [(device.id, node_of(device)) for device in mesh.devices.flat]
    platform = mesh.devices.flat[0].client.platform_version
    environment = [os.environ.get(name, "") for name in ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL")]
    for part in (
        lowered.as_text(),
        _scopes(lowered),
        arguments,
        dict(mesh.shape),
        order,
        platform,
        sorted(about.items()),
        environment,
    ):
        digest.update(repr(part).encode())
    for name in _MAKERS:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:32]


def _scopes(lowered: Any) -> list[str]:
    """Returns the path of scopes of each operation, in the program's order, without the stack that
    MLIR's locations also hold.
    """
    text = lowered.as_text(debug_info=True)
    names = {
        at: (name, inside)
        for at, name, inside in re.findall(
            r'^(#loc\d+) = loc\("(.*)"(?:\((#loc\d+)\))?\)$', text, re.MULTILINE
        )
    }

    def scope(at: str) -> str:
        name, inside = names.get(at, ("", ""))
        return f"{name} {scope(inside)}" if inside else name

    return [scope(at) for at in re.findall(r"^ .*loc\((#loc\d+)\)$", text, re.MULTILINE)]


@contextlib.contextmanager
def _unkept() -> Iterator[None]:
    """Keeps what is compiled meanwhile out of JAX's cache, which would write it and then fail to
    read it.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, 1e9)
    try:
        yield
    finally:
        jax.config.update(name, before)


@contextlib.contextmanager
def _standard_error() -> Iterator[list[str]]:
    """Collects the lines that C++ code logs inside the block. They are printed if the block raises,
    other output always.
    """
    said: list[str] = []
    sys.stderr.flush()
    failed = True
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield said
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said += file.read().decode(errors="replace").splitlines()
            for line in said:
                if failed or not _LOGGED.match(line):
                    print(line, file=sys.stderr)
