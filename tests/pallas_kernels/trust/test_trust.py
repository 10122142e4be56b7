"""Kernels are tested before their first use: verdicts from a process of its own, on disk, and in
this process."""

import dataclasses
import json
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import describe_attention
from pallas_kernels.attention import api
from pallas_kernels.attention.self_test import kind_of
from pallas_kernels.trust import (
    VARIABLE,
    Kind,
    Store,
    Trial,
    Verdict,
    assess,
    gpu_here,
    policy,
    settle,
    trusted,
    verdict,
    worst,
)

PLANTED = Path(__file__).with_name("planted.py")
GPU = ("NVIDIA H100 80GB HBM3", "570.86.15")


def problem(N: int = 2, K: int = 2, S: int = 1024, H: int = 64, **features):
    q, k = (jax.ShapeDtypeStruct((4, S, heads, H), jnp.bfloat16) for heads in (N, K))
    return describe_attention(q, k, k, platform="gpu", capability=(9, 0), **features)


def small(**changes) -> Kind:
    """A kind with the smallest shapes that have several tiles."""
    facts = kind_of(problem()).values | {"shapes": [[1, 136, 136, 2, 1]]}
    return Kind.of("attention", facts | changes)


def trial(fault: str, **limits: float) -> Trial:
    return Trial((sys.executable, str(PLANTED), fault), **limits)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "_settled", {})
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "kernels", GPU, "source")


