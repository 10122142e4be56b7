"""Collectives, FLOPs and kernels with their places: of gpt_175b's step as two versions of XLA print
it, and of small programs."""

from typing import Any

import pytest

from mesh_lm.planning.vocabulary import VOCABULARY
from sharding_rules.lab import hlo
from sharding_rules.lab.ledger import Provenance, collectives, flops_by_phase, kernels
from sharding_rules.lab.provenance import alternatives, merged, read
from sharding_rules.lab.report import Collective, Location
from tests.sharding_rules.lab.test_groups import MESH, mesh_of
from tests.sharding_rules.lab.test_hlo import CUTS

X = 2048 * 12288 * 2
"""Bytes of the residual of one microbatch."""
W = 12288 * 6144 * 2
"""Bytes of one matrix of the mlp, gathered over fsdp."""
BOTH = "layers/attention+mlp"


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("jit(step)/jvp(layers)/while/body/closed_call/attention/add", Location("layers/attention", "forward", "", "add")),
        ("jit(step)/shard_map/while/body/eval_jaxpr/transpose(jvp(layers))/while/body/eval_jaxpr/checkpoint/mlp/bsf,fd->bsd/dot_general",
         Location("layers/mlp", "backward", "", "dot_general")),
        ("jit(f)/transpose(jvp(layers))/checkpoint/rematted_computation/mlp/checkpoint/mul",
         Location("layers/mlp", "recompute", "", "mul")),
        ("jit(step)/transpose(jvp(jvp()))/checkpoint/mul", Location("", "backward", "", "mul")),
        ("jit(step)/jvp(decoder/layers)/jit(_where)/select_n", Location("decoder/layers", "forward", "", "select_n")),
        ("jit(step)/vmap(transpose(jvp(experts)))/branch_1_fun/custom_vjp_call/dot", Location("experts", "backward", "", "dot")),
        ("jit(step)/optimizer/jit(clip)/min", Location("optimizer", "optimizer", "", "min")),
        ("jit(step)/shard_map/psum", Location("", "", "", "psum")),
    ],
)  # fmt: skip
def test_a_path_of_scopes(path: str, where: Location) -> None:
    assert read(path) == where


def test_combined_paths() -> None:
    assert alternatives("a/(b:jvp(c)/d:e)") == ["a/b", "a/jvp(c)/d", "a/e"]
    assert alternatives("jit(f)/(a/(b:c):d)/e") == ["jit(f)/a/b/e", "jit(f)/a/c/e", "jit(f)/d/e"]
    locations = [
        read(path)
        for path in alternatives(
            "jit(f)/(jvp(loss)/shard_map/reduce_scatter:transpose(jvp(embed))/reduce_scatter)"
        )
    ]
    assert merged(locations) == Location("embed+loss", "backward", "", "reduce_scatter")
    three = [
        Location("layers/mlp/up", "forward"),
        Location("layers/attention"),
        Location("layers/attention+moe", "recompute"),
        Location(),
    ]
    assert merged(three) == Location("layers/attention+mlp+moe", "recompute")


def found(version: str) -> dict[str, Collective]:
    module = CUTS[version]
    return {one.name: one for one in collectives(module, Provenance(module), MESH)}


