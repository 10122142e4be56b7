"""Faults planted into our kernels, one at a time: the interpreter or the check of what is compiled
finds each, by name.

The faults are data, in kernel_mutations.toml. An entry has:

- changes: pairs of a text that is in the file (of pallas_kernels/attention/hopper, or of `folder`)
  exactly once, and what replaces it;
- runs: the case in which it shows, of CASES below;
- caught: a regular expression that the error must match; or
- equivalent: why it is no fault, where the case must still give the right numbers.

A kernel that was rewritten has its texts elsewhere: `test_a_fault_has_its_place` then fails for
each of them.
"""

import contextlib
import dataclasses
import importlib
import importlib.abc
import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_formula import normal

import pallas_kernels
from pallas_kernels import attention as package
from pallas_kernels import describe_attention, grouped, stacked
from pallas_kernels.attention import hopper
from pallas_kernels.dev.interpreter import KernelError, interpreted
from pallas_kernels.dev.limits import faults
from pallas_kernels.dev.resources import resources

COMPILE_BUDGET = 90

HOPPER = "pallas_kernels.attention.hopper"
PACKAGES = (
    (package, "hopper", hopper),
    (pallas_kernels, "grouped", grouped),
    (pallas_kernels, "stacked", stacked),
)
"""Packages of kernels: the parent, its attribute, and the package."""
SEEDS = None, 1


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One entry of the file; see above."""

    id: str
    plants: str
    file: str
    changes: list[list[str]]
    runs: str
    caught: str = ""
    equivalent: str = ""
    folder: str = "attention/hopper"

    @property
    def module(self) -> str:
        """The name of the module."""
        return ".".join(("pallas_kernels", *self.folder.split("/"), self.file.removesuffix(".py")))

    @property
    def source(self) -> str:
        """The file with its changes. Raises AssertionError if a text is not there exactly once."""
        path = Path(pallas_kernels.__file__).parent / self.folder / self.file
        source = path.read_text(encoding="utf-8")
        for old, new in self.changes:
            n_places = source.count(old)
            assert n_places == 1, (
                f"{self.id}: the text to change is {n_places} times in {self.file}, so find its "
                f"new place:\n{old}"
            )
            source = source.replace(old, new)
        return source


FILE = Path(__file__).with_name("kernel_mutations.toml")
ENTRIES = tomllib.loads(FILE.read_text(encoding="utf-8"))["mutation"]
MUTATIONS = [Mutation(**entry) for entry in ENTRIES]
ON_HARDWARE = [mutation for mutation in MUTATIONS if mutation.runs == "compiled"]
INTERPRETED = [mutation for mutation in MUTATIONS if mutation.runs != "compiled"]


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from another source."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_source(self, fullname: str) -> str:
        return self.source


@contextlib.contextmanager
def planted(mutation: Mutation | None) -> Iterator[None]:
    """A context in which modules of the Hopper kernels are imported anew, with the mutation.

    The old ones are back after it."""
    prefixes = tuple(f"{kernels.__name__}." for _, _, kernels in PACKAGES)

    def loaded() -> dict[str, ModuleType]:
        return {n: m for n, m in sys.modules.items() if f"{n}.".startswith(prefixes)}

    old_modules = loaded()
    for name in old_modules:
        del sys.modules[name]
    finders = [_Planted(mutation.module, mutation.source)] if mutation else []
    sys.meta_path[:0] = finders
    try:
        yield
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in finders]
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(old_modules)
        for parent, attribute, kernels in PACKAGES:
            setattr(parent, attribute, kernels)


def module(name: str, package: str = HOPPER) -> Any:
    """A module of the Hopper kernels, as this context has it."""
    return importlib.import_module(f"{package}.{name}")


def formula(q: Any, k: Any, v: Any, dout: Any) -> dict[str, np.ndarray]:
    """Attention without a mask, and its gradients, of one head in fp32: q [S, H], k [T, H], v and
    dout [T or S, V]."""
    s = q @ k.T / np.sqrt(q.shape[1])
    lse = np.log(np.exp(s).sum(1))
    p = np.exp(s - lse[:, None])
    out = p @ v
    delta = (dout * out).sum(1)
    ds = p * (dout @ v.T - delta[:, None]) / np.sqrt(q.shape[1])
    return {"out": out, "lse": lse, "delta": delta, "dq": ds @ k, "dk": ds.T @ q, "dv": p.T @ dout}


Pairs = dict[str, tuple[Any, Any]]
"""Results and expected arrays by name."""


def one_kernel(kernel: str, S: int, T: int, H: int = 64, block: int = 64) -> Pairs:
    """Runs one kernel on one tile of rows and several blocks of columns, in two slots."""
    spec = module("spec")
    q, k, v, dout = (
        normal(1, length, 1, H, seed=i).astype(jnp.bfloat16)
        for i, length in enumerate((S, T, T, S))
    )
    expected = formula(*(np.asarray(x[0, :, 0], np.float32) for x in (q, k, v, dout)))
    call = spec.Spec(S, T, H**-0.5, causal=False)

    if kernel == "forward":
        tiles = spec.ForwardTiles(block, 2)
        run = jax.jit(lambda *x: module("forward").forward(call, tiles, *x, {}))
        out, lse = run(q, k, v)
        results = {"out": out, "lse": lse}
    else:
        lse = np.asarray(expected["lse"] * spec.LOG2E, np.float32)[None, None]
        delta = np.asarray(expected["delta"], np.float32)[None, None]
        run = jax.jit(lambda *x: dict(backward_kernel(kernel, block)(call, *x)))
        results = run(q, k, v, dout, lse, delta)
    return {
        name: (np.asarray(x, np.float32).reshape(expected[name].shape), expected[name])
        for name, x in results.items()
    }


def backward_kernel(kernel: str, block: int) -> Callable[..., Any]:
    """A function from a Spec and arrays to gradients by name. kernel: "dq", "dkv", or a way in
    which the fused kernel adds."""
    if kernel in ("red", "tma"):
        fused = module("fused_tiles").FusedTiles(block, 2, kernel)
        return lambda call, *x: module("backward_fused").backward_fused(call, fused, *x, {})
    tiles = module("spec").Tiles(block, 2)
    if kernel == "dq":
        return lambda call, *x: {"dq": module("backward_queries").dq(call, tiles, *x, {})}
    return lambda call, *x: module("backward_keys").dkv(call, tiles, *x, {})


def empty_rows() -> Pairs:
    """The gradients where the last queries see no key, and those without these queries."""
    spec = module("spec")
    differentiable = module("differentiable")
    q, k, v, dout = (normal(1, 128, 1, 64, seed=i).astype(jnp.bfloat16) for i in range(4))
    tiling = differentiable.Tiling(spec.ForwardTiles(64, 2), *[spec.Tiles(64, 2)] * 2)
    like = jax.ShapeDtypeStruct(q.shape, jnp.bfloat16)
    problem = describe_attention(
        like, like, like, q_offset=60, window=50, return_lse=True, platform="gpu", capability=(9, 0)
    )

    def attention(*x: Any) -> Any:
        return differentiable.attention(*x, problem, tiling, q_offset=60)[0]

    @jax.jit
    def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(attention, q, k, v)[1](dout)

    sees_some_key = np.arange(128)[:, None, None] < 128 - 60 + 49
    results = gradients(q, k, v, dout)
    expected = gradients(q, k, v, np.where(sees_some_key, dout, jnp.bfloat16(0)))
    return {
        name: (np.asarray(x, np.float32), np.asarray(y, np.float32))
        for name, x, y in zip(("dq", "dk", "dv"), results, expected, strict=True)
    }


def one_stack() -> Pairs:
    """The kernels of the stacked matmul in row 1 of 3: 3 or 4 tiles that exceed its edges, 5 or 6
    steps each, in 4 slots."""
    kernels = module("hopper", "pallas_kernels.stacked")
    plan = module("plan", "pallas_kernels.grouped").Plan(256, 1)
    adding_plan = module("plan", "pallas_kernels.stacked").AddingPlan(256, 1)
    row = jnp.int32(1)
    rng = np.random.default_rng(0)
    x, dy, w, sums = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((384, 192), (384, 320), (3, 192, 320), (3, 192, 320))
    )
    x16, dy16, w16 = (a.astype(jnp.bfloat16) for a in (x, dy, w))

    @jax.jit
    def run(x: Any, dy: Any, w: Any, sums: Any) -> Any:
        dx = kernels.product(plan, dy, w, row, transpose=True)
        return dx, kernels.add(adding_plan, sums, row, x, dy)

    dx, added = (np.asarray(a, np.float32) for a in run(x16, dy16, w16, sums))
    x, dy, w = (a.astype(np.float32) for a in (x16, dy16, w16))
    expected_sums = sums.copy()
    expected_sums[1] += x.T @ dy
    return {"dx": (dx, dy @ w[1].T), "sums": (added, expected_sums)}


CASES = {
    "forward": lambda: one_kernel("forward", 128, 320),
    "dq": lambda: one_kernel("dq", 128, 320),
    "dq, wide": lambda: one_kernel("dq", 128, 512, 128, 128),
    "dkv": lambda: one_kernel("dkv", 320, 128),
    "fused": lambda: one_kernel("red", 320, 128),
    "fused, tma": lambda: one_kernel("tma", 320, 128),
    "empty rows": empty_rows,
    "stack": one_stack,
}


def case_fault(case: str, seed: int | None) -> str:
    """The interpreter's error, or the name of the numbers that differ; empty if there is none."""
    try:
        with interpreted(seed):
            pairs = CASES[case]()
    except KernelError as error:
        return str(error)
    for name, (result, expected) in pairs.items():
        if not np.isfinite(result).all():
            return f"{name} is not finite"
        error = np.abs(result - expected).max() / np.abs(expected).max()
        if error > 0.01:
            return f"{name} differs by {error:.2g} of its largest"
    return ""


