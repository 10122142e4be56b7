"""Sets of XLA flags: known to the XLA that is installed, whichever of the two that is."""

import jax
import pytest

from sharding_rules.lab.flags import FLAG_SETS, VETTED, auto, options, written, xla_flags
from sharding_rules.lab.report import LabError

COMPILE_BUDGET = 2


def test_xla_knows_every_flag() -> None:
    """The names are the same for all devices. An unknown one in XLA_FLAGS ends the process, so this
    is what keeps runs alive."""
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    every = {flag: value for name in FLAG_SETS for flag, value in options(name).items()}
    lowered.compile(compiler_options=every)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={**every, "xla_gpu_no_such_flag": True})


def test_a_gpu_gets_the_set_of_its_generation() -> None:
    assert (
        VETTED.keys() == {"ampere", "hopper", "blackwell"}
        and set(VETTED.values()) <= FLAG_SETS.keys()
    )
    assert xla_flags("auto", (9, 0)) == "--xla_gpu_enable_latency_hiding_scheduler=true"
    assert xla_flags("auto", (7, 0)) == xla_flags("default", (9, 0)) == "", (
        "nothing is vetted for a V100"
    )
    assert [auto(gpu, pipeline=True) for gpu in ((9, 0), (8, 0), (7, 0))] == [
        "pipeline",
        "pipeline",
        "default",
    ]
    assert [auto((9, 0), stages, pairs=True) for stages in (True, False)] == [
        "pipeline_pairs",
        "overlap",
    ]
    assert options("pipeline_pairs") == {
        **options("pipeline"),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    }


def test_flags_are_written_as_xla_reads_them() -> None:
    assert written({"a": False, "b": 1 << 20, "c": "x=1"}) == "--a=false --b=1048576 --c=x=1"


def test_an_unknown_set_is_named() -> None:
    with pytest.raises(LabError, match=r"overlop.*overlap"):
        options("overlop")