EXPECTED = {
    # name, without what follows the last digit: kind, axes, payload, loops, place, asynchronous,
    # FLOPs behind it
    "0.10.2": {
        "all-gather-start.4": ("all-gather", "tensor", X, (12, 96), "forward layers/attention model/decoder.py:48", True, 0),
        "all-gather-start.3": ("all-gather", "fsdp", W, (12, 96), "forward layers/mlp model/layers.py:107", True, 2048 * W),
        # made from an all-reduce: it has no op_name
        "reduce-scatter-start": ("reduce-scatter", "tensor", X, (12, 96), "forward layers/attention model/layers.py:109", True, 0),
        "all-gather-start.11": ("all-gather", "tensor", X, (12, 96), "recompute layers/attention model/decoder.py:48", False, 0),
        # combined: a tuple of operands; of the second no op_name is left
        "reduce-scatter-start.5": ("reduce-scatter", "fsdp", 3 * W, (12, 96), "backward " + BOTH + " model/layers.py:107", True, 0),
        "all-reduce-start.2": ("all-reduce", "fsdp tensor", 73728 * 4, (12, 96), "backward " + BOTH + " model/layers.py:82", True, 9.28e11),
        "all-reduce-start.5": ("all-reduce", "data", 96 * 12 * 128 * 768 * 4, (), "  step.py:139", True, 0),
    },
    "0.11.2": {
        "all-gather-start.4": ("all-gather", "tensor", X, (12, 96), "forward layers/attention model/layers.py:57", True, 0),
        "all-gather-start.3": ("all-gather", "fsdp", W, (12, 96), "forward layers/mlp model/layers.py:107", True, 2048 * W),
        "all-gather-start.16": ("all-gather", "fsdp", 6400 * 12288 * 2, (12,), "forward embed model/embedding.py:31", True, 0),
        "reduce-scatter-start": ("reduce-scatter", "tensor", X, (12, 96), "forward layers/attention model/layers.py:109", True, 0),
        "reduce-scatter.1.2": ("reduce-scatter", "tensor", X, (12, 96), "backward layers/mlp model/layers.py:109", False, 0),
        "reduce-scatter-start.5": ("reduce-scatter", "fsdp", 3 * W, (12, 96), "backward " + BOTH + " model/layers.py:109", True, 0),
        "all-reduce-start.3": ("all-reduce", "fsdp", 10752 * 4, (12, 96), "backward " + BOTH + " model/layers.py:82", True, 9.28e11),
        "all-reduce-start.5": ("all-reduce", "data", 96 * 12 * 128 * 768 * 4, (), "  step.py:139", True, 0),
        "all-reduce-start.12": ("all-reduce", "fsdp", 8, (), "optimizer loss+optimizer step.py:80", True, 0),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "name"), [(version, name) for version, names in EXPECTED.items() for name in names]
)
def test_collectives_of_a_training_step(version: str, name: str) -> None:
    one = found(version)[name]
    kind, axes, payload, loops, place, asynchronous, hidden = EXPECTED[version][name]
    where = f"{one.where.phase} {one.where.part} {one.where.source.removeprefix('mesh_lm/')}"
    assert (one.kind, " ".join(one.axes), one.payload, one.loops, where) == (
        kind,
        axes,
        payload,
        loops,
        place,
    )
    assert one.asynchronous == asynchronous and one.flops_hidden_behind == pytest.approx(
        hidden, rel=1e-3
    )
    assert (
        one.group == {"tensor": 8, "fsdp": 16, "data": 8, "fsdp tensor": 128}[axes]
        and not one.partial
    )
    assert one.wire == pytest.approx(
        payload * (1 - 1 / one.group) * (2 if kind == "all-reduce" else 1)
    )
    assert one.nodes == {"tensor": 1, "fsdp": 16, "data": 8, "fsdp tensor": 16}[axes]


def test_shapes_are_the_whole_arrays() -> None:
    for version in CUTS:
        assert found(version)["all-gather-start.4"].shapes == ("bf16[2048,12288]",)
        assert found(version)["reduce-scatter-start"].shapes == ("bf16[1,2048,12288]",)
        assert len(found(version)["reduce-scatter-start.5"].shapes) == 4


def test_a_gather_along_a_later_dimension() -> None:
    text = "  ROOT %all = f32[8,32]{1,0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={1}"
    (one,) = of(program(text), tensor=4)
    assert (one.shapes, one.payload, one.wire) == (("f32[8,32]",), 8 * 32 * 4, 8 * 32 * 4 * 3 / 4)


