"""What lint says because it knows where arrays come from, and what the rules promise of them; on
the reports of test_lint.py."""

from __future__ import annotations

import dataclasses

from sharding_rules import preset
from sharding_rules.lab.lint import lint
from sharding_rules.lab.report import Argument, Location
from tests.sharding_rules.lab.test_lint import (
    AXES,
    LAWFUL,
    LAYER,
    LOOPS,
    RULES,
    D,
    F,
    L,
    M,
    S,
    V,
    argument,
    arguments,
    collective,
    only,
    report,
)


def test_what_its_author_called_is_left_alone() -> None:
    called = collective("all-to-all", "tensor", f"bf16[4,{S},{F}]", by_hand=True)
    sums = collective(
        "all-reduce", "tensor", f"bf16[4,{S},{F}]", partial=True, group=2, by_hand=True
    )
    gather = collective("all-gather", "fsdp", f"bf16[8,{S},{D}]", by_hand=True)
    assert lint(report(called, sums, gather), RULES, AXES) == ()


def test_weights_of_the_same_shape_are_told_apart() -> None:
    gather = collective(
        "all-gather",
        "tensor",
        f"f32[{D},{F}]",
        loops=(),
        where=LAYER,
        made_of=("state['params']['blocks.up']",),
    )
    found = only(
        lint(
            report(gather, arguments=(*arguments(), twin())),
            RULES,
            AXES | {"blocks.down": AXES["blocks.up"]},
        )
    )
    assert found.text.startswith(
        "blocks.up is gathered over tensor, along which rules.params['mlp'] shards it"
    )


def twin() -> Argument:
    return argument(
        "state['params']['blocks.down']", "params", (L, D, F), "float32", "fsdp", "tensor"
    )


def test_names_that_are_swapped() -> None:
    axes = AXES | {"blocks.up": ("layers", "mlp", "embed")}
    gather = collective(
        "all-gather", "tensor", f"bf16[4,{S},{F}]", beside=("state['params']['blocks.up']",)
    )
    near = collective("all-to-all", "tensor", f"bf16[4,{S},{D}]")
    found = only(
        tuple(one for one in lint(report(gather, near), RULES, axes) if one.check != "replicated")
    )
    assert found.check == "swapped-names" and found.bytes == int(
        gather.times * gather.wire + near.times * near.wire
    )
    assert (
        found.text.startswith(
            "the names 'mlp' and 'embed' are swapped in blocks.up [2, 1024, 4096]"
        )
        or "'embed' and 'mlp'" in found.text
    )


def test_a_row_that_activations_lack() -> None:
    rules = RULES.replace(activations={"mlp": None})
    gather = collective(
        "all-gather", "tensor", f"bf16[4,{S},{F}]", beside=("state['params']['blocks.up']",)
    )
    found = only(lint(report(gather), rules, AXES))
    assert (
        found.check == "reshard"
        and found.fix == "rules.activations['mlp'] = 'tensor', or None in both columns"
    )
    assert lint(report(), rules, AXES) == (), "nothing is gathered"


