"""Strict rules: each silent failure of Flax's logical axes is an error here, with the exact
message."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from sharding_rules import (
    AXES,
    MANUAL,
    PRESETS,
    MeshConfig,
    MeshError,
    Rules,
    ShardingRuleError,
    axes_of,
    make_mesh,
    preset,
    product,
    unknown_scopes,
)  # fmt: skip

MESH = make_mesh(MeshConfig(data=2, tensor=4))


def test_an_experiment_is_a_changed_row() -> None:
    rules = PRESETS["megatron"]
    assert rules.spec("params", ("embed", "mlp")) == P(None, "tensor")
    assert rules.replace(params={"mlp": None}).spec("params", ("embed", "mlp")) == P(None, None)
    assert rules.spec("params", ("embed", "mlp")) == P(None, "tensor"), (
        "replace changed the original"
    )
    preset("zero1").params["embed"] = "tensor"  # pyright: ignore[reportIndexIssue]
    assert {preset(name).params["embed"] for name in ("zero1", "ddp")} == {None}, (
        "a row changed in place changed other rules"
    )


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (
            ("embd", "mlp"),
            (),
            (
                "layers.mlp.w_up('embd', 'mlp'): no params rule for the logical axis 'embd'; did you "
                "mean 'embed'?"
            ),
        ),
        (
            ("mlp", "heads"),
            (),
            (
                "layers.mlp.w_up('mlp', 'heads'): mesh axis 'tensor' shards both 'mlp' and "
                "'heads'; set one of them to None in rules.params"
            ),
        ),
        (
            ("embed", "mlp"),
            (8, 6),
            "layers.mlp.w_up: dimension 1 ('mlp', size 6) does not divide evenly over 'tensor' (4 ways)",
        ),
        (
            ("embed", "mlp"),
            (8,),
            "layers.mlp.w_up('embed', 'mlp'): 2 logical axes for 1 dimensions (8,); give one axis, or None, for each",
        ),
    ],
)
def test_errors_say_what_would_work(axes, shape, message: str) -> None:
    with pytest.raises(ShardingRuleError) as caught:
        PRESETS["megatron"].spec("params", axes, shape, MESH, "layers.mlp.w_up")
    assert str(caught.value) == message


def test_a_mesh_axis_that_is_not_there() -> None:
    rules = PRESETS["megatron"].replace(params={"mlp": "tensr"})
    with pytest.raises(
        ShardingRuleError,
        match=r"rules.params\['mlp'\]: mesh axis 'tensr' is not an axis of the mesh",
    ):
        rules.spec("params", ("mlp",), mesh=MESH)


def test_columns_and_entries_that_cannot_be() -> None:
    with pytest.raises(
        ShardingRuleError, match=r"^the rules have no column 'param'; did you mean 'params'\?$"
    ):
        PRESETS["ddp"].replace(param={"mlp": None})
    with pytest.raises(
        ShardingRuleError,
        match=r"^replace\(\{'mlp': None\}\) names no column; write replace\(params=",
    ):
        PRESETS["ddp"].replace({"mlp": None})  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ShardingRuleError,
        match=r"^rules\.params\['mlp'\]=3: expected a mesh axis, a tuple of them, or None$",
    ):
        PRESETS["ddp"].replace(params={"mlp": 3})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("fsp", "did you mean 'fsdp'"),
        ("fsdp+megatrn", "did you mean 'megatron'"),
        ("", "known: by_node, context_gather"),
    ],
)
def test_unknown_presets(name: str, suggestion: str) -> None:
    with pytest.raises(ShardingRuleError, match=suggestion):
        preset(name)


def test_zero_stages_are_one_cell_apart() -> None:
    weight = ("embed", "mlp")
    wanted = {  # params, gradients, optimizer
        "ddp": (P(None, None),) * 3,
        "zero1": (P(None, None), P(None, None), P("data", None)),
        "zero2": (P(None, None), P("data", None), P("data", None)),
        "fsdp": (P("fsdp", None),) * 3,
    }
    for name, specs in wanted.items():
        assert (
            tuple(PRESETS[name].spec(kind, weight) for kind in ("params", "gradients", "optimizer"))
            == specs
        )


def test_products() -> None:
    rules = preset("hsdp+megatron_sp")
    assert rules.spec("params", ("embed", "fused", "heads", "head_dim")) == P(
        "fsdp", None, "tensor", None
    )
    assert rules.spec("gathered", ("embed", "fused", "heads", "head_dim")) == P(
        None, None, "tensor", None
    )
    assert rules.spec("activations", ("batch", "seq_resid", "embed")) == P(
        ("data", "fsdp"), "tensor", None
    )
    # Moments start with the axes of the weight: fsdp first, whatever the order of the mesh.
    assert preset("zero1+fsdp").spec("optimizer", ("embed",)) == P(("fsdp", "data"))
    assert preset("zero1+fsdp").spec("gradients", ("embed",)) == P("fsdp")


@pytest.mark.parametrize(
    "name", ["usp+megatron_sp", "megatron_sp+usp", "usp+zero3+megatron_sp", "megatron_sp+fsdp+usp"]
)
def test_axes_of_the_sequence_come_before_tensor(name: str) -> None:
    """Also an axis of the rules' own, which the mesh has behind tensor: the residual stream is
    sharded like attention's input first."""
    rules = preset(name)
    assert rules.activations["seq"] == ("sequence", "ulysses")
    assert rules.activations["seq_resid"] == ("sequence", "ulysses", "tensor")


