"""The bound rules: strict about shapes too, because XLA drops a cut that does not divide without a word."""

import jax
import numpy as np
import pytest

from sharding_rules import MeshConfig, Shard, ShardingRuleError, make_mesh, preset

COMPILE_BUDGET = 4
SHARD = Shard(preset("fsdp+megatron"), make_mesh(MeshConfig(fsdp=2, tensor=4)))


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        (
            (4, 8, 6),
            ("batch", "seq", "mlp"),
            "activation('batch', 'seq', 'mlp'): dimension 2 ('mlp', size 6) does not divide over 'tensor' (4 ways)",
        ),
        ((4, 8, 8), ("batch", "seq"), "activation('batch', 'seq'): 2 logical axes for 3 dimensions (4, 8, 8)"),
        (
            (4, 8, 8),
            ("batch", "seq", "mpl"),
            "activation('batch', 'seq', 'mpl'): no activations rule for logical axis 'mpl'; did you mean 'mlp'?",
        ),
    ],
)
def test_an_activation_that_does_not_fit(shape, axes, message: str) -> None:
    with pytest.raises(ShardingRuleError) as caught:
        jax.eval_shape(lambda x: SHARD(x, *axes), jax.ShapeDtypeStruct(shape, "float32"))
    assert str(caught.value) == message


def test_a_table_used_in_parts_is_refused() -> None:
    rules = preset("megatron").replace(params={"embed": "tensor", "vocab": None})
    with pytest.raises(ShardingRuleError, match=r"rules.gathered\['embed'\]='tensor': the rows of a table are used whole"):
        Shard(rules, SHARD.mesh).stored("vocab", "embed")


def test_what_is_stored_and_what_is_used() -> None:
    table = SHARD.stored("vocab", "embed")
    assert table.spec == jax.P("tensor", "fsdp") and table.used == jax.P("tensor", None)
    assert SHARD.cut("batch") == ("fsdp",) and SHARD.ways(("fsdp", "tensor")) == 8


def test_a_part_of_the_model_has_its_own_rows() -> None:
    rules = SHARD.rules.replace(params={"moe/mlp": None, "moe/vocab": None}, activations={"moe/mlp": None, "moe/seq_resid": "tensor"})
    shard = Shard(rules, SHARD.mesh)
    moe, dense = shard.within("moe"), shard.within("dense")
    assert moe.sharding("params", ("layers", "embed", "mlp"), (2, 8, 6)).spec == jax.P("pipeline", "fsdp", None)
    assert dense.sharding("params", ("layers", "embed", "mlp"), (2, 8, 8)).spec == jax.P("pipeline", "fsdp", "tensor")
    assert moe.cut("seq_resid") == ("tensor",) and dense.cut("seq_resid") == () == shard.cut("seq_resid")
    assert moe.cut("batch") == ("fsdp",)
    assert moe.stored("vocab", "embed").spec == jax.P(None, "fsdp") and dense.stored("vocab", "embed").spec == jax.P("tensor", "fsdp")
    assert moe.within("dense").spec("activations", ("mlp",)) == jax.P("tensor"), "parts are one level deep"
    assert moe.within("").spec("activations", ("moe/mlp", "mlp")) == jax.P(None, "tensor"), "a scope in a name stays"
    pinned = jax.make_jaxpr(lambda x: (moe.constrain(x, "activations", ("batch", "mlp")), dense.weight(x, "embed", "mlp")))(np.ones((4, 8)))
    assert [equation.params["sharding"].spec for equation in pinned.eqns] == [jax.P("fsdp", None), jax.P(None, "tensor")]


def test_errors_of_a_part_name_it() -> None:
    moe = SHARD.within("moe")
    cases = {
        (4, 6): "activation('moe/batch', 'moe/mlp'): dimension 1 ('moe/mlp', size 6) does not divide over 'tensor' (4 ways)",
        (4, 6, 1): "activation('moe/batch', 'moe/mlp'): 2 logical axes for 3 dimensions (4, 6, 1)",
    }
    for shape, message in cases.items():
        with pytest.raises(ShardingRuleError) as caught:
            jax.eval_shape(lambda x: moe(x, "batch", "mlp"), jax.ShapeDtypeStruct(shape, "float32"))
        assert str(caught.value) == message
    with pytest.raises(ShardingRuleError) as caught:
        moe.spec("activations", ("mpl",))
    assert str(caught.value) == "activation('moe/mpl',): no activations rule for logical axis 'moe/mpl'; did you mean 'mlp'?"
    with pytest.raises(ShardingRuleError) as caught:
        moe.within("a/b")
    assert str(caught.value) == "Shard.within('a/b'): a scope is one name, without a slash"


def test_axes_that_are_manual_are_left_out() -> None:
    inside = []

    def f(x):
        inside.append((SHARD.spec("activations", ("batch", "seq", "mlp")), SHARD.cut("batch")))
        return x

    jax.eval_shape(
        jax.shard_map(f, mesh=SHARD.mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"), axis_names={"fsdp"}), np.ones((4, 2, 8))
    )
    assert inside == [(jax.P(None, None, "tensor"), ())]


@pytest.mark.parametrize("embed", ["fsdp", None], ids=["cut over fsdp", "whole"])
def test_gradients_of_a_table_are_the_whole_batchs(embed: str | None) -> None:
    """Each device has one of its part of the batch: they are summed over all that cuts it, whatever of that cuts the table, too."""
    rules = preset("hsdp+megatron").replace(params={"embed": embed})
    shard = Shard(rules, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    table = shard.stored("vocab", "embed")
    mine = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)  # [parts of the batch, rows, width]

    def scatter(dw):
        return table.scatter(dw[0])

    found = jax.jit(shard.local(scatter, jax.P(("data", "fsdp"), "tensor"), table.spec))(mine)
    np.testing.assert_array_equal(np.asarray(found), mine.sum(0))
