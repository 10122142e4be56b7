"""Checks whether a config can run on a number of devices. All problems are reported at once, each
with what would work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import get_args

from mesh_lm import optim
from mesh_lm.config import TrainConfig, bound_problems
from mesh_lm.data.tokenizer import MIN_VOCAB
from mesh_lm.errors import ConfigError
from mesh_lm.parallel.engine import training_schedule
from mesh_lm.parallel.layout import divided
from mesh_lm.schedules.segments import LIGHTER
from mesh_lm.training.check_context import context_problems
from mesh_lm.training.check_data import data_problems
from mesh_lm.training.check_diloco import island_problems
from mesh_lm.training.check_heads import head_problems
from mesh_lm.training.check_recovery import recovery_problems
from mesh_lm.training.check_reduction import reduction_problems
from mesh_lm.training.check_residual import residual_problems
from sharding_rules import (
    ISLAND,
    PRESETS,
    TABLES,
    MeshConfig,
    MeshError,
    axes_of,
    did_you_mean,
    row_of,
    setting,
    unknown_scopes,
    would_fit,
)
from sharding_rules.rules import FLAT, Column, Kind

_BOUNDED_SECTIONS = (
    "train",
    "optimizer",
    "data",
    "checkpoint",
    "profile",
    "launch",
    "pipeline",
    "health",
)


def check(config: TrainConfig, n_devices: int, rule: optim.Rule | None = None) -> TrainConfig:
    """Returns the config with its mesh resolved. Raises ConfigError that lists every problem.

    rule: the optimizer's rule if one was passed in; None: the rule that optimizer.name names.
    """
    problems = list(_fields(config, rule))
    try:
        mesh = config.mesh.resolve(n_devices)
    except MeshError as error:
        fits = would_fit(_that_run(config, error.choices, n_devices))
        problems.append(error.problem + fits + _simulated(config.mesh, n_devices))
        # to check the rest
        mesh = MeshConfig.of({axis: max(1, size) for axis, size in config.mesh.sizes().items()})
    problems += _problems_on(config, mesh)
    if problems:
        raise ConfigError(
            "this config cannot run\n" + "\n".join(f"  - {problem}" for problem in problems)
        )
    return dataclasses.replace(config, mesh=mesh)


def _simulated(mesh: MeshConfig, n_devices: int) -> str:
    """The end of a message about a mesh of several devices where there is one, which may be a
    CPU.
    """
    sizes = mesh.sizes().values()
    least = math.prod(size for size in sizes if size != -1)
    if n_devices != 1 or least < 2 or min(sizes) < -1 or list(sizes).count(-1) > 1:
        return ""
    return f"; without a GPU, launch.cpu_devices={least} simulates {least}"


def _that_run(
    config: TrainConfig, choices: Sequence[tuple[str, MeshConfig]], n_devices: int
) -> list[tuple[str, MeshConfig]]:
    """Returns the meshes on which the config has no other problem, the nearest two of each axis."""
    running: list[tuple[str, MeshConfig]] = []
    for axis, mesh in choices:
        enough = sum(known == axis for known, _ in running) == 2
        if not enough and not _problems_on(config, mesh.resolve(n_devices)):
            running.append((axis, mesh))
    return running


def _problems_on(config: TrainConfig, mesh: MeshConfig) -> list[str]:
    """Returns what keeps the config from running on a mesh whose sizes are all known."""
    config = dataclasses.replace(config, mesh=mesh)
    of_rules = (
        _mesh_axes,
        _unused_axes,
        _unsupported_rows,
        context_problems,
        island_problems,
        reduction_problems,
        residual_problems,
    )
    of_sizes = _flat, _sizes, head_problems, _batch, _halves, _layer_runs, _pipeline, _permuted
    return [problem for part in (*of_rules, *of_sizes) for problem in part(config)]


def _fields(config: TrainConfig, rule: optim.Rule | None) -> Iterator[str]:
    """Problems of single sections, and of pairs of fields that do not depend on the mesh."""
    kind = type(config.model)
    if "__dataclass_fields__" not in vars(kind) and vars(kind).get("__annotations__"):
        missing = "@dataclasses.dataclass(frozen=True)"
        yield (
            f"{kind.__name__} has fields, but no {missing}: they are neither options nor in the "
            "run's config.json"
        )
    yield from (problems := config.model.problems())
    if not problems:
        yield from (stack := config.model.stack()).problems()
        yield from unknown_scopes(config.rules, (*stack.names, TABLES))
    for section in _BOUNDED_SECTIONS:
        yield from bound_problems(section, getattr(config, section))
    if not 0 <= config.seed < 2**32:
        yield f"seed={config.seed} must be at least 0 and below 2^32"
    yield from _optimizer(config, rule)
    yield from data_problems(config.data)
    yield from recovery_problems(config)
    if (
        not (config.data.tokenizer or config.data.blend)
        and config.data.tokenizer_vocab > config.model.vocab_size
    ):
        vocab, ids = config.data.tokenizer_vocab, config.model.vocab_size
        smaller = f"data.tokenizer_vocab={ids}, or " if ids >= MIN_VOCAB else ""
        yield (
            f"data.tokenizer_vocab={vocab} makes ids outside model.vocab_size={ids}; set "
            f"{smaller}model.vocab_size={vocab} or more"
        )


def _optimizer(config: TrainConfig, rule: optim.Rule | None) -> Iterator[str]:
    """Problems of the optimizer's section, and whether its update rule works with the layout that
    the sharding rules choose.
    """
    optimizer, rules = config.optimizer, config.rules
    below = {
        "beta1": 1,
        "beta2": 1,
        "momentum": 1,
        "final_fraction": 1.0001,
        "decay_fraction": 1.0001,
    }
    for name, high in below.items():
        if not 0 <= (value := getattr(optimizer, name)) < high:
            yield f"optimizer.{name}={value} must be in [0, 1{')' if high == 1 else ']'}"
    for name in ("learning_rate", "weight_decay", "clip_norm"):
        if not 0 <= (value := getattr(optimizer, name)) < math.inf:
            yield f"optimizer.{name}={value} must be a number of at least 0"
    # eps=0 gives 0 / 0 for zero gradients, such as those of padded rows
    if not 0 < optimizer.eps < math.inf:
        yield f"optimizer.eps={optimizer.eps} must be a number above 0"
    try:
        elementwise = (rule or optim.make_rule(optimizer)).elementwise
    except ConfigError as error:
        yield str(error)
        return
    flat = [
        (row, entry)
        for row, entry in rules.column("optimizer").items()
        if _name(row) == FLAT and entry is not None
    ]
    if flat and not elementwise:
        row, entry = flat[0]
        yield (
            f"optimizer.name={optimizer.name} needs full matrices, but rules {rules.name!r} store "
            f"its state as flat vectors (rules.optimizer[{row!r}]={entry!r}); use optimizer adamw "
            "or lion, or rules without that row, such as zero2"
        )


def _mesh_axes(config: TrainConfig) -> Iterator[str]:
    """Mesh axes that only one of mesh and rules has."""
    rules, sizes = config.rules, config.mesh.sizes()
    for axis, size in sizes.items():
        if axis not in rules.order():
            fix = f"declare it, as in rules.replace(axes={{{axis!r}: 'auto'}})"
            yield (
                f"{setting(axis, size)}: rules {rules.name!r} declare no mesh axis {axis!r}; {fix}"
            )
    for axis in rules.axes:
        if axis not in sizes:
            yield (
                f"rules {rules.name!r} declare the mesh axis {axis!r}, which this mesh lacks; give "
                f"it a size: mesh.extra={axis}=2"
            )
    for axis in sorted(rules.mesh_axes() - set(rules.order())):
        kind, row = next(
            (k, r)
            for k in get_args(Kind)
            for r, entry in rules.column(k).items()
            if axis in axes_of(entry)
        )
        fix = did_you_mean(axis, rules.order())
        yield (
            f"rules.{kind}[{row!r}]: mesh axis {axis!r} is neither a standard mesh axis nor "
            f"declared in rules.axes{fix}"
        )


def _unused_axes(config: TrainConfig) -> Iterator[str]:
    """Mesh axes that shard no activation: their devices would repeat the same work, and XLA would
    permute arrays along them.
    """
    used = {axis for entry in config.rules.activations.values() for axis in axes_of(entry)}
    for axis, size in config.mesh.sizes().items():
        if axis == "pipeline" or axis not in config.rules.order():
            continue  # pipeline shards the layers, not an activation
        if size > 1 and axis == "expert":
            yield (
                f"mesh.{axis}={size}: no model of this version is sharded over {axis}; set "
                f"mesh.{axis}=1"
            )
        elif size > 1 and axis not in used:
            fits = [
                name
                for name, rules in PRESETS.items()
                if axis in {a for e in rules.activations.values() for a in axes_of(e)}
            ]
            names = " or ".join(
                f"{config.rules.name.removesuffix(' (changed)')}+{name}" for name in fits[:2]
            )
            problem = (
                f"{setting(axis, size)}, but rules {config.rules.name!r} shard no activation over "
                f"{axis}"
            )
            fix = f"rules such as {names}" if fits else f"a row of rules.activations to {axis!r}"
            yield f"{problem}; set {setting(axis, 1)} or {fix}"


def _unsupported_rows(config: TrainConfig) -> Iterator[str]:
    """Rows that shard a dimension which must not be sharded that way: training would be wrong, not
    only slow.
    """
    manual = config.rules.manual_axes()
    for kind, column in (
        ("params", config.rules.params),
        ("gathered", config.rules.gathered or {}),
    ):
        for logical, entry in column.items():
            for axis in axes_of(entry):
                if (
                    axis in manual
                    and (logical, axis) != ("layers", "pipeline")
                    and _name(logical) != FLAT
                ):
                    fix = "to shard them over replicas use the mesh axis 'fsdp'"
                    yield (
                        f"rules.{kind}[{logical!r}]={entry!r}: weights are replicated over {axis}; "
                        f"{fix}"
                    )
    if "pipeline" in axes_of(entry := config.rules.activations.get("batch")):
        yield (
            f"rules.activations['batch']={entry!r}: every stage needs the full batch; remove "
            "'pipeline'"
        )
    for logical, entry in config.rules.activations.items():
        if (name := _name(logical)) == "head_dim" and entry:
            yield (
                f"rules.activations[{logical!r}]={entry!r}: attention needs full heads; set it to "
                "None"
            )
        elif name == "seq":
            for axis in axes_of(entry):
                if axis not in config.rules.context:
                    able = axis in manual - {ISLAND, "pipeline", "data"}
                    fix = (
                        f"set rules.context[{axis!r}] to gather, ulysses or ring"
                        if able
                        else "shard it over 'sequence'"
                    )
                    fix += f", or leave {axis!r} out"
                    yield (
                        f"rules.activations[{logical!r}]={entry!r}: attention needs all keys, and "
                        f"no rule says how over {axis}; {fix}"
                    )
        elif name != "batch":
            allowed = config.rules.context if name == "seq_resid" else ()  # see `context_problems`
            for axis in [axis for axis in axes_of(entry) if axis in manual and axis not in allowed][
                :1
            ]:
                what = "no activation" if axis == "pipeline" else "only the batch"
                yield (
                    f"rules.activations[{logical!r}]={entry!r}: {what} is sharded over {axis}; "
                    f"remove {axis!r}"
                )


def _flat(config: TrainConfig) -> Iterator[str]:
    """Rows of flat vectors belong in the optimizer's column, and in that of params if layers gather
    them, over axes of replicas.
    """
    rules, manual = config.rules, config.rules.manual_axes() - {ISLAND}
    for kind in get_args(Kind):
        for row, entry in (getattr(rules, kind) or {}).items():
            where, axes = f"rules.{kind}[{row!r}]={entry!r}", axes_of(entry)
            if (
                kind == "optimizer"
                and _name(row) != FLAT
                and row not in rules.params
                and did_you_mean(_name(row), [FLAT]).endswith("?")
            ):
                yield f"{where}: no parameter has such an axis{did_you_mean(_name(row), [FLAT])}"
            if _name(row) != FLAT or not axes:
                continue
            if kind == "params":
                yield from _gathered(config, row)
                if rules.optimizer is not None:  # whose row must name the same axes
                    continue
            elif kind != "optimizer":
                yield f"{where}: flat vectors are the optimizer's; set rules.optimizer[{row!r}]"
                continue
            if twice := [axis for axis in axes if axes.count(axis) > 1]:
                yield f"{where}: has {twice[0]!r} twice"
            elif auto := [axis for axis in axes if axis in rules.order() and axis not in manual]:
                over = ", ".join(axis for axis in rules.order() if axis in manual)
                yield (
                    f"{where}: flat vectors are sharded over replicas, whose axes are {over}; "
                    f"remove {auto[0]!r}"
                )
            elif (layers := rules.params.get("layers")) and axes_of(layers) != ("pipeline",):
                yield (
                    f"{where}: each flat vector holds one layer, but "
                    f"rules.params['layers']={layers!r}; set that to 'pipeline'"
                )


def _gathered(config: TrainConfig, row: str) -> Iterator[str]:
    """Settings with which layers cannot gather their own matrices from flat vectors
    (`mesh_lm.parallel.zero3`).
    """
    rules, optimizer = config.rules, config.rules.column("optimizer")
    where, axes = f"rules.params[{row!r}]={rules.params[row]!r}", axes_of(rules.params[row])
    held = axes_of(optimizer[name]) if (name := row_of(optimizer, row)) else ()
    if axes != tuple(axis for axis in held if axis != "pipeline"):
        fix = f"set rules.optimizer[{row!r}] to {('pipeline', *axes)!r}"
        yield (
            f"{where}: layers gather what the optimizer keeps, and "
            f"rules.optimizer[{row!r}]={held or None!r}; {fix}"
        )
    if config.model.problems():
        return
    scope = row.rpartition("/")[0]
    for segment in config.model.stack().segments:
        if segment.remat == "offload" and scope in ("", segment.name):
            yield (
                f"{where}: layers that gather their matrices cannot offload; set model.remat (of "
                f"{segment.name!r}) to save_names or full"
            )


def _layer_runs(config: TrainConfig) -> Iterator[str]:
    """Numbers of layers that recompute less, or that keep the weights they gather."""
    if config.model.problems():
        return
    remat, kept, n = (
        getattr(config.model, field, None) for field in ("remat_layers", "kept_layers", "n_layers")
    )
    segments, stages = config.model.stack().segments, config.mesh.pipeline
    for field, number in (("remat_layers", remat), ("kept_layers", kept or None)):
        if number is None:
            continue
        if not 0 <= number <= n:
            yield f"model.{field}={number} must be in [0, {n}], the layers of the model"
        elif any(run.begin % segment.period for segment in segments for run in segment.runs()):
            yield (
                f"model.{field}={number} divides a period of {segments[0].period} layers "
                "(model.window); set it to a multiple of that"
            )
    if remat is not None and (
        segment := next((s for s in segments if s.remat not in LIGHTER), None)
    ):
        fix = f"set model.remat to one of {', '.join(LIGHTER)}, or leave model.remat_layers unset"
        yield (
            f"model.remat_layers={remat}: no policy recomputes less than remat={segment.remat} of "
            f"{segment.name!r}; {fix}"
        )
    if remat is not None and stages > 1:
        yield (
            f"model.remat_layers={remat}: stages treat all layers alike, and "
            f"mesh.pipeline={stages}; leave model.remat_layers unset"
        )
    if kept and stages > 1:
        yield (
            f"model.kept_layers={kept}: a stage keeps what it gathers anyway, and "
            f"mesh.pipeline={stages}; set model.kept_layers=0"
        )
    elif kept and not any(
        _name(row) == FLAT and entry for row, entry in config.rules.params.items()
    ):
        yield (
            f"model.kept_layers={kept}: under rules {config.rules.name!r} no layer gathers its own "
            "weights; use zero3, or set it to 0"
        )


def _name(row: str) -> str:
    """The name of a row without its scope."""
    return row.rpartition("/")[2]


def _sizes(config: TrainConfig) -> Iterator[str]:
    mesh, seen = config.mesh.sizes(), set()
    for kind in ("params", "activations", "gradients", "optimizer"):
        column = config.rules.column(kind)
        for logical, field, size in _rows_with_sizes(column, config.model.sizes()):
            axes = tuple(a for a in axes_of(column[logical]) if mesh.get(a, 1) > 1)
            ways = math.prod(mesh[a] for a in axes)
            if size % ways and (field, axes) not in seen:
                seen.add((field, axes))
                product = " x ".join(setting(a, mesh[a]) for a in axes)
                hint = (
                    f"; {_field(axes[0])} can be {_few(_divisors(size))}"
                    if len(axes) == 1
                    else f"; their product must divide {size}"
                )
                hint += _replicate_kv_heads(config, kind, logical, ways)
                yield (
                    f"model.{field}={size} is not divisible by {product} (rules.{kind}: {logical} "
                    f"-> {'+'.join(axes)}){hint}"
                )


def _replicate_kv_heads(config: TrainConfig, kind: Kind, logical: str, ways: int) -> str:
    """The other fix if kv heads do not divide: each device holds all of them, or those of the first
    mesh axes, and uses those of its query heads.
    """
    sizes = config.model.sizes()
    heads, kv_heads = (sizes.get(name, ("", 0))[1] for name in ("heads", "kv_heads"))
    if logical.rpartition("/")[2] != "kv_heads" or not kv_heads or heads % kv_heads or heads % ways:
        return ""
    group, local = heads // kv_heads, heads // ways
    if local % group and group % local:
        return ""
    *first, _ = axes_of(config.rules.column(kind)[logical])
    if (
        kind == "activations"
        and first
        and kv_heads % (n := math.prod(config.mesh.sizes().get(axis, 1) for axis in first)) == 0
    ):
        row = f"rules.activations[{logical!r}]"
        return (
            f"; or set {row} to {(first[0] if len(first) == 1 else tuple(first))!r}: "
            f"{kv_heads // n} on each device"
        )
    given = [
        k
        for k in get_args(Kind)
        if getattr(config.rules, k) is not None and axes_of(config.rules.column(k).get(logical))
    ]
    return (
        f"; or set {logical} to None in {' and '.join(f'rules.{k}' for k in given)}: each device "
        "then has all kv heads"
    )


def _rows_with_sizes(
    column: Column, sizes: dict[str, tuple[str, int]]
) -> Iterator[tuple[str, str, int]]:
    """Yields (row, field, size) for each row, scoped or not, of a logical axis whose size is
    known.
    """
    for logical in dict.fromkeys([*sizes, *column]):
        known = sizes.get(logical, sizes.get(logical.rpartition("/")[2]))
        if known and (row := row_of(column, logical)):
            yield row, *known


def _batch(config: TrainConfig) -> Iterator[str]:
    mesh, train = config.mesh.sizes(), config.train
    axes = [a for a in axes_of(config.rules.activations.get("batch")) if mesh.get(a, 1) > 1]
    unit = train.microbatches * math.prod(mesh[a] for a in axes)
    if train.microbatches > 0 and train.global_batch % unit:
        product = " x ".join(
            [f"train.microbatches={train.microbatches}", *(setting(a, mesh[a]) for a in axes)]
        )
        below = train.global_batch // unit * unit
        fits = f"{below} or {below + unit}" if below else str(unit)
        yield (
            f"train.global_batch={train.global_batch} is not divisible by {product}; it can be "
            f"{fits}"
        )


def _halves(config: TrainConfig) -> Iterator[str]:
    """Reasons why no layer can, or why none should, run on two halves of a microbatch."""
    if not getattr(config.model, "batch_halves", False):
        return
    mesh, train, column = config.mesh.sizes(), config.train, config.rules.activations
    over = axes_of(column.get("batch"))
    others = [
        axis
        for name, entry in column.items()
        if _name(name) != "batch"
        for axis in axes_of(entry)
        if axis not in over
    ]
    off = "set model.batch_halves=False"
    if not any(mesh.get(axis, 1) > 1 for axis in others):
        yield (
            "model.batch_halves=True: on this mesh layers exchange no activations that a half "
            f"could hide; {off}"
        )
    elif config.pipeline.pair_layers:
        yield (
            "model.batch_halves=True: pipeline.pair_layers=True hides the same collectives; "
            f"{off}, or pipeline.pair_layers=False"
        )
    shards, n = math.prod(mesh.get(axis, 1) for axis in over), train.microbatches
    if (
        n > 0
        and train.global_batch % (n * shards) == 0
        and (rows := train.global_batch // (n * shards)) % 2
    ):
        fits = [
            str(fewer)
            for fewer in range(n, 0, -1)
            if train.global_batch % (2 * fewer * shards) == 0
        ]
        fix = f"set train.microbatches={fits[0]}, or model.batch_halves=False" if fits else off
        yield (
            f"model.batch_halves=True: a device has {rows} sequences of a microbatch, an odd "
            f"number; {fix}"
        )


def _pipeline(config: TrainConfig) -> Iterator[str]:
    stages, pipeline, rules = config.mesh.pipeline, config.pipeline, config.rules
    if pipeline.pair_layers and stages == 1:
        yield (
            "pipeline.pair_layers=True, but mesh.pipeline=1 has no stage that goes forward and "
            "backward in one tick; set it to False"
        )
    if pipeline.pair_layers and pipeline.stash == "input":
        yield (
            "pipeline.pair_layers=True runs layers one by one, whose residuals "
            "pipeline.stash=input drops; set pipeline.stash=residuals"
        )
    if stages == 1 or config.model.problems() or (stack := config.model.stack()).problems():
        return
    if pipeline.chunks < 1 or config.train.microbatches < 1:
        return
    if pipeline.stash == "residuals" and (
        offloaded := [s.name for s in stack.segments if s.remat == "offload"]
    ):
        whose = (
            "model.remat=offload"
            if len(offloaded) == len(stack.segments)
            else f"remat=offload of segment {offloaded[0]!r}"
        )
        yield (
            f"pipeline.stash=residuals keeps on the device what {whose} moves to the host; change "
            "one of them"
        )
    for kind in ("params", "gradients", "optimizer"):
        if axes_of(rules.column(kind).get("layers")) != ("pipeline",):
            yield (
                f"mesh.pipeline={stages}, but "
                f"rules.{kind}['layers']={rules.column(kind).get('layers')!r}; set it to 'pipeline'"
            )
    for fits in (
        lambda: divided(config.model, pipeline, stages),
        lambda: training_schedule(pipeline, stages, config.train.microbatches),
    ):
        try:
            fits()
        except ConfigError as error:
            yield str(error)


def _permuted(config: TrainConfig) -> Iterator[str]:
    """Rules with which XLA would permute weights among devices. In a pipeline this deadlocks, as
    some stages skip the branch.
    """
    rules, mesh = config.rules, config.mesh.sizes()
    if mesh["pipeline"] == 1:
        return

    def auto_axes(kind: Kind, logical: str) -> tuple[str, ...]:
        row, auto = rules.row(kind, logical), set(mesh) - rules.manual_axes()
        return tuple(
            a
            for a in axes_of(rules.column(kind)[row] if row else None)
            if a in auto and mesh[a] > 1
        )

    for logical in dict.fromkeys([*rules.params, *rules.column("gathered"), *rules.activations]):
        stored, used, acts = (
            auto_axes(kind, logical) for kind in ("params", "gathered", "activations")
        )
        if stored[: len(used)] != used:
            pair = (
                f"rules.params[{logical!r}]={stored} does not start with "
                f"rules.gathered[{logical!r}]={used}"
            )
        elif acts[: len(used)] != used[: len(acts)]:
            pair = (
                f"rules.activations[{logical!r}]={acts} and rules.gathered[{logical!r}]={used} do "
                "not start with the same axes"
            )
        else:
            continue
        yield f"mesh.pipeline={mesh['pipeline']}: {pair}; {_WAITS}"
    default = auto_axes("activations", "seq_resid")
    for logical in rules.activations:
        if (
            logical.endswith("/seq_resid")
            and (scoped := auto_axes("activations", logical))[: len(default)]
            != default[: len(scoped)]
        ):
            pair = (
                f"rules.activations[{logical!r}]={scoped} and "
                f"rules.activations['seq_resid']={default} do not start with the same axes"
            )
            yield f"mesh.pipeline={mesh['pipeline']}: {pair}; {_WAITS}"


_WAITS = "XLA would permute arrays in a branch that some stages skip, and deadlock"


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _field(axis: str) -> str:
    """The config field that has the size of a mesh axis."""
    return setting(axis, 0).removesuffix("=0")


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