@pytest.mark.parametrize(
    "name", ["zero1+zero3", "zero3+zero2", "zero1+megatron+zero3", "zero3+hsdp+zero2"]
)
def test_moments_have_one_form(name: str) -> None:
    """Refused by the names of the presets, not by a row that only their product has."""
    first, *_, last = name.split("+")
    stage = first if last == "zero3" else last
    with pytest.raises(ShardingRuleError) as caught:
        preset(name)
    assert str(caught.value) == (
        f"{first} and {last}: {stage} shards a dimension of each matrix's moments over 'data', and "
        f"zero3 keeps them in flat vectors, which need no such dimension; leave {stage} out"
    )


@pytest.mark.parametrize(
    "name", ["zero1+ulysses+usp", "fsdp+ulysses+megatron+usp", "ulysses+usp+by_node"]
)
def test_contradictions_have_the_names_of_presets(name: str) -> None:
    with pytest.raises(
        ShardingRuleError,
        match=r"^ulysses and usp both exchange keys over 'sequence' by ulysses and by ring; keep",
    ):
        preset(name)


def test_a_column_of_gradients_inherits_no_flat_vectors() -> None:
    changed = PRESETS["zero3"].replace("mine", gradients={"embed": None})
    assert changed.gradients is not None and "flat" not in changed.gradients
    both = product(PRESETS["zero3"], PRESETS["megatron"].replace("mine", gradients={"embed": None}))
    assert (
        both.gradients is not None
        and "flat" not in both.gradients
        and both.params["flat"] == "data"
    )


def test_exchanges_of_tokens() -> None:
    gather = PRESETS["experts_gather"]
    assert gather.exchange == {"expert": "gather"}
    assert gather.as_dict()["exchange"] == {"expert": "gather"}
    assert "exchange" not in PRESETS["ddp"].as_dict()

    padded = gather.replace(exchange={"expert": "padded"})
    assert padded.exchange == {"expert": "padded"}
    assert gather.exchange == {"expert": "gather"}, "replace changed the original"
    more = padded.replace(exchange={"data": "gather"})
    assert more.exchange == {"expert": "padded", "data": "gather"}
    assert more.replace(params={"mlp": None}).exchange == more.exchange
    assert len({gather, gather.replace(gather.name), padded.replace(gather.name)}) == 2


