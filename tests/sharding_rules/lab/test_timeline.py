"""Hand-written programs whose times can be added up on paper."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from sharding_rules.lab import hlo
from sharding_rules.lab.ledger import collectives
from sharding_rules.lab.prices import collective_us
from sharding_rules.lab.provenance import Provenance
from sharding_rules.lab.rates import OPTIMISTIC, SUSTAINED, Rates
from sharding_rules.lab.report import Collective, Location, Slot, Timeline
from sharding_rules.lab.targets import TARGETS
from sharding_rules.lab.timeline import in_parallel, priced, replay
from tests.sharding_rules.lab.test_groups import mesh_of

H100 = TARGETS["h100"]
MATMUL = OPTIMISTIC.matmul.value
MEMORY = OPTIMISTIC.memory["bf16"].value
NVLINK = OPTIMISTIC.nvlink.value
NETWORK = OPTIMISTIC.network.value
KERNEL = OPTIMISTIC.kernel_us.value
ATTENTION = 0.62
ALL = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true"
GATHER = Collective(
    "g",
    "all-gather",
    ("tensor",),
    8,
    1,
    ("bf16[8388608]",),
    "bf16",
    1 << 24,
    7 / 8 * (1 << 24),
    (),
    False,
    Location(),
    True,
    0,
)
GATHER_US = collective_us(GATHER, H100)
START = f"%ag = (bf16[1048576]{{0}}, bf16[8388608]{{0}}) all-gather-start(%p), {ALL}"
DONE = "%done = bf16[8388608]{0} all-gather-done(%ag)"
ONE_NODE = Mesh(np.array(jax.devices()), ("tensor",))


def kernel(name: str, us: float, operand: str = "p") -> str:
    """A fusion that takes `us` here: XLA's estimate has all of the memory's bandwidth."""
    estimate = f'{{"exec_time_us":{us * MEMORY},"compute_time_us":0,"name":"sol"}}'
    return (
        f"%{name} = bf16[1048576]{{0}} fusion(%{operand}), kind=kLoop, calls=%f, "
        f'backend_config={{"reification_cost":[{estimate}]}}'
    )


def replayed(
    *entry: str,
    slots: tuple[Slot, ...] = (),
    mesh: Mesh = ONE_NODE,
    parallel: bool = False,
    rates: Rates = OPTIMISTIC,
    **computations: tuple[str, ...],
) -> Timeline:
    blocks = {
        "f": ("%q = bf16[1048576]{0} parameter(0)", "ROOT %n = bf16[1048576]{0} negate(%q)"),
        **computations,
    }
    text = "HloModule test, is_scheduled=true\n\n"
    for name, lines in (*blocks.items(), ("main", ("%p = bf16[1048576]{0} parameter(0)", *entry))):
        head = "ENTRY " * (name == "main")
        body = "".join(f"  {line}\n" for line in lines)
        text += f"{head}%{name} (a: bf16[1048576]) -> bf16[1048576] {{\n{body}}}\n\n"
    module = hlo.parse(text, slots)
    provenance = Provenance(module)
    sent = collectives(module, provenance, mesh)
    return replay(module, provenance, sent, H100, parallel=parallel, rates=rates)


def test_the_network_runs_beside_compute_and_done_waits_for_the_rest() -> None:
    assert pytest.approx(1e6 * 7 / 8 * 2**24 / (NVLINK * 450e9) + 18.5) == GATHER_US
    hidden = replayed(START, kernel("k", 1000), DONE)
    assert (hidden.step, hidden.compute, hidden.network, hidden.exposed) == pytest.approx(
        (1000, 1000, GATHER_US, 0)
    )
    waits = replayed(START, kernel("k", 20), DONE, kernel("l", 30))
    assert (waits.step, waits.exposed) == pytest.approx((GATHER_US + 30, GATHER_US - 20))
    assert [(span.name, span.stream, round(span.start, 3)) for span in waits.spans] == [
        ("ag", "network", 0),
        ("k", "compute", 0),
        ("l", "compute", round(GATHER_US, 3)),
    ]


def test_the_network_is_one_queue() -> None:
    second, done = (
        START.replace("%ag", "%ag2"),
        DONE.replace("%ag)", "%ag2)").replace("%done", "%done2"),
    )
    both = replayed(START, second, kernel("k", 10), DONE, done)
    assert (both.step, both.exposed) == pytest.approx((2 * GATHER_US, 2 * GATHER_US - 10))


def test_waits_are_of_what_the_network_is_busy_with() -> None:
    """The second is waited for first: of its wait the first one's time is the first one's."""
    second, done = (
        START.replace("%ag", "%ag2"),
        DONE.replace("%ag)", "%ag2)").replace("%done", "%done2"),
    )
    both = replayed(START, second, kernel("k", 10), done, DONE)
    assert both.waits == pytest.approx({"ag": GATHER_US - 10, "ag2": GATHER_US}) and sum(
        both.waits.values()
    ) == pytest.approx(both.exposed)
    inner = ("%p = bf16[1048576]{0} parameter(0)", START, kernel("k", 20), DONE)
    looped = replayed(loop("w", "inner", 7), inner=inner)
    assert looped.waits == pytest.approx({"ag": 7 * (GATHER_US - 20)})
    twice = [dataclasses.replace(GATHER, name="ag", loops=(n,)) for n in (3, 4)]
    assert [one.exposed for one in priced(twice, looped, H100)] == pytest.approx(
        [3 * (GATHER_US - 20), 4 * (GATHER_US - 20)]
    )
    assert [one.duration for one in priced(twice, looped, H100)] == pytest.approx([GATHER_US] * 2)


def test_a_group_takes_as_long_as_its_collectives_together() -> None:
    wrapped = (
        "%p = bf16[1048576]{0} parameter(0)",
        f"%one = bf16[8388608]{{0}} all-gather(%p), {ALL}",
        f"%two = bf16[8388608]{{0}} all-gather(%p), {ALL}",
        "ROOT %t = (bf16[8388608]{0}, bf16[8388608]{0}) tuple(%one, %two)",
    )
    start = (
        "%s = ((bf16[1048576]{0}), (bf16[8388608]{0}, bf16[8388608]{0})) async-start(%p), "
        "calls=%wrapped"
    )
    both = replayed(
        start,
        kernel("k", 10),
        "%d = (bf16[8388608]{0}, bf16[8388608]{0}) async-done(%s)",
        wrapped=wrapped,
    )
    assert (both.step, both.exposed) == pytest.approx((2 * GATHER_US, 2 * GATHER_US - 10))
    assert both.waits == pytest.approx({"one": GATHER_US - 10, "two": GATHER_US})


def test_the_condition_of_a_loop_counts_where_it_sends() -> None:
    test = ("%p = bf16[1048576]{0} parameter(0)", START, DONE)
    body = ("%p = bf16[1048576]{0} parameter(0)", kernel("k", 20))
    found = replayed(
        loop("w", "body", 5).replace("condition=%f", "condition=%test"), test=test, body=body
    )
    assert found.step == pytest.approx(5 * 20 + 6 * GATHER_US) and found.waits == pytest.approx(
        {"ag": 6 * GATHER_US}
    )


def test_a_collective_without_start_and_done_blocks() -> None:
    sync = f"%ag = bf16[8388608]{{0}} all-gather(%p), {ALL}"
    found = replayed(kernel("k", 20), sync, kernel("l", 30))
    assert (found.step, found.exposed, found.network) == pytest.approx(
        (GATHER_US + 50, GATHER_US, GATHER_US)
    )


def loop(name: str, body: str, trips: int) -> str:
    config = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%{name} = bf16[1048576]{{0}} while(%p), condition=%f, body=%{body}, {config}"


def test_loops_count_with_their_trips_and_are_drawn_once() -> None:
    inner = ("%p = bf16[1048576]{0} parameter(0)", START, kernel("k", 20), DONE)
    outer = ("%p = bf16[1048576]{0} parameter(0)", kernel("o", 100), loop("w", "inner", 3))
    found = replayed(loop("v", "outer", 5), kernel("last", 7), inner=inner, outer=outer)
    assert found.step == pytest.approx(5 * (100 + 3 * GATHER_US) + 7)
    assert (found.compute, found.network) == pytest.approx((5 * 160 + 7, 15 * GATHER_US))
    assert found.exposed == pytest.approx(15 * (GATHER_US - 20))
    spans = {span.name: span for span in found.spans}
    assert len(found.spans) == 4
    assert spans["ag"].loops == (5, 3) and spans["o"].loops == (5,) and spans["last"].loops == ()
    assert spans["last"].start == pytest.approx(100 + GATHER_US)


def test_a_collective_that_a_loop_is_run_beside_is_hidden_by_all_its_trips() -> None:
    body = ("%p = bf16[1048576]{0} parameter(0)", kernel("k", 20))
    found = replayed(START, loop("w", "body", 100), DONE, body=body)
    assert (found.step, found.exposed) == pytest.approx((2000, 0))


def test_of_a_conditional_the_dearest_branch_runs() -> None:
    cheap = ("%p = bf16[1048576]{0} parameter(0)", kernel("k", 20))
    dear = ("%p = bf16[1048576]{0} parameter(0)", kernel("l", 50))
    found = replayed(
        "%c = bf16[1048576]{0} conditional(%p, %p), branch_computations={%cheap, %dear}",
        cheap=cheap,
        dear=dear,
    )
    assert found.step == pytest.approx(50)


def conditional(name: str, scope: str, branch: str) -> str:
    branches = f"branch_computations={{%idle, %{branch}}}"
    return (
        f"%{name} = bf16[1048576]{{0}} conditional(%p, %p, %p), {branches}, "
        f'metadata={{op_name="while/body/{scope}/cond"}}'
    )


def test_every_trip_lasts_as_long_as_on_its_slowest_stage() -> None:
    """Two stages, three microbatches. Embedding and loss are on different stages, so that no trip
    has both."""
    p = "%p = bf16[1048576]{0} parameter(0)"
    first, last = (
        f"{slot}_slot/cond/branch_1_fun/{scope}"
        for slot, scope in (("forward", "embed"), ("backward", "loss"))
    )
    found = replayed(
        loop("v", "tick", 5), kernel("last", 7),
        slots=(
            Slot("forward_slot", ("11100", "01110")), Slot("embed", ("11100", "00000")),
            Slot("backward_slot", ("00111", "01110")), Slot("loss", ("00000", "01110")),
        ),
        idle=(p,), table=(p, kernel("e", 2)),
        forward=(p, kernel("f", 10), conditional("c", first, "table")), head=(p, kernel("h", 5)),
        backward=(p, kernel("b", 20), conditional("d", last, "head")),
        tick=(p, kernel("o", 1.6), conditional("x", "forward_slot", "forward"), conditional("y", "backward_slot", "backward")),
    )  # fmt: skip
    assert found.step == pytest.approx(5 * 1.6 + 12 + 35 + 35 + 35 + 20 + 7)
    spans = {span.name: span for span in found.spans}
    assert {name: span.loops for name, span in spans.items()} == {
        "o": (5,),
        "f": (4,),
        "b": (4,),
        "h": (3,),
        "last": (),
    }
    assert spans["last"].start == pytest.approx(1.6 + 35)


def test_sends_between_stages_do_not_wait_for_other_collectives() -> None:
    x = "bf16[1048576]{0}"
    send = (
        f"%send = ({x}, {x}) collective-permute-start(%p), source_target_pairs={{{{0,1}},{{1,0}}}}"
    )
    found = replayed(
        START, send, kernel("k", 5000), DONE, f"%sent = {x} collective-permute-done(%send)"
    )
    assert [span.start for span in found.spans] == [0, 0, 0] and found.exposed == 0


@pytest.mark.parametrize(
    ("estimate", "expected"), [(13_701, 268.4354e9 / (MATMUL * 989.4e6)), (300, 300)]
)
def test_a_matmul_that_xla_prices_absurdly_gets_its_roofline(
    estimate: float, expected: float
) -> None:
    """XLA knows no bf16 matmul with an f32 result. 2 x 1024 x 16384 x 8000 = 268.4 GFLOP."""
    lines = ("%a = bf16[1024,8000]{1,0} parameter(0)", "%b = bf16[8000,16384]{1,0} parameter(1)")
    dot = (
        "ROOT %d = f32[1024,16384]{1,0} dot(%a, %b), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}"
    )
    sol = f'backend_config={{"reification_cost":[{{"exec_time_us":{estimate},"name":"sol"}}]}}'
    found = replayed(
        f"%k = f32[1024,16384]{{1,0}} fusion(%p, %p), kind=kCustom, calls=%g, {sol}",
        g=(*lines, dot),
    )
    assert found.spans[0].kind == "matmul"
    assert found.step == pytest.approx(expected, rel=1e-3)


def test_what_xla_does_not_price_is_priced_by_its_bytes() -> None:
    found = replayed(
        kernel("k", 20), "%c = bf16[1048576]{0} copy(%p)", "%b = bf16[1048576]{0} bitcast(%c)"
    )
    assert found.step == pytest.approx(
        20 + max(KERNEL, 2 * 2**21 * 1e6 / (MEMORY * H100.hbm_bandwidth))
    )
    assert found.spans[1].kind == "copy"


def test_fused_attention_is_priced_by_its_matmuls() -> None:
    q = [
        f"%{name} = bf16[2,4096,16,128]{{3,2,1,0}} parameter({i})"
        for i, name in enumerate("qkv", 1)
    ]
    cudnn = 'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask":"CAUSAL"}'
    call = f"%x = bf16[2,4096,16,128]{{3,2,1,0}} custom-call(%q, %k, %v), {cudnn}"
    found = replayed(kernel("s", 10), *q, call)
    assert found.spans[1].kind == "attention"
    assert found.spans[1].duration == pytest.approx(
        1e6 * 0.5 * 4 * 2 * 16 * 4096**2 * 128 / (0.62 * 989.4e12)
    )


@pytest.mark.parametrize(
    ("attributes", "kind", "expected"),
    [
        (
            'kernel="attention forward",kernel_bytes="8192",kernel_flops="1000000000000"',
            "attention",
            1e6 / (0.62 * 989.4),
        ),
        (
            'kernel="attention forward",kernel_bytes="8192",kernel_flops="1000000000000",kernel_occupancy="0.250"',
            "attention",
            1e6 / (0.25 * 0.62 * 989.4),
        ),
        ('kernel="grouped matmul",kernel_flops="1000000000000"', "matmul", 1e6 / (MATMUL * 989.4)),
        (
            'kernel="attention forward",kernel_bytes="33520000000",kernel_flops="1000000000000"',
            "attention",
            1e4 / MEMORY,
        ),
    ],
)
def test_a_kernel_is_priced_by_what_it_says(attributes: str, kind: str, expected: float) -> None:
    call = (
        '%x = f32[8,8]{1,0} custom-call(%p), custom_call_target="mosaic_gpu_v2", '
        f"frontend_attributes={{{attributes}}}"
    )
    found = replayed(kernel("s", 10), call)
    assert (found.spans[1].kind, found.spans[1].duration) == (kind, pytest.approx(expected))


def test_a_fusion_that_slices_moves_the_slice_and_one_that_updates_in_place_the_update() -> None:
    slices = (
        "%a = f32[96,1000,1000]{2,1,0} parameter(0)", "%b = f32[1000,1000]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        ("%s = f32[1,1000,1000]{2,1,0} dynamic-slice(%a, %i, %i, %i), "
        "dynamic_slice_sizes={1,1000,1000}"),
        "ROOT %n = f32[1000,1000]{1,0} add(%s, %b)",
    )  # fmt: skip
    updates = (
        "%a = f32[96,1000,1000]{2,1,0} parameter(0)", "%u = f32[1,1000,1000]{2,1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        "ROOT %d = f32[96,1000,1000]{2,1,0} dynamic-update-slice(%a, %u, %i, %i, %i)",
    )  # fmt: skip
    arrays = 4e6 * 1e6 / (MEMORY * H100.hbm_bandwidth)
    read = replayed(
        "%k = f32[1000,1000]{1,0} fusion(%p, %p, %p), kind=kLoop, calls=%slices", slices=slices
    )
    assert read.step == pytest.approx(3 * arrays, rel=1e-4)
    written = replayed(
        "%k = f32[96,1000,1000]{2,1,0} fusion(%p, %p, %p), kind=kLoop, calls=%updates",
        updates=updates,
    )
    assert written.step == pytest.approx(2 * arrays, rel=1e-4)


def test_members_of_a_ring_in_one_node_share_its_network_ports() -> None:
    """The mistake that once made FSDP over 8 nodes twice too slow: k members per node have k
    ports."""
    gather = dataclasses.replace(GATHER, wire=1e10)
    apart, together = (dataclasses.replace(gather, group=group, nodes=8) for group in (8, 64))
    assert collective_us(apart, H100) == pytest.approx(1e16 / (NETWORK * 50e9), rel=1e-3)
    assert collective_us(together, H100) == pytest.approx(
        1e16 / min(NVLINK * 450e9, 8 * NETWORK * 50e9), rel=1e-2
    )
    permute = dataclasses.replace(together, kind="collective-permute")
    assert collective_us(permute, H100) == pytest.approx(collective_us(apart, H100), rel=1e-2)


@pytest.mark.parametrize("kind", ["all-to-all", "ragged-all-to-all"])
@pytest.mark.parametrize(
    ("group", "nodes", "outside"),
    [(8, 2, 4 / 7), (16, 2, 8 / 15), (64, 8, 56 / 63), (8, 8, 1), (2, 2, 1)],
)
def test_of_an_all_to_all_only_what_leaves_the_node_passes_the_network(
    kind: str, group: int, nodes: int, outside: float
) -> None:
    """A device sends each of the others as much; G - g of the G - 1 others are in other nodes."""
    exchange = dataclasses.replace(GATHER, kind=kind, wire=1e10, group=group, nodes=nodes)
    latency = 8 + 7 + 1.5 + 6
    # An H100 has 50 GB/s to the network, of which collectives reach 84 %.
    assert collective_us(exchange, H100) == pytest.approx(outside * 1e16 / 42e9 + latency)


def test_an_all_to_all_takes_as_long_as_its_slower_link() -> None:
    within = dataclasses.replace(GATHER, kind="all-to-all", wire=1e10, group=8)
    # In one node: 450 GB/s of NVLink, of which collectives reach 78 %.
    assert collective_us(within, H100) == pytest.approx(1e16 / 351e9 + 9.5)
    # With a network of 1 TB/s, 7/15 of the bytes over NVLink take longer than 8/15 over the port.
    fast = dataclasses.replace(H100, network=1e12)
    across = dataclasses.replace(within, group=16, nodes=2)
    assert collective_us(across, fast) == pytest.approx(7 / 15 * 1e16 / 351e9 + 22.5)


def test_latency_of_a_ring_is_linear_in_its_nodes() -> None:
    small = dataclasses.replace(GATHER, wire=0.0, group=8)
    us = [
        collective_us(dataclasses.replace(small, group=8 * nodes, nodes=nodes), H100)
        for nodes in (2, 34, 66)
    ]
    assert us[2] - us[1] == pytest.approx(us[1] - us[0]) == 192
    reduce = dataclasses.replace(small, kind="all-reduce", group=1024, nodes=128)
    assert collective_us(reduce, H100) < 150


def test_a_long_program_keeps_few_spans_and_all_of_its_time() -> None:
    kernels = [kernel(f"k{i}", 2 + i % 5) for i in range(2000)]
    found = replayed(*kernels[:1000], START, DONE, *kernels[1000:])
    assert len(found.spans) <= 600
    assert sum(span.duration for span in found.spans if span.stream == "compute") == pytest.approx(
        found.compute
    )
    assert any(span.name == "ag" for span in found.spans)


def test_collectives_between_nodes_and_within_one_have_streams_of_their_own_where_xla_allows_it() -> (
    None
):
    mesh = mesh_of(node=4, data=2, tensor=4)
    inside = START.replace("{{0,1,2,3,4,5,6,7}}", "{{0,1,2,3},{4,5,6,7}}").replace(
        "8388608", "4194304"
    )
    done = DONE.replace("8388608", "4194304")
    across = (
        START.replace("%ag", "%far")
        .replace("{{0,1,2,3,4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}")
        .replace("8388608", "2097152")
    )
    done_far = (
        DONE.replace("8388608", "2097152").replace("%ag", "%far").replace("%done", "%done_far")
    )
    entry = (inside, across, kernel("k", 1), done, done_far)
    one, two = (replayed(*entry, mesh=mesh, parallel=parallel) for parallel in (False, True))
    times = {span.name: span.duration for span in one.spans if span.stream == "network"}
    assert one.step == pytest.approx(sum(times.values())) and two.step == pytest.approx(
        max(times.values())
    )
    assert one.network == pytest.approx(two.network) and sum(two.waits.values()) == pytest.approx(
        two.exposed
    )
    again = (
        across.replace("%far", "%far_too"),
        done_far.replace("%far", "%far_too").replace("%done_far", "%done_too"),
    )
    both = replayed(across, again[0], kernel("k", 1), done_far, again[1], mesh=mesh, parallel=True)
    assert both.step == pytest.approx(2 * times["far"]), "two of a kind are one after the other"


def test_the_overlap_limit_is_read_from_options_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "xla_gpu_experimental_parallel_collective_overlap_limit"
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert not in_parallel({}) and not in_parallel({name: 1}) and in_parallel({name: 2})
    monkeypatch.setenv("XLA_FLAGS", f"--{name}=4")
    assert in_parallel({}) and not in_parallel({name: 1})


def test_a_kernel_in_a_fusion_that_slices_its_operands_costs_what_it_costs_alone() -> None:
    """XLA wraps it where `xla_gpu_enable_dynamic_slice_fusion` is set."""
    flops = 10**11
    call = (
        'custom-call(%p), custom_call_target="mosaic_gpu_v2", '
        f'frontend_attributes={{kernel="attention forward",kernel_flops="{flops}"}}'
    )
    alone = replayed(f"%k = bf16[1048576]{{0}} {call}")
    inside = (
        "%p.1 = bf16[4,1048576]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%row = bf16[1,1048576]{1,0} dynamic-slice(%p.1, %i, %i), dynamic_slice_sizes={1,1048576}",
        f"ROOT %call = bf16[1048576]{{0}} {call.replace('%p', '%row')}",
    )
    stacked = "%s = bf16[4,1048576]{1,0} broadcast(%p)", "%n = s32[] constant(0)"
    wrapped = replayed(
        *stacked, "%w = bf16[1048576]{0} fusion(%s, %n), kind=kCustom, calls=%inside", inside=inside
    )
    (expected,), (found,) = (
        [span for span in line.spans if span.kind == "attention"] for line in (alone, wrapped)
    )
    assert (
        found.duration
        == pytest.approx(expected.duration)
        == pytest.approx(1e6 * flops / (ATTENTION * 989.4e12))
    )


DOT = (
    "%a = bf16[1024,8000]{1,0} parameter(0)", "%b = bf16[8000,16384]{1,0} parameter(1)",
    ("ROOT %d = bf16[1024,16384]{1,0} dot(%a, %b), lhs_contracting_dims={1}, "
    "rhs_contracting_dims={0}"),
)  # fmt: skip
"""2 x 1024 x 16384 x 8000 = 268.4 GFLOP, at least 352 us at MATMUL."""


def matmul(us: float) -> str:
    """A matmul that takes `us` by XLA's table."""
    sol = f'backend_config={{"reification_cost":[{{"exec_time_us":{us},"name":"sol"}}]}}'
    return f"%m = bf16[1024,16384]{{1,0}} fusion(%p, %p), kind=kCustom, calls=%g, {sol}"


