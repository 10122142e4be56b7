"""A step made twice: one flipped bit in either of the two runs is found under any rules, and a
healthy run is not changed by it."""

import re

import jax
import numpy as np
import pytest
from replayed import UP, Calls, flipped, sharded, trainer
from support import host_batch, on_devices, with_flipped_bit

from mesh_lm import distributed
from mesh_lm.state.initial import init_state
from mesh_lm.training import replay
from mesh_lm.training.replay import StepsDiffer

COMPILE_BUDGET = 60
MORE = pytest.mark.exhaustive
EACH = [
    "fsdp",
    pytest.param("distributed", marks=pytest.mark.slow),
    pytest.param("ddp", marks=MORE),
    pytest.param("zero2", marks=MORE),
]


@pytest.mark.slow
@pytest.mark.parametrize("rules", EACH)
def test_a_healthy_run_is_not_changed(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout included; every second step is made twice, once outside of what counts as training,
    and nothing is compiled again."""
    _, _, step = trainer(rules)
    calls, met = Calls(lambda: step), list[tuple[int, bool]]()
    gather = distributed.gather_from_all

    def meet(value: object) -> list[object]:
        met.append((calls.calls, calls.inside))
        return gather(value)

    monkeypatch.setattr(distributed, "gather_from_all", meet)
    after = calls.train(rules, 4)
    assert met == [(2, True), (3, True), (5, True), (6, True)], (
        "they meet before the second run, where the watchdogs are patient"
    )
    assert (calls.calls, calls.paused_calls) == (6, 2)
    assert step._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess]
    plain, batch = init_state(*trainer(rules)[:2], 0), on_devices(host_batch(1), trainer(rules)[0])
    for _ in range(4):
        plain, _ = step(plain, batch)
    for (path, x), y in zip(
        jax.tree_util.tree_flatten_with_path(after)[0], jax.tree.leaves(plain), strict=True
    ):
        assert x.sharding == y.sharding, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), str(path))


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("rules", EACH)
def test_one_bit_of_one_shard(rules: str, call: int) -> None:
    """An update that one device computes wrongly, in the first or the second of the two runs: its
    leaf and device are named."""
    _, _, step = trainer(rules)
    part, name = sharded(init_state(*trainer(rules)[:2], 0))
    calls = Calls(
        lambda: step,
        fault=lambda n, state: flipped(state, part, name, device=2) if n == call else state,
    )
    with pytest.raises(StepsDiffer) as error:
        calls.train(rules, 4)
    head, line, *_ = str(error.value).splitlines()
    assert head.startswith(
        "step 2 was made twice from the same state and batch, and the results differ; a device, "
        "its memory or a link"
    )
    assert re.fullmatch(
        rf"  - device 2 \(process 0 on \S+, cpu:2\): {part}/{re.escape(name)}", line
    ), line
    assert "all" not in str(error.value) and calls.step == 1


@pytest.mark.slow
@pytest.mark.parametrize("rules", EACH[:2])
def test_a_wrong_gradient_reaches_all_devices(rules: str) -> None:
    """A bit that is wrong while one device computes the first run is found, and the message says
    that it does not show which device."""
    _, _, step = trainer(rules)
    calls = Calls(
        lambda: step, before=lambda n, state: flipped(state, *UP, device=2) if n == 1 else state
    )
    with pytest.raises(
        StepsDiffer,
        match=r"all 4 devices differ, as after a gradient that one of them computed wrongly",
    ):
        calls.train(rules, 2)


def test_a_copy_that_was_damaged_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step = trainer("fsdp")
    put_back = replay.put_back
    monkeypatch.setattr(
        replay,
        "put_back",
        lambda *given: flipped(state := put_back(*given), *sharded(state), device=3),
    )
    with pytest.raises(
        StepsDiffer, match=r"the state before step 2 came back from host memory with other bits"
    ) as error:
        Calls(lambda: step).train("fsdp", 2)
    assert "device 3" in str(error.value) and "device 2" not in str(error.value)


def test_a_replica_that_differed_already_is_not_repaired() -> None:
    _, _, step = trainer("fsdp")
    sick = lambda state: {**state, "recent": with_flipped_bit(state["recent"], device=1)}  # noqa: E731
    calls = Calls(lambda: step, fault=lambda n, state: sick(state) if n == 0 else state)
    with pytest.raises(
        StepsDiffer, match=r"or was not the same on all of its replicas(.|\n)*device 1 .*: recent\n"
    ):
        calls.train("fsdp", 2)
