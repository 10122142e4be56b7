"""lax primitives on NumPy arrays. Rules take (params, *arrays); the machine casts their results to
the traced type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def _floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule in float32 for types for which NumPy lacks the function, or rounds after each step."""

    def rule(params: Any, *operands: np.ndarray) -> Any:
        return function(
            *(
                x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x
                for x in operands
            )
        )

    return rule


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *operands: function(*operands)


def _reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    def rule(params: Any, x: np.ndarray) -> Any:
        narrow = x.dtype.itemsize < 4 and x.dtype.kind not in "iub"
        return function(x.astype(np.float32) if narrow else x, axis=tuple(params["axes"]))

    return rule


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
    shape, axis = params["shape"], params["dimension"]
    return np.broadcast_to(
        np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape
    )


def _select_n(params: Any, which: np.ndarray, *cases: np.ndarray) -> Any:
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _dot_general(params: Any, a: np.ndarray, b: np.ndarray) -> Any:
    (lhs, rhs), batch = params["dimension_numbers"]
    if any(batch):
        raise NotImplementedError("dot_general with batch dimensions")
    return np.tensordot(a.astype(np.float32), b.astype(np.float32), (lhs, rhs))


def _slice(params: Any, x: np.ndarray) -> Any:
    strides: Sequence[int] = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _shift_right(params: Any, x: np.ndarray, y: np.ndarray) -> Any:
    return (x.view(x.dtype.str.replace("i", "u")) >> y.astype(x.dtype.str.replace("i", "u"))).view(
        x.dtype
    )


def _logistic(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _same(params: Any, x: Any, *rest: Any) -> Any:
    return x


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _plain(getattr(np, name)) for name in ("abs", "sign", "floor", "ceil")},
    **{name: _floats(getattr(np, name)) for name in ("exp", "exp2", "expm1", "log", "log1p", "tanh", "sqrt", "sin", "cos")},
    "add": _plain(np.add), "add_any": _plain(np.add), "sub": _plain(np.subtract),
    "mul": _plain(np.multiply), "div": _div, "rem": _rem,
    "neg": _plain(np.negative), "max": _plain(np.maximum), "min": _plain(np.minimum),
    "pow": _floats(np.power),
    "rsqrt": _floats(lambda x: 1 / np.sqrt(x)), "reciprocal": _floats(lambda x: 1 / x),
    "logistic": _floats(_logistic),
    "integer_pow": lambda p, x: x ** p["y"] if p["y"] >= 0 else 1 / x ** -p["y"],
    "square": _plain(np.square),
    "eq": _plain(np.equal), "ne": _plain(np.not_equal), "lt": _plain(np.less),
    "le": _plain(np.less_equal),
    "gt": _plain(np.greater), "ge": _plain(np.greater_equal), "is_finite": _floats(np.isfinite),
    "and": _plain(np.bitwise_and), "or": _plain(np.bitwise_or), "xor": _plain(np.bitwise_xor),
    "not": _plain(np.invert),
    "shift_left": _plain(np.left_shift), "shift_right_arithmetic": _plain(np.right_shift),
    "shift_right_logical": _shift_right,
    "clamp": lambda p, low, x, high: np.minimum(np.maximum(x, low), high), "select_n": _select_n,
    "reduce_sum": _reduce(np.sum), "reduce_max": _reduce(np.max), "reduce_min": _reduce(np.min),
    "reduce_and": _reduce(np.all), "reduce_or": _reduce(np.any),
    "broadcast_in_dim": _broadcast_in_dim, "iota": _iota, "dot_general": _dot_general,
    "slice": _slice,
    "reshape": lambda p, x, *_: x.reshape(p["new_sizes"]), "squeeze": lambda p,
    x: x.squeeze(tuple(p["dimensions"])),
    "transpose": lambda p, x: x.transpose(p["permutation"]), "concatenate": lambda p,
    *xs: np.concatenate(xs, p["dimension"]),
    "bitcast_convert_type": lambda p, x: x.view(np.dtype(p["new_dtype"])),
    **dict.fromkeys(("convert_element_type", "copy", "stop_gradient", "layout_cast", "multiple_of", "reshard"), _same),
}  # fmt: skip
"""Rules by the name of the primitive. Layouts are ignored here; pallas_kernels.dev.resources shows
what the compiler makes of them."""
