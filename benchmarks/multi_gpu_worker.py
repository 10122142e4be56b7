"""One task of multi_gpu.py, in a process of its own: python benchmarks/multi_gpu_worker.py TASK
'{"key": value, ...}'; as gpu_worker.py.

A variant is a strategy: its name's columns, and under "changes" its changes of the config (see
strategies.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from gpu_worker import Run, timed
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from record import Row
from worker import emit, reported, serve

from mesh_lm.distributed import gpu
from mesh_lm.parallel.engine import region
from mesh_lm.state import weights_of
from mesh_lm.state.disk_form import complete_weights
from mesh_lm.state.unflatten import unflatten_matrices
from sharding_rules.lab.targets import TARGETS

TOLERANCE = 1e-5
"""The project's tolerance (CONTRIBUTING.md), on a GPU, too: with fp32 matmuls a mesh changes only
the order of sums."""
BF16_TOLERANCE = 1e-2
"""The relative tolerance of each loss of the first 20 steps. bf16 has 8 bits: sums of rounded
partial sums differ by 0.4 %."""

Variant = dict[str, Any]
Outcome = dict[str, np.ndarray]
"""Returns initial parameters, sums and gradients, as "params.name", "sums.name" and
"grads.name"."""


def strategy(directory: str, changes: dict[str, dict], variant: Variant) -> Run:
    """Returns a run with a variant's changes on top of the others."""
    merged = both(changes, variant)
    return Run(directory, merged, variant["rules"], devices=math.prod(merged["mesh"].values()))


def both(changes: dict[str, dict], variant: Variant) -> dict[str, dict]:
    variant_changes = variant["changes"]
    return {
        section: changes.get(section, {}) | variant_changes.get(section, {})
        for section in {**changes, **variant_changes}
    }


def named(variant: Variant) -> Row:
    """Returns a variant without the entries that only the worker reads."""
    return {key: value for key, value in variant.items() if not isinstance(value, dict | list)}


# Numerics.


def reference(directory: str, changes: dict[str, dict], variants: list[Variant], path: str) -> None:
    """Writes the results of the only variant, in fp32, as the reference of `equality`."""
    (variant,) = variants
    with jax.default_matmul_precision("highest"):
        results: dict[str, Any] = {**outcome(strategy(directory, changes, variant))}
    np.savez(path, **results)
    emit(**named(variant))


def equality(directory: str, changes: dict[str, dict], variants: list[Variant], path: str) -> None:
    """Compares initial bits, sums and every gradient in fp32 with the reference's."""
    expected = dict(np.load(path))
    for variant in variants:
        with reported(**named(variant)), jax.default_matmul_precision("highest"):
            emit(
                **named(variant),
                **compared(outcome(strategy(directory, changes, variant)), expected),
            )


def outcome(run: Run) -> Outcome:
    """Returns one global batch whose sequences have from few labels to all, so that a mean of means
    is not the mean."""
    layout, train, state = run.layout, run.config.train, run.state()
    rows = run.sequences.rows(np.arange(train.global_batch))
    sample_weights = (
        np.random.default_rng(0).random(rows["weights"].shape)
        < np.linspace(0.1, 1, train.global_batch)[:, None]
    )
    batch = run.placed({**rows, "weights": rows["weights"] * sample_weights.astype(np.float32)})
    (sums, _), grads = jax.jit(region(layout, batch, layout.flat))(
        weights_of(layout, state), batch, jax.random.key(run.config.seed)
    )
    grads = unflatten_matrices(layout.flat, grads, layout.shardings("params"))
    trees = {"params": complete_weights(layout, state), "grads": grads}
    ordered = {kind: layout.to_model_order(tree, "params") for kind, tree in trees.items()}
    return {
        f"{kind}.{name}": np.asarray(x)
        for kind, tree in {**ordered, "sums": sums}.items()
        for name, x in tree.items()
    }


def compared(result: Outcome, expected: Outcome) -> Row:
    """Returns relative differences, with an "error" if any initial bit differs, or another
    difference exceeds TOLERANCE."""
    assert result.keys() == expected.keys(), (
        f"leaves {sorted(result.keys() ^ expected.keys())} are in one only"
    )
    initial = [name for name in result if name.startswith("params.")]
    bits = [
        name.removeprefix("params.")
        for name in initial
        if result[name].tobytes() != expected[name].tobytes()
    ]
    grads = {name: w for name, w in expected.items() if name.startswith("grads.")}
    top = max(np.abs(w).max() for w in grads.values())
    far = {
        name: float(np.abs(result[name] - w).max() / max(np.abs(w).max(), 1e-3 * top))
        for name, w in grads.items()
    }
    far |= {
        name: float(abs(result[name] - w) / (abs(w) or 1))
        for name, w in expected.items()
        if name.startswith("sums.")
    }
    worst = {
        kind: max(
            (name for name in far if name.startswith(kind)), key=lambda name: _size(far[name])
        )
        for kind in ("sums.", "grads.")
    }
    wrong = [
        f"{name} is {far[name]:.1e} from the reference's"
        for name in worst.values()
        if not far[name] <= TOLERANCE
    ]
    wrong += [f"initial bits of {', '.join(bits[:2])} differ"] if bits else []
    row = {
        "leaves": len(grads),
        "init_differ": len(bits),
        "sums_rel": far[worst["sums."]],
        "grads_rel": far[worst["grads."]],
    }
    return {
        **row,
        "worst": worst["grads."].removeprefix("grads."),
        **({"error": "; ".join(wrong)} if wrong else {}),
    }


def _size(x: float) -> float:
    return math.inf if math.isnan(x) else x