def test_experts_are_not_gathered_where_their_tokens_are_exchanged() -> None:
    weight = ("experts", "embed", "expert_mlp")
    rules = preset("experts_gather+hsdp+megatron")
    assert rules.spec("params", weight) == P("expert", "fsdp", "tensor")
    assert rules.spec("gathered", weight) == P(("expert",), None, ("tensor",))
    # Over fsdp, too, with a scope or without one, if there is an exchange.
    over_fsdp = rules.replace(
        params={"embed": None, "moe/experts": ("expert", "fsdp")}, exchange={"fsdp": "padded"}
    )
    assert over_fsdp.spec("gathered", ("moe/experts",)) == P(("expert", "fsdp"))
    assert over_fsdp.replace(exchange={}).spec("gathered", ("experts",)) == P(("expert",))
    without = preset("hsdp").replace(params={"embed": None, "experts": "fsdp"})
    assert without.spec("gathered", ("experts",)) == P(None)


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("distributed+experts_gather", {"pipeline", "data", "expert"}),
        ("experts_padded+zero3+ring", {"pipeline", "data", "expert", "sequence"}),
    ],
)
def test_flat_vectors_are_sharded_over_the_axes_of_experts(name: str, replicas: set[str]) -> None:
    rules = preset(name)
    assert set(axes_of(rules.column("optimizer")["flat"])) == replicas
    if "zero3" in name:
        assert set(axes_of(rules.params["flat"])) == replicas - {"pipeline"}
    assert rules.exchange["expert"] in name
    assert rules.activations["batch"] == ("data", "expert")


def test_exchanges_that_contradict() -> None:
    for name in ("experts_gather+experts_padded", "experts_gather+fsdp+experts_padded"):
        with pytest.raises(ShardingRuleError) as caught:
            preset(name)
        assert str(caught.value) == (
            "experts_gather and experts_padded both exchange tokens over 'expert' by gather and by "
            "padded; keep one of them"
        )
    assert preset("experts_gather+experts_gather").exchange == {"expert": "gather"}


@given(st.lists(st.sampled_from(sorted(PRESETS)), min_size=1, max_size=3))
def test_a_product_keeps_every_cut_of_its_parts(names: list[str]) -> None:
    exchanges = [PRESETS[name].context["sequence"] for name in names if PRESETS[name].context]
    if len(set(exchanges)) > 1:
        with pytest.raises(ShardingRuleError, match="exchange keys over 'sequence' by"):
            preset("+".join(names))
        return
    if {"experts_gather", "experts_padded"} <= {*names}:
        with pytest.raises(ShardingRuleError, match="exchange tokens over 'expert' by"):
            preset("+".join(names))
        return
    if "zero3" in names and {"zero1", "zero2"} & {*names}:
        with pytest.raises(
            ShardingRuleError,
            match=r"flat vectors, which need no such dimension; leave zero[12] out",
        ):
            preset("+".join(names))
        return
    rules = preset("+".join(names))
    for kind in ("params", "activations", "gradients", "optimizer"):
        for name in names:
            for row, entry in PRESETS[name].column(kind).items():
                assert set(axes_of(entry)) <= set(axes_of(rules.column(kind)[row]))
    assert rules.mesh_axes() == {axis for name in names for axis in PRESETS[name].mesh_axes()}
    assert rules.context.keys() == {axis for name in names for axis in PRESETS[name].context}
    assert rules.exchange.keys() == {axis for name in names for axis in PRESETS[name].exchange}
    assert hash(rules) == hash(preset("+".join(names)))


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 8), max_size=4), st.integers(1, 64))
def test_a_mesh_resolves_or_says_what_would(sizes: dict[str, int], n_devices: int) -> None:
    config = MeshConfig.of(sizes)
    try:
        mesh = config.resolve(n_devices)
    except MeshError as error:
        for choice in [word for word in str(error).split() if word.startswith("mesh.")]:
            axis, size = choice.removeprefix("mesh.").split("=")
            assert MeshConfig.of({**sizes, axis: int(size)}).resolve(n_devices)
    else:
        assert mesh == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MeshConfig(data=3, tensor=2),
            "mesh has 6 devices (data=3 x tensor=2) but the number of visible devices is 8; mesh.data=4 would fit",
        ),
        (
            MeshConfig(data=-1, tensor=-1),
            "only one mesh axis can be -1, not data and tensor; set mesh.data=1 or mesh.tensor=1",
        ),
        (
            MeshConfig(data=-1, fsdp=-1, tensor=-1),
            (
                "only one mesh axis can be -1, not data and fsdp and tensor; give each of the "
                "others a size"
            ),
        ),
        (
            MeshConfig(data=0),
            "mesh.data=0: sizes are 1 or more, or -1 on one axis for whatever is left",
        ),
        (
            MeshConfig(data=-1, tensor=3),
            (
                "mesh has 3 x ? devices (data=-1 x tensor=3) but the number of visible devices is 8; mesh.tensor=2 or "
                "mesh.tensor=4 would fit"
            ),
        ),
    ],
)
def test_mesh_errors(config: MeshConfig, message: str) -> None:
    with pytest.raises(MeshError) as caught:
        config.resolve(8)
    assert str(caught.value) == message


