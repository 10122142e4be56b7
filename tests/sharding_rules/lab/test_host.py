"""Arrays in the host's memory: their bytes are apart from the device's, and copies have a price."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding_rules.lab import LabError, Report, assert_budget, compile_report, h100, hlo
from sharding_rules.lab.host import host_copies
from sharding_rules.lab.prices import host_copy_us
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.rates import SUSTAINED
from sharding_rules.lab.summary import host_words
from sharding_rules.lab.targets import TARGETS

COMPILE_BUDGET = 1

LAYERS = 4
ROWS = 1024
WIDTH = 512
HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device

PROGRAM = """HloModule m

%slice (p.1: f32[4,8], p.2: s32[]) -> f32[1,8] {
  %p.1 = f32[4,8]{1,0:S(5)} parameter(0)
  %p.2 = s32[] parameter(1)
  ROOT %slice.1 = f32[1,8]{1,0} dynamic-slice(%p.1, %p.2, %p.2), dynamic_slice_sizes={1,8}
}

%update (p.3: f32[4,8], p.4: f32[1,8], p.5: s32[]) -> f32[4,8] {
  %p.3 = f32[4,8]{1,0:S(5)} parameter(0)
  %p.4 = f32[1,8]{1,0} parameter(1)
  %p.5 = s32[] parameter(2)
  ROOT %update.1 = f32[4,8]{1,0:S(5)} dynamic-update-slice(%p.3, %p.4, %p.5, %p.5)
}

ENTRY %main (a: f32[4,8], b: f32[16], c: f32[4]) -> f32[4,8] {
  %a = f32[4,8]{1,0:S(5)} parameter(0)
  %b = f32[16]{0:S(5)} parameter(1)
  %c = f32[4]{0} parameter(2)
  %i = s32[] constant(1)
  %d = f32[4]{0} copy(%c)
  %e = (f32[16]{0}, f32[16]{0:S(5)}, u32[]) copy-start(%b)
  %f = f32[16]{0} copy-done(%e)
  %g = ((f32[4,8]{1,0:S(5)}, s32[]), f32[1,8]{1,0}, u32[]) fusion-start(%a, %i), calls=%slice
  %h = f32[1,8]{1,0} fusion-done(%g)
  %k = f32[4,8]{1,0:S(5)} fusion(%a, %h, %i), calls=%update
  ROOT %l = f32[4,8]{1,0:S(5)} copy(%k)
}
"""


def test_copies_are_found_by_the_memory_of_what_they_read_and_write() -> None:
    module = hlo.parse(PROGRAM)
    found = host_copies(module, Provenance(module), TARGETS["h100"])
    assert [(copy.name, copy.direction, copy.bytes) for copy in found] == [
        ("e", "from host", 64),
        ("g", "from host", 32),
        ("k", "to host", 32),
        ("l", "within host", 128),
    ]
    assert all(copy.duration > 0 for copy in found)
    assert not host_copies(
        hlo.parse(PROGRAM.replace(":S(5)", "")), Provenance(module), TARGETS["h100"]
    )


def momentum_step(
    params: jax.Array, grads: jax.Array, momentum: jax.Array, table: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A layer a turn, with the momentum as carry; and one array that moves whole."""

    def layer(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple, None]:
        params, momentum = carry

        def row(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, i, 1)

        new = 0.9 * jax.device_put(row(momentum), DEVICE) + row(grads)
        params = jax.lax.dynamic_update_slice_in_dim(params, row(params) - new, i, 0)
        momentum = jax.lax.dynamic_update_slice_in_dim(momentum, jax.device_put(new, HOST), i, 0)
        return (params, momentum), None

    (params, momentum), _ = jax.lax.scan(layer, (params, momentum), jnp.arange(LAYERS))
    table = jax.device_put(0.9 * jax.device_put(table, DEVICE), HOST)
    return params, momentum, table


@pytest.fixture(scope="module")
def report(reports: str) -> Report:
    mesh = h100(data=1)
    on_device = NamedSharding(mesh, PartitionSpec())
    # On the concrete mesh of absent devices the kind would be lost.
    on_host = NamedSharding(mesh.abstract_mesh, PartitionSpec(), memory_kind="pinned_host")

    def array(sharding: NamedSharding, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    stack = LAYERS, ROWS, WIDTH
    return compile_report(
        jax.jit(momentum_step, donate_argnums=(0, 2, 3)),
        array(on_device, *stack),
        array(on_device, *stack),
        array(on_host, *stack),
        array(on_host, ROWS, WIDTH),
        mesh=mesh,
        cache=reports,
        kind_of=lambda name: "moments" if name in ("momentum", "table") else "params",
    )


@pytest.mark.deviceless
def test_the_peak_is_the_devices_alone(report: Report) -> None:
    stack = 4 * LAYERS * ROWS * WIDTH
    row = 4 * ROWS * WIDTH
    host = report.memory.host
    assert host.by_kind == {"moments": stack + row}
    assert (host.arguments, host.outputs, host.temporaries) == (stack + row, 0, 0)
    assert report.host_bytes == stack + row
    assert 2 * stack < report.peak_bytes < 2 * stack + 4 * row
    assert sum(buffer.bytes for buffer in report.memory.buffers) == report.peak_bytes
    assert "moments" not in report.memory.by_kind
    assert_budget(report, peak_bytes=2 * stack + 4 * row, host_bytes=stack + row)
    with pytest.raises(LabError, match=r"host memory: \d+ bytes a device, 1 allowed"):
        assert_budget(report, host_bytes=1)
    assert Report.from_json(report.to_json()) == report
    full = dataclasses.replace(report, hbm=3 * stack)
    assert full.fits, "the host's bytes do not count"


@pytest.mark.deviceless
def test_copies_to_the_host_have_a_stream_and_a_price(report: Report) -> None:
    row = 4 * ROWS * WIDTH
    directions = [copy.direction for copy in report.host_copies]
    assert sorted(directions) == ["from host"] * 2 + ["to host"] * 2
    assert report.host_copy_bytes == 2 * (LAYERS + 1) * row
    line = report.timeline
    slow = report.sustained
    assert line is not None and slow is not None
    us = host_copy_us(row, TARGETS["h100"])
    assert line.host == pytest.approx(2 * (LAYERS + 1) * us)
    assert slow.host == pytest.approx(
        2 * (LAYERS + 1) * host_copy_us(row, TARGETS["h100"], SUSTAINED)
    )
    assert 0.5 * line.host < line.host_exposed <= line.host
    assert line.exposed == pytest.approx(0)
    assert line.step == pytest.approx(line.compute + line.host_exposed)
    assert {span.kind for span in line.spans if span.stream == "host"} == set(directions)
    words = host_words(report)
    assert words.startswith("10.0 MiB on the host for each device (moments 10.0 MiB)")
    assert "of PCIe" in words
