"""XLA's flags for a GPU, chosen by the name that the driver reports. No GPU is needed, and JAX only
to compile with the flags."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mesh_lm.distributed.gpu import absent, missing, set_flags, set_memory, visible
from mesh_lm.errors import ConfigError
from pallas_kernels import describe_attention
from sharding_rules.lab.targets import h100

COMPILE_BUDGET = 3

OVERLAP = "--xla_gpu_enable_latency_hiding_scheduler=true"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A machine with two H100s, as /proc/driver/nvidia/gpus shows them."""
    for bus in ("0000:19:00.0", "0000:3b:00.0"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n", encoding="utf-8"
        )
    return tmp_path


def test_flags_are_added_to_those_that_are_there(driver: Path) -> None:
    environment = {"XLA_FLAGS": "--xla_dump_to=here"}
    printed = set_flags("auto", environment, driver)
    assert environment["XLA_FLAGS"] == f"--xla_dump_to=here {OVERLAP}"
    assert printed == f"XLA flags for NVIDIA H100 80GB HBM3 (launch.xla_flags=auto): {OVERLAP}"
    assert set_flags("auto", environment, driver) == "", "once is enough"


def test_a_mesh_with_stages_sends_beside_their_work(driver: Path) -> None:
    sends = (
        "--xla_gpu_experimental_parallel_collective_overlap_limit=8 "
        "--xla_gpu_memory_limit_slop_factor=110"
    )
    environment: dict[str, str] = {}
    assert set_flags("auto", environment, driver, pipeline=True).endswith(f": {OVERLAP} {sends}")
    assert environment == {"XLA_FLAGS": f"{OVERLAP} {sends}"}
    assert sends not in set_flags("overlap", {}, driver, pipeline=True), (
        "a set that was asked for stays as it is"
    )


def test_slots_side_by_side_keep_their_collectives_apart(driver: Path) -> None:
    apart = "--xla_gpu_reduce_scatter_combine_threshold_bytes=1"
    printed = set_flags("auto", {}, driver, pipeline=True, pairs=True)
    assert printed.endswith(f" {apart}")
    assert printed.removesuffix(f" {apart}") == set_flags("auto", {}, driver, pipeline=True)


def test_a_flag_of_the_users_keeps_its_value(driver: Path) -> None:
    environment = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}
    assert set_flags("overlap", environment, driver) == ""
    assert environment == {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}
    assert missing("--a=1 --ab=2", "--ab=3 --c") == "--a=1"


@pytest.mark.parametrize(
    "changes",
    [
        {"JAX_PLATFORMS": "cpu"},
        *({"CUDA_VISIBLE_DEVICES": none} for none in ("", "-1", "NoDevFiles")),
    ],
)
def test_a_run_on_the_cpu_is_left_alone(driver: Path, changes: dict[str, str]) -> None:
    environment = dict(changes)
    assert set_flags("auto", environment, driver) == ""
    assert environment == changes


def test_none_sets_nothing(driver: Path) -> None:
    environment: dict[str, str] = {}
    assert set_flags("none", environment, driver) == ""
    assert environment == {}


def test_a_gpu_that_nothing_is_vetted_for_gets_nothing_and_hears_of_it(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "information").write_text(
        "Model: \t\t Tesla V100-SXM2-16GB\n", encoding="utf-8"
    )
    environment: dict[str, str] = {"JAX_PLATFORMS": "cuda,cpu"}
    assert (
        set_flags("auto", environment, tmp_path)
        == "XLA flags: none, because none are vetted for Tesla V100-SXM2-16GB"
    )
    assert "XLA_FLAGS" not in environment


def test_without_the_drivers_files_nvidia_smi_is_asked(tmp_path: Path) -> None:
    assert visible({"PATH": str(tmp_path)}, tmp_path) == ""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA B200'\necho 'NVIDIA B200'\n", encoding="utf-8")
    tool.chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    assert visible(environment, tmp_path / "nothing") == "NVIDIA B200"
    assert OVERLAP in set_flags("auto", environment, tmp_path / "nothing")
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert visible(environment, tmp_path / "nothing") == "", (
        "a driver that does not answer is no GPU"
    )


def test_a_set_that_does_not_exist(driver: Path) -> None:
    with pytest.raises(
        ConfigError, match="xla_flags='fast' must be one of the sets auto, none, default, overlap"
    ):
        set_flags("fast", {}, driver)


