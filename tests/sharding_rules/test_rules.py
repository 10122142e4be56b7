"""Strict rules: each silent failure of Flax's logical axes is an error here, with the text a user reads."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from sharding_rules import AXES, PRESETS, MeshConfig, MeshError, Rules, ShardingRuleError, axes_of, make_mesh, preset

MESH = make_mesh(MeshConfig(data=2, tensor=4))


def test_an_experiment_is_a_changed_row() -> None:
    rules = PRESETS["megatron"]
    assert rules.spec("params", ("embed", "mlp")) == P(None, "tensor")
    assert rules.replace(params={"mlp": None}).spec("params", ("embed", "mlp")) == P(None, None)
    assert rules.spec("params", ("embed", "mlp")) == P(None, "tensor"), "replace changed the original"


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (("embd", "mlp"), (), "layers.mlp.w_up('embd', 'mlp'): no params rule for logical axis 'embd'; did you mean 'embed'?"),
        (
            ("mlp", "heads"),
            (),
            "layers.mlp.w_up('mlp', 'heads'): mesh axis 'tensor' shards both 'mlp' and 'heads'; set one of them to None in rules.params",
        ),
        (("embed", "mlp"), (8, 6), "layers.mlp.w_up: dimension 1 ('mlp', size 6) does not divide over 'tensor' (4 ways)"),
        (("embed", "mlp"), (8,), "layers.mlp.w_up('embed', 'mlp'): 2 logical axes for 1 dimensions (8,)"),
    ],
)
def test_errors_say_what_would_work(axes, shape, message: str) -> None:
    with pytest.raises(ShardingRuleError) as caught:
        PRESETS["megatron"].spec("params", axes, shape, MESH, "layers.mlp.w_up")
    assert str(caught.value) == message


def test_a_mesh_axis_that_is_not_there() -> None:
    rules = PRESETS["megatron"].replace(params={"mlp": "tensr"})
    with pytest.raises(ShardingRuleError, match=r"rules.params\['mlp'\]: mesh axis 'tensr' is not in mesh"):
        rules.spec("params", ("mlp",), mesh=MESH)


def test_a_column_that_is_not_there() -> None:
    with pytest.raises(ShardingRuleError, match="rules have no column 'param'"):
        PRESETS["ddp"].replace(param={"mlp": None})


@pytest.mark.parametrize(
    ("name", "suggestion"), [("fsp", "did you mean 'fsdp'"), ("fsdp+megatrn", "did you mean 'megatron'"), ("", "known: ddp")]
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
        assert tuple(PRESETS[name].spec(kind, weight) for kind in ("params", "gradients", "optimizer")) == specs


def test_products() -> None:
    rules = preset("hsdp+megatron_sp")
    assert rules.spec("params", ("embed", "fused", "heads", "head_dim")) == P("fsdp", None, "tensor", None)
    assert rules.spec("gathered", ("embed", "fused", "heads", "head_dim")) == P(None, None, "tensor", None)
    assert rules.spec("activations", ("batch", "seq_resid", "embed")) == P(("data", "fsdp"), "tensor", None)
    # Moments refine the cut of the weight: fsdp first, whatever the mesh's order.
    assert preset("zero1+fsdp").spec("optimizer", ("embed",)) == P(("fsdp", "data"))
    assert preset("zero1+fsdp").spec("gradients", ("embed",)) == P("fsdp")


@given(st.lists(st.sampled_from(sorted(PRESETS)), min_size=1, max_size=3))
def test_a_product_keeps_every_cut_of_its_parts(names: list[str]) -> None:
    rules = preset("+".join(names))
    for kind in ("params", "activations", "gradients", "optimizer"):
        for name in names:
            for row, entry in PRESETS[name].column(kind).items():
                assert set(axes_of(entry)) <= set(axes_of(rules.column(kind)[row]))
    assert rules.mesh_axes() == {axis for name in names for axis in PRESETS[name].mesh_axes()}
    assert hash(rules) == hash(preset("+".join(names)))


@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 8), max_size=4), st.integers(1, 64))
def test_a_mesh_resolves_or_says_what_would(sizes: dict[str, int], n_devices: int) -> None:
    config = MeshConfig(**sizes)
    try:
        mesh = config.resolve(n_devices)
    except MeshError as error:
        for choice in [word for word in str(error).split() if word.startswith("mesh.")]:
            axis, size = choice.removeprefix("mesh.").split("=")
            assert MeshConfig(**{**sizes, axis: int(size)}).resolve(n_devices)
    else:
        assert mesh == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(data=3, tensor=2), "mesh has 6 devices (data=3 x tensor=2) but 8 are visible; mesh.data=4 would fit"),
        (MeshConfig(data=-1, tensor=-1), "only one mesh axis can be -1, not data and tensor"),
        (MeshConfig(data=0), "mesh.data=0: sizes are 1 or more, or -1 on one axis for whatever is left"),
        (
            MeshConfig(data=-1, tensor=3),
            "mesh has 3 x ? devices (data=-1 x tensor=3) but 8 are visible; mesh.tensor=2 or mesh.tensor=4 would fit",
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
    ids = [[d.id for d in row] for row in make_mesh(MeshConfig(data=2, tensor=4)).devices.reshape(2, 4)]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_tensor_neighbours_share_a_node_whatever_their_ids() -> None:
    """Ids that go round the nodes, as a runtime may number them."""
    devices = [Far(id=i, process_index=i % 2) for i in range(8)]
    ids = [[d.id for d in row] for row in make_mesh(MeshConfig(data=2, tensor=4), devices).devices.reshape(2, 4)]
    assert ids == [[0, 2, 4, 6], [1, 3, 5, 7]]


@dataclasses.dataclass(frozen=True)
class Far:
    """A device that is not here."""

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


def test_the_batch_row_is_not_optional() -> None:
    with pytest.raises(ShardingRuleError, match=r"rules\.activations needs a row 'batch'"):
        Rules("mine", params={}, activations={"seq": None})
