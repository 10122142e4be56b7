"""Resources of small kernels, compiled for an H100 without a device: counts follow from the kernel,
and spills are reported."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.dev import resources as resources_module
from pallas_kernels.dev.limits import faults
from pallas_kernels.dev.resources import KernelResources, TensorMap, resources

COMPILE_BUDGET = 8


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [64, I] @ b [I, C], one warpgroup: two TMA loads, I / 16 wgmma instructions, one TMA
    store."""

    def body(a_g: Any, b_g: Any, out_g: Any, a_s: Any, b_s: Any, out_s: Any, here: Any) -> None:
        plgpu.copy_gmem_to_smem(a_g, a_s, here.at[0])
        plgpu.copy_gmem_to_smem(b_g, b_s, here.at[0])
        plgpu.barrier_wait(here.at[0])

        def step(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, a_s, b_s)
            return acc[...]

        out_s[...] = pl.run_scoped(step, plgpu.ACC(out_s.shape)).astype(out_s.dtype)  # pyright: ignore[reportPrivateImportUsage]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out_g)
        plgpu.wait_smem_to_gmem(0)

    out = (a.shape[0], b.shape[1])
    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    tiles = [plgpu.SMEM(shape, a.dtype, transforms=layout) for shape in (a.shape, b.shape, out)]
    scratch = [*tiles, plgpu.Barrier(num_arrivals=2, num_barriers=1)]
    return launch(body, out, scratch, a, b)


def hog(x: jax.Array) -> jax.Array:
    """A kernel that holds three tiles [64, 256] of fp32, 128 registers of every thread each,
    through a loop."""

    def body(x_g: Any, out_g: Any) -> None:
        tiles = [
            compat.load(x_g.at[i], layout=plgpu.Layout.WGMMA, optimized=False) for i in range(3)
        ]
        a, b, c = lax.fori_loop(
            0,
            100,
            lambda i, carry: (carry[0] * carry[1], carry[1] + carry[2], carry[2] * carry[0]),
            tuple(tiles),
        )
        out_g[...] = a + b + c

    return launch(body, x.shape[1:], [], x)


def launch(body: Any, out: tuple[int, ...], scratch: Any, *inputs: jax.Array) -> jax.Array:
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out, inputs[0].dtype),
        scratch_types=scratch,
        compiler_params=params,
    )(*inputs)


def of_matmul(columns: int, **how: Any) -> KernelResources:
    [found] = resources(
        matmul,
        jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, columns), jnp.bfloat16),
        **how,
    )
    return found


