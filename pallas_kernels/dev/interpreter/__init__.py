"""Runs Mosaic GPU kernels on the CPU, and checks their synchronisation.

It needs no GPU and no compiler.

    with interpreted():
        out = f(q, k, v)  # arrays on the CPU; f calls plgpu.kernel, in jit or not

jax's own interpreter (plgpu.InterpretGPUParams) lacks features of attention kernels (pl.run_state,
wgmma with an operand in registers), takes minutes instead of seconds, and hangs if a thread fails.
This one evaluates the kernel's traced program in NumPy. A copy arrives when a thread waits for it,
not before; an asynchronous read lasts until a thread waits for it. So it detects, with a
KernelError: a missing barrier_wait, wgmma_wait, wait_smem_to_gmem or commit_smem, a buffer that is
overwritten while in use, a phase that a thread missed, a deadlock, an index out of bounds, a copy
that starts inside a tile. It ignores registers, the size of shared memory and other facts of
layouts: see pallas_kernels.dev.resources.

Features that the kernels of this project do not use are refused with a KernelError:

- clusters of more than one block, their barriers, and copies to several of their blocks
- tensor memory (TMEM) and semaphores
- inline_mgpu of a function that has no attribute `in_numpy`, which does the same with arrays, or on
  shared memory
- copy_gmem_to_smem without a barrier; copy_smem_to_gmem with a reduction other than add
- an array as an index (a gather), a reshape of a reference that would copy, any other unknown
  reference transform
- axis_index of several axes at once, dot_general with batch dimensions
- any primitive that is not in operations.py, primitives.py or machine.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import callback, config
from jax._src.interpreters import mlir
from jax._src.pallas import mpmd

from pallas_kernels import compat
from pallas_kernels.dev.interpreter.machine import run_kernel
from pallas_kernels.dev.interpreter.threads import KernelError

__all__ = ["KernelError", "interpreted"]

_ERRORS: list[list[KernelError]] = []
"""The errors of each open context, innermost last, because XLA passes on an exception of a callback
as text only."""


@dataclass(frozen=True)
class _Interpreted:
    """A mark of programs that are traced inside the context: jit caches them separately."""

    seed: int | None


@contextlib.contextmanager
def interpreted(seed: int | None = None) -> Iterator[None]:
    """A context in which plgpu.kernel programs that run on the CPU are interpreted.

    Inside the context, jax has a lowering rule of this module for Pallas programs on the CPU, and
    the interpret mode of Pallas has a value of this module, which is part of the key under which
    jax caches traces and compiled programs. Nothing else in jax is changed.

    Args:
      seed: None: a warpgroup runs until it must wait. A number: warpgroups alternate at random, in
        an order that depends on the seed.

    Raises:
      ValueError: the version of jax is not supported.
      KernelError: the first error of a kernel, when the context ends, whatever happened to jax's
        own exception: block on the results inside.
    """
    # It uses internals of jax: mpmd_map, its parameters, the primitives of Mosaic GPU.
    if not compat.is_supported():
        raise ValueError(
            f"the interpreter supports {compat.SUPPORTED}, and this is jax {jax.__version__}"
        )
    mode = config.pallas_tpu_interpret_mode_context_manager
    rules = mlir._platform_specific_lowerings["cpu"]
    errors: list[KernelError] = []
    outer_mode = mode.swap_local(_Interpreted(seed))
    outer_rule = rules.get(mpmd.mpmd_map_p)
    mlir.register_lowering(mpmd.mpmd_map_p, _lowering, platform="cpu")
    _ERRORS.append(errors)
    try:
        yield
    except KernelError:
        raise
    except Exception:
        if errors:
            raise errors[0] from None
        raise
    finally:
        _ERRORS.pop()
        mode.set_local(outer_mode)
        if outer_rule is None:
            del rules[mpmd.mpmd_map_p]
        else:
            rules[mpmd.mpmd_map_p] = outer_rule
    if errors:
        raise errors[0]


def _lowering(
    ctx: Any,
    *operands: Any,
    jaxprs: Any,
    meshes: Any,
    interpret: Any,
    input_output_aliases: Any,
    name: Any,
    **_: Any,
) -> Any:
    if not isinstance(interpret, _Interpreted):
        raise ValueError(f"{name}: traced outside interpreted(), compiled for the CPU inside")
    [jaxpr] = jaxprs
    [mesh] = meshes

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        try:
            return run_kernel(
                str(name),
                jaxpr,
                mesh,
                [np.asarray(array) for array in arrays],
                ctx.avals_out,
                dict(input_output_aliases),
                interpret.seed,
            )
        except KernelError as error:
            if _ERRORS:
                _ERRORS[-1].append(error)
            raise

    results, _, _ = callback.emit_python_callback(
        ctx, run, None, operands, ctx.avals_in, ctx.avals_out, has_side_effect=False
    )
    return results