def compiled_faults() -> str:
    """The faults of the compiled forward."""
    spec = module("spec")
    call = spec.Spec(256, 256, 0.1)
    tiles = spec.ForwardTiles(64, 2)
    shape = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)
    [kernel] = resources(
        lambda *x: module("forward").forward(call, tiles, *x, {}), shape, shape, shape
    )
    return "; ".join(faults(kernel))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.id)
def test_a_fault_has_its_place(mutation: Mutation) -> None:
    compile(mutation.source, mutation.file, "exec")
    assert mutation.plants.endswith(".") and bool(mutation.caught) != bool(mutation.equivalent)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_wrong_without_a_fault(case: str) -> None:
    assert [case_fault(case, seed) for seed in SEEDS] == ["", ""]


def test_a_planted_module_is_gone_afterwards() -> None:
    spec = sys.modules[f"{HOPPER}.spec"]
    [mutation] = [mutation for mutation in MUTATIONS if mutation.file == "spec.py"]
    with planted(mutation):
        assert module("spec").REGISTERS != spec.REGISTERS
        assert module("backward_keys").REGISTERS == module("spec").REGISTERS
    assert module("spec") is spec and sys.modules[HOPPER] is hopper


@pytest.mark.slow
@pytest.mark.parametrize("mutation", INTERPRETED, ids=lambda mutation: mutation.id)
def test_a_fault_is_found_by_name(mutation: Mutation) -> None:
    message = ""
    with planted(mutation):
        for seed in SEEDS:
            message = message or case_fault(mutation.runs, seed)
    if mutation.equivalent:
        assert not message
    else:
        assert re.search(mutation.caught, message), message


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize("mutation", ON_HARDWARE, ids=lambda mutation: mutation.id)
def test_a_fault_that_only_hardware_has_is_found_in_what_is_compiled(mutation: Mutation) -> None:
    assert not compiled_faults()
    with planted(mutation):
        message = compiled_faults()
        assert re.search(mutation.caught, message), message