@pytest.mark.deviceless
@pytest.mark.parametrize("columns", [64, 128])
def test_a_small_matmul_spills_nothing_and_has_the_instructions_it_was_written_with(
    columns: int,
) -> None:
    found = of_matmul(columns)
    assert (found.spill_stores, found.spill_loads, found.warnings) == (0, 0, ())
    assert (found.wgmma, found.tma_loads, found.tma_stores) == (64 // 16, 2, 1)
    assert (found.name, found.threads, found.set_registers) == ("body", 128, ())
    assert (found.barriers, found.grid) == ((2 * 128,), (1, 1, 1))
    # Of a, and of b and the result: tiles of 8 rows and 64 columns; with 64 columns all arrays are
    # alike.
    wide = [((8, columns // 64, 8, 64), (8 * columns, 64, columns, 1))] if columns > 64 else []
    assert [(one.shape, one.strides) for one in found.tensor_maps] == [
        ((8, 8, 64), (512, 64, 1)),
        *wide,
    ]
    assert all((one.box, one.swizzle) == (one.shape, 128) for one in found.tensor_maps)
    assert faults(found) == []
    tiles = 2 * (64 * 64 + 64 * columns + 64 * columns)
    assert tiles <= found.dynamic_shared < tiles + 2048
    assert 0 < found.registers < 168


@pytest.mark.deviceless
def test_a_register_hog_shows_its_spills() -> None:
    [found] = resources(hog, jax.ShapeDtypeStruct((3, 64, 256), jnp.float32))
    assert found.registers == 255
    assert found.spill_stores > 100
    assert found.spill_loads > 100
    assert any("spilled" in warning for warning in found.warnings)


@pytest.mark.deviceless
def test_a_kernel_that_this_process_compiled_before_is_read_all_the_same() -> None:
    assert of_matmul(64) == of_matmul(64)


@pytest.mark.deviceless
def test_a_kept_result_is_the_same_and_compiles_nothing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = of_matmul(64, cache=tmp_path)
    monkeypatch.setattr(resources_module, "_read", None)
    assert of_matmul(64, cache=tmp_path) == first
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.deviceless
def test_a_function_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="lowers to no Mosaic GPU kernel"):
        resources(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32))


def test_without_the_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install"):
        resources(matmul, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), capability=(9, 1))


BOX_BEFORE_JAX_0_12 = """
    %box = llvm.alloca %three x i64 : (i64) -> !llvm.ptr
    %p0 = llvm.getelementptr %box[0] : (!llvm.ptr) -> !llvm.ptr, i64
    llvm.store %eight, %p0 : i64, !llvm.ptr
    %p1 = llvm.getelementptr %box[1] : (!llvm.ptr) -> !llvm.ptr, i64
    llvm.store %four, %p1 : i64, !llvm.ptr
    %p2 = llvm.getelementptr %box[2] : (!llvm.ptr) -> !llvm.ptr, i64
    llvm.store %width, %p2 : i64, !llvm.ptr
"""
BOX_SINCE_JAX_0_12 = """
    %numbers = memref.alloca() : memref<3xi64> loc(#loc12)
    memref.store %eight, %numbers[%i0] : memref<3xi64> loc(#loc12)
    memref.store %four, %numbers[%i1] : memref<3xi64> loc(#loc12)
    memref.store %width, %numbers[%i2] : memref<3xi64> loc(#loc12)
    %as = builtin.unrealized_conversion_cast %numbers : memref<3xi64> to !llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>
    %aligned = llvm.extractvalue %as[1] : !llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>  loc(#loc12)
    %offset = llvm.extractvalue %as[2] : !llvm.struct<(ptr, ptr, i64, array<1 x i64>, array<1 x i64>)>  loc(#loc12)
    %bytes = llvm.mul %offset, %eight : i64 loc(#loc12)
    %number = llvm.ptrtoint %aligned : !llvm.ptr to i64 loc(#loc12)
    %sum = llvm.add %number, %bytes : i64 loc(#loc12)
    %box = llvm.inttoptr %sum : i64 to !llvm.ptr loc(#loc12)
"""


@pytest.mark.parametrize("box", [BOX_BEFORE_JAX_0_12, BOX_SINCE_JAX_0_12])
def test_a_tensor_map_is_read_as_each_jax_prints_it(box: str) -> None:
    constants = {
        "three": "3 : i64",
        "four": "4 : i64",
        "eight": "8 : i64",
        "width": "64 : i64",
        "swizzle": "128 : i64",
    }
    constants |= {f"i{i}": f"{i} : index" for i in range(3)}
    host = [
        *(f"    %{name} = arith.constant {value}" for name, value in constants.items()),
        (
            "    %a, %b, %c:3, %d:3 = memref.extract_strided_metadata %x : memref<8x8x64xbf16, "
            "strided<[512, 64, 1]>> -> memref<bf16>, index"
        ),
        *box.splitlines(),
        (
            "    call @mosaic_gpu_init_tma_desc(%map, %base, %type, %three, %sizes, %strides, "
            "%swizzle, %box) : (!llvm.ptr) -> ()"
        ),
    ]
    expected = TensorMap("bf16", (8, 8, 64), (512, 64, 1), (8, 4, 64), 128)
    assert list(resources_module._tensor_maps(host)) == [expected]
