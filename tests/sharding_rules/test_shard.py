"""`Shard` is strict about shapes, too, because XLA silently drops a sharding that does not
divide."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from sharding_rules import MeshConfig, Rules, Shard, ShardingRuleError, make_mesh, preset

COMPILE_BUDGET = 8
SHARD = Shard(preset("fsdp+megatron"), make_mesh(MeshConfig(fsdp=2, tensor=4)))


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        (
            (4, 8, 6),
            ("batch", "seq", "mlp"),
            (
                "activation('batch', 'seq', 'mlp'): dimension 2 ('mlp', size 6) cannot be divided evenly "
                "over 'tensor' (4 ways)"
            ),
        ),
        (
            (4, 8, 8),
            ("batch", "seq"),
            "activation('batch', 'seq'): 2 logical axes for 3 dimensions (4, 8, 8); name an axis, or None, for each",
        ),
        (
            (4, 8, 8),
            ("batch", "seq", "mpl"),
            (
                "activation('batch', 'seq', 'mpl'): no activations rule for the logical axis 'mpl'; "
                "did you mean 'mlp'?"
            ),
        ),
    ],
)
def test_an_activation_that_does_not_fit(shape, axes, message: str) -> None:
    with pytest.raises(ShardingRuleError) as caught:
        jax.eval_shape(lambda x: SHARD(x, *axes), jax.ShapeDtypeStruct(shape, "float32"))
    assert str(caught.value) == message


def test_a_table_used_in_parts_is_refused() -> None:
    rules = preset("megatron").replace(params={"embed": "tensor", "vocab": None})
    with pytest.raises(
        ShardingRuleError,
        match=r"rules.gathered\['embed'\]='tensor': a table is used with complete rows",
    ):
        Shard(rules, SHARD.mesh).table("vocab", "embed")


def test_what_is_stored_and_what_is_used() -> None:
    table = SHARD.table("vocab", "embed")
    assert table.spec == jax.P("tensor", "fsdp") and table.gathered_spec == jax.P("tensor", None)
    assert SHARD.axes_for("batch") == ("fsdp",) and SHARD.n_shards(("fsdp", "tensor")) == 8


def test_a_part_of_the_model_has_its_own_rows() -> None:
    rules = SHARD.rules.replace(
        params={"moe/mlp": None, "moe/vocab": None},
        activations={"moe/mlp": None, "moe/seq_resid": "tensor"},
    )
    shard = Shard(rules, SHARD.mesh)
    moe, dense = shard.within("moe"), shard.within("dense")
    assert moe.sharding("params", ("layers", "embed", "mlp"), (2, 8, 6)).spec == jax.P(
        "pipeline", "fsdp", None
    )
    assert dense.sharding("params", ("layers", "embed", "mlp"), (2, 8, 8)).spec == jax.P(
        "pipeline", "fsdp", "tensor"
    )
    assert moe.axes_for("seq_resid") == ("tensor",) and dense.axes_for(
        "seq_resid"
    ) == () == shard.axes_for("seq_resid")
    assert moe.axes_for("batch") == ("fsdp",)
    assert moe.table("vocab", "embed").spec == jax.P(None, "fsdp") and dense.table(
        "vocab", "embed"
    ).spec == jax.P("tensor", "fsdp")
    assert moe.within("dense").spec("activations", ("mlp",)) == jax.P("tensor"), (
        "parts are one level deep"
    )
    assert moe.within("").spec("activations", ("moe/mlp", "mlp")) == jax.P(None, "tensor"), (
        "a scope in a name stays"
    )
    pinned = jax.make_jaxpr(
        lambda x: (
            moe.constrain(x, "activations", ("batch", "mlp")),
            dense.weight(x, "embed", "mlp"),
        )
    )(np.ones((4, 8)))
    assert [equation.params["sharding"].spec for equation in pinned.eqns] == [
        jax.P("fsdp", None),
        jax.P(None, "tensor"),
    ]


def test_errors_of_a_part_name_it() -> None:
    moe = SHARD.within("moe")
    cases = {
        (
            4,
            6,
        ): (
            "activation('moe/batch', 'moe/mlp'): dimension 1 ('moe/mlp', size 6) cannot be divided evenly "
            "over 'tensor' (4 ways)"
        ),
        (
            4,
            6,
            1,
        ): "activation('moe/batch', 'moe/mlp'): 2 logical axes for 3 dimensions (4, 6, 1); name an axis, or None, for each",
    }
    for shape, message in cases.items():
        with pytest.raises(ShardingRuleError) as caught:
            jax.eval_shape(lambda x: moe(x, "batch", "mlp"), jax.ShapeDtypeStruct(shape, "float32"))
        assert str(caught.value) == message
    with pytest.raises(ShardingRuleError) as caught:
        moe.spec("activations", ("mpl",))
    assert str(caught.value) == (
        "activation('moe/mpl',): no activations rule for the logical axis 'moe/mpl'; did you mean "
        "'mlp'?"
    )
    with pytest.raises(ShardingRuleError) as caught:
        moe.within("a/b")
    assert str(caught.value) == "Shard.within('a/b'): a scope is one name, without a slash"


def test_axes_that_are_manual_are_left_out() -> None:
    inside = []

    def f(x):
        inside.append((SHARD.spec("activations", ("batch", "seq", "mlp")), SHARD.axes_for("batch")))
        return x

    jax.eval_shape(
        jax.shard_map(
            f, mesh=SHARD.mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"), axis_names={"fsdp"}
        ),
        np.ones((4, 2, 8)),
    )
    assert inside == [(jax.P(None, None, "tensor"), ())]


@pytest.mark.parametrize("embed", ["fsdp", None], ids=["cut over fsdp", "whole"])
def test_gradients_of_a_table_are_the_whole_batchs(embed: str | None) -> None:
    """Each device has a gradient for its part of the batch: these are summed over all axes of the
    batch, including those of the table."""
    rules = preset("hsdp+megatron").replace(params={"embed": embed})
    shard = Shard(rules, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    table = shard.table("vocab", "embed")
    # [shards of the batch, rows, width]
    mine = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)

    def scatter(dw):
        return table.reduce_scatter(dw[0])

    found = jax.jit(shard.shard_map(scatter, jax.P(("data", "fsdp"), "tensor"), table.spec))(mine)
    np.testing.assert_array_equal(np.asarray(found), mine.sum(0))


SUMS = make_mesh(MeshConfig(fsdp=4, tensor=2))
EINSUM = "bsd,dfn->bsfn", ("embed", "fused", "mlp")


def dot(rules: Rules, mesh: Mesh = SUMS) -> Callable[..., Any]:
    """(x, w, dy) -> the gradients of an einsum with respect to x and w."""
    shard = Shard(rules, mesh)

    def gradients(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        f = jax.checkpoint(
            lambda x, w: shard(
                shard.einsum(EINSUM[0], x, w, EINSUM[1]), "batch", "seq", "fused", "mlp"
            )
        )
        return jax.vjp(f, x, w)[1](dy)

    return gradients


def arrays() -> tuple[np.ndarray, ...]:
    """x [8, 16, 4] and dy [8, 16, 2, 6] in bf16, w [4, 2, 6] in fp32."""
    x, w, dy = (
        np.random.default_rng(i).normal(size=shape)
        for i, shape in enumerate([(8, 16, 4), (4, 2, 6), (8, 16, 2, 6)])
    )
    return x.astype(jnp.bfloat16), w.astype(np.float32), dy.astype(jnp.bfloat16)


@pytest.mark.parametrize("name", ["fsdp+megatron", "hsdp+megatron_sp"])
def test_a_gradient_is_summed_in_the_type_asked_for(name: str) -> None:
    x, w, dy = arrays()
    exact = np.einsum("bsd,bsfn->dfn", *(np.asarray(a, np.float64) for a in (x, dy)))
    shard, dx, errors = Shard(preset(name), SUMS), [], {}
    out = (
        shard.sharding("activations", ("batch", "seq", "embed")),
        shard.sharding("params", EINSUM[1]),
    )
    for reduction in ("auto", "float32"):
        found, dw = jax.jit(dot(shard.rules.replace(reduction=reduction)), out_shardings=out)(
            x, w, dy
        )
        assert found.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
        dx.append(np.asarray(found, np.float32))
        errors[reduction] = np.abs(np.asarray(dw) - exact).max() / np.abs(exact).max()
    np.testing.assert_array_equal(*dx)
    assert errors["float32"] < 1e-6 and errors["auto"] > 1e-3, errors


def test_what_is_not_summed_over_devices_is_left_alone() -> None:
    """The same program, except where devices have different tokens and the same shard of the
    weight."""

    def program(name: str, **change: Any) -> str:
        return str(jax.make_jaxpr(dot(preset(name).replace(**change)))(*arrays()))

    for name, changes in {
        "megatron": False, "megatron_sp": False, "ddp": False, "zero2": False, "fsdp": True,
        "hsdp": True, "fsdp+megatron_sp": True
    }.items():  # fmt: skip
        assert (program(name) != program(name, reduction="float32")) is changes, name
        assert program(name) == program(name, reduction="bfloat16"), name
    whole = {"params": {"mlp": None}, "activations": {"mlp": None}}
    assert program("megatron_sp", **whole) != program(
        "megatron_sp", reduction="float32", **whole
    ), "tokens are cut by the sequence"
    mesh = make_mesh(MeshConfig(data=4, tensor=2))
    assert str(
        jax.make_jaxpr(dot(preset("fsdp").replace(reduction="float32"), mesh))(*arrays())
    ) == str(jax.make_jaxpr(dot(preset("fsdp"), mesh))(*arrays())), "an axis of one device"


def test_what_is_gathered_before_a_matmul() -> None:
    """Heads are scattered over tensor_y, which shards the weight along embed; an MLP that is
    replicated is another matter."""
    mesh = make_mesh(MeshConfig(data=2, tensor=2, extra=("tensor_y=2",)))
    two, plain = (
        Shard(preset("megatron_2d"), mesh),
        Shard(preset("megatron").replace(params={"mlp": None}), mesh),
    )
    heads, mlp = ("embed", "heads", "head_dim"), ("embed", "mlp")
    assert two.regathers(heads) and not two.regathers(mlp) and not two.regathers(("embed", None))
    assert not plain.regathers(heads) and not plain.regathers(mlp)
