"""docs/experts.md: its rules pass the check, its options are the published models', and the
exchanges send what its formulas say."""

import dataclasses
import doctest
import math
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from mesh_lm.commands.command_line import parse
from mesh_lm.config import load
from mesh_lm.model import DecoderConfig
from mesh_lm.model.exchange import Exchange, Hop, Tokens, chosen_share, exchanged
from mesh_lm.parallel.remat import remat
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, Rules
from sharding_rules.rules import TokenExchange
from tests.docs.expert_tables import FACTOR, metrics, sparse_beside_dense

PAGE = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [
    shlex.split(line)
    for kind, text in BLOCKS
    if kind == "sh"
    for line in text.replace("\\\n", " ").splitlines()
]


def parsed(words: list[str]) -> Any:
    assert words[:2] == ["mesh-lm", "train"]
    return parse(words[2:])


def test_both_commands_are_the_same_run() -> None:
    first, second, *_ = COMMANDS
    config = parsed(first)
    assert config == load("gpt_tiny_moe")
    assert dataclasses.replace(parsed(second), output=config.output) == config
    assert config.model.experts.number / config.model.experts.active == 4


def test_the_command_for_eight_devices() -> None:
    (command,) = [words for words in COMMANDS if any("mesh.expert" in word for word in words)]
    config = check(parsed(command), 8)
    assert config.model.experts.number // config.mesh.expert == 2


def test_the_config_across_nodes() -> None:
    names: dict[str, Any] = {}
    exec(PYTHON[0], names)
    config = check(names["get_config"](), 8)
    assert config.rules.exchange == {"expert": "gather", "data": "padded"}


@pytest.mark.parametrize(
    ("number", "mesh"),
    [
        (1, MeshConfig(data=8)),
        (2, MeshConfig(sequence=8)),
        (3, MeshConfig(data=2, expert=2, tensor=2)),
    ],
)
def test_the_rules_over_other_axes(number: int, mesh: MeshConfig) -> None:
    names: dict[str, Any] = {}
    exec("from sharding_rules import preset\n" + PYTHON[number], names)
    rules = names["rules"]
    assert isinstance(rules, Rules) and len(PYTHON) == 4
    check(dataclasses.replace(load("gpt_tiny_moe"), rules=rules, mesh=mesh), 8)


def test_examples() -> None:
    session = "".join(text for kind, text in BLOCKS if kind == "pycon")
    failures: list[str] = []
    test = doctest.DocTestParser().get_doctest(session, {}, "docs/experts.md", None, 0)
    doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert test.examples and not failures, "".join(failures)


def test_the_routers_of_published_models() -> None:
    rows = re.findall(r"^\| \[.*\]\(.*\) \| `(number=.*)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for row in rows:
        options = [f"--model.experts.{option}" for option in row.split()]
        model = parse(["gpt_tiny", "--model.block=moe", *options]).model
        assert isinstance(model, DecoderConfig) and not model.problems()


def test_the_sentences_about_the_first_run() -> None:
    balanced = metrics("balanced")
    unbalanced = metrics("unbalanced")
    later = [step for step in balanced if step >= 20]
    assert all(balanced[step]["expert_load"] < 2.3 for step in later)
    assert all(balanced[step]["expert_idle"] == 0 for step in balanced)
    assert all(unbalanced[step]["expert_load"] > 3 for step in later)
    last = max(later)
    assert abs(balanced[last]["mean_loss"] - unbalanced[last]["mean_loss"]) < 0.03


def test_the_sparse_model_is_better_with_every_seed() -> None:
    rows = sparse_beside_dense().splitlines()[2:]
    assert len(rows) == 3
    for row in rows:
        _, _, *losses, _ = (cell.strip() for cell in row.split("|"))
        dense, sparse, dense_heldout, sparse_heldout = map(float, losses)
        assert sparse < dense and sparse_heldout < dense_heldout


@pytest.mark.parametrize(("number", "active", "n_devices"), [(8, 2, 4), (128, 8, 8), (256, 8, 64)])
def test_a_token_is_sent_to_a_device_once(number: int, active: int, n_devices: int) -> None:
    """The formula of the page, and what `padded` makes of it."""
    local = number // n_devices
    p = 1 - math.comb(number - local, active) / math.comb(number, active)
    assert chosen_share(number, active, local) == pytest.approx(p)
    n_tokens = 1 << 20
    hop = Hop(("expert",), "padded", n_devices)
    exchange = Exchange((hop,), number, active, n_tokens, FACTOR)
    expected = min(1.0, FACTOR * p) * n_tokens
    assert exchange.sent_tokens(hop, (), n_tokens) == pytest.approx(expected, rel=1e-4)
    worst = dataclasses.replace(exchange, factor=0.0)
    assert worst.sent_tokens(hop, (), n_tokens) == n_tokens
    assert worst.buffer_rows(n_devices * n_tokens) == min(active, local) * n_devices * n_tokens


_G, _T, _D, _E, _K = 4, 16, 32, 8, 2


@pytest.mark.parametrize("kind", ["gather", "padded"])
@pytest.mark.parametrize(
    ("policy", "exchanges"),
    [("none", 4), ("save_names", 4), ("full", 5), ("save_attention", 5)],
)
def test_exchanges_of_a_layer(kind: TokenExchange, policy: Any, exchanges: int) -> None:
    """Collectives of tokens or results, forward and backward, in the program as traced."""
    mesh = Mesh(jax.devices()[:_G], ("expert",))
    exchange = Exchange((Hop(("expert",), kind, _G),), _E, _K, _T, 0.0)

    def mlp(x: jax.Array, weights: jax.Array, sizes: jax.Array, *, first: bool) -> jax.Array:
        return jnp.sin(x) * weights[:, None]

    def layer(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        return exchanged(exchange, exchange.hops, Tokens(x, experts, weights), mlp)

    def loss(x: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
        return remat(policy)(partial(layer, experts=experts))(x, weights).sum()

    spec = jax.P("expert")
    run = jax.shard_map(
        jax.grad(loss, (0, 1)),
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=(spec, spec),
        check_vma=False,
    )
    rows = jax.ShapeDtypeStruct((_G * _T, _D), jnp.float32)
    weights = jax.ShapeDtypeStruct((_G * _T, _K), jnp.float32)
    experts = jax.ShapeDtypeStruct((_G * _T, _K), jnp.int32)
    traced = jax.make_jaxpr(run)(rows, weights, experts)
    names = {"gather": ("all_gather", "reduce_scatter"), "padded": ("all_to_all",)}[kind]
    found = [name for name, width in _collectives(traced.jaxpr) if width == _D]
    assert set(found) == set(names)
    assert len(found) == exchanges


def _collectives(jaxpr: Any) -> Iterator[tuple[str, int]]:
    """Yields (name, width of the rows) of each collective of a traced program."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("all_gather", "reduce_scatter", "all_to_all"):
            yield name, equation.invars[0].aval.shape[-1]
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _collectives(inner)
