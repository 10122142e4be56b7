"""Which programs share a kept report. Nothing is compiled for a GPU here."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import train
from mesh_lm.errors import ConfigError
from sharding_rules.lab import compile as lab
from sharding_rules.lab import hlo
from sharding_rules.lab.report import Slot

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))


def key(
    scope: str = "mlp",
    leaf: str = "up",
    kind_of=lab.kind_of_argument,
    second: str = "norm",
    **request: Any,
) -> str:
    def step(params):
        with jax.named_scope(scope):
            x = jnp.sin(params[leaf])
        with jax.named_scope(second):
            x = jnp.sin(x)
        return x.sum()

    args = (
        {
            leaf: jax.ShapeDtypeStruct(
                (8,), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec("data"))
            )
        },
    )
    return lab._key(
        jax.jit(step).lower(*args),
        MESH,
        lab._Request("step", **request),
        lab._arguments(step, args, {}, kind_of),
    )


def test_a_kept_report_is_of_this_program(monkeypatch) -> None:
    assert key() == key()
    others = {
        key(scope="attention"),
        key(leaf="down"),
        key(kind_of=lambda name: "moments"),
        key(options={"a": 1}),
    }
    others |= {key(scope="norm", second="mlp"), key(slots=(Slot("forward_slot", ("10",)),))}
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_all_reduce_combine_threshold_bytes=0")
    assert len({key(), *others}) == 7


def test_whoever_asks_gets_the_kept_report() -> None:
    """The stack of the one who asked is in the locations of the program's operations."""

    def another() -> str:
        return key()

    assert key() == another() == (lambda: another())()


def test_a_loop_of_unknown_length_is_told_of() -> None:
    text = (
        "ENTRY %main (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n  ROOT %w = f32[] "
        "while(%p), condition=%c, body=%b\n}\n"
    )
    (said,) = lab._unknown_loops(hlo.parse(text))
    assert said == "w: XLA does not know how often this loop runs; what is in it is counted once"


@pytest.mark.parametrize("there", [(), ("jax_cuda13_plugin",)])
def test_without_the_compiler_a_plan_says_what_to_install(
    monkeypatch, there: tuple[str, ...]
) -> None:
    absent = {"jax_cuda13_plugin", "jax_cuda12_plugin", "nvidia"} - {*there}
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: (
            None if name in absent else find(name, *more) if name not in there else name
        ),
    )
    monkeypatch.setattr("sharding_rules.lab.targets.version", lambda name: jax.__version__)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"run: pip install -e '\.\[aot\]'"):
        train.main(["--config=configs/gpt_tiny.py", "--plan", "--target=a100", "--devices=16"])


def arguments(step, *args, kind_of=lab.kind_of_argument, **kwargs) -> dict[str, tuple]:
    """Name -> class, whole shape, bytes and axes, of those that the lowered program has as
    parameters."""
    _, names = lab._lower(step if hasattr(step, "lower") else jax.jit(step), args, kwargs)
    return {
        a.name: (a.kind, a.shape, a.bytes, a.axes)
        for a in lab._arguments(step, args, kwargs, kind_of, names)
    }


W = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec("data")))
WEIGHTS = ("params", (8, 4), 32, ("data",))


def test_arguments_of_ordinary_step_functions() -> None:
    """Star arguments, keywords, static ones, Python's own numbers, and what has no signature."""
    assert arguments(lambda *args: args[0]["w"] + args[1], {"w": W}, W) == {
        "args[0]['w']": WEIGHTS, "args[1]": ("other", (8, 4), 32, ("data",)),
    }  # fmt: skip

    def step(params, mode, batch, scale, **rest):
        return params["w"] + batch * scale + rest["mu"] if mode == "train" else params["w"]

    static = jax.jit(step, static_argnames="mode")
    assert arguments(static, {"w": W}, "train", W, 0.5, mu=W) == {
        "params['w']": WEIGHTS, "batch": ("batch", (8, 4), 32, ("data",)),
        "scale": ("other", (), 4, ()),
        "rest['mu']": ("moments", (8, 4), 32, ("data",)),
    }  # fmt: skip
    assert "mode" not in arguments(jax.jit(step, static_argnums=1), {"w": W}, "train", W, 0.5, mu=W)
    assert arguments(jax.jit(lambda params, n: params["w"] * n), {"w": W}, 3)["n"] == (
        "other",
        (),
        4,
        (),
    )


def test_a_number_of_numpy_is_as_wide_as_the_program_has_it() -> None:
    assert arguments(lambda params, n: params["w"] * n, {"w": W}, np.float64(2))["n"][2] == 4
