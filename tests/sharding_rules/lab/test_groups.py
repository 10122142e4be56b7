"""Every spelling of the same groups must give the same mesh axes."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding_rules.lab import groups


def mesh_of(node: int = 8, **sizes: int) -> Any:
    """A mesh of devices that are only a process each, with ids that are not positions."""
    n_devices = math.prod(sizes.values())
    devices = np.empty(n_devices, object)
    for at in range(n_devices):
        devices[at] = SimpleNamespace(process_index=at // node, id=n_devices - 1 - at)
    return SimpleNamespace(
        devices=devices.reshape(tuple(sizes.values())), axis_names=tuple(sizes), shape=sizes
    )


MESH = mesh_of(data=8, fsdp=16, tensor=8)


def listed(members: np.ndarray) -> str:
    return (
        "replica_groups={"
        + ",".join("{" + ",".join(map(str, group)) + "}" for group in members)
        + "}"
    )


@st.composite
def spelled(draw: st.DrawFn) -> tuple[Any, tuple[str, ...], np.ndarray, str]:
    """A mesh, axes of it, the groups along them, and one of their spellings."""
    sizes = dict(
        zip("abcde", draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)), strict=False)
    )
    chosen = [name for name in sizes if draw(st.booleans())]
    names, shape = list(sizes), tuple(sizes.values())
    outer = [dim for dim, name in enumerate(names) if name not in chosen]
    inner = [dim for dim, name in enumerate(names) if name in chosen]
    n_groups, n_members = math.prod(shape[d] for d in outer), math.prod(shape[d] for d in inner)
    members = (
        np.arange(math.prod(shape))
        .reshape(shape)
        .transpose(outer + inner)
        .reshape(n_groups, n_members)
    )
    dims, order = ",".join(map(str, shape)), ",".join(map(str, outer + inner))
    axes = ",".join(f"'{name}'={size}" for name, size in sizes.items())
    before = np.cumprod([1, *shape])
    spelling = draw(
        st.sampled_from([
            listed(members),
            f"replica_groups=[{n_groups},{n_members}]<=[{dims}]T({order})",
            f"replica_groups=mesh[{axes}] {{{','.join(repr(name) for name in chosen)}}}",
            (f"replica_groups=mesh['x'={n_groups},'y'={n_members}], "
                f"device_ids=([{dims}]T({order})) "
            "{'y'}"),
            (f"replica_groups=mesh['x'={n_groups},'y'={n_members}], "
            f"device_ids=({','.join(map(str, members.ravel()))}) {{'y'}}"),
            # one axis for the whole mesh, cut into the real ones
            f"replica_groups=mesh['x'={math.prod(shape)}] "
            + "{" + ",".join(f"'x':({before[dim]}){shape[dim]}" for dim in inner) + "}",
        ])
    )  # fmt: skip
    return (
        mesh_of(**sizes),
        tuple(name for name in chosen if sizes[name] > 1),
        members,
        f", channel_id=3, {spelling}, dimensions={{0}}",
    )


@given(spelled())
def test_every_spelling_gives_the_groups(
    case: tuple[Any, tuple[str, ...], np.ndarray, str],
) -> None:
    mesh, axes, members, text = case
    found = groups.parse(text, mesh.devices.size)
    assert {frozenset(group) for group in found.members.tolist()} == {
        frozenset(group) for group in members.tolist()
    }
    assert (found.axes(mesh), found.size, found.partial(mesh)) == (axes, members.shape[1], False)


@pytest.mark.parametrize(
    ("text", "axes", "size", "nodes", "partial"),
    [
        ("replica_groups={}", ("data", "fsdp", "tensor"), 1024, 128, False),
        ("to_apply=%add", ("data", "fsdp", "tensor"), 1024, 128, False),
        ("replica_groups=[128,8]<=[1024], dimensions={0}", ("tensor",), 8, 1, False),
        ("replica_groups=[64,16]<=[8,16,8]T(0,2,1), dimensions={1}", ("fsdp",), 16, 16, False),
        ("replica_groups=mesh['pipeline'=1,'data'=8,'fsdp'=16,'expert'=1,'sequence'=1,'tensor'=8] {'data'}", ("data",), 8, 8, False),
        (
            ("replica_groups=mesh['axis_0'=1,'axis_1'=16,'axis_2'=64], "
            "device_ids=([8,16,8]T(1,0,2)) {'axis_1'}, use_global_device_ids=true"),
            ("fsdp",), 16, 16, False,
        ),
        ("replica_groups=mesh['axis_0'=64,'axis_1'=16] {'axis_1':(8)2}", ("tensor",), 2, 1, True),
        ("replica_groups=mesh['axis_0'=8,'axis_1'=128] {'axis_1':(4)8}", ("fsdp", "tensor"), 8, 4, True),
        ("replica_groups=[512,2]<=[1024]", ("tensor",), 2, 1, True),
        ("source_target_pairs={{0,128},{128,256},{256,0}}", ("data",), 2, 2, False),
        ("source_target_pairs={{0,1},{1,0},{2,2}}", ("tensor",), 2, 1, False),
        ("source_target_pairs={{2,2}}", (), 2, 1, False),
    ],
)  # fmt: skip
def test_groups_in_a_mesh_of_nodes(
    text: str, axes: tuple[str, ...], size: int, nodes: int, partial: bool
) -> None:
    found = groups.parse(f", channel_id=1, {text}", 1024)
    assert (found.axes(MESH), found.size, found.nodes(MESH), found.partial(MESH)) == (
        axes,
        size,
        nodes,
        partial,
    )


def test_uneven_lists_and_slices() -> None:
    found = groups.parse("replica_groups={{0,1,2},{3}}", 4)
    assert found.members.tolist() == [[0, 1, 2], [3, 3, 3]]
    mesh = mesh_of(node=4, data=4)
    for device, part in zip(mesh.devices.flat, itertools.cycle((0, 1)), strict=False):
        device.slice_index = part
    assert groups.parse("replica_groups={}", 4).nodes(mesh) == 2
