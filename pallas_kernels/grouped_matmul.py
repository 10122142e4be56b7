"""Grouped matmul for a mixture of experts: each token times its expert's matrix, without padding.

The public function is `grouped_matmul`. It has two implementations; `choose_grouped_matmul` says
which one serves a call and why:

- mosaic: kernels for Hopper (`grouped/hopper.py`). They need no temporary arrays. An H200
  has run them: docs/kernels.md has their rates.
- xla: a loop over blocks of tokens (`grouped/xla.py`, on CPUs `grouped/blocks.py`). It runs on any
  platform.

Shape suffixes: T tokens sorted by group, E groups (experts), D width in, F width out.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels import compat
from pallas_kernels.attention.problem import DTYPES, target_of
from pallas_kernels.choice import Choice, serving, trusted_choice
from pallas_kernels.grouped import blocks, xla
from pallas_kernels.grouped.plan import balanced, plan_rows, plan_weights
from pallas_kernels.trust.verdict import Verdict, trusted

IMPLEMENTATIONS = ("mosaic", "xla")


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
    x: Any,
    w: Any,
    group_sizes: Any,
    *,
    platform: str | None = None,
    capability: tuple[int, int] | None = None,
) -> GroupedMatmulProblem:
    """Returns the `GroupedMatmulProblem` of a call with these arguments of `grouped_matmul`.

    Arrays may be `jax.ShapeDtypeStruct`s. Raises ValueError with every fault.
    """
    shapes = f"x {tuple(x.shape)}, w {tuple(w.shape)}, group_sizes {tuple(group_sizes.shape)}"
    faults = []
    if x.ndim != 2 or w.ndim != 3 or group_sizes.ndim != 1:
        faults.append(f"x must be [T, D], w [E, D, F] and group_sizes [E], got {shapes}")
    elif x.shape[1] != w.shape[1] or group_sizes.shape[0] != w.shape[0]:
        faults.append(
            "x [T, D] and w [E, D, F] must have the same D, w and group_sizes [E] the same E, got "
            f"{shapes}"
        )
    if 0 in (*x.shape, *w.shape):
        faults.append(f"every dim must be at least 1, got {shapes}")
    if x.dtype != w.dtype or str(x.dtype) not in DTYPES:
        faults.append(
            f"x and w must have one dtype of {', '.join(DTYPES)}, got {x.dtype}, {w.dtype}; cast "
            "the weights to the tokens' type"
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        faults.append(f"group_sizes must be integers, got {group_sizes.dtype}")
    if faults:
        raise ValueError("grouped_matmul: " + "; ".join(faults))
    platform, capability = target_of(platform, capability)
    E, D, F = w.shape
    return GroupedMatmulProblem(
        platform=platform,
        capability=capability,
        dtype=str(x.dtype),
        tokens=x.shape[0],
        d_in=D,
        d_out=F,
        groups=E,
    )


def unsupported_reason(problem: GroupedMatmulProblem) -> str | None:
    """Every reason why `mosaic` cannot serve this problem, in one line; None if it can.

    `xla` serves all problems.
    """
    on_gpu = problem.platform == "gpu"
    major, minor = problem.capability
    reasons = []
    if not on_gpu:
        reasons.append(f"it needs a Hopper GPU, and the platform is {problem.platform}")
    # wgmma exists on sm_90a alone.
    if on_gpu and problem.capability != (9, 0):
        reasons.append(f"it needs compute capability 9.0, and this GPU has {major}.{minor}")
    if problem.dtype not in ("bfloat16", "float16"):
        reasons.append(f"it takes bfloat16 and float16, not {problem.dtype}")
    # Mosaic copies arrays whose dims are multiples of the swizzle's tile, 8 x 64.
    if problem.d_in % 64 != 0 or problem.d_out % 64 != 0:
        reasons.append(f"its widths are multiples of 64, not {problem.d_in} and {problem.d_out}")
    if problem.tokens % 8 != 0 or problem.tokens < 64:
        reasons.append(f"its tokens are a multiple of 8 from 64 on, not {problem.tokens}")
    if not compat.is_supported():
        reasons.append(f"it is tested with {compat.SUPPORTED}, and this is jax {jax.__version__}")
    return "; ".join(reasons) or None


def choose_grouped_matmul(problem: GroupedMatmulProblem) -> Choice:
    """The implementation that serves a problem best, with the reason against the other. Pure.

    On Hopper this is `mosaic` where it can serve the call, and `xla` everywhere else.
    """
    reason = unsupported_reason(problem)
    if reason:
        return Choice("xla", {"mosaic": reason})
    return Choice(
        "mosaic",
        {
            "xla": (
                "its loop multiplies one block of tokens at a time, which leaves most of a GPU idle"
            )
        },
    )


def choose_trusted_grouped_matmul(problem: GroupedMatmulProblem) -> Choice:
    """Chooses as `choose_grouped_matmul`, but `mosaic` only if it passed its self-test on this GPU.

    The first call for a kind of problem may run that self-test (`pallas_kernels.trust`).
    """

    def verdict() -> Verdict:
        # Imported here, so that no other platform loads Mosaic.
        from pallas_kernels.grouped.self_test import kind_of

        return trusted(kind_of(problem))

    return trusted_choice(
        choose_grouped_matmul(problem), verdict, lambda reason: Choice("xla", {"mosaic": reason})
    )


def grouped_matmul(
    x: Array,
    w: Array,
    group_sizes: Array,
    *,
    implementation: Literal["mosaic", "xla"] | None = None,
    platform: str | None = None,
    capability: tuple[int, int] | None = None,
    expected_rows: int | None = None,
) -> Array:
    """x[t] @ w[group of t] for every token t, accumulated in fp32 (MegaBlocks, arXiv 2211.15841).

    Shapes are those of one device: under a mesh, call it inside `jax.shard_map(check_vma=False)`.

    Args:
      x: [T, D], sorted by group: the first group_sizes[0] tokens are those of group 0, and so on.
        All must be finite, including those that belong to no group.
      w: [E, D, F] in x's dtype.
      group_sizes: integers [E] of at least 0; their sum is at most T.
      implementation: None lets `choose_grouped_matmul` decide, and `choose_trusted_grouped_matmul`
        on this process's own GPUs.
      platform, capability: of the target device; None: this process's. See
        `pallas_kernels.describe_attention`.
      expected_rows: of the T tokens, those that groups are expected to have in sum; None, or more
        than T: all. Only the cost that the kernels report depends on it, gradients included, so
        that rows of a buffer that nobody fills do not count as FLOPs.

    Returns:
      [T, F] in x's dtype. Tokens after the last group get 0, and gradient 0. Has a gradient with
      respect to x and w.

    Raises:
      ValueError: the arguments have faults; the message has all of them.
      Unsupported: `implementation` cannot serve the call.
    """
    problem = describe_grouped_matmul(x, w, group_sizes, platform=platform, capability=capability)
    if expected_rows is not None and expected_rows < 0:
        raise ValueError(
            f"grouped_matmul: expected_rows must be None or at least 0, got {expected_rows}"
        )
    on_own_devices = platform is None and capability is None
    choose = choose_trusted_grouped_matmul if on_own_devices else choose_grouped_matmul
    name = serving(
        "grouped_matmul",
        implementation,
        IMPLEMENTATIONS,
        choose=lambda: choose(problem),
        reason=lambda name: unsupported_reason(problem) if name == "mosaic" else None,
    )
    return _product(
        x, w, group_sizes.astype(jnp.int32), _Server(name, problem.platform, expected_rows)
    )


class _Server(NamedTuple):
    """The implementation that serves a call, with its arguments besides arrays."""

    name: str
    platform: str
    expected_rows: int | None

    def rows(self, x_TD: Array, w_EDF: Array, sizes_E: Array, *, transposed: bool) -> Array:
        """Each token times its group's matrix, or the transpose of it."""
        if self.name == "xla":
            return self._loop.rows(x_TD, w_EDF, sizes_E, transposed=transposed)
        return _mosaic_rows(x_TD, w_EDF, sizes_E, self.expected_rows, transposed=transposed)

    def weights(self, x_TD: Array, dy_TF: Array, sizes_E: Array) -> Array:
        """[E, D, F]: for each group, the sum of the outer products of its tokens."""
        if self.name == "xla":
            return self._loop.weights(x_TD, dy_TF, sizes_E)
        return _mosaic_weights(x_TD, dy_TF, sizes_E, self.expected_rows)

    @property
    def _loop(self) -> Any:
        """The module of XLA's loop."""
        return blocks if self.platform == "cpu" else xla


