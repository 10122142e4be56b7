"""optimizer.offload: with parts of the state in the hosts' memory a run has the same weights, and
checkpoints do not know where the state was."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from support import GPT, host_batch, on_devices, shard_on

from mesh_lm.checkpoint import Checkpoints, find
from mesh_lm.config import DilocoConfig, OptimizerConfig, PipelineConfig, TrainConfig
from mesh_lm.distributed import host_memory
from mesh_lm.errors import ConfigError
from mesh_lm.optim import Adafactor, AdamW, AdamW8, Lion, Muon, Optimizer, Rule
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning.program import Program
from mesh_lm.state import State, abstract_state
from mesh_lm.state.digest import digests
from mesh_lm.state.disk_form import back, to_disk
from mesh_lm.state.host_copy import copied, put_back
from mesh_lm.state.initial import init_state
from mesh_lm.state.placement import HOST
from mesh_lm.training import host_room, offload
from mesh_lm.training.check import check
from mesh_lm.training.host_room import Share, host_problems, require_host_memory
from mesh_lm.training.replay import shard_digests
from mesh_lm.training.step import train_step
from sharding_rules import preset
from sharding_rules.lab import Report

COMPILE_BUDGET = 520

# Without biases, some of which have gradients of rounding errors alone, which Adam makes large.
MODEL = dataclasses.replace(GPT, biases=False, norm="rmsnorm")
STEPS = 2
MICROBATCHES = 2


class Case(NamedTuple):
    rules: str
    mesh: dict[str, int]
    rule: Rule
    parts: tuple[str, ...]
    pipeline: PipelineConfig = PipelineConfig()
    diloco: DilocoConfig = DilocoConfig()


MOMENTS = ("mu", "nu")
ISLANDS = DilocoConfig(outer_steps=10)
CASES = {
    "ddp": Case("ddp", {"data": 2}, AdamW(), MOMENTS),
    "fsdp": Case("fsdp", {"fsdp": 2}, AdamW(), MOMENTS),
    "zero1": Case("zero1", {"data": 2}, AdamW(), MOMENTS),
    "zero2": Case("zero2", {"data": 2}, AdamW(), ("nu",)),
    "zero3": Case("zero3", {"data": 2}, AdamW(), MOMENTS),
    "zero3, weights": Case("zero3", {"data": 2}, AdamW(), (*MOMENTS, "master")),
    "zero3, weights, tensor": Case(
        "zero3+megatron_sp", {"data": 2, "tensor": 2}, AdamW(), (*MOMENTS, "master")
    ),
    "zero3, weights, pipeline": Case(
        "zero3", {"pipeline": 2, "data": 2}, AdamW(), (*MOMENTS, "master")
    ),
    "distributed": Case("distributed", {"data": 2}, AdamW(), (*MOMENTS, "master")),
    "distributed, one replica": Case(
        "distributed+megatron_sp", {"tensor": 2}, AdamW(), (*MOMENTS, "master")
    ),
    "pipeline": Case("megatron+zero1", {"pipeline": 2, "data": 2, "tensor": 2}, AdamW(), MOMENTS),
    "pipeline, distributed": Case(
        "distributed", {"pipeline": 2, "data": 2}, AdamW(), (*MOMENTS, "master")
    ),
    "lion": Case("zero1", {"data": 2}, Lion(), ("mu",)),
    "muon": Case("fsdp", {"fsdp": 2}, Muon(), MOMENTS),
    "muon, pipeline": Case("zero1", {"pipeline": 2, "data": 2}, Muon(), MOMENTS),
    "adafactor": Case("fsdp", {"fsdp": 2}, Adafactor(), ("v_row", "v_col", "v")),
    "muon, owners": Case("zero2+owner", {"data": 2}, Muon(), MOMENTS),
    "adafactor, owners": Case("zero2+owner", {"data": 2}, Adafactor(), ("v_row", "v_col", "v")),
    "adamw8, owners": Case("zero2+owner", {"data": 2}, AdamW8(block_size=16), ("mu8", "root8")),
    "adamw8": Case("zero2", {"data": 2}, AdamW8(block_size=16), ("mu8", "root8")),
    "islands": Case(
        "diloco+megatron_sp+zero1",
        {"island": 2, "data": 2, "tensor": 2},
        AdamW(),
        MOMENTS,
        diloco=ISLANDS,
    ),
    "islands, muon": Case("diloco+fsdp", {"island": 2, "fsdp": 2}, Muon(), MOMENTS, diloco=ISLANDS),
}


def layout_of(case: Case) -> ModelLayout:
    return ModelLayout.of(MODEL, shard_on(case.rules, **case.mesh), case.pipeline)


def optimizer_of(case: Case, *, offloads: bool) -> Optimizer:
    config = OptimizerConfig(
        rule=case.rule,
        learning_rate=1e-3,
        warmup_steps=1,
        offload=case.parts if offloads else (),
    )
    return Optimizer(config, 10, case.diloco)


def kinds(state: State) -> dict[str, set[str]]:
    return {
        part: {x.sharding.memory_kind for x in arrays.values()}
        for part, arrays in state.items()
        if isinstance(arrays, dict) and arrays
    }


def require_on_host(state: State, case: Case) -> None:
    for part, found in kinds(state).items():
        assert found == {HOST if part in case.parts else "device"}, part


@functools.cache
def trained(name: str, offloads: bool) -> State:
    """A state after some steps, in NumPy."""
    case = CASES[name]
    layout = layout_of(case)
    optimizer = optimizer_of(case, offloads=offloads)
    state = init_state(layout, optimizer, seed=0)
    step = train_step(layout, optimizer, seed=0)
    for number in range(STEPS):
        if offloads:
            require_on_host(state, case)
        state, _ = step(state, on_devices(host_batch(MICROBATCHES, seed=number), layout))
    if offloads:
        require_on_host(state, case)
    return jax.tree.map(np.asarray, state)


FAST = {"zero1"}
COMPLETE_RUN = {
    "zero2", "zero3", "zero3, weights, tensor", "distributed, one replica",
    "pipeline, distributed", "muon", "muon, pipeline", "adafactor", "adamw8", "islands, muon",
}  # fmt: skip
"""CI has the same ways through the update with other rules, and each rule in another place."""


def mark(name: str) -> Any:
    if name in FAST:
        return ()
    return pytest.mark.exhaustive if name in COMPLETE_RUN else pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark(name)) for name in CASES])
def test_an_offloaded_update_is_the_plain_one(name: str) -> None:
    plain = trained(name, offloads=False)
    found = trained(name, offloads=True)
    assert jax.tree.structure(found) == jax.tree.structure(plain)
    assert int(found["step"]) == STEPS and int(found["skipped"]) == 0
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(plain), strict=True
    ):
        difference = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max(initial=0)
        # A rounded moment may fall on the other side of a level.
        most = 1 if x.dtype in (np.int8, np.uint8) else 1e-6
        assert difference <= most, (jax.tree_util.keystr(path), difference)


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    case = CASES["zero1"]
    layout = layout_of(case)
    optimizer = optimizer_of(case, offloads=True)
    step = train_step(layout, optimizer, seed=0)
    state = init_state(layout, optimizer, seed=0)
    weights = dict(state["params"])
    weights["norm.scale"] = weights["norm.scale"] * np.float32(np.inf)
    state["params"] = weights
    old = jax.tree.map(np.array, state)
    state, _ = step(state, on_devices(host_batch(MICROBATCHES), layout))
    assert int(state["skipped"]) == 1
    require_on_host(state, case)
    for part in ("params", "mu", "nu"):
        for name, x in state[part].items():
            np.testing.assert_array_equal(x, old[part][name], err_msg=name)


def test_tables_are_updated_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((96, 32), np.float32)
    assert offload._slice_size(x) == 0  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(offload, "_SLICE_BYTES", 20 * 32 * 4)
    assert offload._slice_size(x) == 16  # pyright: ignore[reportArgumentType]
    # 97 rows have no divisor but 1.
    assert offload._slice_size(np.zeros((97, 32), np.float32)) == 0  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_slices_of_a_table_are_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained("distributed", offloads=False)
    monkeypatch.setattr(offload, "_SLICE_BYTES", 2048)
    found = trained.__wrapped__("distributed", offloads=True)
    for part in ("params", "master", *MOMENTS):
        for name, x in found[part].items():
            np.testing.assert_allclose(x, plain[part][name], atol=1e-6, rtol=0, err_msg=name)


# Checkpoints, copies and digests.


UNEVEN = Case("zero1", {"pipeline": 2, "data": 2}, AdamW(), MOMENTS, PipelineConfig(layers=(1, 3)))
FLAT = Case(
    "distributed",
    {"pipeline": 2, "data": 2},
    AdamW(),
    (*MOMENTS, "master"),
    PipelineConfig(layers=(1, 3)),
)


def filled(layout: ModelLayout, optimizer: Optimizer) -> State:
    """A state of which all arrays have different elements, without a step."""
    random = np.random.default_rng(0)
    state = init_state(layout, optimizer, seed=0)
    for slot in MOMENTS:
        for name, x in state[slot].items():
            values = random.random(x.shape, np.float32)
            stack = layout.stacks["blocks"]
            has_padding = not optimizer.diloco.outer_steps  # islands have no stages
            if has_padding and (name in layout.stacked or "/" in name):
                values[stack.layer_of_row() < 0] = 0
            state[slot][name] = jax.device_put(values, x.sharding)
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [CASES["ddp"], UNEVEN, FLAT, CASES["islands"]],
    ids=["ddp", "uneven", "flat", "islands"],
)
def test_a_run_may_switch_it_at_a_resume(case: Case, tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, n_layers=4)
    shard = shard_on(case.rules, **case.mesh)
    layout = ModelLayout.of(model, shard, case.pipeline)
    plain = optimizer_of(case, offloads=False)
    offloaded = optimizer_of(case, offloads=True)
    state = init_state(layout, plain, seed=0) if layout.flat.vectors else filled(layout, plain)
    wanted = jax.tree.map(np.array, state)

    def saved_and_resumed(state: State, source: Optimizer, target: Optimizer, name: str) -> State:
        config = TrainConfig(
            model=model,
            output=str(tmp_path / name),
            rules=shard.rules,
            pipeline=case.pipeline,
            optimizer=source.config,
            diloco=case.diloco,
        )
        with Checkpoints(config) as checkpoints:
            kept = checkpoints.save(1, state, {"position": 16}, layout, source)
            require_equal(kept, wanted)
        found = find(config.output)
        assert found is not None
        state = found.resumed(layout, target)
        described = abstract_state(layout, target)
        for x, like in zip(jax.tree.leaves(state), jax.tree.leaves(described), strict=True):
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
        require_equal(state, wanted)
        return state

    state = state | {"step": state["step"] + 1}
    wanted["step"] = np.asarray(state["step"])
    state = saved_and_resumed(state, plain, offloaded, "on")
    require_on_host(state, case)
    state = saved_and_resumed(state, offloaded, offloaded, "on again")
    require_on_host(state, case)
    state = saved_and_resumed(state, offloaded, plain, "off")
    assert HOST not in set().union(*kinds(state).values())


def require_equal(state: State, wanted: State) -> None:
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x), y, err_msg=jax.tree_util.keystr(path))


def test_copies_and_digests_do_not_depend_on_the_memory() -> None:
    case = CASES["ddp"]
    layout = layout_of(case)
    plain = filled(layout, optimizer_of(case, offloads=False))
    optimizer = optimizer_of(case, offloads=True)
    state = filled(layout, optimizer)
    require_on_host(state, case)
    assert digests(state) == digests(plain)
    expected = shard_digests(plain)
    for device, found in shard_digests(state).items():
        np.testing.assert_array_equal(found, expected[device])
    again = put_back(copied(state), abstract_state(layout, optimizer))
    require_on_host(again, case)
    require_equal(again, jax.tree.map(np.asarray, plain))


@pytest.mark.parametrize("name", ["ddp", "distributed", "muon, owners"])
def test_nothing_that_is_written_shares_memory_with_the_state(name: str) -> None:
    """The next step donates the state while a thread still writes what was saved."""
    case = CASES[name]
    layout = layout_of(case)
    optimizer = optimizer_of(case, offloads=True)
    state = init_state(layout, optimizer, seed=0)
    of_state = {
        shard.data.unsafe_buffer_pointer()
        for part in case.parts
        for x in state[part].values()
        for shard in x.addressable_shards
    }
    tree, _ = to_disk(layout, optimizer, state)
    hosted = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == HOST]
    saved = {shard.data.unsafe_buffer_pointer() for x in hosted for shard in x.addressable_shards}
    assert saved and not saved & of_state
    state = back(layout, optimizer, state, tree)
    for parts_of_leaf in copied(state).values():
        assert all(x.flags.owndata for x in parts_of_leaf.values())


# Errors.


class SharedNorm(Lion):
    """A rule one of whose slots has no row for each layer."""

    def slots(self, leaves: Any) -> Any:
        slots = super().slots(leaves)
        return {
            **slots,
            "shared": {name: leaf.without(0) for name, leaf in leaves.items() if leaf.stacked},
        }


def test_a_slot_without_rows_is_refused() -> None:
    case = CASES["lion"]._replace(rule=SharedNorm())
    with pytest.raises(ConfigError, match=r"its slot 'shared' has the shape .* goes through rows"):
        state = abstract_state(layout_of(case), optimizer_of(case, offloads=True))
        step = train_step(layout_of(case), optimizer_of(case, offloads=True), seed=0)
        step.lower(state, on_devices(host_batch(MICROBATCHES), layout_of(case)))


def config(**fields: Any) -> TrainConfig:
    return TrainConfig(model=MODEL, output="out", **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"optimizer": OptimizerConfig(offload=("mu", "v"))},
            "'v' is not a part of the state of the rule adamw, which has mu, nu",
        ),
        (
            {"optimizer": OptimizerConfig(rule=Lion(), offload=MOMENTS)},
            "'nu' is not a part of the state of the rule lion, which has mu",
        ),
        ({"optimizer": OptimizerConfig(offload=("master",))}, "rules 'ddp' keep no master"),
        ({"optimizer": OptimizerConfig(offload=("mu", "mu"))}, "names a part more than once"),
        (
            {"optimizer": OptimizerConfig(offload=("params",))},
            "under rules zero3 layers gather their weights from the master",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config(**fields), 1)


def test_a_host_with_too_little_memory_is_named_with_its_processes() -> None:
    gib = 2**30
    shares = [
        Share("a", 100 * gib, None, 60 * gib),
        Share("a", 100 * gib, None, 60 * gib),
        Share("b", 100 * gib, 64e9, 90 * gib),
        Share("c", 100 * gib, 128e9, 90 * gib),
    ]
    on_a, on_b = host_problems("optimizer.offload=mu,nu", shares)
    assert on_a == (
        "optimizer.offload=mu,nu needs 120.0 GiB of host memory on a, with the copy that a "
        "checkpoint is saved from, 60.0 GiB for each of its 2 processes, and it has 100.0 GiB; "
        "offload fewer parts, or use more hosts"
    )
    assert "XLA pins at most 59.6 GiB; unset the environment variable" in on_b


def test_the_limit_of_pinned_memory_is_the_hosts_unless_it_is_set(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    assert host_memory.limit(environment) == 64e9
    host_memory.raise_limit(environment)
    assert host_memory.limit(environment) >= host_memory.size()
    environment[host_memory.LIMIT] = "100"
    host_memory.raise_limit(environment)
    assert host_memory.limit(environment) == 100e9
    container = tmp_path / "memory.max"
    container.write_text("1000\n", encoding="utf-8")
    assert host_memory.size(container) == 1000
    container.write_text("max\n", encoding="utf-8")
    assert host_memory.size(container) > 1000


def test_a_run_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["ddp"]
    layout = layout_of(case)
    require_host_memory(layout, optimizer_of(case, offloads=True))
    monkeypatch.setattr(host_memory, "size", lambda: 1000)
    require_host_memory(layout, optimizer_of(case, offloads=False))
    with pytest.raises(
        ConfigError, match=r"the hosts lack memory for what .*\n  - optimizer\.offload=mu,nu needs"
    ):
        require_host_memory(layout, optimizer_of(case, offloads=True))


def test_a_device_without_pinned_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["ddp"]
    monkeypatch.setattr(host_room, "HOST", "pinned by nobody")
    with pytest.raises(
        ConfigError,
        match=r"offload=mu,nu: cpu has no pinned by nobody memory with jax .* \(it has .*device",
    ):
        require_host_memory(layout_of(case), optimizer_of(case, offloads=True))


# Compiled for GPUs.


def report_of(rules: str, offloaded: tuple[str, ...], cache: str) -> tuple[Report, Program]:
    model = dataclasses.replace(
        MODEL, n_layers=8, d_model=512, n_heads=8, seq_len=512, vocab_size=4096, dtype="bfloat16",
        remat="full", dropout=0.0, attention="xla", unroll=False,
    )  # fmt: skip
    base = config(rules=preset(rules), optimizer=OptimizerConfig(offload=offloaded))
    run = dataclasses.replace(
        base,
        model=model,
        train=dataclasses.replace(base.train, global_batch=8, microbatches=4),
        launch=dataclasses.replace(base.launch, compile_cache=cache),
    )
    program = Program.of(run, "h100", 1)
    return program.compile(), program


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("rules", "offloaded"),
    [("ddp", MOMENTS), ("distributed", (*MOMENTS, "master"))],
    ids=["ddp", "distributed"],
)
def test_the_host_has_one_copy_of_each_stack(
    rules: str, offloaded: tuple[str, ...], reports: str
) -> None:
    report, program = report_of(rules, offloaded, reports)
    host = report.memory.host
    declared = program.declared
    nbytes = sum(declared[part].nbytes for part in offloaded)
    assert (host.arguments, host.outputs, host.temporaries) == (nbytes, 0, 0)
    assert "moments" not in report.memory.by_kind
    # Each byte goes to the device and back once, and no stack is copied on the host.
    assert {copy.direction for copy in report.host_copies} == {"from host", "to host"}
    assert report.host_copy_bytes == pytest.approx(2 * nbytes, rel=0.01)
    layer = max(
        array.nbytes / array.shape[0]
        for array in declared[offloaded[0]].leaves.values()
        if array.stacked
    )
    assert max(copy.bytes for copy in report.host_copies) <= max(layer, 2**26)
    line = report.timeline
    assert line is not None and 0 < line.host_exposed <= line.host

    # On the device are the params, one set of gradients, and some layers.
    plain, _ = report_of(rules, (), reports)
    assert plain.host_bytes == 0 and not plain.host_copies
    on_device = sum(part.nbytes for name, part in declared.items() if name not in offloaded)
    gradients = declared["mu"].nbytes
    assert report.peak_bytes < on_device + gradients + 6 * gradients / 8
    assert plain.peak_bytes - report.peak_bytes > 0.9 * nbytes


@pytest.mark.deviceless
def test_layers_stream_their_weights_from_the_host(reports: str) -> None:
    """zero3: the host has the weights. Each microbatch copies a layer's twice, in the forward and in
    the backward pass, a layer ahead; and the last one's, or the first one's, once more."""
    offloaded = (*MOMENTS, "master")
    report, program = report_of("zero3", offloaded, reports)
    host = report.memory.host
    nbytes = sum(program.declared[part].nbytes for part in offloaded)
    assert (host.arguments, host.outputs, host.temporaries) == (nbytes, 0, 0)
    stacked = [array for array in program.declared["master"].leaves.values() if array.stacked]
    layers = sum(array.nbytes for array in stacked)
    n_layers = stacked[0].shape[0]
    reads = 4 * (2 * n_layers + 1) / n_layers
    assert report.host_copy_bytes == pytest.approx(2 * nbytes + reads * layers, rel=0.02)

    # The device has gradients once, whatever the number of microbatches, and no weights.
    plain, _ = report_of("zero3", (), reports)
    assert plain.peak_bytes - report.peak_bytes > 0.9 * nbytes