def test_layers_that_are_gathered_at_once() -> None:
    made_of = ("state['params']['blocks.up']",)
    gather = collective("all-gather", "fsdp", f"f32[{L},{D},{F // 4}]", loops=(M,), made_of=made_of)
    found = only(lint(report(gather), RULES, AXES))
    assert (found.check, found.bytes) == ("gathered-early", L * D * F // 4 * 4 // 2)
    assert found.text == "all 2 layers of blocks.up are gathered over fsdp at once"


def test_weights_that_are_gathered_for_the_update() -> None:
    gather = collective(
        "all-gather",
        "tensor",
        f"f32[{L},{D},{F}]",
        loops=(),
        where=Location("optimizer", "optimizer"),
        made_of=("state['params']['blocks.up']",),
    )
    found = only(lint(report(gather), RULES, AXES))
    assert found.text == "blocks.up, sharded along tensor, are gathered in the optimizer"


def test_gradients_that_are_summed_whole() -> None:
    whole = collective(
        "all-reduce",
        "fsdp",
        f"f32[{D},{F // 4}]",
        loops=LOOPS,
        where=Location("layers/mlp", "backward"),
        by_hand=True,
    )
    found = only(lint(report(whole), RULES, AXES))
    assert found.check == "all-reduce-of-shards" and found.text.startswith(
        "gradients of blocks.up are all-reduced in full over fsdp"
    )
    norms = dataclasses.replace(whole, shapes=(f"f32[{L * D}]",))
    assert lint(report(norms), RULES, AXES) == (), "as many elements as the rules leave whole"


def test_a_residual_stream_that_is_not_sharded() -> None:
    summed = collective("all-reduce", "tensor", f"bf16[4,{S},{D}]")
    found = only(lint(report(summed), RULES, AXES))
    assert found.check == "residual-not-sharded" and "rules.activations['seq_resid']" in found.text
    assert lint(report(collectives=(summed, *LAWFUL[2:])), preset("hsdp+megatron"), AXES) == ()


def test_a_table_of_which_a_device_uses_a_part() -> None:
    table = dataclasses.replace(argument("bias", "other", (16, 2048, 2048), "float32"), used_ways=4)
    found = only(lint(report(arguments=(*arguments(), table)), RULES, AXES))
    assert found.check == "replicated" and found.bytes == table.bytes * 3 // 4
    assert (
        found.text
        == "bias is replicated on every device, and each uses 1/4 of it, as tensor would shard it"
    )
    assert (
        lint(report(arguments=(*arguments(), dataclasses.replace(table, used_ways=1))), RULES, AXES)
        == ()
    )


def test_an_optimizer_that_multiplies_matrices() -> None:
    """What XLA moves for it is a notice, once; without matmuls there the same is an error."""
    where = Location("optimizer", "optimizer", "muon.py:1")
    moves = [
        collective(
            "collective-permute", "fsdp", f"f32[{L},{D},{F // 4}]", loops=(), where=where, name=name
        )
        for name in "ab"
    ]
    found = only(lint(report(*moves, flops={"optimizer": 10**9}), RULES, AXES))
    assert (found.check, found.severity) == (
        "optimizer-matmuls",
        "notice",
    ) and "2 arrays over fsdp" in found.text
    assert only(lint(report(*moves), RULES, AXES)).check == "reshard"


def test_matrices_of_which_devices_multiply_parts() -> None:
    """In Newton-Schulz XLA gathers them in every iteration, with merged dimensions. What brings
    complete matrices to their owners is lawful."""
    rules = preset("hsdp+megatron_sp")
    product = Location("optimizer", "optimizer", "muon.py:1", "dot_general")
    gathers = [
        collective(
            "all-gather", "fsdp", f"f32[{L},{F // 4},{D}]", loops=(), where=product, name=name
        )
        for name in "ab"
    ]
    table = collective(
        "all-gather", "fsdp", f"f32[{V // 4},{D}]", loops=(), where=product, name="c"
    )
    multiplies = {"flops": {"optimizer": 10**9}}
    found = only(lint(report(*gathers, table, **multiplies), rules, AXES))
    assert (found.check, found.severity) == ("divided-matrices", "error")
    assert "matrices (blocks.up) of which a device has a part" in found.text
    assert "over fsdp in 2 collectives" in found.text
    assert "--rules=hsdp+megatron_sp+owner" in found.fix
    changed = only(lint(report(*gathers, table, **multiplies), rules.replace(), AXES))
    assert "sharding_rules.owner.with_owners" in changed.fix
    assert found.bytes == sum(int(one.wire) for one in gathers)
    # AdamW multiplies no matrices.
    assert "divided-matrices" not in {one.check for one in lint(report(*gathers), rules, AXES)}
    # Without rules nothing says that it is not the price of what was asked for.
    assert {one.severity for one in lint(report(*gathers, **multiplies), None, AXES)} == {"notice"}

    moved = Location("optimizer", "optimizer", "layout.py:1", "sharding_constraint")
    exchange = collective("all-to-all", "fsdp", f"f32[{L},{D},{F // 4}]", loops=(), where=moved)
    owners = preset("hsdp+megatron_sp+owner")
    of_owners = lint(report(exchange, arguments=(), **multiplies), owners, AXES)
    assert "optimizer-matmuls" not in {one.check for one in of_owners}