ATTENDING = (
    '%x = f32[8,8]{1,0} custom-call(%p), custom_call_target="mosaic_gpu_v2", '
    'frontend_attributes={kernel="flash_attention_forward",kernel_flops="1000000000000"}'
)


def test_the_floor_of_a_timeline_is_the_time_of_its_own_kernels() -> None:
    """Whatever the speed of its matmuls, a program that does nothing but what its model needs has
    a ratio of 1."""
    flops = 2 * 1024 * 16384 * 8000
    line = replayed(matmul(400), ATTENDING, g=DOT)
    assert line.flops == {"matmul": flops, "attention": 1e12}
    assert line.step == pytest.approx(400 + line.kinds["attention"])
    assert line.model_us(flops + 1e12, 1e12) == pytest.approx(line.step)
    # A program that computes twice as much, and moves memory, has twice the floor and more.
    both = replayed(matmul(400), matmul(400).replace("%m", "%n"), kernel("k", 30), g=DOT)
    assert both.step == pytest.approx(2 * both.model_us(flops, 0) + 30)
    # Attention of matmuls and softmax has no kernel of its own.
    assert both.model_us(2 * flops, flops) == pytest.approx(800)
    assert replayed(kernel("k", 30)).model_us(flops, 0) == 0


def test_sustained_rates_scale_xlas_table_and_memory_by_type() -> None:
    def slower(*entry: str, **computations: tuple[str, ...]) -> float:
        fast = replayed(*entry, **computations)
        return replayed(*entry, rates=SUSTAINED, **computations).step / fast.step

    # By hand: 0.758 of the table over 0.69; 0.9 of the memory's bandwidth over 0.68 and 0.86.
    assert slower(matmul(400), g=DOT) == pytest.approx(0.758 / 0.69)
    assert slower(matmul(0), g=DOT) == pytest.approx(0.77 / 0.69)
    assert slower(kernel("k", 100)) == pytest.approx(0.9 / 0.68)
    f32 = "%p2 = f32[1048576]{0} parameter(1)", kernel("k", 100, "p2").replace("bf16[", "f32[")
    assert slower(*f32) == pytest.approx(0.9 / 0.86)
    assert slower(START, DONE) == pytest.approx(
        (1e6 * 7 / 8 * 2**24 / (0.70 * 450e9) + 18.5) / GATHER_US
    )