def test_minus_one_is_whatever_is_left() -> None:
    assert MeshConfig(data=-1, tensor=2).resolve(8) == MeshConfig(data=4, tensor=2)


def test_tensor_neighbours_are_device_neighbours() -> None:
    ids = [
        [d.id for d in row] for row in make_mesh(MeshConfig(data=2, tensor=4)).devices.reshape(2, 4)
    ]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_tensor_neighbours_share_a_node_whatever_their_ids() -> None:
    """Devices whose ids alternate between nodes, as a runtime may number them."""
    devices = [Far(id=i, process_index=i % 2) for i in range(8)]
    ids = [
        [d.id for d in row]
        for row in make_mesh(MeshConfig(data=2, tensor=4), devices).devices.reshape(2, 4)
    ]
    assert ids == [[0, 2, 4, 6], [1, 3, 5, 7]]


@dataclasses.dataclass(frozen=True)
class Far:
    """A device of another process."""

    id: int
    process_index: int


def test_rules_are_plain_data() -> None:
    rules = PRESETS["zero1"]
    assert (
        Rules(
            **{
                "name": "zero1",
                "params": rules.params,
                "activations": rules.activations,
                "gradients": rules.gradients,
                "optimizer": rules.optimizer,
            }
        )
        == rules
    )
    assert rules.as_dict()["optimizer"]["embed"] == ["data"]


SCOPED = PRESETS["megatron"].replace(
    "scoped", params={"moe/mlp": None}, activations={"moe/mlp": None}
)


def test_a_scoped_row_comes_before_the_plain_one() -> None:
    for kind in ("params", "gathered", "gradients", "optimizer", "activations"):
        found = [SCOPED.spec(kind, (f"{scope}mlp",)) for scope in ("", "moe/", "dense/")]
        assert found == [P("tensor"), P(None), P("tensor")], kind
        assert (
            SCOPED.row(kind, "moe/mlp") == "moe/mlp"
            and SCOPED.row(kind, "dense/mlp") == "mlp"
            and SCOPED.row(kind, "moe/mpl") is None
        )
    assert SCOPED.scopes() == {"moe"} and not PRESETS["megatron"].scopes()


def test_a_scoped_weight_is_gathered_over_the_batch() -> None:
    rules = PRESETS["hsdp"].replace(params={"moe/embed": None, "moe/mlp": ("fsdp", "tensor")})
    assert rules.spec("params", ("moe/embed", "moe/mlp")) == P(None, ("fsdp", "tensor"))
    assert rules.spec("gathered", ("moe/embed", "moe/mlp")) == P(None, "tensor")
    assert rules.spec("gathered", ("dense/embed", "dense/mlp")) == P(None, None)


def test_scoped_rows_are_told_apart() -> None:
    assert SCOPED.as_dict()["params"]["moe/mlp"] == [] and SCOPED.as_dict()["params"]["mlp"] == [
        "tensor"
    ]
    assert hash(SCOPED) != hash(SCOPED.replace("scoped", params={"moe/mlp": "tensor"}))
    assert SCOPED.replace(params={"mlp": None}).spec("params", ("mlp",)) == P(None)


