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
from collections.abc import Iterator
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
PLACES = {
    HOPPER: (package, "hopper", hopper),
    **{
        one.__name__: (pallas_kernels, one.__name__.split(".")[1], one)
        for one in (grouped, stacked)
    },
}
"""Packages of kernels -> their parent, the attribute of it, and themselves."""
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
        source = (Path(pallas_kernels.__file__).parent / self.folder / self.file).read_text(
            encoding="utf-8"
        )
        for old, new in self.changes:
            times = source.count(old)
            assert times == 1, (
                f"{self.id}: the text to change is {times} times in {self.file}, so find its new "
                f"place:\n{old}"
            )
            source = source.replace(old, new)
        return source


MUTATIONS = [
    Mutation(**entry)
    for entry in tomllib.loads(
        Path(__file__).with_name("kernel_mutations.toml").read_text(encoding="utf-8")
    )["mutation"]
]


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from another source."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.source = name, source

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_source(self, fullname: str) -> str:
        return self.source


@contextlib.contextmanager
def planted(mutation: Mutation | None) -> Iterator[None]:
    """A context in which modules of the Hopper kernels are imported anew, with the mutation; those
    of before are back after it."""

    def loaded() -> dict[str, ModuleType]:
        return {
            name: module
            for name, module in sys.modules.items()
            if f"{name}.".startswith(tuple(f"{place}." for place in PLACES))
        }

    before = loaded()
    for name in before:
        del sys.modules[name]
    finder = [_Planted(mutation.module, mutation.source)] if mutation else []
    sys.meta_path[:0] = finder
    try:
        yield
    finally:
        sys.meta_path[:] = [each for each in sys.meta_path if each not in finder]
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(before)
        for parent, name, here in PLACES.values():
            setattr(parent, name, here)


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


def one_kernel(
    kernel: str, S: int, T: int, H: int = 64, block: int = 64
) -> dict[str, tuple[Any, Any]]:
    """Runs one kernel on one tile of rows and several blocks of columns, in two slots. Returns
    (found, wanted) by name."""
    spec = module("spec")
    arrays = [
        normal(1, length, 1, H, seed=i).astype(jnp.bfloat16)
        for i, length in enumerate((S, T, T, S))
    ]
    wanted = formula(*(np.asarray(x[0, :, 0], np.float32) for x in arrays))
    what, tiles = (
        spec.Spec(S, T, H**-0.5, causal=False),
        (spec.ForwardTiles if kernel == "forward" else spec.Tiles)(block, 2),
    )
    if kernel == "forward":
        found = dict(
            zip(
                ("out", "lse"),
                jax.jit(lambda *x: module("forward").forward(what, tiles, *x, {}))(*arrays[:3]),
                strict=True,
            )
        )
    else:
        arrays += [
            np.asarray(wanted[name] * factor, np.float32)[None, None]
            for name, factor in (("lse", spec.LOG2E), ("delta", 1))
        ]
        if kernel == "dq":
            found = {
                "dq": jax.jit(lambda *x: module("backward_queries").dq(what, tiles, *x, {}))(
                    *arrays
                )
            }
        elif kernel in ("red", "tma"):  # of the fused backward
            fused = module("fused_tiles").FusedTiles(block, 2, kernel)
            found = jax.jit(
                lambda *x: dict(module("backward_fused").backward_fused(what, fused, *x, {}))
            )(*arrays)
        else:
            found = jax.jit(lambda *x: dict(module("backward_keys").dkv(what, tiles, *x, {})))(
                *arrays
            )
    return {
        name: (np.asarray(x, np.float32).reshape(wanted[name].shape), wanted[name])
        for name, x in found.items()
    }


def empty_rows() -> dict[str, tuple[Any, Any]]:
    """The gradients where the last queries see no key; they are compared with those without these
    queries."""
    spec, differentiable = module("spec"), module("differentiable")
    q, k, v, dout = (normal(1, 128, 1, 64, seed=i).astype(jnp.bfloat16) for i in range(4))
    tiling = differentiable.Tiling(spec.ForwardTiles(64, 2), *[spec.Tiles(64, 2)] * 2)
    of = jax.ShapeDtypeStruct(q.shape, jnp.bfloat16)
    problem = describe_attention(
        of, of, of, q_offset=60, window=50, return_lse=True, platform="gpu", capability=(9, 0)
    )

    @jax.jit
    def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(
            lambda *x: differentiable.attention(*x, problem, tiling, q_offset=60)[0], q, k, v
        )[1](dout)

    sees = np.arange(128)[:, None, None] < 128 - 60 + 49  # the queries that see a key
    found, wanted = (
        gradients(q, k, v, dout),
        gradients(q, k, v, np.where(sees, dout, jnp.bfloat16(0))),
    )
    return {
        name: (np.asarray(x, np.float32), np.asarray(y, np.float32))
        for name, x, y in zip(("dq", "dk", "dv"), found, wanted, strict=True)
    }