def training(
    directory: str,
    changes: dict[str, dict],
    variants: list[Variant],
    steps: int,
    wanted: list[float],
) -> None:
    """Compares the losses of the first steps with `wanted`; empty: nothing to compare with."""
    for variant in variants:
        with reported(**named(variant)):
            run = strategy(directory, changes, variant)
            history = [metrics["loss"] for metrics in run.steps(run.state(), steps)[1]]
            off = max(
                (abs(a - b) / abs(b) for a, b in zip(history, wanted, strict=bool(wanted))),
                default=0.0,
                key=_size,
            )
            wrong = [] if off <= BF16_TOLERANCE else [f"a loss is {off:.1e} from the reference's"]
            wrong += [] if history[-1] < history[0] else ["the loss does not fall"]
            row = {
                "loss_rel": off,
                "loss_first": history[0],
                "loss_last": history[-1],
                "losses": history,
            }
            emit(**named(variant), **row, **({"error": "; ".join(wrong)} if wrong else {}))


# Speed.


def speed(directory: str, changes: dict[str, dict], variants: list[Variant], steps: int) -> None:
    """Measures time and memory of the train step, of one variant only, because the high water is
    the process's."""
    (variant,) = variants
    with reported(**named(variant)):
        emit(**named(variant), **timed(strategy(directory, changes, variant), steps))


# Bandwidth.


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of n devices along the axis "group", with the accounting of nccl-tests
    (doc/PERFORMANCE.md)."""

    run: Callable[[jax.Array, int], jax.Array]
    local: Callable[[int, int], int]
    """(bytes, n) -> bytes that a device contributes. `bytes` is the larger of its contribution and
    its result."""
    factor: Callable[[int], float]
    """n -> bus bandwidth over bytes / time: what a link must carry, whatever the algorithm."""
    in_place: bool = False
    """Whether the result replaces the operand, which saves a copy."""


COLLECTIVES = {
    "all-reduce": Collective(
        lambda x, n: lax.psum(x, "group"),
        lambda size, n: size,
        lambda n: 2 * (n - 1) / n,
        in_place=True,
    ),
    "all-gather": Collective(
        lambda x, n: lax.all_gather(x, "group", tiled=True),
        lambda size, n: size // n,
        lambda n: (n - 1) / n,
    ),
    "reduce-scatter": Collective(
        lambda x, n: lax.psum_scatter(x, "group", tiled=True),
        lambda size, n: size,
        lambda n: (n - 1) / n,
    ),
    "all-to-all": Collective(
        lambda x, n: lax.all_to_all(x.reshape(n, -1), "group", 0, 0).reshape(-1),
        lambda size, n: size,
        lambda n: (n - 1) / n,
    ),
    "ppermute": Collective(
        lambda x, n: lax.ppermute(x, "group", [(i, (i + 1) % n) for i in range(n)]),
        lambda size, n: size,
        lambda n: 1.0,
    ),
}


def bandwidth(variants: list[Variant], most: int) -> None:
    """Times one collective at one size. devices: a row of device numbers for each group; all groups
    run concurrently. most: repeats."""
    for variant in variants:
        with reported(**named(variant)):
            emit(**named(variant), **_bandwidth(variant, most))


def _bandwidth(variant: Variant, most: int) -> Row:
    collective, size = COLLECTIVES[variant["collective"]], variant["bytes"]
    groups = np.array([[jax.devices()[i] for i in row] for row in variant["devices"]])
    n, mesh = groups.shape[1], Mesh(groups, ("groups", "group"))
    repeats = max(5, min(most, (4 << 30) // size))
    f = repeated(collective, n, repeats, mesh)
    spec = PartitionSpec(("groups", "group"))
    x = jax.device_put(
        np.zeros(groups.size * (collective.local(size, n) // 4), np.float32),
        jax.NamedSharding(mesh, spec),
    )
    times = []
    for i in range(4):
        start_time = time.perf_counter()
        x = jax.block_until_ready(f(x))
        if i:
            times.append((time.perf_counter() - start_time) / repeats)
    seconds = statistics.median(times)
    bus, nominal = size / seconds * collective.factor(n), nvlink(jax.devices()[0].device_kind)
    row = {
        "microseconds": 1e6 * seconds,
        "gb_per_s": size / seconds / 1e9,
        "bus_gb_per_s": bus / 1e9,
    }
    return {
        **row,
        "nominal_gb_per_s": nominal and nominal / 1e9,
        "of_nominal": nominal and bus / nominal,
    }


def repeated(
    collective: Collective, n: int, repeats: int, mesh: Mesh
) -> Callable[[jax.Array], jax.Array]:
    """Repeats the collective in one program, because a launch from Python would take longer than a
    small collective."""

    def again(_: int, x: jax.Array) -> jax.Array:
        y = collective.run(x, n)
        if collective.in_place:
            return y  # zeros stay zeros
        # all of y is computed, and the next iteration depends on a number of it
        y, x = lax.optimization_barrier((y, x))
        return x.at[0].set(y[-1])

    spec = PartitionSpec(("groups", "group"))
    program = jax.shard_map(
        lambda x: lax.fori_loop(0, repeats, again, x),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(program, donate_argnums=0)


def nvlink(device_kind: str) -> float | None:
    """Returns the nominal bytes/s of one GPU in one direction; None if unknown. PCIe cards have no
    NVLink between all of them."""
    kind = device_kind.lower()
    return next(
        (
            target.nvlink
            for target in TARGETS.values()
            if target.name in kind and "pcie" not in kind
        ),
        None,
    )


if __name__ == "__main__":
    flags = next(
        (variant.get("flags", {}) for variant in json.loads(sys.argv[2]).get("variants", [])), {}
    )
    # as train.py does, before JAX looks for devices
    print(gpu.set_flags("auto", **flags), flush=True)
    gpu.set_memory()
    serve({f.__name__: f for f in (reference, equality, training, speed, bandwidth)})