def test_a_product_of_scoped_rules() -> None:
    """If one has a scoped row and the other a plain one, the product shards that part over the axes
    of both."""
    both = product(
        PRESETS["zero2"].replace(params={"moe/embed": "fsdp"}),
        SCOPED.replace(params={"moe/embed": "tensor"}),
    )
    assert both.spec("params", ("moe/embed",)) == P(("fsdp", "tensor")) and both.spec(
        "params", ("embed",)
    ) == P(None)
    assert both.spec("params", ("moe/mlp",)) == P(None) and both.spec("params", ("mlp",)) == P(
        "tensor"
    )
    # The weight's own axes come first; zero2 has no row of its gradients for the part, so its plain
    # one holds.
    assert both.spec("gradients", ("moe/embed",)) == P(("tensor", "data")) and both.spec(
        "gradients", ("embed",)
    ) == P("data")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": {"a/b/mlp": None}}, "rules have a row 'a/b/mlp': a row is a logical axis or scope/axis, as in 'moe/mlp'"),
        ({"params": {"moe/": None}}, "rules have a row 'moe/': a row is a logical axis or scope/axis, as in 'moe/mlp'"),
        ({"optimizer": {"/mlp": None}}, "rules have a row '/mlp': a row is a logical axis or scope/axis, as in 'moe/mlp'"),
        ({"activations": {"moe/batch": None}},
         "rules have a row 'moe/batch': the whole model has one batch; leave the scope out of this row"),
        ({"params": {"moe/layers": None}},
         ("rules have a row 'moe/layers': all segments are divided into the same stages; leave the "
         "scope out of this row")),
        ({"axes": {"tensor": "auto"}}, "rules.axes['tensor']: every mesh has an axis of that name; choose another"),
        ({"axes": {"y": "both"}}, "rules.axes['y']='both': a mesh axis is one of the types auto, manual"),
        ({"reduction": "flaot32"}, ("rules.reduction='flaot32': gradients cannot be summed in this type; did you mean "
            "'float32'?")),
        ({"reduction": "f8"}, ("rules.reduction='f8': gradients cannot be summed in this type; known: auto, bfloat16, "
            ""
            ""
            "float32, int8")),
        ({"exchange": {"expert": "paded"}}, ("rules.exchange['expert']='paded': experts have no such exchange; did you mean "
            "'padded'?")),
        ({"exchange": {"expert": "ring"}}, ("rules.exchange['expert']='ring': experts have no such exchange; known: gather, "
            "padded, ragged")),
        ({"node_axis": "fsdp"},
         ("rules.node_axis='fsdp': gradients are not summed along it once a step; known: data, "
         "expert, sequence")),
    ],
)  # fmt: skip
def test_rows_and_axes_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingRuleError) as caught:
        PRESETS["ddp"].replace(**change)
    assert str(caught.value) == message


def test_errors_name_the_scoped_axis() -> None:
    rules = SCOPED.replace(params={"moe/heads": "tensor", "moe/mlp": ("tensor", "fsdp")})
    cases = {
        (
            "moe/embd",
        ): "w('moe/embd',): no params rule for the logical axis 'moe/embd'; did you mean 'embed'?",
        (
            "moe/heads",
            "moe/mlp",
        ): "w('moe/heads', 'moe/mlp'): mesh axis 'tensor' shards both 'moe/heads' and 'moe/mlp'; "
        "set one of them to "
        "None in rules.params",
    }
    for axes, message in cases.items():
        with pytest.raises(ShardingRuleError) as caught:
            rules.spec("params", axes, mesh=MESH, name="w")
        assert str(caught.value) == message
    with pytest.raises(ShardingRuleError) as caught:
        rules.spec("params", ("moe/mlp",), (6,), MESH, "w")
    assert (
        str(caught.value)
        == "w: dimension 0 ('moe/mlp', size 6) does not divide evenly over ('tensor', 'fsdp') (4 ways)"
    )


