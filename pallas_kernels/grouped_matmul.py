"""Grouped matmul for a mixture of experts: each token is multiplied by the matrix of its own expert, without padding.

The public function is `grouped_matmul`. It has two implementations, and takes `xla` unless the other one is named (see
`choose_grouped_matmul`):

- mosaic: jax's own kernels for Hopper, `jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` and `transposed_ragged_dot_mgpu`, patched here
  in two places (see `_patched`). They need no temporary arrays.
- xla: a loop over cells; a cell is the part of one block of tokens that belongs to one group. It runs on any platform.
  `jax.lax.ragged_dot` is not used, because XLA expands it to one copy of the tokens for each group.

Shape suffixes: T tokens sorted by group, E groups (experts), D width in, F width out, C tokens in a block.
"""

import dataclasses
import functools
import importlib.util
import itertools
import types
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.attention.api import Choice, Unsupported
from pallas_kernels.attention.cost import cost_metadata
from pallas_kernels.attention.problem import DTYPES, target_of

IMPLEMENTATIONS = ("mosaic", "xla")
KNOWN = ("0.10.", "0.11.")
"""Versions of jax whose kernels were read, interpreted on the CPU and compiled for an H100."""
CORES = 132
"""Streaming multiprocessors of an H100 SXM or H200. On a GPU with fewer, the kernel is also correct, but runs in two rounds."""
BLOCK = 512
"""Tokens in a block of the loop: FLOPs for each byte of a weight that is read, twice an H100's ratio of compute to bandwidth."""


@dataclasses.dataclass(frozen=True)
class GroupedMatmulProblem:
    """One call without its arrays. Make it with `describe_grouped_matmul`, which checks it."""

    platform: str
    capability: tuple[int, int]
    dtype: str
    tokens: int
    d_in: int
    d_out: int
    groups: int


def describe_grouped_matmul(
    x: Any, w: Any, group_sizes: Any, *, platform: str | None = None, capability: tuple[int, int] | None = None
) -> GroupedMatmulProblem:
    """The arguments of `grouped_matmul` as a `GroupedMatmulProblem`; arrays may be `jax.ShapeDtypeStruct`s.

    Raises ValueError with every fault.
    """
    shapes = f"x {tuple(x.shape)}, w {tuple(w.shape)}, group_sizes {tuple(group_sizes.shape)}"
    faults = []
    if x.ndim != 2 or w.ndim != 3 or group_sizes.ndim != 1:
        faults.append(f"x must be [T, D], w [E, D, F] and group_sizes [E], got {shapes}")
    elif x.shape[1] != w.shape[1] or group_sizes.shape[0] != w.shape[0]:
        faults.append(f"x [T, D] and w [E, D, F] must have the same D, w and group_sizes [E] the same E, got {shapes}")
    if 0 in (*x.shape, *w.shape):
        faults.append(f"every dim must be at least 1, got {shapes}")
    if x.dtype != w.dtype or str(x.dtype) not in DTYPES:
        faults.append(f"x and w must have one dtype of {', '.join(DTYPES)}, got {x.dtype}, {w.dtype}; cast the weights to the tokens' type")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        faults.append(f"group_sizes must be integers, got {group_sizes.dtype}")
    if faults:
        raise ValueError("grouped_matmul: " + "; ".join(faults))
    platform, capability = target_of(platform, capability)
    E, D, F = w.shape
    return GroupedMatmulProblem(platform, capability, str(x.dtype), tokens=x.shape[0], d_in=D, d_out=F, groups=E)


def unsupported_reason(problem: GroupedMatmulProblem) -> str | None:
    """Every reason why `mosaic` cannot serve this problem, in one line; None if it can. `xla` serves all problems."""
    on_gpu = problem.platform == "gpu"
    reasons = {
        f"it needs a Hopper GPU, and the platform is {problem.platform}": not on_gpu,
        # wgmma exists on sm_90a alone.
        f"it needs compute capability 9.0, and this GPU has {problem.capability[0]}.{problem.capability[1]}": on_gpu
        and problem.capability != (9, 0),
        f"it takes bfloat16 and float16, not {problem.dtype}": problem.dtype not in ("bfloat16", "float16"),
        f"its widths are multiples of 64, not {problem.d_in} and {problem.d_out}": problem.d_in % 64 != 0 or problem.d_out % 64 != 0,
        f"it needs 128 tokens or more, not {problem.tokens}": problem.tokens < 128,
        f"it is tested with jax {', '.join(k + 'x' for k in KNOWN)}, and this is {jax.__version__}": not jax.__version__.startswith(KNOWN),
        "jax's kernels import absl: pip install absl-py": importlib.util.find_spec("absl") is None,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds) or None