def one_stack() -> dict[str, tuple[Any, Any]]:
    """The kernels of the stacked matmul in row 1 of 3: 3 or 4 tiles that exceed its edges, 5 or 6
    steps each, in 4 slots."""
    kernels, plan = (
        module("hopper", "pallas_kernels.stacked"),
        module("plan", "pallas_kernels.stacked"),
    )
    plain, adding, row = (
        module("plan", "pallas_kernels.grouped").Plan(256, 1),
        plan.AddingPlan(256, 1),
        jnp.int32(1),
    )
    random = np.random.default_rng(0)
    x, dy, w, sums = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((384, 192), (384, 320), (3, 192, 320), (3, 192, 320))
    )
    narrow = [a.astype(jnp.bfloat16) for a in (x, dy, w)]
    x, dy, w = (a.astype(np.float32) for a in narrow)

    @jax.jit
    def both(x: Any, dy: Any, w: Any, sums: Any) -> Any:
        return kernels.product(plain, dy, w, row, transpose=True), kernels.add(
            adding, sums, row, x, dy
        )

    dx, added = (np.asarray(a, np.float32) for a in both(*narrow, sums))
    wanted = sums.copy()
    wanted[1] += x.T @ dy
    return {"dx": (dx, dy @ w[1].T), "sums": (added, wanted)}


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


def wrong(case: str, seed: int | None) -> str:
    """What is wrong with a case, interpreted: the interpreter's error, or which numbers differ;
    nothing if all is right."""
    try:
        with interpreted(seed):
            pairs = CASES[case]()
    except KernelError as error:
        return str(error)
    for name, (found, wanted) in pairs.items():
        if not np.isfinite(found).all():
            return f"{name} is not finite"
        if (error := np.abs(found - wanted).max() / np.abs(wanted).max()) > 0.01:
            return f"{name} differs by {error:.2g} of its largest"
    return ""


def compiled() -> str:
    """What the check of the compiled forward finds."""
    spec = module("spec")
    what, shape = spec.Spec(256, 256, 0.1), jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)
    [kernel] = resources(
        lambda *x: module("forward").forward(what, spec.ForwardTiles(64, 2), *x, {}), *[shape] * 3
    )
    return "; ".join(faults(kernel))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.id)
def test_a_fault_has_its_place(mutation: Mutation) -> None:
    compile(mutation.source, mutation.file, "exec")
    assert mutation.plants.endswith(".") and bool(mutation.caught) != bool(mutation.equivalent)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_wrong_without_a_fault(case: str) -> None:
    assert [wrong(case, seed) for seed in SEEDS] == ["", ""]


def test_a_planted_module_is_gone_afterwards() -> None:
    before = sys.modules[f"{HOPPER}.spec"]
    with planted(next(each for each in MUTATIONS if each.file == "spec.py")):
        assert (
            module("spec").REGISTERS != before.REGISTERS
            and module("backward_keys").REGISTERS == module("spec").REGISTERS
        )
    assert module("spec") is before and sys.modules[HOPPER] is hopper


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation", [each for each in MUTATIONS if each.runs != "compiled"], ids=lambda each: each.id
)
def test_a_fault_is_found_by_name(mutation: Mutation) -> None:
    with planted(mutation):
        said = next(filter(None, (wrong(mutation.runs, seed) for seed in SEEDS)), "")
    assert not said if mutation.equivalent else re.search(mutation.caught, said), said


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(
    "mutation", [each for each in MUTATIONS if each.runs == "compiled"], ids=lambda each: each.id
)
def test_a_fault_that_only_hardware_has_is_found_in_what_is_compiled(mutation: Mutation) -> None:
    assert not compiled()
    with planted(mutation):
        assert re.search(mutation.caught, said := compiled()), said