def test_scopes_that_the_model_does_not_have() -> None:
    rules = SCOPED.replace(params={"mo/mlp": None, "mo/embed": None, "encoder/mlp": None})
    assert unknown_scopes(rules, {"moe", "dense"}) == [
        (
            "rules have the scope 'encoder' (encoder/mlp), which the model does not have; the "
            "model has 'dense', 'moe'"
        ),
        (
            "rules have the scope 'mo' (mo/embed, mo/mlp), which the model does not have; did you "
            "mean 'moe'?"
        ),
    ]
    assert unknown_scopes(SCOPED, {"moe"}) == []
    assert unknown_scopes(SCOPED, ()) == [
        "rules have the scope 'moe' (moe/mlp), which the model does not have; the model has none"
    ]


def test_declared_mesh_axes() -> None:
    rules = (
        PRESETS["megatron"]
        .replace(axes={"y": "auto"}, params={"mlp": ("tensor", "y")})
        .replace(axes={"replica": "manual"})
    )
    assert rules.axes == {"y": "auto", "replica": "manual"} and rules.order() == (
        *AXES,
        "y",
        "replica",
    )
    assert (
        rules.manual_axes() == MANUAL | {"replica"} and PRESETS["megatron"].manual_axes() == MANUAL
    )
    assert (
        rules.as_dict()["axes"] == {"y": "auto", "replica": "manual"}
        and "axes" not in PRESETS["megatron"].as_dict()
    )
    assert (
        len({rules, rules.replace(rules.name), rules.replace(rules.name, axes={"y": "manual"})})
        == 2
    )
    both = product(PRESETS["hsdp"], rules)
    assert both.axes == rules.axes and both.spec("params", ("embed", "mlp")) == P(
        "fsdp", ("tensor", "y")
    )
    with pytest.raises(ShardingRuleError) as caught:
        product(rules, PRESETS["ddp"].replace("other", axes={"y": "manual"}))
    assert str(caught.value) == (
        "megatron (changed) (changed) and other both declare the mesh axis 'y' as auto and as manual; "
        "rename one of them"
    )


def test_the_type_of_sums() -> None:
    auto, float32 = PRESETS["hsdp"], PRESETS["hsdp"].replace("hsdp", reduction="float32")
    assert (auto.reduction, float32.reduction) == ("auto", "float32") and float32.replace(
        params={"mlp": None}
    ).reduction == "float32"
    assert "reduction" not in auto.as_dict() and float32.as_dict() == {
        **auto.as_dict(),
        "reduction": "float32",
    }
    assert (
        len({auto, float32, float32.replace("hsdp"), float32.replace("hsdp", reduction="auto")})
        == 2
    )
    assert (
        product(float32, PRESETS["megatron"]).reduction
        == product(PRESETS["megatron"], float32).reduction
        == "float32"
    )
    assert (
        product(float32, float32).reduction == "float32"
        and product(auto, PRESETS["megatron"]).reduction == "auto"
    )
    with pytest.raises(ShardingRuleError) as caught:
        product(float32, PRESETS["megatron"].replace("mine", reduction="bfloat16"))
    said = (
        "hsdp and mine sum gradients in float32 and in bfloat16; set one of them to auto: "
        "replace(reduction='auto')"
    )
    assert str(caught.value) == said


def test_the_type_of_sums_by_name() -> None:
    rules = preset("hsdp + megatron_sp + reduce_bfloat16")
    assert (rules.name, rules.reduction) == ("hsdp+megatron_sp+reduce_bfloat16", "bfloat16")
    assert (
        rules
        == preset("hsdp+megatron_sp").replace(rules.name, reduction="bfloat16")
        == preset(rules.name)
    )
    assert preset("reduce_float32+fsdp+reduce_float32").reduction == "float32"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fsdp+reduce_flaot32",
            "there is no rules preset 'reduce_flaot32'; did you mean 'reduce_float32'?",
        ),
        (
            "reduce_float32",
            "rules 'reduce_float32' have no strategy; add one, as in fsdp+reduce_float32",
        ),
        (
            "fsdp+reduce_float32+reduce_bfloat16",
            (
                "rules 'fsdp+reduce_float32+reduce_bfloat16' sum gradients in two types; keep "
                "reduce_float32 or reduce_bfloat16"
            ),
        ),
    ],
)
def test_types_of_sums_that_cannot_be_named(name: str, message: str) -> None:
    with pytest.raises(ShardingRuleError) as caught:
        preset(name)
    assert str(caught.value) == message