def counted(
    tmp_path: Path, line: str = '{"status": "passed", "reason": "fine"}', seconds: float = 0
) -> Trial:
    """A test without JAX that writes a line into a file each time it runs."""
    runs = str(tmp_path / "runs")
    code = (
        f"import time; open({runs!r}, 'a').write('x\\n'); time.sleep({seconds}); print('@self-test "
        f"' + {line!r})"
    )
    return Trial((sys.executable, "-c", code))


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    ("fault", "limits", "status", "reason"),
    [
        ("none", {}, "passed", "it agrees with XLA, and repeatedly"),
        pytest.param(
            "hang", {"run": 1.0}, "failed", "it did not finish within 1 s", marks=pytest.mark.slow
        ),
        ("dies", {}, "failed", "its self-test was ended by SIGSEGV when the kernel ran"),
        pytest.param(
            "wrong",
            {},
            "failed",
            "out is too far from the reference: over 0.008",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("races", {}, "failed", "out differs when it is computed again"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("refused", {}, "failed", "NotImplementedError: no lowering for this version of jax"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "no memory",
            {},
            "untested",
            "its self-test could not be run: RuntimeError: RESOURCE_EXHAUSTED",
            marks=pytest.mark.slow,
        ),
        ("slow start", {"start": 0.5}, "untested", "its self-test did not start within 0.5 s"),
    ],
)
def test_a_planted_fault_is_found_in_a_process_of_its_own(
    fault: str, limits: dict, status: str, reason: str
) -> None:
    began = time.monotonic()
    found, _ = trial(fault, **limits)(small())
    assert found.status == status and found.reason.startswith(reason), found
    assert time.monotonic() - began < 100, "a hanging test was not ended"


@pytest.mark.slow
def test_a_test_ends_with_the_run_that_started_it(tmp_path: Path) -> None:
    """A kernel that hangs must not hold the GPU of a run that was killed."""
    code = (
        "import sys; from pallas_kernels.trust import Kind, Trial; Trial((sys.executable, "
        "sys.argv[1], 'slow start'))(Kind.of('attention', {'pid': sys.argv[2]}))"
    )
    run, pid = (
        subprocess.Popen([sys.executable, "-c", code, str(PLANTED), str(tmp_path / "pid")]),
        tmp_path / "pid",
    )
    until = time.monotonic() + 60
    while not (pid.is_file() and pid.read_text(encoding="utf-8")) and time.monotonic() < until:
        time.sleep(0.1)
    run.kill()
    run.wait()
    status = Path("/proc") / pid.read_text(encoding="utf-8") / "status"
    while (
        status.exists()
        and "State:\tZ" not in status.read_text(encoding="utf-8")
        and time.monotonic() < until
    ):
        time.sleep(0.1)
    assert time.monotonic() < until, "the test is still running"


def test_a_command_that_is_not_there_says_nothing_of_the_kernel() -> None:
    found, _ = Trial(("/no/such/python",))(small())
    assert found.status == "untested" and "could not be started" in found.reason


def test_without_a_gpu_the_test_says_nothing_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found, _ = Trial()(small())
    assert found.status == "untested" and "JAX uses the platform cpu" in found.reason


def test_a_verdict_is_kept_until_something_that_decides_it_changes(
    store: Store, tmp_path: Path
) -> None:
    once = counted(tmp_path)
    first, second = (assess(small(), store, once) for _ in range(2))
    assert first == second and first.passed and Path(first.report).is_file() and runs(tmp_path) == 1
    others = [
        dataclasses.replace(store, gpu=("NVIDIA H200", GPU[1])),
        dataclasses.replace(store, gpu=(GPU[0], "580.1")),
        dataclasses.replace(store, source="other"),
    ]
    for n, other in enumerate(others):
        assert assess(small(), other, once).passed and runs(tmp_path) == 2 + n
    assess(small(window=100), store, once)
    assert runs(tmp_path) == 5


def test_another_version_of_jax_tests_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = store.path(small())
    monkeypatch.setattr("pallas_kernels.trust.store.versions", lambda: ("jax 99",))
    assert store.path(small()) != before


def test_a_failure_is_kept_with_its_output_and_a_warning_says_how_to_report_it(
    store: Store, tmp_path: Path
) -> None:
    failing = counted(tmp_path, '{"status": "failed", "reason": "out is wrong"}')
    with pytest.warns(
        RuntimeWarning,
        match=r"failed its self-test on this GPU and is not used: out is wrong\. Please report it",
    ):
        assert not trusted(small(), store, failing).passed
    with warnings.catch_warnings(action="error"):
        assert not trusted(small(), store, failing).passed  # once is enough
    file = Path(store.get(small()).report)
    row = json.loads(file.read_text(encoding="utf-8"))
    assert (row["status"], row["reason"], row["gpu"], row["kind"]) == (
        "failed",
        "out is wrong",
        list(GPU),
        small().values,
    )
    assert runs(tmp_path) == 1
    file.write_text("{", encoding="utf-8")
    assess(small(), store, failing)
    assert runs(tmp_path) == 2, "a damaged file was believed"


def test_a_test_that_could_not_run_is_repeated(store: Store, tmp_path: Path) -> None:
    busy = counted(tmp_path, '{"status": "untested", "reason": "no memory"}')
    for _ in range(2):
        assert assess(small(), store, busy) == Verdict("untested", "no memory")
    assert runs(tmp_path) == 2


def test_a_cache_that_cannot_be_written_costs_only_another_test(tmp_path: Path) -> None:
    # root may write into any directory, but not below a file
    (tmp_path / "file").write_text("", encoding="utf-8")
    store, once = Store(tmp_path / "file" / "kernels", GPU, "source"), counted(tmp_path)
    for n in (1, 2):
        found = assess(small(), store, once)
        assert found == Verdict("passed", "fine") and runs(tmp_path) == n


def test_processes_of_a_host_test_once(store: Store, tmp_path: Path) -> None:
    """By threads: a lock belongs to an open file, of which each of them has its own."""
    slow = counted(tmp_path, seconds=0.5)
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda _: assess(small(), store, slow), range(3))]
    assert [each.status for each in found] == ["passed"] * 3 and runs(tmp_path) == 1