def choose_grouped_matmul(problem: GroupedMatmulProblem) -> Choice:
    """The implementation that `implementation=None` takes, with the reason against the other. Pure.

    This is `xla` for now: the test of jax's kernel for the weights' gradient is skipped upstream as broken, and the two have not been
    compared on a GPU.
    """
    return Choice("xla", {"mosaic": unsupported_reason(problem) or "it has not been compared with xla on a GPU yet; ask for it by name"})


def grouped_matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    implementation: Literal["mosaic", "xla"] | None = None,
    platform: str | None = None,
    capability: tuple[int, int] | None = None,
) -> Array:
    """x[t] @ w[group of t] for every token t, accumulated in fp32 (MegaBlocks, arXiv 2211.15841).

    Args:
      x: [T, D], sorted by group: the first group_sizes[0] tokens are those of group 0, and so on. All must be
        finite, including those that belong to no group.
      w: [E, D, F] in x's dtype.
      group_sizes: integers [E] of at least 0; their sum is at most T.
      implementation: None lets `choose_grouped_matmul` decide.
      platform, capability: of the target device; None: this process's. See `pallas_kernels.describe_attention`.

    Returns [T, F] in x's dtype. Tokens after the last group get 0, and gradient 0. Has a gradient with respect to x and w.

    Shapes are those of one device: under a mesh, call it inside `jax.shard_map(check_vma=False)`.

    Raises ValueError with every fault of the arguments, `Unsupported` when `implementation` cannot serve the call.
    """
    problem = describe_grouped_matmul(x, w, group_sizes, platform=platform, capability=capability)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"grouped_matmul: implementation must be one of {', '.join(IMPLEMENTATIONS)} or None, got {implementation!r}")
    name = implementation or choose_grouped_matmul(problem).name
    if name == "mosaic" and (reason := unsupported_reason(problem)):
        raise Unsupported(f"grouped_matmul: implementation={name!r} cannot serve this call: {reason}")
    return _product(x, w, group_sizes.astype(jnp.int32), name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x_TD: Array, w_EDF: Array, sizes_E: Array, name: str) -> Array:
    return _ROWS[name](x_TD, w_EDF, sizes_E, transposed=False)


def _forward(x_TD: Array, w_EDF: Array, sizes_E: Array, name: str) -> tuple[Array, tuple[Array, Array, Array]]:
    return _product(x_TD, w_EDF, sizes_E, name), (x_TD, w_EDF, sizes_E)


def _backward(name: str, kept: tuple[Array, Array, Array], dy_TF: Array) -> tuple[Array, Array, None]:
    x_TD, w_EDF, sizes_E = kept
    return _ROWS[name](dy_TF, w_EDF, sizes_E, transposed=True), _WEIGHTS[name](x_TD, dy_TF, sizes_E), None


_product.defvjp(_forward, _backward)


def _mosaic_rows(x_TD: Array, w_EDF: Array, sizes_E: Array, *, transposed: bool) -> Array:
    """Each token times its group's matrix or the transpose of it, by jax's kernel."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # here: no other platform loads Mosaic

    width = w_EDF.shape[1 if transposed else 2]
    with _with_cost("grouped_matmul", x_TD.shape[0], w_EDF, x_TD.dtype):
        y = _patched(ragged_dot)(x_TD, w_EDF, group_sizes=sizes_E, transpose_rhs=transposed, block_m=128, **_tiles(width))
    # The kernel writes the rows of groups only.
    return jnp.where(jnp.arange(len(y))[:, None] < sizes_E.sum(), y, 0)


def _mosaic_weights(x_TD: Array, dy_TF: Array, sizes_E: Array) -> Array:
    """[E, D, F]: for each group, the sum of the outer products of its tokens."""
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    (T, D), F = x_TD.shape, dy_TF.shape[1]
    with _with_cost("grouped_matmul_weights", T, jax.ShapeDtypeStruct((len(sizes_E), D, F), x_TD.dtype), x_TD.dtype):
        return _patched(transposed_ragged_dot)(x_TD, dy_TF, group_sizes=sizes_E, block_m=_block(D), **_tiles(F))


def _block(width: int) -> int:
    return 64 if width % 128 else 128


def _tiles(width: int) -> dict[str, int]:
    """The tile sizes for a result of this width: those of jax's own Hopper matmul, without autotuning."""
    blocks = width // _block(width)
    # Columns of tiles that share rows in L2. A divisor of all of them would make the kernel divide by 0 in a branch that it then drops.
    together = next(n for n in itertools.count(4) if blocks % n)
    return {"block_n": _block(width), "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": together}


def _with_cost(kernel: str, T: int, w: Any, dtype: Any) -> Any:
    E, D, F = w.shape
    return cost_metadata(kernel, flops=2 * T * D * F, bytes_accessed=(T * D + T * F + E * D * F) * jnp.dtype(dtype).itemsize)