def test_owners_divide_the_layers() -> None:
    """Over every mesh axis that shards the state of a layer's matrices; tables keep their rows."""
    rules = preset("zero2 + owner + megatron")
    assert rules.name == "zero2+owner+megatron" and rules.params == preset("zero2+megatron").params
    axes = ("layers", "embed", "mlp")
    for kind in ("gradients", "optimizer"):
        owned = rules.spec(kind, axes)
        assert owned == P(("pipeline", "data", "tensor"), None, None)
        table = rules.spec(kind, ("tables/vocab", "tables/embed"))
        assert table == preset("zero2+megatron").spec("optimizer", ("vocab", "embed"))
    assert preset("fsdp+owner").spec("optimizer", axes) == P(("pipeline", "fsdp"), None, None)
    assert preset("fsdp+reduce_float32+owner").reduction == "float32"


@pytest.mark.parametrize("name", ["distributed+owner", "zero3+megatron+owner"])
def test_owners_of_flat_vectors_are_refused(name: str) -> None:
    with pytest.raises(ShardingRuleError) as caught:
        preset(name)
    assert str(caught.value) == (
        f"rules {name!r}: owner gives each device complete matrices, and these rules keep the "
        "optimizer state in flat vectors, of which a device has parts of several matrices; use "
        "zero2, fsdp or hsdp instead"
    )


def test_owners_need_sharded_state() -> None:
    with pytest.raises(ShardingRuleError) as caught:
        preset("ddp+owner")
    assert str(caught.value) == (
        "rules 'ddp+owner': owner divides the optimizer state by layers over the axes that shard "
        "its matrices, and these rules shard none; multiply with zero2, fsdp or hsdp"
    )
    with pytest.raises(ShardingRuleError, match="'owner' have no strategy; add one, as in fsdp"):
        preset("owner")


def test_a_declared_axis_is_the_innermost() -> None:
    config = MeshConfig(data=-1, tensor=2, extra=("y=2",)).resolve(8)
    assert config == MeshConfig(data=2, tensor=2, extra=("y=2",)) == MeshConfig.of(config.sizes())
    mesh = make_mesh(config)
    assert mesh.axis_names == (*AXES, "y") and [
        [d.id for d in row] for row in mesh.devices.reshape(4, 2)
    ] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert MeshConfig(data=2, extra=("y=-1",)).resolve(8) == MeshConfig(data=2, extra=("y=4",))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("y",), "mesh.extra='y' is not an axis and its size, as in tensor_y=2"),
        (("y=two",), "mesh.extra='y=two' is not an axis and its size, as in tensor_y=2"),
        (("2=2",), "mesh.extra='2=2' is not an axis and its size, as in tensor_y=2"),
        (
            ("tensor=2",),
            "mesh.extra='tensor=2': the mesh already has an axis 'tensor'; set mesh.tensor=2",
        ),
        (("y=2", "y=4"), "mesh.extra='y=4': the mesh already has an axis 'y'; give it one size"),
        (("y=0",), "mesh.extra=y=0: sizes are 1 or more, or -1 on one axis for whatever is left"),
        (
            ("y=3",),
            "mesh has 3 devices (y=3) but the number of visible devices is 8; mesh.extra=y=8 would fit",
        ),
    ],
)
def test_extra_axes_that_cannot_be(extra: tuple[str, ...], message: str) -> None:
    with pytest.raises(MeshError) as caught:
        MeshConfig(extra=extra).resolve(8)
    assert str(caught.value) == message


def test_the_batch_row_is_not_optional() -> None:
    with pytest.raises(ShardingRuleError, match=r"rules\.activations needs a row 'batch'"):
        Rules("mine", params={}, activations={"seq": None})
