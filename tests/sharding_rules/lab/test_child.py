"""Programs compile in processes of their own: what XLA's abort says, what a child gives back, and
that several run at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_lm.planning.vocabulary import VOCABULARY
from sharding_rules.lab import LabError, compile_report, h100
from sharding_rules.lab import compile as lab
from sharding_rules.lab.aborts import explain_abort
from sharding_rules.lab.child import server
from sharding_rules.lab.vocabulary import NEUTRAL

COMPILE_BUDGET = 9
LINE = next(
    n
    for n, line in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1)
    if line.endswith("# the lookup")
)


def lookup(mesh: Any) -> tuple[Any, ...]:
    """A step with a plain lookup in a sharded table, in a region that is manual over data: XLA's
    partitioner aborts."""

    def array(shape: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def loss(table: jax.Array, w: jax.Array, tokens: jax.Array) -> jax.Array:
        with jax.named_scope("embed"):
            x = table.astype(jnp.bfloat16)[tokens]  # the lookup
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)).astype(jnp.float32).sum()

    @partial(
        jax.shard_map,
        mesh=mesh,
        axis_names={"data"},
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    def gradient(table: jax.Array, w: jax.Array, tokens: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.grad(loss)(table, w, tokens), "data")

    table, w = (
        array((1024, 64), jnp.float32, "tensor", "fsdp"),
        array((64, 64), jnp.float32, "fsdp", "tensor"),
    )
    return gradient, table, w, array((16, 32), jnp.int32, ("data", "fsdp"))


@pytest.mark.deviceless
@pytest.mark.parametrize("vocabulary", [NEUTRAL, VOCABULARY])
def test_an_abort_names_the_operation_its_line_the_cause_and_a_fix(vocabulary: Any) -> None:
    mesh = h100(data=2, fsdp=4, tensor=2)
    with pytest.raises(LabError) as caught:
        compile_report(*lookup(mesh), mesh=mesh, name="mine", vocabulary=vocabulary)
    first, operation, cause, fix = str(caught.value).splitlines()
    assert first.startswith(
        "XLA's process ended with SIGABRT while it compiled mine: Check failed: "
        "partition_group_list"
    )
    assert (
        operation
        == f"  - it was partitioning: gather in forward of embed (lab/test_child.py:{LINE})"
    )
    assert "a lookup in a sharded table" in cause
    assert ("mesh_lm.model.embedding.lookup" in fix) == (vocabulary == VOCABULARY)


@pytest.mark.deviceless
def test_a_child_compiles_what_this_process_would(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = h100(fsdp=2, tensor=4)
    w = jax.ShapeDtypeStruct(
        (64, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", "tensor"))
    )
    program, options = (
        jax.jit(lambda w: jnp.tanh(w @ w).sum()).lower(w),
        {"xla_gpu_collect_cost_model_stats": True},
    )
    made: list[Any] = []
    for compiler in (
        lab.compile_in_child,
        lambda lowered, options, request, folder: lab._compile_here(lowered, options),
    ):
        monkeypatch.setattr(
            lab,
            "compile_in_child",
            lambda *a, compiler=compiler: made.append(compiler(*a)) or made[-1],
        )
        lab._compile(program, (), mesh, lab._Request("w", target="h100", options=options))
    (text, memory, _), (here, stats, _) = made
    assert text == here and "all-gather" in text
    assert (
        memory.peak_memory_in_bytes == stats.peak_memory_in_bytes > 0
        and memory.temp_size_in_bytes == stats.temp_size_in_bytes
    )


@pytest.mark.deviceless
def test_several_programs_at_once_do_not_mix() -> None:
    mesh = h100(fsdp=8)

    def compiled(n: int) -> int:
        x = jax.ShapeDtypeStruct((64 * n, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
        return compile_report(lambda x: x.sum(0), x, mesh=mesh).memory.arguments

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(compiled, (1, 2, 3))) == [64 * 64 * 4 * n // 8 for n in (1, 2, 3)]


@pytest.mark.deviceless
def test_what_xla_refuses_is_its_own_message_and_the_server_goes_on() -> None:
    mesh = h100(fsdp=8)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    serving = server()
    with pytest.raises(LabError, match=r"XLA cannot compile mine: .*xla_gpu_no_such_flag"):
        compile_report(
            lambda x: x.sum(), x, mesh=mesh, name="mine", options={"xla_gpu_no_such_flag": True}
        )
    assert server() is serving and serving.alive


PROGRAM = """\
#loc1 = loc("/home/me/trainer/model.py":12:8 to :20)
#loc2 = loc("/venv/site-packages/jax/numpy.py":3:8)
#loc3 = loc(callsite(#loc2 at #loc1))
#loc4 = loc("transpose(jvp(layers))/while/body/mlp/dot_general"(#loc3))
#loc5 = loc("jvp(embed)/gather"(#loc1))
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (["    @ 0x7f xla::spmd::SpmdPartitioningVisitor::HandleDot()"], "dot in backward of layers/mlp (trainer/model.py:12)"),
        (["W1 [SPMD] Involuntary: for HLO operation %g = f32[2] gather(%a, %b)"], "gather in forward of embed (trainer/model.py:12)"),
        (["F1123 15:49:35.9   206 spmd.cc:4] Check failed: sharding.IsManualSubgroup() "], "manual over some of the mesh axes"),
        (["F1123 15:49:35.9   206 other.cc:4] Check failed: a < b "], "while it compiled mine: Check failed: a < b (other.cc:4)"),
        (["something else"], "XLA's log: something else"),
    ],
)  # fmt: skip
def test_what_a_log_says(log: list[str], said: str) -> None:
    assert said in explain_abort("mine", "XLA's process ended with SIGABRT", log, PROGRAM, NEUTRAL)


def test_a_killed_compiler_ran_out_of_memory() -> None:
    assert "ran out of memory" in explain_abort(
        "mine", "XLA's process ended with SIGKILL", [], PROGRAM, NEUTRAL
    )


@pytest.mark.deviceless
def test_a_step_with_star_static_and_scalar_arguments() -> None:
    mesh = h100(fsdp=8)
    w = jax.ShapeDtypeStruct((64, 1024 * 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    step = jax.jit(
        lambda *args, mode: args[0]["params"] * args[1] if mode == "double" else args[0]["params"],
        static_argnames="mode",
    )
    report = compile_report(step, {"params": w}, 2.0, mesh=mesh, kwargs={"mode": "double"})
    assert (
        report.memory.by_kind["params"] == w.size * 4 // 8
        and report.peak_bytes >= 2 * w.size * 4 // 8
    )