def program(body: str, computations: str = "") -> hlo.Module:
    return hlo.parse(
        f"HloModule m\n\n{computations}\nENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  %x = "
        f"f32[8,8]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def of(module: hlo.Module, **sizes: int) -> Any:
    return collectives(module, Provenance(module), mesh_of(node=2, **sizes))


DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
WRAPPED = """%wrapped (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %inner = f32[8,8]{1,0} all-to-all(%p), replica_groups={{0,1},{2,3}}, dimensions={0}, metadata={op_name="jit(f)/moe/all_to_all"}
}
"""


def test_a_wrapped_collective_counts_once_with_what_it_hides() -> None:
    module = program(
        f"""  %before = f32[8,8]{{1,0}} {DOT}
  %start = ((f32[8,8]{{1,0}}), f32[8,8]{{1,0}}, s32[]) async-start(%x), calls=%wrapped
  %one = f32[8,8]{{1,0}} {DOT}
  %update = ((f32[8,8]{{1,0}}), f32[8,8]{{1,0}}, s32[]) async-update(%start)
  %two = f32[8,8]{{1,0}} {DOT}
  %done = f32[8,8]{{1,0}} async-done(%update)
  ROOT %after = f32[8,8]{{1,0}} {DOT}""",
        WRAPPED,
    )
    (one,) = of(module, data=2, expert=2)
    assert (one.name, one.kind, one.axes, one.payload, one.wire) == (
        "start",
        "all-to-all",
        ("expert",),
        256,
        128,
    )
    assert (
        one.asynchronous and one.flops_hidden_behind == 2 * (2 * 8**3) and one.where.part == "moe"
    )


def test_a_permute_between_nodes_in_a_branch() -> None:
    module = program(
        (
            "  ROOT %either = f32[8,8]{1,0} conditional(%x, %x, %x), branch_computations={%seldom, "
            "%often}"
        ),
        f"""%seldom (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  ROOT %send = f32[8,8]{{1,0}} collective-permute(%p), channel_id=1, source_target_pairs={{{{0,2}},{{1,3}}}}
}}

%often (x2: f32[8,8]) -> f32[8,8] {{
  %x2 = f32[8,8]{{1,0}} parameter(0)
  ROOT %product = f32[8,8]{{1,0}} {DOT.replace("%x", "%x2")}, metadata={{op_name="jit(f)/jvp(head)/dot_general"}}
}}
""",
    )
    (one,) = of(module, pipeline=2, data=2)
    assert (one.axes, one.group, one.nodes, one.payload, one.wire) == (
        ("pipeline",),
        2,
        2,
        256,
        256,
    )
    assert one.conditional and one.bounded and not one.asynchronous
    assert flops_by_phase(module, Provenance(module)) == {"forward": 2 * 8**3}


GROUP = """%wrapped (p: f32[8,8], q: f32[4,8]) -> (f32[8,8], f32[8,8]) {
  %p = f32[8,8]{1,0} parameter(0)
  %q = f32[4,8]{1,0} parameter(1)
  %sent = f32[8,8]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(f)/ring/ppermute"}
  %whole = f32[8,8]{1,0} all-gather(%q), replica_groups={{0,1}}, dimensions={0}, metadata={op_name="jit(f)/jvp(mlp)/all_gather"}
  ROOT %both = (f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%sent, %whole)
}
"""


def test_each_collective_of_a_group_counts() -> None:
    module = program(
        """  %half = f32[4,8]{1,0} slice(%x), slice={[0:4], [0:8]}
  %start = ((f32[8,8]{1,0}, f32[4,8]{1,0}), (f32[8,8]{1,0}, f32[8,8]{1,0}), s32[]) async-start(%x, %half), calls=%wrapped
  ROOT %done = (f32[8,8]{1,0}, f32[8,8]{1,0}) async-done(%start)""",
        GROUP,
    )
    sent = {one.kind: one for one in of(module, data=2)}
    assert {kind: (one.name, one.payload, one.where.part) for kind, one in sent.items()} == {
        "collective-permute": ("sent", 256, "ring"), "all-gather": ("whole", 256, "mlp"),
    }  # fmt: skip
    assert all(one.asynchronous for one in sent.values())


@pytest.mark.parametrize(
    ("config", "times"), [(', backend_config={"known_trip_count":{"n":"3"}}', 4), ("", 1)]
)
def test_a_collective_in_the_condition_of_a_loop_runs_once_more_than_the_body(
    config: str, times: int
) -> None:
    module = program(
        f"  ROOT %w = f32[8,8]{{1,0}} while(%x), condition=%test, body=%step{config}",
        """%test (p: f32[8,8]) -> pred[] {
  %p = f32[8,8]{1,0} parameter(0)
  %norm = f32[8,8]{1,0} all-reduce(%p), replica_groups={{0,1}}, metadata={op_name="jit(f)/while/cond/psum"}
  ROOT %small = pred[] custom-call(%norm), custom_call_target="less"
}

%step (b: f32[8,8]) -> f32[8,8] {
  ROOT %b = f32[8,8]{1,0} parameter(0)
}
""",
    )
    (one,) = of(module, data=2)
    assert (one.name, one.loops, one.wire, one.bounded) == ("norm", (times,), 256, False)


LOOP = """%body (p: (s32[], f32[8,8], f32[8,8])) -> (s32[], f32[8,8], f32[8,8]) {
  %p = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %sum = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%p), index=2
  %gradient = f32[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/while/body/transpose(jvp(layers))/mlp/dot_general"}
  %added = f32[8,8]{1,0} add(%sum, %gradient), metadata={op_name="jit(f)/while/body/add"}
  ROOT %next = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%sum, %added, %w)
}
"""
AFTER = """  %start = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%x, %x, %x)
  %mask = f32[8,8]{1,0} negate(%x), metadata={op_name="jit(f)/attention/neg"}
  %loop = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) while(%start), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %total = f32[8,8]{1,0} get-tuple-element(%loop), index=1
  %copied = f32[8,8]{1,0} copy(%total)
  %reduced = f32[8,8]{1,0} all-reduce(%copied), replica_groups={}, metadata={op_name="jit(f)/psum"}
  %scaled = f32[8,8]{1,0} multiply(%reduced, %reduced), metadata={op_name="jit(f)/mul"}
  ROOT %out = f32[8,8]{1,0} all-gather(%scaled), replica_groups={{0,1}}, dimensions={1}"""


def test_gradients_summed_in_a_loop_keep_their_place() -> None:
    """Reduced after the loop that makes them, their place is that of what made them; what comes
    after is the optimizer."""
    module = program(AFTER, LOOP)
    provenance = Provenance(module)
    where = {
        name: provenance.of(module.by_name[name])
        for name in ("reduced", "copied", "added", "scaled", "mask")
    }
    assert where["reduced"] == Location("layers/mlp", "backward", "", "psum")
    assert where["copied"] == Location("layers/mlp", "backward", "", "dot_general")
    assert [where[name].phase for name in ("added", "scaled", "mask")] == [
        "backward",
        "optimizer",
        "forward",
    ]
    assert [one.shapes for one in of(module, data=2)] == [("f32[8,8]",), ("f32[8,16]",)]
    assert flops_by_phase(module, provenance) == {"backward": 3 * 2 * 8**3}


def test_a_place_from_users_and_from_the_loop() -> None:
    module = program(
        """  %gathered = f32[16,8]{1,0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
  %used = f32[16,8]{1,0} negate(%gathered), metadata={op_name="jit(f)/jvp(head)/neg"}
  %loop = f32[8,8]{1,0} while(%x), body=%body, metadata={op_name="jit(f)/jvp(layers)/while"}""",
        """%body (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %alone = f32[8,8]{1,0} all-reduce(%p), replica_groups={}
}
""",
    )
    provenance = Provenance(module)
    assert provenance.of(module.by_name["gathered"]) == Location("head", "forward", "", "neg")
    assert provenance.of(module.by_name["alone"]) == Location("layers", "forward", "", "while")


JOINED = """%joined (p0: f32[128], p1: f32[128], p2: f32[1]) -> f32[257] {
  %p0 = f32[128]{0} parameter(0)
  %p1 = f32[128]{0} parameter(1)
  %p2 = f32[1]{0} parameter(2)
  ROOT %inside = f32[257]{0} concatenate(%p0, %p1, %p2), dimensions={0}
}
"""


def test_a_joined_reduction_is_where_most_of_its_bytes_are() -> None:
    """Without the scalar that is reduced along; and not where an operand without a scope got its
    own operands from."""
    module = program(
        """  %loss = f32[128]{0} reshape(%x), metadata={op_name="jit(f)/jvp(loss)/reshape"}
  %norm = f32[128]{0} negate(%loss), metadata={op_name="jit(f)/transpose(jvp())/neg"}
  %mlp = f32[128]{0} negate(%norm), metadata={op_name="jit(f)/transpose(jvp(mlp))/neg"}
  %one = f32[1]{0} slice(%mlp), metadata={op_name="jit(f)/optimizer/norm"}
  %all = f32[257]{0} fusion(%mlp, %norm, %one), kind=kLoop, calls=%joined
  ROOT %sum = f32[257]{0} all-reduce(%all), replica_groups={}""",
        JOINED,
    )
    assert Provenance(module).of(module.by_name["sum"]) == Location("mlp", "backward", "", "neg")


def test_a_helper_gives_way_to_its_caller() -> None:
    frames = (
        "1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}\n3 "
        "{file_location_id=3 parent_frame_id=3}"
    )
    text = f"""HloModule m

FileNames
1 "/home/me/mesh_lm/mesh_lm/model/layers.py"
2 "/home/me/mesh_lm/sharding_rules/shard.py"
3 "/usr/lib/python3/dist-packages/optax/update.py"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=1}}
2 {{file_name_id=2 function_name_id=1 line=20 end_line=20 column=1 end_column=1}}
3 {{file_name_id=3 function_name_id=1 line=30 end_line=30 column=1 end_column=1}}

StackFrames
{frames}

ENTRY %main (x: f32[]) -> f32[] {{
  ROOT %out = f32[] negate(%x), metadata={{op_name="jit(f)/neg" stack_frame_id=3}}
}}
"""
    module = hlo.parse(text)
    assert (
        list(module.stack(module.by_name["out"]))[1]
        == "/home/me/mesh_lm/sharding_rules/shard.py:20"
    )
    assert Provenance(module).of(module.by_name["out"]).source == "model/layers.py:10"
    assert (
        Provenance(module, VOCABULARY).of(module.by_name["out"]).source
        == "mesh_lm/model/layers.py:10"
    ), "the trainer names its root"


def test_kernels() -> None:
    calls = [
        "Sharding",
        "AllocateBuffer",
        "__cublas$gemm",
        "__gpu$TopK",
        "xla_ffi_python_gpu_callback",
        "__cudnn$fmhaSoftmax",
        "mosaic_gpu_v2",
    ]
    module = program(
        "\n".join(
            f"  %k{n} = (f32[8,8]{{1,0}}, u8[0]{{0}}) custom-call(%x, %x), "
            f'custom_call_target="{target}", '
            'metadata={op_name="jit(f)/jvp(attention)/call"}'
            for n, target in enumerate(calls)
        )
    )
    where = Location("attention", "forward", "", "call")
    assert kernels(module, Provenance(module)) == tuple(
        (target, ("f32[8,8]", "f32[8,8]"), where) for target in calls[-2:]
    )


def test_kernels_say_their_name_and_flops() -> None:
    """As Pallas for Mosaic GPU writes them; the kernel's own name is no scope of the model."""
    said = 'frontend_attributes={kernel="attention backward",kernel_flops="1000"}'
    path = "jit(f)/transpose(jvp(layers))/attention/shard_map/the_kernel/mpmd_map"
    call = (
        f'  %k = f32[8,8]{{1,0}} custom-call(%x), custom_call_target="mosaic_gpu_v2", {said}, '
        f'metadata={{op_name="{path}"}}'
    )
    module = program(call)
    where = Location("layers/attention", "backward", "", "the_kernel")
    assert kernels(module, Provenance(module)) == (
        ("mosaic_gpu_v2: attention backward", ("f32[8,8]",), where),
    )
    assert flops_by_phase(module, Provenance(module)) == {"backward": 1000}


@pytest.mark.parametrize(
    ("target", "operands", "results", "flops"),
    [
        ("__cudnn$fmhaSoftmax", 3, 1, 4 * 2 * 4 * 1024**2 * 64),
        ("__cudnn$fmhaSoftmaxBackward", 5, 3, 10 * 2 * 4 * 1024**2 * 64),
        ("mosaic_gpu_v2", 4, 1, 6 * 2 * 4 * 1024**2 * 64),
    ],
)
def test_fused_attention_that_says_nothing_is_known_by_its_operands(
    target: str, operands: int, results: int, flops: int
) -> None:
    """B 2, N 4, S 1024, H 64. A causal mask of cuDNN halves it."""
    shape = "bf16[2,1024,4,64]{3,2,1,0}"
    made = "".join(f"  %o{n} = {shape} broadcast()\n" for n in range(operands))
    result = f"({', '.join([shape] * results)}, u8[0]{{0}})"
    call = (
        f"  %k = {result} custom-call({', '.join(f'%o{n}' for n in range(operands))}), "
        f'custom_call_target="{target}"'
    )
    for mask, factor in (
        ("", 1),
        (', backend_config={"mask_type":"CAUSAL"}', 2 if "cudnn" in target else 1),
    ):
        module = program(made + call + mask)
        assert module.flops(module.by_name["k"]) == flops // factor
