"""The measured programs: what they compute, and that XLA leaves the collective in the loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_lm.measure.collectives import COLLECTIVES, looped, measured
from mesh_lm.measure.matmul import measured as measured_matmuls
from sharding_rules.lab.ledger import wire_bytes
from sharding_rules.lab.targets import lower_for

N_LOCAL = 8
KINDS = ("all-reduce", "collective-permute")
COMPILE_BUDGET = 34


def mesh_2d() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "tensor"))


def result(kind: str) -> np.ndarray:
    """Returns the results of the four devices of one group, [4, elements], of the inputs 0 to 31
    of the first group."""
    mesh = mesh_2d()
    run, (x, y) = looped(mesh, "tensor", kind, N_LOCAL)
    values = jnp.arange(x.size, dtype=x.dtype)
    x = jax.device_put(values, NamedSharding(mesh, P(("data", "tensor"))))
    kept, after = run(x, y, np.int32(3))
    np.testing.assert_array_equal(kept, values)
    return np.asarray(after).reshape(2, 4, -1)[0]


def test_each_program_computes_its_collective() -> None:
    shards = np.arange(32.0).reshape(4, N_LOCAL)
    np.testing.assert_array_equal(result("all-reduce"), [shards.sum(0)] * 4)
    np.testing.assert_array_equal(result("all-gather"), [shards.reshape(-1)] * 4)
    np.testing.assert_array_equal(result("reduce-scatter").reshape(-1), shards.sum(0))
    np.testing.assert_array_equal(
        result("all-to-all"), shards.reshape(4, 4, 2).swapaxes(0, 1).reshape(4, -1)
    )
    np.testing.assert_array_equal(result("collective-broadcast"), [shards[0]] * 4)
    np.testing.assert_array_equal(result("collective-permute"), np.roll(shards, 1, axis=0))


def test_every_axis_and_kind_is_measured() -> None:
    found = list(measured(mesh_2d(), [1024, 4096], kinds=KINDS, seconds=1e-4, samples=1))
    assert [(one.axis, one.kind) for one in found] == [
        (axis, kind) for axis in ("data", "tensor") for kind in KINDS
    ]
    for one in found:
        assert (one.group, one.nodes) == ({"data": 2, "tensor": 4}[one.axis], 1)
        assert [point.payload for point in one.points] == [1024, 4096]
        assert [point.wire for point in one.points] == [
            wire_bytes(one.kind, payload, one.group) for payload in (1024, 4096)
        ]
        assert all(point.us > 0 for point in one.points) and one.fit.bytes_per_s > 0


def test_matmuls_of_a_device_without_a_known_peak_have_no_share() -> None:
    (matmul,) = measured_matmuls([32], seconds=1e-4, samples=1)
    assert matmul.share is None
    assert matmul.flops_per_s == pytest.approx(2 * 32**3 / matmul.us * 1e6)


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_xla_leaves_the_collective_in_the_loop_on_a_gpu(kind: str) -> None:
    mesh = lower_for("h100", 8, tensor=8)
    spec = NamedSharding(mesh, P(mesh.axis_names))
    run, (x, y) = looped(mesh, "tensor", kind, 1024, abstract=True)
    assert x.sharding == spec and y.sharding == spec
    text = run.lower(x, y, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
    bodies = re.findall(r"body=%([\w.\-]+)", text)
    blocks = [
        block for block in text.split("\n\n") if any(f"%{body} " in block[:200] for body in bodies)
    ]
    assert any(f" {kind}-start(" in block or f" {kind}(" in block for block in blocks), text