def test_a_user_may_skip_the_test_or_the_kernels(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, passed in (("always", True), ("never", False)):
        monkeypatch.setenv(VARIABLE, value)
        found = assess(small(), store, counted(tmp_path))
        assert found.passed is passed and found.reason == f"{VARIABLE}={value}"
    assert not (tmp_path / "runs").exists()
    with warnings.catch_warnings(action="error"):
        assert not trusted(small()).passed  # what the user asked for needs no warning
    monkeypatch.setenv(VARIABLE, "perhaps")
    with pytest.raises(
        ValueError,
        match="MESH_LM_TRUST_KERNELS must be unset or one of test, always, never, got 'perhaps'",
    ):
        policy()


def test_several_processes_use_what_was_settled_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    settle([(small(), Verdict("passed", "fine"))])
    assert trusted(small()).passed
    with pytest.warns(RuntimeWarning, match="did not foresee this kind"):
        assert trusted(small(window=100)).status == "untested"


def test_the_worst_verdict_counts() -> None:
    passed, untested, failed = (Verdict(status, "") for status in ("passed", "untested", "failed"))
    assert (
        worst([passed, untested, failed]) == failed
        and worst([passed, untested]) == untested
        and worst([passed, passed]) == passed
    )


def test_a_kernel_that_failed_gives_way_to_the_next() -> None:
    plain, capped = problem(), problem(softcap=30.0)
    settle(
        [
            (kind_of(each), Verdict("failed", "it did not finish within 60 s"))
            for each in (plain, capped)
        ]
    )
    choices = [api.choose_trusted_attention(each) for each in (plain, capped)]
    assert [choice.name for choice in choices] == ["cudnn", "xla"]
    assert choices[0].rejected["mosaic"] == "it did not finish within 60 s"
    settle([(kind_of(plain), Verdict("passed", ""))])
    assert api.choose_trusted_attention(plain).name == "mosaic"


def test_calls_for_other_devices_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        api,
        "choose_trusted_attention",
        lambda problem: asked.append(problem) or api.Choice("xla", {}),
    )
    q = jax.ShapeDtypeStruct((1, 16, 1, 64), jnp.bfloat16)
    jax.eval_shape(lambda q: api.flash_attention(q, q, q, platform="cpu"), q)
    assert not asked
    jax.eval_shape(lambda q: api.flash_attention(q, q, q), q)
    assert len(asked) == 1


def test_a_kind_has_what_decides_the_code_and_nothing_else() -> None:
    base = kind_of(problem())
    assert base == kind_of(problem(S=4096)), "a length"
    assert kind_of(problem(N=8, K=2)) == kind_of(problem(N=32, K=4))
    others = [
        problem(N=8), problem(S=1000), problem(S=1), problem(H=128), problem(window=7),
        problem(softcap=3.0), problem(causal=False),
        problem(deterministic=True), problem(q_offset=np.zeros((), np.int32)),
        problem(segment_ids=jax.ShapeDtypeStruct((4, 1024), jnp.int32)),
        problem(sinks=jax.ShapeDtypeStruct((2,), jnp.float32)), problem(return_lse=False),
    ]  # fmt: skip
    kinds = [kind_of(each) for each in others]
    assert kinds.pop() == base
    assert len({base, *kinds}) == 1 + len(kinds)


@pytest.mark.parametrize("S", [1024, 1000])
def test_both_grids_of_the_backward_pass_are_tested(S: int) -> None:
    from pallas_kernels.attention.occupancy import by_query_head

    split = [
        by_query_head(B, N, K, T) for B, _, T, N, K in kind_of(problem(S=S, N=8)).values["shapes"]
    ]
    assert split == [True, False]


def test_the_gpu_is_known_without_using_it(tmp_path: Path) -> None:
    (tmp_path / "gpus" / "0000:19:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:19:00.0" / "information").write_text(
        "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 18\n", encoding="utf-8"
    )
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
        encoding="utf-8",
    )
    assert gpu_here(tmp_path) == GPU


def test_a_test_does_not_claim_the_gpus_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/else")
    said = (
        "{'status': 'passed', 'reason': os.environ['PYTHONPATH'] + ' ' + "
        "os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']}"
    )
    code = f"import os, json; print('@self-test ' + json.dumps({said}))"
    found, _ = Trial((sys.executable, "-c", code))(small())
    assert found.reason == f"{Path(api.__file__).parents[2]}{os.pathsep}/else false"