@pytest.mark.parametrize(
    ("kernel_name", "shape", "phase", "expected"),
    [
        ("flash_attention_forward", "8,2048,16,128", "forward", 0.49),
        ("flash_attention_forward", "8,16,2048,128", "forward", 0.49),
        ("flash_attention_bwd", "8,2048,16,128", "backward", 0.42),
        # The logarithm of 4,096 is a third of the way from that of 2,048 to that of 16,384.
        ("flash_attention_forward", "8,4096,16,128", "forward", 0.49 + 0.11 / 3),
        ("flash_attention_forward", "8,131072,16,128", "forward", 0.60),
        ("flash_attention_forward", "8,512,12,64", "forward", 0.25),
        ("flash_attention_forward", "8,2048,12,80", "forward", 0.31),
        ("flash_attention_dkv", "8,2048,16,128", "backward", 0.65),
        ("grouped_matmul", "64,2048,1408", "forward", 0.60),
    ],
)
def test_sustained_kernels_depend_on_their_shape(
    kernel_name: str, shape: str, phase: str, expected: float
) -> None:
    scope = {"forward": "jvp(layers)", "backward": "transpose(jvp(layers))"}[phase]
    q = f"%q0 = bf16[{shape}] parameter(1)"
    call = (
        f'%x = bf16[{shape}] custom-call(%q0, %q0), custom_call_target="mosaic_gpu_v2", '
        f'frontend_attributes={{kernel="{kernel_name}",kernel_bytes="1",kernel_flops="1000000000000"}}, '
        f'metadata={{op_name="jit(step)/{scope}/pallas_call"}}'
    )
    (span,) = replayed(q, call, rates=SUSTAINED).spans
    n_groups = 64 if "grouped" in kernel_name else 0
    assert span.duration == pytest.approx(1e6 / (expected * 989.4) + 0.6 * n_groups, rel=1e-3)


def test_which_sustained_rates_are_faster_than_the_optimistic_ones() -> None:
    """The backward of long sequences reached more than FlashAttention-3's rate."""
    for width in (64, 80, 96, 128, 192, 256):
        for n_keys in (512, 1024, 2048, 5000, 16_384, 131_072):
            for backward in (False, True):
                shares = [
                    rates.attention_share(width, n_keys, backward=backward, deterministic=False)
                    for rates in (OPTIMISTIC, SUSTAINED)
                ]
                assert shares[0] >= shares[1] or (width >= 96 and backward and n_keys > 8192)
    for name in ("matmul", "matmul_table", "grouped", "nvlink", "network"):
        assert getattr(OPTIMISTIC, name).value >= getattr(SUSTAINED, name).value