def test_the_same_bits_every_time(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    autotuning = tmp_path / "run" / "autotuning"
    mine = f"--xla_gpu_deterministic_ops=true --xla_gpu_per_fusion_autotune_cache_dir={autotuning}"
    environment = {"XLA_FLAGS": "--xla_dump_to=here"}
    printed = set_flags("auto", environment, driver, deterministic=autotuning)
    assert environment == {"XLA_FLAGS": f"--xla_dump_to=here {OVERLAP} {mine}"}
    assert autotuning.is_dir()
    assert printed.endswith(f"\nXLA flags for determinism (launch.deterministic): {mine}")
    assert set_flags("auto", environment, driver, deterministic=autotuning) == "", "once is enough"
    alone: dict[str, str] = {}
    set_flags("none", alone, driver, deterministic=autotuning)
    assert alone == {"XLA_FLAGS": mine}, (
        "also with no set of flags, or on a GPU that none is vetted for"
    )
    cpu = {"JAX_PLATFORMS": "cpu"}
    assert set_flags("auto", cpu, driver, deterministic=tmp_path / "nothing") == ""
    assert "XLA_FLAGS" not in cpu
    assert not (tmp_path / "nothing").exists()
    jax.devices()  # the backend starts with the flags of the whole run, not with those below
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    for flags, fixed in ((mine, True), (OVERLAP, False)):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert describe_attention(q, q, q).deterministic is fixed, (
            "our attention kernel follows XLA's flag"
        )


def test_the_same_bits_are_refused_where_they_cannot_be_had(driver: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="XLA_FLAGS has --xla_gpu_deterministic_ops=false; remove one of them"
    ):
        set_flags(
            "auto",
            {"XLA_FLAGS": "--xla_gpu_deterministic_ops=false"},
            driver,
            deterministic=tmp_path / "kept",
        )
    with pytest.raises(ConfigError, match="set an output without spaces"):
        set_flags("auto", {}, driver, deterministic=tmp_path / "my run")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make .*/file/autotuning: Not a directory"):
        set_flags("auto", {}, driver, deterministic=tmp_path / "file" / "autotuning")


@pytest.mark.deviceless
def test_xla_sorts_before_it_adds_up_an_embeddings_gradient(driver: Path, tmp_path: Path) -> None:
    """The flag's effect on a program without convolutions: rows of one token are added in a fixed
    order, without a loop over tokens."""
    environment: dict[str, str] = {}
    set_flags("none", environment, driver, deterministic=tmp_path / "kept")
    flags: dict[str, Any] = dict(
        word.lstrip("-").split("=") for word in environment["XLA_FLAGS"].split()
    )
    flags["xla_gpu_deterministic_ops"] = flags["xla_gpu_deterministic_ops"] == "true"
    sharding = jax.NamedSharding(h100(data=1), jax.P())
    tokens = jax.ShapeDtypeStruct((512,), jnp.int32, sharding=sharding)
    rows = jax.ShapeDtypeStruct((512, 128), jnp.float32, sharding=sharding)
    add = jax.jit(lambda tokens, rows: jnp.zeros((1024, 128)).at[tokens].add(rows))
    lowered = add.lower(tokens, rows)
    plain = str(lowered.compile(compiler_options={}).as_text())
    deterministic = str(lowered.compile(compiler_options=flags).as_text())
    assert " sort(" not in plain
    assert " sort(" in deterministic
    assert " while(" not in deterministic


def test_jax_gets_the_memory_that_a_plan_counts_on(driver: Path, tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    set_memory(environment, driver)
    assert environment == {"XLA_CLIENT_MEM_FRACTION": "0.92"}
    mine = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    set_memory(mine, driver)
    cpu = {"JAX_PLATFORMS": "cpu"}
    set_memory(cpu, driver)
    assert mine == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}
    assert cpu == {"JAX_PLATFORMS": "cpu"}


def test_a_gpu_is_absent_only_where_nothing_speaks_of_one(driver: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "dev"
    nothing.mkdir()
    assert absent({"PATH": str(nothing)}, nothing, nothing)
    assert not absent({"PATH": str(nothing)}, nothing, driver)
    (nothing / "nvidiactl").touch()
    assert not absent({"PATH": str(nothing)}, nothing, tmp_path / "none")
