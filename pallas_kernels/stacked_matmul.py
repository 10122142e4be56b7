"""Matmuls with one matrix of a stack, by its row.

The matrix is not copied out of the stack, and its gradient is added in place. The public functions
are `stacked_matmul` and `add_weight_gradient`. Each has two implementations:

- xla: a slice of the stack, a matmul, and an addition to a row (`stacked/xla.py`). It runs on any
  platform.
- mosaic: kernels for Hopper (`stacked/hopper.py`) that take the row as a number on the device.
  **Experimental**: they serve only calls that ask for them by name. `EXPERIMENTAL` says what they
  must show first.

Shape suffixes: R rows of the stack, T tokens, K and N the widths of a matrix.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import compat
from pallas_kernels.attention.problem import DTYPES, target_of
from pallas_kernels.choice import Choice, serving, trusted_choice
from pallas_kernels.stacked import xla
from pallas_kernels.trust.verdict import Verdict, trusted

IMPLEMENTATIONS = ("mosaic", "xla")
FACTOR_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "float64")
GOAL = 0.95
"""The share of cuBLAS's rate, at the shapes of gpt_175b, that the kernels must reach to serve calls
by default."""
EXPERIMENTAL = (
    f"it is experimental until a GPU measures {GOAL:g} of cuBLAS's rate; implementation='mosaic' "
    "asks for it"
)
"""The reason why the kernels do not serve a call by default. If it is empty, they serve the calls
that they can, after they passed their self-test."""
Form = Literal["product", "transposed", "add"]


@dataclasses.dataclass(frozen=True)
class StackedMatmulProblem:
    """One call without its arrays.

    Make it with `describe_stacked_matmul` or `describe_weight_gradient`, which check it.
    """

    platform: str
    capability: tuple[int, int]
    form: Form
    """x @ w, x @ w^T, or x^T dy that is added."""
    dtype: str
    """The type of the factors."""
    tokens: int
    K: int
    N: int
    rows: int
    rounded: bool = False
    """The form "add" rounds each sum over the tokens to `dtype` before it adds it."""


def describe_stacked_matmul(
    x: Any,
    weights: Any,
    row: Any,
    *,
    transposed: bool = False,
    platform: str | None = None,
    capability: tuple[int, int] | None = None,
) -> StackedMatmulProblem:
    """Returns the `StackedMatmulProblem` of a call with these arguments of `stacked_matmul`.

    Arrays may be `jax.ShapeDtypeStruct`s. Raises ValueError with every fault.
    """
    shapes = f"x {tuple(x.shape)} and weights {tuple(weights.shape)}"
    width = "N" if transposed else "K"
    faults = []
    if x.ndim != 2 or weights.ndim != 3:
        faults.append(f"x must be [T, {width}] and weights [R, K, N], got {shapes}")
    elif x.shape[1] != weights.shape[1 + transposed]:
        faults.append(
            f"x [T, {width}] and weights [R, K, N] must have the same {width}, got {shapes}"
        )
    faults += _factor_faults({"x": x, "weights": weights}, row, shapes)
    if faults:
        raise ValueError("stacked_matmul: " + "; ".join(faults))
    R, K, N = weights.shape
    platform, capability = target_of(platform, capability)
    return StackedMatmulProblem(
        platform=platform,
        capability=capability,
        form="transposed" if transposed else "product",
        dtype=str(x.dtype),
        tokens=x.shape[0],
        K=K,
        N=N,
        rows=R,
    )


def describe_weight_gradient(
    sums: Any,
    row: Any,
    x: Any,
    dy: Any,
    *,
    rounded: bool = False,
    platform: str | None = None,
    capability: tuple[int, int] | None = None,
) -> StackedMatmulProblem:
    """Returns the `StackedMatmulProblem` of a call with these arguments of `add_weight_gradient`.

    Arrays may be `jax.ShapeDtypeStruct`s. Raises ValueError with every fault.
    """
    shapes = f"sums {tuple(sums.shape)}, x {tuple(x.shape)} and dy {tuple(dy.shape)}"
    faults = []
    if sums.ndim != 3 or x.ndim != 2 or dy.ndim != 2:
        faults.append(f"sums must be [R, K, N], x [T, K] and dy [T, N], got {shapes}")
    elif x.shape[0] != dy.shape[0] or sums.shape[1:] != (x.shape[1], dy.shape[1]):
        faults.append(
            f"sums [R, K, N], x [T, K] and dy [T, N] must have the same T, K and N, got {shapes}"
        )
    if sums.dtype != jnp.float32:
        faults.append(f"sums must be float32, got {sums.dtype}")
    faults += _factor_faults({"x": x, "dy": dy}, row, shapes, sums)
    if faults:
        raise ValueError("add_weight_gradient: " + "; ".join(faults))
    R, K, N = sums.shape
    platform, capability = target_of(platform, capability)
    return StackedMatmulProblem(
        platform=platform,
        capability=capability,
        form="add",
        dtype=str(x.dtype),
        tokens=x.shape[0],
        K=K,
        N=N,
        rows=R,
        rounded=rounded,
    )


def _factor_faults(factors: dict[str, Any], row: Any, shapes: str, *other_arrays: Any) -> list[str]:
    """The faults of the two factors of a product, by name, and of a row."""
    (x_name, x), (y_name, y) = factors.items()
    faults = []
    if any(0 in array.shape for array in (x, y, *other_arrays)):
        faults.append(f"every dim must be at least 1, got {shapes}")
    if x.dtype != y.dtype or str(x.dtype) not in FACTOR_DTYPES:
        faults.append(
            f"{x_name} and {y_name} must have one dtype of {', '.join(FACTOR_DTYPES)}, got "
            f"{x.dtype} and {y.dtype}; cast one to the other's"
        )
    row_dtype = getattr(row, "dtype", jnp.result_type(row))
    row_shape = jnp.shape(row)
    if row_shape or not jnp.issubdtype(row_dtype, jnp.integer):
        faults.append(f"row must be one integer, got {row_dtype}{list(row_shape)}")
    return faults


def unsupported_reason(problem: StackedMatmulProblem) -> str | None:
    """Every reason why `mosaic` cannot serve this problem, in one line; None if it can.

    `xla` serves all problems.
    """
    on_gpu = problem.platform == "gpu"
    major, minor = problem.capability
    K = problem.K
    N = problem.N
    T = problem.tokens
    reasons = []
    if not on_gpu:
        reasons.append(f"it needs a Hopper GPU, and the platform is {problem.platform}")
    # wgmma exists on sm_90a alone.
    if on_gpu and problem.capability != (9, 0):
        reasons.append(f"it needs compute capability 9.0, and this GPU has {major}.{minor}")
    if problem.dtype not in ("bfloat16", "float16"):
        reasons.append(f"it takes bfloat16 and float16, not {problem.dtype}")
    # Mosaic copies arrays whose dims are multiples of the swizzle's tile, 8 x 64.
    if K % 64 != 0 or N % 64 != 0:
        reasons.append(
            f"its widths are multiples of 64, not {K} and {N}; pad to {_round_up(K, 64)} and "
            f"{_round_up(N, 64)}"
        )
    if T % 8 != 0 or T < 64:
        padded = max(64, _round_up(T, 8))
        reasons.append(f"its tokens are a multiple of 8 from 64 on, not {T}; pad to {padded}")
    if not compat.is_supported():
        reasons.append(f"it is tested with {compat.SUPPORTED}, and this is jax {jax.__version__}")
    return "; ".join(reasons) or None


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def choose_stacked_matmul(problem: StackedMatmulProblem) -> Choice:
    """The implementation that serves a problem, with the reason against the other. Pure."""
    reason = unsupported_reason(problem) or EXPERIMENTAL
    if reason:
        return Choice("xla", {"mosaic": reason})
    return Choice(
        "mosaic",
        {"xla": "it copies the matrix out of its stack, or its gradient to memory and back"},
    )


def choose_trusted_stacked_matmul(problem: StackedMatmulProblem) -> Choice:
    """Chooses as `choose_stacked_matmul`, but `mosaic` only if it passed its self-test on this GPU.

    The first call for a kind of problem may run that self-test (`pallas_kernels.trust`).
    """

    def verdict() -> Verdict:
        # Imported here, so that no other platform loads Mosaic.
        from pallas_kernels.stacked.self_test import kind_of

        return trusted(kind_of(problem))

    return trusted_choice(
        choose_stacked_matmul(problem), verdict, lambda reason: Choice("xla", {"mosaic": reason})
    )


def stacked_matmul(
    x: Array,
    weights: Array,
    row: Array | int,
    *,
    transposed: bool = False,
    implementation: Literal["mosaic", "xla"] | None = None,
    platform: str | None = None,
    capability: tuple[int, int] | None = None,
) -> Array:
    """x @ weights[row], accumulated in fp32; with `transposed`, x @ weights[row]^T.

    Shapes are those of one device: under a mesh, call it inside `jax.shard_map(check_vma=False)`.

    Args:
      x: [T, K]; with `transposed`, [T, N].
      weights: [R, K, N] in x's dtype.
      row: an integer, which may be traced. One outside of 0 to R - 1 counts as the nearest one,
        unlike an index of NumPy.
      implementation: None lets `choose_stacked_matmul` decide, and `choose_trusted_stacked_matmul`
        on this process's own GPUs.
      platform, capability: of the target device; None: this process's. See
        `pallas_kernels.describe_attention`.

    Returns:
      [T, N] in x's dtype; with `transposed`, [T, K]. Has a gradient with respect to x and weights.
      That of weights is a whole stack, which is 0 but for the row: in a loop over rows, add to one
      stack with `add_weight_gradient` instead.

    Raises:
      ValueError: the arguments have faults; the message has all of them.
      Unsupported: `implementation` cannot serve the call.
    """
    problem = describe_stacked_matmul(
        x, weights, row, transposed=transposed, platform=platform, capability=capability
    )
    on_own_devices = platform is None and capability is None
    name = _serving("stacked_matmul", problem, implementation, on_own_devices)
    return _product(x, weights, jnp.asarray(row, jnp.int32), transposed, name)


def add_weight_gradient(
    sums: Array,
    row: Array | int,
    x: Array,
    dy: Array,
    *,
    rounded: bool = False,
    implementation: Literal["mosaic", "xla"] | None = None,
    platform: str | None = None,
    capability: tuple[int, int] | None = None,
) -> Array:
    """`sums` with x^T dy added to its row: the gradient of the weights of `stacked_matmul`.

    Summed over microbatches, Megatron-LM calls this gradient accumulation fusion. In a jitted
    program whose `sums` are donated, or carried by a loop, they stay where they are, and other rows
    are not touched. Shapes and errors are as for `stacked_matmul`.

    Args:
      sums: fp32 [R, K, N].
      row: an integer, which may be traced. One outside of 0 to R - 1 counts as the nearest one,
        unlike an index of NumPy.
      x, dy: [T, K] and [T, N] in one dtype.
      rounded: whether the sum over the tokens is rounded to x's dtype before it is added, as when a
        matmul with a result of that dtype is added to fp32 sums. False: nothing is rounded.
      implementation, platform, capability: as for `stacked_matmul`.

    Returns:
      fp32 [R, K, N]. `mosaic` adds in the L2 cache, where numbers too small to be normal count as
      0. It has no gradient.
    """
    problem = describe_weight_gradient(
        sums, row, x, dy, rounded=rounded, platform=platform, capability=capability
    )
    on_own_devices = platform is None and capability is None
    name = _serving("add_weight_gradient", problem, implementation, on_own_devices)
    return _add(name, sums, jnp.asarray(row, jnp.int32), x, dy, rounded)


def _serving(
    function: str, problem: StackedMatmulProblem, implementation: str | None, on_own_devices: bool
) -> str:
    """The implementation that serves a call of `function`."""
    choose = choose_trusted_stacked_matmul if on_own_devices else choose_stacked_matmul
    return serving(
        function,
        implementation,
        IMPLEMENTATIONS,
        choose=lambda: choose(problem),
        reason=lambda name: unsupported_reason(problem) if name == "mosaic" else None,
    )


# A Mosaic GPU kernel has no derivative rule: the gradient of x is the product with the transposed
# matrix.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(x: Array, weights_RKN: Array, row: Array, transposed: bool, name: str) -> Array:
    if name == "xla":
        return xla.product(x, weights_RKN, row, transposed=transposed)
    # Imported here, so that no other platform loads Mosaic.
    from pallas_kernels.stacked import hopper, plan

    width = weights_RKN.shape[1 if transposed else 2]
    best, estimate = plan.plan_for(len(x), width, x.shape[1])
    return hopper.product(
        best, x, weights_RKN, row, transpose=transposed, occupancy=estimate.occupancy
    )


def _forward(
    x: Array, weights_RKN: Array, row: Array, transposed: bool, name: str
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _product(x, weights_RKN, row, transposed, name), (x, weights_RKN, row)


def _backward(
    transposed: bool, name: str, residuals: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array, None]:
    x, weights_RKN, row = residuals
    zeros_RKN = jnp.zeros(weights_RKN.shape, jnp.float32)
    left, right = (dy, x) if transposed else (x, dy)
    dw_RKN = _add(name, zeros_RKN, row, left, right, False)
    dx: Array = _product(dy, weights_RKN, row, not transposed, name)
    return dx, dw_RKN.astype(weights_RKN.dtype), None


_product.defvjp(_forward, _backward)


def _add(name: str, sums_RKN: Array, row: Array, x_TK: Array, dy_TN: Array, rounded: bool) -> Array:
    if name == "xla":
        return xla.add(sums_RKN, row, x_TK, dy_TN, rounded=rounded)
    from pallas_kernels.stacked import hopper, plan

    best, estimate = plan.plan_to_add(x_TK.shape[1], dy_TN.shape[1], len(x_TK))
    return hopper.add(
        best, sums_RKN, row, x_TK, dy_TN, rounded=rounded, occupancy=estimate.occupancy
    )