# A Mosaic GPU kernel has no derivative rule: both gradients are grouped matmuls, too.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x_TD: Array, w_EDF: Array, sizes_E: Array, server: _Server) -> Array:
    return server.rows(x_TD, w_EDF, sizes_E, transposed=False)


def _forward(
    x_TD: Array, w_EDF: Array, sizes_E: Array, server: _Server
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _product(x_TD, w_EDF, sizes_E, server), (x_TD, w_EDF, sizes_E)


def _backward(
    server: _Server, residuals: tuple[Array, Array, Array], dy_TF: Array
) -> tuple[Array, Array, None]:
    x_TD, w_EDF, sizes_E = residuals
    dx_TD = server.rows(dy_TF, w_EDF, sizes_E, transposed=True)
    dw_EDF = server.weights(x_TD, dy_TF, sizes_E)
    return dx_TD, dw_EDF, None


_product.defvjp(_forward, _backward)


def _mosaic_rows(
    x_TD: Array, w_EDF: Array, sizes_E: Array, expected_rows: int | None, *, transposed: bool
) -> Array:
    # Imported here, so that no other platform loads Mosaic.
    from pallas_kernels.grouped import hopper

    width = w_EDF.shape[1 if transposed else 2]
    plan, occupancy = plan_rows(balanced(len(x_TD), len(sizes_E)), width)
    return hopper.rows(
        plan,
        x_TD,
        w_EDF,
        sizes_E,
        transpose=transposed,
        occupancy=occupancy.efficiency,
        expected_rows=expected_rows,
    )


def _mosaic_weights(x_TD: Array, dy_TF: Array, sizes_E: Array, expected_rows: int | None) -> Array:
    from pallas_kernels.grouped import hopper

    sizes = balanced(len(x_TD), len(sizes_E))
    plan, occupancy = plan_weights(sizes, x_TD.shape[1], dy_TF.shape[1])
    return hopper.weights(
        plan,
        x_TD,
        dy_TF,
        sizes_E,
        occupancy=occupancy.efficiency,
        expected_rows=expected_rows,
    )
