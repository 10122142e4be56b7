"""The interpreter computes what a kernel computes, and reports its errors: each planted fault
removes a line that a kernel needs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels.dev.interpreter
from pallas_kernels import compat
from pallas_kernels.dev.interpreter import KernelError, interpreted

COMPILE_BUDGET = 52

ROWS, INNER, COLUMNS = 64, 256, 64
SHARED = plgpu.SMEM((64,), jnp.float32)
STEP = 64


def tiled(*shape: int, dtype: Any) -> Any:
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )


def matmul(a: jax.Array, b: jax.Array, without: str = "", slots: int = 2) -> jax.Array:
    """a [R, I] @ b [I, C]: warpgroup 1 loads, warpgroup 0 multiplies, 64 of I at a time. `without`
    removes one operation."""

    def body(
        a_g: Any, b_g: Any, out_g: Any, a_s: Any, b_s: Any, out_s: Any, here: Any, free: Any
    ) -> None:
        row = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
        steps = INNER // STEP

        def fetch(i: Any, carry: None) -> None:
            slot, block = lax.rem(i, slots), pl.ds(i * STEP, STEP)
            if without != "wait until free":
                pl.when(i >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
            plgpu.copy_gmem_to_smem(a_g.at[row, block], a_s.at[slot], here.at[slot])
            plgpu.copy_gmem_to_smem(b_g.at[block, :], b_s.at[slot], here.at[slot])

        def multiply(i: Any, acc: jax.Array) -> jax.Array:
            slot = lax.rem(i, slots)
            if without != "wait until here":
                plgpu.barrier_wait(here.at[slot])

            def step(acc_ref: Any) -> None:
                plgpu.wgmma(acc_ref, a_s.at[slot], b_s.at[slot])
                if without == "wgmma_wait":
                    plgpu.barrier_arrive(free.at[slot])
                    plgpu.barrier_wait(here.at[slot])
                if without == "arrival after the wait":
                    plgpu.barrier_arrive(free.at[slot])
                plgpu.wgmma_wait(0)

            acc = pl.run_state(step)(plgpu.ACC.init(acc))  # pyright: ignore
            if without not in ("arrival", "arrival after the wait"):
                plgpu.barrier_arrive(free.at[slot])
            if without == "one arrival only":
                plgpu.barrier_arrive(free.at[slot])
            return acc

        @pl.when(lax.axis_index("wg") == 1)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            lax.fori_loop(0, steps, fetch, None)

        @pl.when(lax.axis_index("wg") == 0)
        def _() -> None:
            acc = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
            out_s[...] = lax.fori_loop(0, steps, multiply, acc).astype(out_s.dtype)
            if without != "commit_smem":
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, out_g.at[row])
            if without == "store after copy":
                out_s[...] = jnp.zeros_like(out_s)
            if without != "wait_smem_to_gmem":
                plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((a.shape[0], COLUMNS), a.dtype),
        scratch_types=[
            tiled(slots, ROWS, STEP, dtype=a.dtype),
            tiled(slots, STEP, COLUMNS, dtype=a.dtype),
            tiled(ROWS, COLUMNS, dtype=a.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        grid=(a.shape[0] // ROWS,), grid_names=("tile",), num_threads=2, thread_name="wg",
    )(a, b)  # fmt: skip


def operands(dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(2 * ROWS, INNER)), dtype), jnp.asarray(
        rng.normal(size=(INNER, COLUMNS)), dtype
    )


def small(
    body: Callable[..., None],
    *inputs: jax.Array,
    out: tuple[int, ...] = (64,),
    scratch: Any = (),
    threads: int = 1,
) -> jax.Array:
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out, jnp.float32),
        scratch_types=list(scratch),
        num_threads=threads,
        thread_name="wg",
    )
    return kernel(*inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_pipelined_matmul_is_right_in_any_order_of_its_warpgroups(
    dtype: str, seed: int | None
) -> None:
    a, b = operands(jnp.dtype(dtype))
    with interpreted(seed):
        out = np.asarray(matmul(a, b), np.float32)
    np.testing.assert_allclose(
        out, np.asarray(a, np.float32) @ np.asarray(b, np.float32), rtol=0.01, atol=0.05
    )


@pytest.mark.parametrize(
    ("without", "says"),
    {
        "wait until here": "nothing was stored",
        "wait until free": "overwrites .*, and no barrier orders this after the read of thread 0: a race",
        "wgmma_wait": "overwrites .* while the wgmma issued at .* still reads it",
        "arrival": (
            "deadlock: thread 0 waits for .*; thread 1 waits for .*phase 0; 0 complete, 0 of 1 "
            "arrivals"
        ),
        "arrival after the wait": "overwrites .*, and no barrier orders this after the read of thread 0: a race",
        "one arrival only": "too many arrivals",
        "commit_smem": "thread 0 stored to without a commit_smem",
        "wait_smem_to_gmem": "ends before it waits for the copy to",
        "store after copy": "overwrites .* while the copy to .* still reads it",
    }.items(),
)
def test_a_planted_fault_is_found(without: str, says: str) -> None:
    with pytest.raises(KernelError, match=says), interpreted():
        jax.block_until_ready(matmul(*operands(), without=without))


def test_the_fault_names_the_kernel_the_block_the_thread_and_the_line() -> None:
    with (
        pytest.raises(
            KernelError,
            match=r"body, block tile=0, thread 0, wgmma_ref at .*test_interpreter.py:\d+",
        ),
        interpreted(),
    ):
        jax.block_until_ready(matmul(*operands(), without="wait until here"))


def test_it_works_in_jit_and_is_gone_afterwards() -> None:
    a, b = operands()
    jitted = jax.jit(matmul)
    with interpreted():
        once, again = np.asarray(jitted(a, b)), np.asarray(jitted(a, b))
    np.testing.assert_array_equal(once, again)
    with pytest.raises(Exception, match=r"(?i)interpret|cpu"):
        jitted(a, b)
    with interpreted():  # the program compiled above still works
        np.testing.assert_array_equal(np.asarray(jitted(a, b)), once)


def test_loops_conditions_and_scalars_read_from_global_memory() -> None:
    def body(n_g: Any, x_g: Any, out_g: Any) -> None:
        n = n_g[0]
        # a bound that is known at run time only
        total = lax.fori_loop(0, n, lambda i, acc: acc + x_g[i], jnp.float32(0))
        halvings = lax.while_loop(
            lambda s: s[0] > 1, lambda s: (s[0] // 2, s[1] + 1), (n, jnp.int32(0))
        )[1]
        sign = lax.cond(total > 0, lambda: jnp.float32(1), lambda: jnp.float32(-1))
        column = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        out_g[...] = jnp.where(column < n, sign * total, halvings.astype(jnp.float32))

    x = jnp.arange(8, dtype=jnp.float32)
    with interpreted():
        out = np.asarray(small(body, jnp.array([5], jnp.int32), x))
    np.testing.assert_array_equal(out, np.where(np.arange(64) < 5, 10.0, 2.0))


def test_boxes_over_the_edge_read_zeros_and_store_nothing() -> None:
    def body(x_g: Any, out_g: Any, x_s: Any, here: Any) -> None:
        second = pl.ds((lax.axis_index("wg") + 1) * 64, 64)
        plgpu.copy_gmem_to_smem(x_g.at[second], x_s, here.at[0])
        plgpu.barrier_wait(here.at[0])
        x_s[...] = x_s[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_s, out_g.at[second])
        plgpu.wait_smem_to_gmem(0)

    scratch = [SHARED, plgpu.Barrier(num_barriers=1)]
    with interpreted():
        out = np.asarray(
            small(body, jnp.arange(100, dtype=jnp.float32), out=(100,), scratch=scratch)
        )
    np.testing.assert_array_equal(out[64:], np.arange(65, 101))
    assert np.isnan(out[:64]).all()  # elements that no kernel wrote are visible


def out_of_bounds(x_g: Any, out_g: Any) -> None:
    out_g[...] = x_g[pl.ds(lax.axis_index("wg") + 32, 64)]


def in_flight(x_g: Any, out_g: Any, x_s: Any, here: Any) -> None:
    plgpu.copy_gmem_to_smem(x_g, x_s, here.at[0])
    out_g[...] = x_s[...]


def twice(x_g: Any, out_g: Any, x_s: Any, here: Any) -> None:
    plgpu.copy_gmem_to_smem(x_g, x_s, here.at[0])
    plgpu.copy_gmem_to_smem(x_g, x_s, here.at[0])


def multiplied(x_g: Any, out_g: Any, a_s: Any, disturb: Callable[[Any], None]) -> None:
    def step(acc: Any) -> None:
        plgpu.wgmma(acc, a_s, a_s)
        disturb(acc)

    a_s[...] = jnp.ones((64, 64), a_s.dtype)
    plgpu.commit_smem()
    pl.run_scoped(step, plgpu.ACC((64, 64)))  # pyright: ignore[reportPrivateImportUsage]


def never_waits(x_g: Any, out_g: Any, a_s: Any) -> None:
    multiplied(x_g, out_g, a_s, lambda acc: None)


def disturbed(x_g: Any, out_g: Any, a_s: Any) -> None:
    multiplied(x_g, out_g, a_s, lambda acc: acc.__setitem__(..., jnp.zeros((64, 64))))


def unordered(x_g: Any, out_g: Any, x_s: Any) -> None:
    pl.when(lax.axis_index("wg") == 0)(lambda: x_s.__setitem__(..., x_g[...]))
    pl.when(lax.axis_index("wg") == 1)(lambda: out_g.__setitem__(..., x_s[...]))


def uninitialised(x_g: Any, out_g: Any, x_s: Any) -> None:
    out_g[...] = x_s[...]


def unknown(x_g: Any, out_g: Any) -> None:
    out_g[...] = lax.erf_inv(x_g[...])


def divided(x_g: Any, out_g: Any) -> None:
    out_g[...] = jnp.full((64,), lax.div(jnp.int32(1), lax.axis_index("wg")), jnp.float32)


def starts_in_a_tile(x_g: Any, out_g: Any, a_s: Any, here: Any) -> None:
    plgpu.copy_gmem_to_smem(
        x_g.at[pl.ds(lax.axis_index("wg") + 4, 64), pl.ds(0, 64)], a_s, here.at[0]
    )


def ends_in_a_tile(x_g: Any, out_g: Any, a_s: Any) -> None:
    a_s[...] = jnp.ones((64, 64), a_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(a_s, x_g.at[:, pl.ds(lax.axis_index("wg") + 8, 64)])


@pytest.mark.parametrize(
    ("body", "scratch", "starts"),
    [
        (
            starts_in_a_tile,
            (tiled(64, 64, dtype=jnp.bfloat16), plgpu.Barrier(num_barriers=1)),
            "[4, 0]",
        ),
        (ends_in_a_tile, (tiled(64, 64, dtype=jnp.bfloat16),), "[0, 8]"),
    ],
)
def test_a_copy_that_starts_inside_a_tile_is_a_fault(
    body: Callable[..., None], scratch: Any, starts: str
) -> None:
    """The hardware copies whole tiles, 8 x 64 here: an H200 read zeros in the place of the last 4
    of every 8 rows of the first case."""
    says = re.escape(f"starts at {starts}, not on a multiple of the tiles [8, 64] in shared memory")
    with pytest.raises(KernelError, match=says), interpreted():
        jax.block_until_ready(small(body, jnp.ones((64, 128), jnp.bfloat16), scratch=scratch))


@pytest.mark.parametrize(
    ("body", "scratch", "says"),
    [
        (out_of_bounds, (), r"index 32:96 is out of bounds on axis 0 of shape \(64,\)"),
        (
            in_flight,
            (SHARED, plgpu.Barrier(num_barriers=1)),
            "a copy is still in flight: a barrier_wait is missing",
        ),
        (
            twice,
            (SHARED, plgpu.Barrier(num_barriers=1)),
            "overwrites x_s where a copy is still in flight",
        ),
        (
            never_waits,
            (tiled(64, 64, dtype=jnp.bfloat16),),
            "thread 0 ends before it waits for 1 wgmma",
        ),
        (
            disturbed,
            (tiled(64, 64, dtype=jnp.bfloat16),),
            "writes an accumulator while its wgmma is in flight",
        ),
        (
            unordered,
            (SHARED,),
            "thread 1, .* no barrier orders this after the store of thread 0: a race",
        ),
        (uninitialised, (SHARED,), "nothing was stored"),
        (unknown, (), "does not know the primitive erf_inv"),
        (divided, (), "division by zero"),
    ],
)
def test_a_fault_in_one_thread_is_an_error_and_no_hang(
    body: Callable[..., None], scratch: Any, says: str
) -> None:
    with pytest.raises(KernelError, match=says), interpreted():
        jax.block_until_ready(
            small(body, jnp.ones(64), scratch=scratch, threads=1 + (body is unordered))
        )


def test_a_kernel_that_ends_with_a_copy_in_flight_is_a_fault() -> None:
    def body(x_g: Any, out_g: Any, x_s: Any, here: Any) -> None:
        plgpu.copy_gmem_to_smem(x_g, x_s, here.at[0])
        out_g[...] = jnp.zeros(64)

    scratch = [SHARED, plgpu.Barrier(num_barriers=1)]
    with (
        pytest.raises(KernelError, match="ends before any thread waits for the copy of"),
        interpreted(),
    ):
        jax.block_until_ready(small(body, jnp.ones(64), scratch=scratch))


def test_a_reference_that_is_passed_in_is_read_and_written_in_place() -> None:
    """jax makes it an operand and an output, and a kernel may write through either."""

    def body(x_g: Any, sum_g: Any) -> None:
        sum_g[...] = sum_g[...] + x_g[...]

    mesh = plgpu.Mesh(num_threads=1, thread_name="wg", kernel_name="adds")

    @jax.jit
    def twice(x: jax.Array) -> jax.Array:
        total = jax.new_ref(jnp.ones(64))
        for _ in range(2):
            pl.kernel(body, (), mesh=mesh, name="adds")(x, total)
        return total[...]

    with interpreted():
        np.testing.assert_array_equal(
            np.asarray(twice(jnp.arange(64, dtype=jnp.float32))), 1 + 2 * np.arange(64)
        )


def test_an_accumulator_that_is_stored_to_starts_there() -> None:
    def body(x_g: Any, out_g: Any, a_s: Any) -> None:
        def step(acc: Any) -> jax.Array:
            acc[...] = plgpu.layout_cast(jnp.full((64, 64), 5.0, jnp.float32), plgpu.Layout.WGMMA)
            plgpu.wgmma(acc, a_s, a_s)
            return acc[...]

        a_s[...] = jnp.ones((64, 64), a_s.dtype)
        plgpu.commit_smem()
        out_g[...] = pl.run_scoped(step, plgpu.ACC((64, 64)))  # pyright: ignore[reportPrivateImportUsage]

    with interpreted():
        out = np.asarray(
            small(body, jnp.ones(64), out=(64, 64), scratch=(tiled(64, 64, dtype=jnp.bfloat16),))
        )
    np.testing.assert_array_equal(out, np.full((64, 64), 69.0))


@pytest.mark.parametrize("with_arrays", [True, False])
def test_inlined_code_is_replaced_by_what_it_does_with_arrays(with_arrays: bool) -> None:
    def function(ctx: Any, ref: Any, x: Any) -> None:
        raise AssertionError("not called in the interpreter")

    def in_numpy(ref: Any, x: Any) -> None:
        ref += 2 * x

    if with_arrays:
        function.in_numpy = in_numpy  # pyright: ignore[reportFunctionMemberAccess]

    def body(x_g: Any, out_g: Any) -> None:
        out_g[...] = jnp.ones((2, 64))
        x = compat.load(x_g, layout=plgpu.Layout.WGMMA.reduce(1))
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA.reduce(1)))(function)(
            out_g.at[1], x
        )

    x = jnp.arange(64, dtype=jnp.float32)
    if not with_arrays:
        with (
            pytest.raises(
                KernelError, match="inline_mgpu of function, which has no attribute in_numpy"
            ),
            interpreted(),
        ):
            jax.block_until_ready(small(body, x, out=(2, 64)))
        return
    with interpreted():
        out = np.asarray(small(body, x, out=(2, 64)))
    np.testing.assert_array_equal(out, np.stack([np.ones(64), 1 + 2 * np.arange(64)]))


def test_a_fault_whose_exception_was_lost_is_raised_at_the_end() -> None:
    with (
        pytest.raises(KernelError, match="nothing was stored"),
        interpreted(),
        contextlib.suppress(jax.errors.JaxRuntimeError),
    ):
        jax.block_until_ready(small(uninitialised, jnp.ones(64), scratch=(SHARED,)))


def test_another_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_kernels.dev.interpreter.jax, "__version__", "0.13.0")
    with (
        pytest.raises(
            ValueError, match=r"supports jax 0.10.x, 0.11.x, 0.12.x, and this is jax 0.13.0"
        ),
        interpreted(),
    ):
        pass
