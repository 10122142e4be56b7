"""lax primitives on NumPy arrays.

Rules take (params, *arrays); the machine casts their results to the traced type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def _floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule in float32 for types for which NumPy lacks the function, or rounds after each step."""
    return lambda params, *operands: function(*map(_widened, operands))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *operands: function(*operands)


def _reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: function(_widened(x), axis=tuple(params["axes"]))


def _widened(x: np.ndarray) -> np.ndarray:
    """x in float32 if it is a float of fewer bits."""
    narrow = x.dtype.itemsize < 4 and x.dtype.kind not in "iub"
    return x.astype(np.float32) if narrow else x


def _div(params: Any, x: np.ndarray, y: np.ndarray) -> Any:
    if x.dtype.kind not in "iu":
        return x / y
    if np.any(y == 0):
        raise ZeroDivisionError("integer division by zero")
    quotient = np.abs(x) // np.abs(y)  # towards zero, as lax.div
    return np.where((x < 0) != (y < 0), -quotient, quotient)


def _rem(params: Any, x: np.ndarray, y: np.ndarray) -> Any:
    if x.dtype.kind in "iu" and np.any(y == 0):
        raise ZeroDivisionError("integer remainder by zero")
    return np.fmod(x, y)


def _broadcast_in_dim(params: Any, x: np.ndarray, *dynamic: Any) -> Any:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _iota(params: Any) -> Any:
    shape = params["shape"]
    axis = params["dimension"]
    along_axis = [-1 if i == axis else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(along_axis), shape)


def _select_n(params: Any, case: np.ndarray, *cases: np.ndarray) -> Any:
    if case.dtype == bool:
        return np.where(case, cases[1], cases[0])
    return np.choose(case, cases)


def _dot_general(params: Any, a: np.ndarray, b: np.ndarray) -> Any:
    (lhs, rhs), batch = params["dimension_numbers"]
    if any(batch):
        raise NotImplementedError("dot_general with batch dimensions")
    return np.tensordot(a.astype(np.float32), b.astype(np.float32), (lhs, rhs))


def _slice(params: Any, x: np.ndarray) -> Any:
    strides: Sequence[int] = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _shift_right(params: Any, x: np.ndarray, y: np.ndarray) -> Any:
    unsigned = x.dtype.str.replace("i", "u")
    return (x.view(unsigned) >> y.astype(unsigned)).view(x.dtype)


def _logistic(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _integer_pow(params: Any, x: np.ndarray) -> Any:
    y = params["y"]
    return x**y if y >= 0 else 1 / x**-y


def _identity(params: Any, x: Any, *_: Any) -> Any:
    return x


OPERATIONS: dict[str, Callable[..., Any]] = {
    # Arithmetic
    "abs": _plain(np.abs),
    "sign": _plain(np.sign),
    "floor": _plain(np.floor),
    "ceil": _plain(np.ceil),
    "add": _plain(np.add),
    "add_any": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _plain(np.multiply),
    "div": _div,
    "rem": _rem,
    "neg": _plain(np.negative),
    "max": _plain(np.maximum),
    "min": _plain(np.minimum),
    "clamp": lambda params, low, x, high: np.minimum(np.maximum(x, low), high),
    # Functions
    "exp": _floats(np.exp),
    "exp2": _floats(np.exp2),
    "expm1": _floats(np.expm1),
    "log": _floats(np.log),
    "log1p": _floats(np.log1p),
    "tanh": _floats(np.tanh),
    "sin": _floats(np.sin),
    "cos": _floats(np.cos),
    "logistic": _floats(_logistic),
    "sqrt": _floats(np.sqrt),
    "rsqrt": _floats(lambda x: 1 / np.sqrt(x)),
    "reciprocal": _floats(lambda x: 1 / x),
    "square": _plain(np.square),
    "pow": _floats(np.power),
    "integer_pow": _integer_pow,
    # Comparisons and bits
    "eq": _plain(np.equal),
    "ne": _plain(np.not_equal),
    "lt": _plain(np.less),
    "le": _plain(np.less_equal),
    "gt": _plain(np.greater),
    "ge": _plain(np.greater_equal),
    "is_finite": _floats(np.isfinite),
    "select_n": _select_n,
    "and": _plain(np.bitwise_and),
    "or": _plain(np.bitwise_or),
    "xor": _plain(np.bitwise_xor),
    "not": _plain(np.invert),
    "shift_left": _plain(np.left_shift),
    "shift_right_arithmetic": _plain(np.right_shift),
    "shift_right_logical": _shift_right,
    # Reductions and products
    "reduce_sum": _reduce(np.sum),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "dot_general": _dot_general,
    # Shapes
    "broadcast_in_dim": _broadcast_in_dim,
    "iota": _iota,
    "slice": _slice,
    "reshape": lambda params, x, *_: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: x.squeeze(tuple(params["dimensions"])),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "bitcast_convert_type": lambda params, x: x.view(np.dtype(params["new_dtype"])),
    # The machine casts the result.
    "convert_element_type": _identity,
    "copy": _identity,
    "stop_gradient": _identity,
    "layout_cast": _identity,
    "multiple_of": _identity,
    "reshard": _identity,
}
"""Rules by the name of the primitive. Layouts are ignored here; pallas_kernels.dev.resources shows
the compiler's registers and shared memory for them."""