@functools.cache
def _patched(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """A copy of one of jax's kernels that looks up two names elsewhere; jax itself is not changed.

    - The kernel of the weights' gradient asks `jax.devices()` for the number of cores, which fails in a deviceless compilation.
    - Both kernels release a buffer to the next copy one step after issuing the wgmma that reads it, without waiting for that wgmma.
      `pallas_kernels.dev.interpreter` reports a race, as the PTX manual does. Waiting for all but the newest wgmma removes it.
    """
    globals_: dict[str, Any] = kernel.__globals__  # pyright: ignore[reportFunctionMemberAccess]
    plgpu = globals_["plgpu"]

    def wgmma(*operands: Any) -> None:
        plgpu.wgmma(*operands)
        plgpu.wgmma_wait(1)

    names = {
        "plgpu": _Overlaid(plgpu, wgmma=wgmma),
        "jax": _Overlaid(jax, devices=lambda: [types.SimpleNamespace(core_count=CORES)]),
    }
    patched = types.FunctionType(kernel.__code__, globals_ | names, kernel.__name__, kernel.__defaults__, kernel.__closure__)  # pyright: ignore
    patched.__kwdefaults__ = kernel.__kwdefaults__  # pyright: ignore[reportFunctionMemberAccess]
    return patched


class _Overlaid:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _cells(sizes_E: Array, T: int) -> tuple[tuple[Array, Array, Array, Array], int]:
    """((group, first row read, first row counted, row after the last one counted), each [n], C).

    Cells are in the order of groups. Their number suffices for the worst group sizes; spare cells count no rows and belong to the last
    group that is not empty.
    """
    C = min(BLOCK, T)
    ends = jnp.cumsum(sizes_E)
    starts = ends - sizes_E
    first = starts // C
    blocks = jnp.where(sizes_E > 0, (ends - 1) // C - first + 1, 0)
    after = jnp.cumsum(blocks)
    cell = jnp.arange(-(-T // C) + len(sizes_E) - 1)
    group = jnp.searchsorted(after, jnp.minimum(cell, after[-1] - 1), side="right")
    begin = (first[group] + cell - (after - blocks)[group]) * C
    stop = jnp.where(cell < after[-1], jnp.minimum(ends[group], begin + C), 0)
    # The last block is read from an earlier row, so that it has C rows.
    return (group, jnp.clip(begin, 0, T - C), jnp.maximum(starts[group], begin), stop), C


def _xla_rows(x_TD: Array, w_EDF: Array, sizes_E: Array, *, transposed: bool) -> Array:
    cells, C = _cells(sizes_E, len(x_TD))

    def step(y: Array, cell: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        group, row, begin, stop = cell
        x_C, w = lax.dynamic_slice_in_dim(x_TD, row, C), w_EDF[group]
        new = jnp.einsum("cf,df->cd" if transposed else "cd,df->cf", x_C, w, preferred_element_type=_wide(x_C)).astype(y.dtype)
        rows = row + jnp.arange(C)[:, None]
        new = jnp.where((begin <= rows) & (rows < stop), new, lax.dynamic_slice_in_dim(y, row, C))
        return lax.dynamic_update_slice_in_dim(y, new, row, 0), None

    width = w_EDF.shape[1 if transposed else 2]
    return lax.scan(step, jnp.zeros((len(x_TD), width), x_TD.dtype), cells)[0]


def _xla_weights(x_TD: Array, dy_TF: Array, sizes_E: Array) -> Array:
    cells, C = _cells(sizes_E, len(x_TD))

    def step(carry: tuple[Array, Array], cell: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
        (dw, sum_DF), (group, row, begin, stop, fresh) = carry, cell
        rows = row + jnp.arange(C)[:, None]
        inside = (begin <= rows) & (rows < stop)
        x_C, dy_C = (jnp.where(inside, lax.dynamic_slice_in_dim(a, row, C), 0) for a in (x_TD, dy_TF))
        sum_DF = jnp.where(fresh, 0, sum_DF) + jnp.einsum("cd,cf->df", x_C, dy_C, preferred_element_type=sum_DF.dtype)
        return (dw.at[group].set(sum_DF.astype(dw.dtype)), sum_DF), None

    # Only the current group is summed in fp32.
    group, shape = cells[0], (x_TD.shape[1], dy_TF.shape[1])
    fresh = group != jnp.roll(group, 1).at[0].set(-1)
    return lax.scan(step, (jnp.zeros((len(sizes_E), *shape), x_TD.dtype), jnp.zeros(shape, _wide(x_TD))), (*cells, fresh))[0][0]


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


_ROWS: dict[str, Callable[..., Array]] = {"mosaic": _mosaic_rows, "xla": _xla_rows}
_WEIGHTS: dict[str, Callable[..., Array]] = {"mosaic": _mosaic_weights, "xla": _xla_weights}
