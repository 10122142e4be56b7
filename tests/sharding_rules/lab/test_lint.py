"""Each check of lint on reports cut by hand: what it finds, and the lawful neighbour that it must
be silent about."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from mesh_lm.planning.vocabulary import VOCABULARY
from sharding_rules import preset
from sharding_rules.lab.hlo import arrays
from sharding_rules.lab.lint import CHECKS, Finding, lint
from sharding_rules.lab.lint_reductions import reduced
from sharding_rules.lab.report import Argument, Collective, Location, Memory, Report, Timeline
from sharding_rules.lab.summary import size

MESH = {"pipeline": 1, "data": 2, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 4}
L, M, B, S, D, F, N, H, V = 2, 4, 16, 512, 1024, 4096, 8, 64, 32768
AXES: dict[str, tuple[str, ...]] = {
    "embedding": ("vocab", "embed"),
    "blocks.up": ("layers", "embed", "mlp"),
    "blocks.out": ("layers", "embed", "heads", "head_dim"),
    "blocks.norm": ("layers", "norm"),
}
SIZES = {"vocab": V, "embed": D, "layers": L, "mlp": F, "heads": N, "head_dim": H, "norm": D}
RULES = preset("hsdp+megatron_sp")
LAYER = Location("layers/mlp", "forward", "model.py:10", "dot_general")
LOOPS = (M, L)


def argument(name: str, kind: str, shape: tuple[int, ...], dtype: str, *axes: str) -> Argument:
    size = 4 * math.prod(shape) // math.prod(MESH[axis] for axis in axes)
    return Argument(name, kind, shape, dtype, size, axes)


def arguments(**cut: tuple[str, ...]) -> tuple[Argument, ...]:
    """Of the step; `cut` says which mesh axes cut a parameter, instead of fsdp and tensor."""
    found = [argument("batch['tokens']", "batch", (M, B, S), "int32", "data", "fsdp")]
    for name, axes in AXES.items():
        shape = tuple(SIZES[axis] for axis in axes)
        by = cut.get(name.removeprefix("blocks."), () if "norm" in name else ("fsdp", "tensor"))
        for tree, kind in (("params", "params"), ("mu", "moments"), ("nu", "moments")):
            found.append(argument(f"state['{tree}']['{name}']", kind, shape, "float32", *by))
    return tuple(found)


def collective(kind: str, along: str, shapes: str, **changes: Any) -> Collective:
    axes = tuple(along.split())
    payload, group = sum(a.bytes for a in arrays(shapes)), math.prod(MESH[axis] for axis in axes)
    wire = payload * (group - 1) / group
    known: dict[str, Any] = {
        "name": kind, "kind": kind, "axes": axes, "group": group, "nodes": 1,
        "shapes": tuple(shapes.split()), "dtype": "",
        "payload": payload, "wire": wire, "loops": LOOPS, "conditional": False, "where": LAYER,
        "asynchronous": True,
        "flops_hidden_behind": 1,
    }  # fmt: skip
    return Collective(**known | changes)


LAWFUL = (
    collective("all-gather", "tensor", f"bf16[4,{S},{D}]"),
    collective("reduce-scatter", "tensor", f"bf16[4,{S},{D}]"),
    collective("all-gather", "fsdp", f"bf16[{D},{F // 4}] bf16[{D},{N // 4},{H}]"),
    collective(
        "all-gather",
        "fsdp",
        f"bf16[{D},{F // 4}] bf16[{D},{N // 4},{H}]",
        where=Location("layers/mlp", "recompute"),
    ),
    collective(
        "all-gather", "fsdp", f"bf16[{V // 4},{D}]", loops=(M,), where=Location("embed", "forward")
    ),
    collective(
        "reduce-scatter",
        "fsdp",
        f"f32[{V // 4},{D}]",
        loops=(M,),
        where=Location("embed+loss", "backward"),
    ),
    collective(
        "reduce-scatter", "fsdp", f"bf16[{D},{F // 4}]", where=Location("layers/mlp", "backward")
    ),
    collective(
        "all-reduce",
        "data",
        "f32[4000000]",
        loops=(),
        where=Location("layers", "backward"),
        nodes=2,
    ),
)


def report(*more: Collective, **changes: Any) -> Report:
    known: dict[str, Any] = {
        "name": "step", "target": "h100", "hbm": 80 << 30, "mesh": MESH,
        "axis_nodes": {**dict.fromkeys(MESH, 1), "data": 2},
        "collectives": (*LAWFUL, *more), "memory": Memory(100 << 20, 0, 0, 160 << 20, ()),
        "arguments": arguments(), "flops": {},
        "kernels": (), "warnings": (), "timeline": None, "instructions": 0, "text_bytes": 0,
        "compile_seconds": 0.0, "versions": {},
        "options": {}, "vocabulary": VOCABULARY,
    }  # fmt: skip
    return Report(**known | changes)


def only(found: tuple[Finding, ...]) -> Finding:
    assert len(found) == 1, "\n".join(map(str, found))
    return found[0]


@pytest.mark.parametrize("rules", [RULES, None])
@pytest.mark.parametrize("axes", [AXES, None])
def test_a_lawful_step_is_clean(rules: Any, axes: Any) -> None:
    assert lint(report(), rules, axes) == ()


def test_one_device_sends_nothing() -> None:
    one = dict.fromkeys(MESH, 1)
    assert lint(report(mesh=one, axis_nodes=one, collectives=(), arguments=()), RULES, AXES) == ()


def test_every_check_is_small_and_named() -> None:
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS) == 28


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (
            collective("all-to-all", "tensor", f"bf16[4,{S},{F}]"),
            "all-to-all of activation bf16[4,512,4096] (batch, seq, mlp)",
        ),
        (
            collective("collective-permute", "fsdp", f"bf16[4,{S},{F}]"),
            "activation bf16[4,512,4096] (batch, seq, mlp) along fsdp",
        ),
        (
            collective("all-reduce", "tensor", f"bf16[4,{S},{F}]", partial=True, group=2),
            "between a part of the devices along tensor",
        ),
        (
            collective("all-gather", "tensor", f"bf16[4,{S},24,{H}]"),
            "activation bf16[4,512,24,64] is gathered over tensor",
        ),
        (
            collective("all-gather", "tensor", f"bf16[4,{S},16,{H}]"),
            "activation bf16[4,512,16,64] is gathered over tensor",
        ),
        (
            collective("all-gather", "data", f"bf16[8,{S},{D}]"),
            "bf16[8,512,1024] (batch, seq, embed) is gathered over data, which shards",
        ),
        (collective("all-gather", "tensor", f"f32[{D}]"), ""),
        (
            collective("all-gather", "fsdp", f"bf16[4,{S},{D}]"),
            "activation bf16[4,512,1024] (batch, seq, embed) is gathered over fsdp",
        ),
        (
            collective("all-gather", "fsdp", f"bf16[8,{S},{D}]"),
            "activation bf16[8,512,1024] (batch, seq, embed) is gathered over fsdp",
        ),
        (
            collective("all-gather", "fsdp", f"f32[99,{V}]"),
            "f32[99,32768] is gathered over fsdp, which shards the batch",
        ),
        (
            collective("all-gather", "tensor", f"f32[99,{V}]"),
            "f32[99,32768] is gathered over tensor",
        ),
        (
            collective("all-gather", "tensor", f"bf16[4,{S},{F}]"),
            "is gathered over tensor, along which rules.activations['mlp']",
        ),
        (
            collective("all-gather", "tensor", f"bf16[{D},{F}]"),
            "blocks.up is gathered over tensor, along which rules.params['mlp'] shards",
        ),
        (
            collective("all-gather", "tensor", f"bf16[{N},{H},{D}]"),
            "blocks.out is gathered over tensor",
        ),
    ],
)
def test_reshards(one: Collective, text: str) -> None:
    found = lint(report(one), RULES, AXES)
    if not text:  # too few bytes
        assert found == ()
        return
    assert only(found).check == "reshard" and text in only(found).text
    assert (
        only(found).bytes == int(one.times * one.wire)
        and only(found).where == LAYER
        and "model.py:10" in only(found).fix
    )
    small = dataclasses.replace(one, loops=(), wire=one.wire / 100)
    assert lint(report(small), RULES, AXES) == ()


def test_ways_that_the_rules_do_not_describe_are_left_alone() -> None:
    ring = collective("collective-permute", "tensor", f"bf16[4,{S},{F}]", axes=("sequence",))
    assert lint(report(ring), RULES, AXES) == ()


def test_zero_gathers_new_weights_after_the_update() -> None:
    gather = collective(
        "all-gather", "data", f"f32[4,{S},{D}]", loops=(), where=Location("optimizer", "optimizer")
    )
    moments = tuple(
        dataclasses.replace(a, axes=("data", *a.axes)) if a.kind == "moments" and a.axes else a
        for a in arguments()
    )
    assert lint(report(gather, arguments=moments), preset("zero1+hsdp+megatron_sp"), AXES) == ()


def test_rematerialization() -> None:
    line = (
        "[SPMD] Involuntary full rematerialization. The compiler was not able to go from sharding "
        "... to ..."
    )
    found = only(lint(report(warnings=(line, line)), RULES, AXES))
    assert found.check == "rematerialization" and found.text == line


WHOLE_TABLE = collective(
    "all-gather", "fsdp", f"bf16[{V},{D}]", loops=(M,), where=Location("embed", "forward")
)
"""The gather of an embedding that tensor does not shard."""


def test_a_row_that_shards_nothing() -> None:
    rules = RULES.replace(
        params={"vocab": None, "vocba": "tensor"}, activations={"vocab": None, "vocba": "tensor"}
    )
    whole = report(
        collectives=(*LAWFUL[:4], WHOLE_TABLE, *LAWFUL[5:]),
        arguments=arguments(embedding=("fsdp",)),
    )
    found = {one.check: one for one in lint(whole, rules, AXES)}
    assert found.keys() == {"dead-rule", "replicated"}
    assert (
        found["dead-rule"].fix == "did you mean rules.params['vocab']?"
        and "embedding stay whole" in found["dead-rule"].text
    )
    assert found["dead-rule"].bytes == found["replicated"].bytes == 3 * V * D * 4 // 2 * 3 // 4
    # another model's row
    assert lint(report(), RULES.replace(params={"experts": "tensor"}), AXES) == ()
    none = only(
        lint(report(logical=AXES), RULES.replace(params={"mpl": None}, activations={"mpl": None}))
    )
    assert (none.check, none.severity, none.fix) == (
        "dead-rule",
        "notice",
        "did you mean rules.params['mlp']?",
    )
    assert (
        none.text
        == "rules.params['mpl'] = None changes nothing: no parameter has a dimension 'mpl'"
    )
    assert (
        only(lint(report(), RULES.replace(optimizer={"embd": "data"}), AXES)).fix
        == "did you mean rules.optimizer['embed']?"
    )
    # a row for one part of the model
    assert lint(report(), RULES.replace(params={"moe/mlp": "tensor"}), AXES) == ()


def test_replicated() -> None:
    whole = report(
        collectives=(*LAWFUL[:4], WHOLE_TABLE, *LAWFUL[5:]),
        arguments=arguments(embedding=("fsdp",)),
    )
    promised = only(lint(whole, RULES, AXES))
    assert (promised.check, promised.severity) == ("replicated", "error")
    where = "parameters and moments (mu and nu) of embedding are replicated along tensor"
    assert promised.text == f"{where}, along which rules.params and rules.optimizer shard them"
    assert promised.bytes == 3 * V * D * 4 // 2 * 3 // 4
    asked = only(lint(whole, RULES.replace(params={"vocab": None}), AXES))
    assert asked.severity == "error" and "put 'tensor' into rules.params['vocab']" in asked.fix
    guessed = only(lint(whole))
    assert guessed.severity == "notice" and "embedding is replicated along tensor" in guessed.text
    roomy = Memory(100 << 20, 0, 0, 40 << 30, ())
    assert lint(dataclasses.replace(whole, memory=roomy), RULES, AXES) == ()


def test_what_a_strategy_replicates_on_purpose() -> None:
    """ddp: everything; megatron with more devices than kv heads: the kv weights, which divide over
    tensor in no usual dimension."""
    whole = arguments(embedding=(), up=(), out=())
    summed = collective("all-reduce", "data", "f32[4000000]", loops=())
    batch = dataclasses.replace(whole[0], axes=("data", "fsdp", "tensor"))
    ddp = preset("ddp").replace(activations={"batch": ("data", "fsdp", "tensor")})
    assert lint(report(collectives=(summed,), arguments=(batch, *whole[1:])), ddp, AXES) == ()
    kv = argument("state['params']['blocks.kv']", "params", (L, D, 2, 2, 512 * H), "float32")
    axes = AXES | {"blocks.kv": ("layers", "embed", "fused", "kv_heads", "head_dim")}
    found = lint(
        report(arguments=(*arguments(), kv)), RULES.replace(params={"kv_heads": None}), axes
    )
    assert not [one for one in found if "tensor" in one.text]


def test_gathered_twice() -> None:
    again = collective(
        "all-gather",
        "fsdp",
        f"bf16[{D},{F // 4}]",
        where=Location("layers/mlp", "backward", "model.py:3"),
    )
    found = only(lint(report(again), RULES, AXES))
    assert (
        found.check == "gathered-twice"
        and found.text == "blocks.up gathered 16 times over fsdp in the backward, 8 would do"
    )
    assert found.bytes == again.times * again.wire
    head = collective(
        "all-gather", "fsdp", f"bf16[{V // 4},{D}]", loops=(M,), where=Location("loss", "forward")
    )
    assert lint(report(head), RULES, AXES) == ()  # the tied head: another part uses it again
    both = collective(
        "all-gather",
        "fsdp",
        " ".join(2 * [f"bf16[{V // 4},{D}]"]),
        loops=(M,),
        where=Location("embed+loss", "forward"),
    )
    assert lint(report(collectives=(*LAWFUL[:4], both)), RULES, AXES) == ()


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (
            collective("all-gather", "tensor", f"f32[4,{S},{D}]"),
            "all-gather of activation f32[4,512,1024] in f32 over tensor",
        ),
        (
            collective("reduce-scatter", "tensor", f"f32[4,{S},{D}]"),
            "reduce-scatter of activation f32[4,512,1024] in f32 over tensor",
        ),
        (collective("reduce-scatter", "fsdp", f"f32[{D},{F}]"), ""),  # a gradient
        (
            collective(
                "all-gather",
                "fsdp",
                f"f32[{V},{D}]",
                loops=(),
                where=Location("optimizer", "optimizer"),
            ),
            "",
        ),
    ],
)
def test_f32_on_the_wire(one: Collective, text: str) -> None:
    found = lint(report(one), RULES, AXES)
    assert [(each.check, each.text) for each in found] == (
        [("f32-collective", text)] if text else []
    )
    f32 = tuple(
        dataclasses.replace(each, shapes=tuple(s.replace("bf16", "f32") for s in each.shapes))
        for each in (*LAWFUL, one)
    )
    # an fp32 program
    assert "f32-collective" not in {
        each.check for each in lint(report(collectives=f32), RULES, AXES)
    }


def test_reductions_of_each_microbatch() -> None:
    each = collective(
        "all-reduce",
        "data fsdp",
        f"bf16[{3 * D * D}]",
        where=Location("layers/mlp", "backward", "model.py:3"),
    )
    found = only(lint(report(each), RULES, AXES))
    assert (
        found.check == "microbatch-reduction"
        and "summed over data in each of 4 microbatches" in found.text
    )
    once = dataclasses.replace(each, axes=("data",), loops=(), shapes=(f"f32[{3 * D * D}]",))
    assert lint(report(once), RULES, AXES) == ()
    by_nature = dataclasses.replace(each, axes=("fsdp",))
    # fsdp shards parameters
    assert only(lint(report(by_nature), RULES, AXES)).check == "all-reduce-of-shards"


def test_f32_weights_on_the_wire() -> None:
    wide = tuple(
        dataclasses.replace(one, shapes=(f"f32[{D},{F // 4}]", *one.shapes[1:]))
        for one in LAWFUL[2:4]
    )
    found = only(lint(report(collectives=(*LAWFUL[:2], *wide, *LAWFUL[4:])), RULES, AXES))
    assert (found.check, found.text) == (
        "f32-collective",
        "all-gather of blocks.up in f32 over fsdp",
    )


FLOAT32, BFLOAT16 = (
    RULES.replace(RULES.name, reduction=reduction) for reduction in ("float32", "bfloat16")
)
WIDE = tuple(
    dataclasses.replace(one, shapes=tuple(s.replace("bf16", "f32") for s in one.shapes))
    for one in LAWFUL[6:7]
)
"""The sums of matrices over fsdp, in fp32."""


def test_gradients_in_another_type_than_asked_for() -> None:
    found = only(lint(report(), FLOAT32, AXES))
    assert (found.check, found.severity, found.where) == (
        "reduction-dtype",
        "error",
        LAWFUL[6].where,
    )
    assert found.text == (
        "gradients of blocks.up are summed in bf16 over fsdp; rules.reduction='float32' asks for "
        "float32"
    )
    assert found.bytes == LAWFUL[6].times * LAWFUL[6].wire
    asked_for = report(collectives=(*LAWFUL[:6], *WIDE, LAWFUL[7]))
    assert lint(asked_for, FLOAT32, AXES) == () == lint(asked_for, RULES, AXES)
    assert lint(report(), None, AXES) == (), "without rules nothing is asked for"
    twin = dataclasses.replace(LAWFUL[6], loops=(M,), wire=LAWFUL[6].wire / 8)
    assert lint(report(collectives=(*LAWFUL[:6], twin, LAWFUL[7])), FLOAT32, AXES) == (), (
        "too small"
    )


def test_gradients_that_are_summed_once_a_step() -> None:
    """auto asks for fp32 there, and bfloat16 for bf16 of all that is no vector: here the norm, of
    which a device has 4 KiB."""
    narrow = dataclasses.replace(LAWFUL[7], shapes=("bf16[4000000]",))
    half = report(collectives=(*LAWFUL[:7], narrow))
    told = only(lint(half, RULES, AXES))
    assert (told.check, told.severity) == (
        "reduction-dtype",
        "notice",
    ) and "rules.replace(reduction='bfloat16')" in told.fix
    assert (
        told.text
        == "gradients are summed in bf16 over data; rules.reduction='auto' asks for float32"
    )
    assert lint(half, BFLOAT16, AXES) == ()
    wide = only(lint(report(), BFLOAT16, AXES))
    assert (wide.check, wide.severity) == ("reduction-dtype", "error")
    assert wide.text == (
        "gradients of matrices are summed in f32 over data; rules.reduction='bfloat16' asks for "
        "bfloat16"
    )
    vectors = L * D
    assert wide.bytes == pytest.approx(LAWFUL[7].wire * (1 - vectors / 4000000), abs=1)
    norms = collective("all-reduce", "data", f"f32[{vectors}]", loops=(), wire=LAWFUL[7].wire)
    assert lint(report(collectives=(*LAWFUL[:7], narrow, norms)), BFLOAT16, AXES) == (), (
        "as many as there are vectors"
    )


def test_gradients_in_int8() -> None:
    """Devices exchange parts and gather sums. Only int8 asks for it, and it asks for no wider sums
    of matrices."""
    int8 = RULES.replace(RULES.name, reduction="int8")
    shapes, where = (
        f"s8[2,{2000000 // 256},256] f32[2,{2000000 // 256}]",
        Location("", "backward", "x.py:1"),
    )
    parts = [
        collective(kind, "data", shapes, loops=(), where=where, by_hand=True)
        for kind in ("all-to-all", "all-gather")
    ]
    rounded = report(collectives=(*LAWFUL[:7], *parts))
    assert lint(rounded, int8, AXES) == () and reduced(rounded, int8).startswith("s8 (")
    for rules, type in ((RULES, "float32"), (BFLOAT16, "bfloat16")):
        told = only(lint(rounded, rules, AXES))
        assert (told.check, told.severity) == (
            "reduction-dtype",
            "error",
        ) and "reduction='int8'" in told.fix
        assert told.text == (
            f"gradients are summed in s8 over data; rules.reduction={rules.reduction!r} asks for "
            f"{type}"
        )
    wide = only(lint(report(), int8, AXES))
    assert (
        wide.text
        == "gradients of matrices are summed in f32 over data; rules.reduction='int8' asks for int8"
    )
    half = report(
        collectives=(*LAWFUL[:7], dataclasses.replace(LAWFUL[7], shapes=("bf16[4000000]",)))
    )
    assert only(lint(half, int8, AXES)).text.startswith(
        "gradients of matrices are summed in bf16 over data"
    )
    activation = collective(
        "all-to-all", "data", f"s8[4,{S},{F}]", where=Location("layers/mlp", "backward")
    )
    assert "s8" not in reduced(report(activation), RULES), "an activation is no gradient"


def test_the_types_in_words() -> None:
    table, layers, once = (size(one.times * one.wire) for one in LAWFUL[5:])
    words = f"f32 ({once}) over data, f32 ({table}) and bf16 ({layers}) over fsdp"
    assert reduced(report(), RULES) == reduced(report()) == words
    norms = collective(
        "all-reduce", "fsdp tensor", "f32[6144]", where=Location("layers/mlp", "backward")
    )
    activation = collective("all-reduce", "fsdp", f"bf16[4,{S},{F}]")
    assert reduced(report(norms, activation), RULES) == words, (
        "vectors are too small, and activations are no gradients"
    )
    assert reduced(report(collectives=LAWFUL[:5])) == ""


@pytest.mark.parametrize(
    ("operand", "row"),
    [
        (f"bf16[{B},{S},{N // 4},{H}]", "batch"),
        (f"bf16[{B // 4},{S},{N},{H}]", "heads"),
        (f"bf16[{B // 4},{N},{S},{H}]", "heads"),
        (f"bf16[{B // 4},{S},{N // 4},{H}]", ""),
        (f"bf16[{B // 4},{N // 4},{S},{S}]", ""),
    ],
)
def test_a_kernel_on_the_global_shape(operand: str, row: str) -> None:
    found = lint(report(kernels=(("mosaic_gpu", (operand,), LAYER),)), RULES, AXES)
    assert [(each.check, f"rules.activations[{row!r}]" in each.text) for each in found] == (
        [("global-kernel", True)] if row else []
    )


def test_idle_axes() -> None:
    mesh = MESH | {"expert": 2}
    found = only(lint(report(mesh=mesh), RULES, AXES))
    assert (
        found.check == "idle-axis"
        and found.text
        == "mesh axis expert (2) shards no argument: all devices along it compute the same"
        and "mesh.expert=1" in found.fix
    )
    stores = [
        dataclasses.replace(a, axes=(*a.axes, "expert")) if a.kind == "params" else a
        for a in arguments()
    ]
    assert (
        "only stores (embedding, blocks.up, blocks.out and 1 more)"
        in only(lint(report(mesh=mesh, arguments=tuple(stores)), RULES)).text
    )


def test_device_order_and_nodes() -> None:
    far = tuple(
        dataclasses.replace(one, nodes=2) if "tensor" in one.axes else one for one in LAWFUL
    )
    found = only(
        lint(
            report(collectives=far, axis_nodes=dict.fromkeys(MESH, 1) | {"tensor": 2}), RULES, AXES
        )
    )
    assert (
        found.check == "device-order"
        and found.text == "groups of 4 along tensor span 2 nodes; 1 would hold them"
    )
    assert found.bytes == sum(one.times * one.wire for one in far if "tensor" in one.axes)
    wide = report(
        mesh=MESH | {"data": 1, "fsdp": 1, "tensor": 16},
        axis_nodes=dict.fromkeys(MESH, 1) | {"tensor": 2},
        arguments=(),
    )
    assert only(lint(wide)).check == "leaves-nvlink" and "mesh.tensor=8" in only(lint(wide)).fix
    # nodes of an unknown size
    assert lint(report(axis_nodes=dict.fromkeys(MESH, 1) | {"tensor": 2}, target="")) == ()


def test_communication_that_nothing_hides() -> None:
    """By mesh axes: two sums that are neither of them long, but together are. What compute runs
    beside does not count."""
    pair = tuple(
        dataclasses.replace(LAWFUL[-1], name=name, exposed=8.0) for name in ("first", "second")
    )
    slow = report(collectives=(*LAWFUL[:-1], *pair), timeline=Timeline(100, 80, 40, 16, ()))
    found = only(lint(slow, RULES, AXES))
    assert (found.check, found.severity, found.collectives) == (
        "exposed-communication",
        "notice",
        ("first", "second"),
    )
    assert (
        found.text
        == "compute waits 16% of the predicted step for all-reduce over data once in a step"
    )
    assert (
        lint(dataclasses.replace(slow, timeline=Timeline(1000, 980, 40, 16, ())), RULES, AXES) == ()
    )
    hidden = tuple(dataclasses.replace(one, exposed=1.0) for one in pair)
    assert lint(dataclasses.replace(slow, collectives=(*LAWFUL[:-1], *hidden)), RULES, AXES) == ()
    in_node = tuple(dataclasses.replace(one, nodes=1) for one in pair)
    assert lint(dataclasses.replace(slow, collectives=(*LAWFUL[:-1], *in_node)), RULES, AXES) == ()


def test_most_bytes_first() -> None:
    elsewhere = Location("layers/attention", "forward")
    small = collective("all-to-all", "tensor", f"bf16[4,{S},{F}]", where=elsewhere)
    large = collective("all-to-all", "tensor", f"bf16[4,{S},{2 * F}]")
    found = lint(report(small, large), RULES, AXES)
    assert [one.bytes for one in found] == [
        int(large.times * large.wire),
        int(small.times * small.wire),
    ]
    assert str(found[0]).startswith("error: reshard: all-to-all of activation bf16[4,512,8192]")
    assert lint(Report.from_json(report(small, large).to_json()), RULES, AXES) == found
