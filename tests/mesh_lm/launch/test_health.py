"""Health checks against what sick hardware would print: nvidia-smi, the kernel's log, /sys, disks,
and programs that end wrongly."""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mesh_lm.launch import agent
from mesh_lm.launch.health import Examination, checks, gpu, matrix_product, programs, system
from mesh_lm.launch.health.finding import Finding
from mesh_lm.launch.job import Job
from mesh_lm.network.secret import Secret

UUIDS = [f"GPU-{i}a0b1c2d-0000-4000-8000-00000000000{i}" for i in range(8)]
BUSES = [f"00000000:{i}A:00.0" for i in range(8)]


class Smi:
    """Stands in for nvidia-smi: `ecc`, `pending`, `hot`, `links` and the like are what each GPU
    reports."""

    def __init__(self, gpus: int = 8) -> None:
        self.gpus = [*range(gpus)]
        self.ecc = ["0"] * 8
        self.hot = ["Not Active"] * 8
        self.brake = ["Not Active"] * 8
        self.pending = ["No"] * 8
        self.failure = ["No"] * 8
        self.links = [18] * 8
        self.unknown: tuple[str, ...] = ()
        self.error = ""

    def __call__(self, *words: str) -> str:
        if self.error:
            raise RuntimeError(self.error)
        if words[0] == "nvlink":
            return "".join(map(self._nvlink_status, self.gpus))
        option, _, fields = words[0].partition("=")
        for field in fields.split(","):
            if field.startswith(self.unknown) and self.unknown:
                raise RuntimeError(
                    f'nvidia-smi ended with status 2: Field "{field}" is not a valid field to '
                    "query."
                )
        columns = {
            "index": [*map(str, range(8))],
            "uuid": UUIDS,
            "pci.bus_id": BUSES,
            "gpu_bus_id": BUSES,
            "ecc.errors.uncorrected.volatile.total": self.ecc,
            "remapped_rows.pending": self.pending,
            "remapped_rows.failure": self.failure,
        }
        for kind in ("event", "throttle"):
            columns |= {
                f"clocks_{kind}_reasons.hw_thermal_slowdown": self.hot,
                f"clocks_{kind}_reasons.hw_power_brake_slowdown": self.brake,
            }
        assert option in ("--query-gpu", "--query-remapped-rows")
        assert words[1].startswith("--format=csv,noheader")
        lines = [", ".join(columns[field][i] for field in fields.split(",")) for i in self.gpus]
        return "".join(f"{line}\n" for line in lines)

    def _nvlink_status(self, i: int) -> str:
        lines = [f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[i]})"]
        for n in range(18):
            lines.append(f"\t Link {n}: {'26.562 GB/s' if n < self.links[i] else '<inactive>'}")
        return "".join(f"{line}\n" for line in lines)


def test_gpu_memory() -> None:
    smi = Smi()
    gpus = gpu.Gpus(smi, {})
    assert gpus.memory() == ("ok", "8 GPUs")
    smi.ecc[3] = "2"
    smi.ecc[4] = "[N/A]"
    assert gpus.memory() == (
        "failed",
        (
            "GPU 3 has 2 uncorrected ECC errors: reset the GPU (nvidia-smi --gpu-reset -i 3), or "
            "reboot the node"
        ),
    )
    smi.ecc[3] = "0"
    smi.pending[5] = "Yes"
    smi.failure[6] = "1"
    assert gpus.memory() == (
        "failed",
        "GPU 5 has memory rows to remap: reset the GPU (nvidia-smi --gpu-reset -i 5), or reboot "
        "the node; GPU 6 could not remap a bad memory row: replace it",
    )
    smi.unknown = ("remapped_rows",)
    assert gpus.memory()[0] == "ok", "a GPU that does not remap rows"
    smi.gpus.remove(7)
    assert gpus.memory() == gpus.memory() == ("failed", "7 of 8 GPUs are left: reboot the node")
    smi.error = (
        "nvidia-smi ended with status 15: Unable to determine the device handle for "
        "GPU0000:7A:00.0: GPU is lost."
    )
    assert gpus.memory() == ("failed", f"{smi.error}; reboot the node")
    smi.error = (
        "nvidia-smi ended with status 9: NVIDIA-SMI has failed because it couldn't communicate "
        "with the NVIDIA driver."
    )
    assert gpus.memory() == ("unknown", smi.error)


@pytest.mark.parametrize("visible", ["0,1", f"{UUIDS[0]},{UUIDS[1][:12]}"])
def test_gpus_of_other_jobs_are_not_checked(visible: str) -> None:
    smi = Smi()
    smi.ecc[2] = "1"
    smi.hot[2] = "Active"
    smi.links[2] = 1
    gpus = gpu.Gpus(smi, {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpus.memory(), gpus.clocks(), gpus.nvlink()] == [
        ("ok", "2 GPUs"),
        ("ok", "2 GPUs"),
        ("ok", "36 links"),
    ]
    everything = gpu.Gpus(smi, {"CUDA_VISIBLE_DEVICES": "MIG-2"})
    assert [everything.memory()[0], everything.clocks()[0], everything.nvlink()[0]] == [
        "failed"
    ] * 3


def test_gpu_clocks() -> None:
    smi = Smi(2)
    smi.unknown = ("clocks_event",)  # as drivers before 535
    assert gpu.Gpus(smi, {}).clocks() == ("ok", "2 GPUs")
    smi.hot[0] = smi.brake[1] = "Active"
    assert gpu.Gpus(smi, {}).clocks() == (
        "failed",
        (
            "GPU 0 is slowed down because it is too hot: check the cooling; GPU 1 is slowed down "
            "by its power brake: check the power supply"
        ),
    )


def test_nvlink() -> None:
    smi = Smi()
    smi.links[2] = 17
    assert gpu.Gpus(smi, {}).nvlink()[1].startswith("GPU 2 has 17 of 18 NVLinks: reset the GPU")
    smi.links[2] = 18
    smi.links[6:] = [0, 0]
    assert gpu.Gpus(smi, {}).nvlink() == ("ok", "108 links"), "two cards have no bridge"
    smi.links[:4] = [0, 0, 18, 18]
    smi.gpus = [0, 1, 2, 3]
    gpus = gpu.Gpus(smi, {})
    assert gpus.nvlink() == ("ok", "36 links"), "two of four are bridged"
    smi.links[2] = 0
    assert gpus.nvlink() == (
        "failed",
        "GPU 2 has 0 of 18 NVLinks: reset the GPU (nvidia-smi --gpu-reset -i 2), or reboot the node",
    )
    assert gpus.nvlink()[0] == "failed", "what was seen once is expected"


def test_xids() -> None:
    def line(seconds: float, text: str) -> str:
        return f"4,1234,{seconds * 1e6:.0f},-;NVRM: Xid (PCI:0000:1a:00): {text}"

    lost = line(5000, "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    gpus = gpu.Gpus(Smi(), {})
    out_of_bounds = line(5000, "31, pid=1, MMU Fault")
    other = "6,1,5000000000,-;eth0: link up"
    assert gpus.xids([out_of_bounds, other], 5030) == ("ok", "no Xid"), "an error of the program"
    assert gpus.xids([lost, lost, other], 5030) == (
        "failed",
        (
            "GPU at 0000:1a:00: Xid 79 30 s ago (it has fallen off the bus): reset the GPU, or "
            "reboot the node"
        ),
    )
    assert gpus.xids([lost], 5030 + gpu.COUNTS - 1)[0] == "failed"
    assert gpus.xids([lost], 5030 + gpu.COUNTS)[0] == "ok", (
        "the run waits for a reset GPU, and nothing clears the log"
    )
    again = line(5100, "79, GPU has fallen off the bus.")
    assert gpus.xids([lost, again], 5030 + gpu.COUNTS)[0] == "failed"
    assert gpu.Gpus(Smi(), {}).xids([lost], 5000 + gpu.RECENT + 1)[0] == "ok"
    without_it = Smi()
    without_it.gpus.remove(1)
    for visible in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        assert gpu.Gpus(without_it, visible).xids([lost], 5030)[0] == "failed", (
            "a GPU that is not listed any more"
        )
    assert gpu.Gpus(Smi(), {"CUDA_VISIBLE_DEVICES": "0"}).xids([lost], 5030)[0] == "ok", (
        "a GPU of another job"
    )
    part = lost.replace("1a:00", "1a:00 GPU-I:03")
    assert gpu.Gpus(Smi(), {"CUDA_VISIBLE_DEVICES": "1"}).xids([part], 5030)[0] == "failed"
    lost_all = Smi()
    lost_all.error = "GPU is lost"
    assert gpu.Gpus(lost_all, {"CUDA_VISIBLE_DEVICES": "0"}).xids([lost], 5030)[0] == "failed", (
        "nvidia-smi cannot say whose it is"
    )


def test_the_kernels_log_is_read_where_that_is_allowed(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        f"4,1,{time.monotonic() * 1e6:.0f},-;NVRM: Xid (PCI:0000:1a:00): 48, DBE\n",
        encoding="utf-8",
    )
    gpus = gpu.Gpus(Smi(), {})
    assert gpus.kernel_log(log)[0] == "failed"
    (finding,) = wait(Examination({"kernel log": lambda: gpus.kernel_log(tmp_path / "none")}))
    assert finding.outcome == "unknown"
    assert "No such file" in finding.text


def test_network_ports_that_were_active_must_stay_so(tmp_path: Path) -> None:
    def plant(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n", encoding="utf-8")

    plant("net/eth0/operstate", "up")
    plant("net/eth0/device/vendor", "0x15b3")
    plant("infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    plant("infiniband/mlx5_1/ports/1/state", "1: DOWN")
    network = system.Network(tmp_path)
    assert network() == network() == ("ok", "1 ports are active"), "what was never up is not used"
    plant("net/eth0/operstate", "down")
    assert network()[0] == "ok", "a card that the run may not use"
    plant("infiniband/mlx5_0/ports/1/state", "2: INIT")
    assert network() == (
        "failed",
        (
            "mlx5_0 port 1 is 2: INIT, but was active before: check the cable, the switch and the "
            "driver"
        ),
    )
    (tmp_path / "infiniband/mlx5_0/ports/1/state").unlink()
    assert network()[1].startswith("mlx5_0 port 1 is gone, but")


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = system.Disk(tmp_path / "not" / "there")
    assert disk()[0] == "ok"
    assert not [*tmp_path.iterdir()], "it leaves nothing there"
    monkeypatch.setattr(system, "FREE", 1e18)
    assert disk()[0] == "unknown"
    assert "MB left, less than" in disk()[1], "the run's own checkpoints may fill it"

    def fails(number: int) -> Callable[..., None]:
        def fsync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    for number, outcomes in (
        (errno.EIO, ("failed", "failed")),
        (errno.ESTALE, ("failed", "failed")),
        (errno.ENOSPC, ("unknown", "unknown")),
        (errno.EROFS, ("failed", "unknown")),
        (errno.EACCES, ("unknown", "unknown")),
    ):
        monkeypatch.setattr(system.os, "fsync", fails(number))
        disk._worked = True
        assert (disk()[0], system.Disk(tmp_path)()[0]) == outcomes, errno.errorcode[number]
        assert os.strerror(number) in disk()[1]
        assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(system.os, "fsync", lambda _: None)
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"other")
    assert disk() == (
        "failed",
        f"{tmp_path}: a file that was written has other contents when it is read; replace the disk",
    )


def test_directories_on_the_command_line() -> None:
    words = [
        "train.py",
        "--output=a",
        "--config.output",
        "b",
        "--checkpoint.local=c",
        "--outputs=d",
    ]
    assert [
        system.option_value(words, option)
        for option in ("output", "checkpoint.local", "data.cache")
    ] == ["b", "c", ""]


def test_the_product_is_the_one_that_is_known() -> None:
    a, b = matrix_product.matrices(512)
    exact = a.astype(np.int64) @ b.astype(np.int64)
    assert (np.abs(a).astype(np.int64) @ np.abs(b).astype(np.int64)).max() < 2**24, (
        "all sums are exact, in any order"
    )
    assert matrix_product.is_exact(exact)
    assert matrix_product.is_exact(a @ b)
    wrong = exact.copy()
    wrong[17, 4] += 1
    assert not matrix_product.is_exact(wrong)
    assert matrix_product.verdict(wrong) == "failed: its matrix product is wrong"
    assert programs.matrix_product("cpu", os.environ) == ("ok", "exact on all devices (1)")


@pytest.mark.slow
def test_the_product_by_jax(tmp_path: Path) -> None:
    on_cpu = (
        f"import sys; sys.path.insert(0, {str(Path(matrix_product.__file__).parent)!r}); import "
        "matrix_product as m; m.multiply_with_jax('cpu', 512)"
    )
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
    assert programs.matrix_product("gpu", variables, planted(tmp_path / "program.py", on_cpu)) == (
        "ok",
        "exact on all devices (2)",
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_large_product() -> None:
    a, b = matrix_product.matrices(4096)
    assert matrix_product.is_exact(a.astype(np.float64) @ b.astype(np.float64))
    assert (np.abs(a) @ np.abs(b)).max() < 2**24


@pytest.mark.gpu
def test_the_checks_of_this_gpu() -> None:
    """None of them fails on a healthy GPU, and the product is exact."""
    findings = {
        finding.check: finding
        for finding in wait(Examination(checks(Job(("train.py",)), os.environ)))
    }
    assert (
        findings["GPU memory"].outcome
        == findings["GPU clocks"].outcome
        == findings["matrix product"].outcome
        == "ok"
    ), findings
    assert not [finding for finding in findings.values() if finding.outcome == "failed"]


def planted(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_results_of_the_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(text: str, limit: float = 20.0) -> tuple[str, str]:
        return programs.matrix_product(
            "gpu", os.environ, planted(tmp_path / "program.py", text), limit
        )

    assert result("print('devices 2 0.1\\n0 ok\\n1 ok')") == ("ok", "exact on all devices (2)")
    assert result("print('devices 2 0.1\\n0 ok\\n1 failed: its')")[1].startswith(
        "device 1 failed: its; take the node out"
    )
    assert result("print('devices 1 0.1\\n0 failed: ECC')")[0] == "failed"
    assert result("raise ImportError('no jax')") == ("unknown", "ImportError: no jax")
    assert result("print('devices 0 0.1')")[0] == "unknown"
    assert result("import time; time.sleep(60)", 0.5)[0] == "unknown", "it did not come that far"
    assert result("print('devices 2 0.1\\n0 ok\\n1 unknown: RESOURCE_EXHAUSTED')") == (
        "unknown",
        "device 1 RESOURCE_EXHAUSTED",
    )
    hang = "import time; print('devices 2 0.1\\ncompiled 0.1\\n0 ok', flush=True); time.sleep(60)"
    assert result(hang, 0.5)[0] == "unknown", "too early to say"
    monkeypatch.setattr(programs, "_HANGS", 0.2)
    assert result(hang, 2.5)[1].startswith("device 1 did not finish a matrix product within 2 s")
    assert result(hang.replace("compiled 0.1", ""), 0.5)[0] == "unknown", "it may still compile"


def test_which_errors_of_a_product_are_faults_of_the_device() -> None:
    for text, outcome in (
        (
            (
                "INTERNAL: CUDA error: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error "
                "encountered"
            ),
            "failed",
        ),
        ("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered", "failed"),
        ("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure", "failed"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 67108864 bytes.", "unknown"),
        ("INTERNAL: ptxas exited with non-zero error code 1: No space left on device", "unknown"),
    ):
        assert matrix_product.error_verdict(RuntimeError(text)) == f"{outcome}: {text}"


def test_your_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(text: str, mode: int = 0o755) -> tuple[str, str]:
        planted(tmp_path / "check", text).chmod(mode)
        return programs.own_command([str(tmp_path / "check")], os.environ)

    assert result("#!/bin/sh\necho all is well") == ("ok", "all is well")
    assert result("#!/bin/sh\necho a; echo the fan has stopped; exit 3") == (
        "failed",
        "the fan has stopped",
    )
    assert result("#!/bin/sh\nexit 3") == ("failed", f"{tmp_path}/check ended with status 3")
    assert result("#!/no/such/shell\n")[0] == result("#!/bin/sh\nno_such_tool\n")[0] == "unknown"
    monkeypatch.setattr(programs, "_OWN", 0.5)
    assert result("#!/bin/sh\nsleep 60") == (
        "unknown",
        f"{tmp_path}/check did not end within 0.5 s",
    )


def wait(examination: Examination) -> list[Finding]:
    while True:
        findings = examination.findings()
        if findings is not None:
            return findings
        time.sleep(0.01)


def test_an_examination_takes_limited_time_and_its_lines_are_printable() -> None:
    examination = Examination(
        {
            "a": lambda: ("failed", "x\n\x1b[31m" + "y" * 999),
            "b": lambda: time.sleep(60),
            "c": lambda: 1 / 0,
        },
        0.3,
    )  # type: ignore
    first, second, third = wait(examination)
    assert first.text.isprintable()
    assert len(first.text) == 300
    assert first.outcome == "failed"
    assert (second.outcome, second.text) == ("unknown", "no answer within 0.3 s")
    assert (third.outcome, third.text) == ("unknown", "ZeroDivisionError: division by zero")


def test_a_check_that_hangs_is_started_once() -> None:
    started: list[threading.Event] = []

    def hangs() -> tuple[str, str]:
        started.append(threading.Event())
        started[-1].wait(20)
        return "failed", "late"

    first = Examination({"a": hangs}, 0.1)  # type: ignore
    assert wait(first)[0].outcome == "unknown"
    second = Examination({"a": hangs}, 0.1, first)  # type: ignore
    assert wait(second)[0].outcome == "unknown"
    assert len(started) == 1
    started[0].set()
    while second.findings()[0].outcome != "failed":  # type: ignore
        time.sleep(0.01)
    assert wait(Examination({"a": lambda: ("ok", "")}, 5, second))[0].outcome == "ok"


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    assert Examination({"a": lambda: ("failed", "")}).findings() == [
        ("a", "unknown", "can't start new thread")
    ]


def test_nvidia_smi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check does not wait for a process that keeps the output open, as one that SIGKILL does
    not end would. Xids in the kernel's log count."""
    monkeypatch.setattr(gpu, "_LIMIT", 0.5)
    planted(tmp_path / "nvidia-smi", "#!/bin/sh\nsetsid sleep 20 &\nsleep 20\n").chmod(0o755)
    start = time.monotonic()
    gpus = gpu.Gpus(gpu.nvidia_smi(str(tmp_path / "nvidia-smi"), os.environ), {})
    lost = "4,1,5000000000,-;NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus."
    assert gpus.xids([lost], 5030)[0] == "failed"
    assert time.monotonic() - start < 10
    assert gpus.memory() == ("unknown", "nvidia-smi did not answer within 0.5 s")


def test_which_checks_a_node_has(tmp_path: Path) -> None:
    planted(tmp_path / "nvidia-smi", "#!/bin/sh\nexit 9\n").chmod(0o755)
    on_gpus = {"PATH": str(tmp_path), "MESH_LM_SECRET": "hidden from what is run"}
    command = ("train.py", "--checkpoint.local=/scratch")
    gpus = {"GPU memory", "GPU clocks", "NVLink", "kernel log"}
    always = {"temporary directory", "output", "local checkpoints"}
    assert {*checks(Job(command, nodes=2), on_gpus)} == {
        *always,
        *gpus,
        "network",
        "matrix product",
    }
    assert {*checks(Job(command), on_gpus | {"JAX_PLATFORMS": "cpu"})} == {
        *always,
        "matrix product",
    }
    assert {*checks(Job(command, health="quick", devices=2), on_gpus)} == always
    assert not checks(Job(command, health="off", health_command="/bin/false"), on_gpus)
    print_secret = (
        f'{sys.executable} -c \'import os; print(os.environ.get("MESH_LM_SECRET"), '
        'os.environ["MESH_LM_NODE"])\''
    )
    command_check = checks(Job(command, nodes=3, node=2, health_command=print_secret), on_gpus)[
        "command"
    ]
    assert command_check() == ("ok", "None 2")


def test_a_check_that_excludes_no_node_is_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    """A disk that is almost full was checked: the line must not read as if the check had not
    run."""
    node_agent = agent.Agent(Job(("train.py",), health="off"), ("127.0.0.1", 1), Secret.new())
    text = "/r has 2 MB left, less than 100 MB: free disk space"
    examination = SimpleNamespace(findings=lambda: [Finding("output", "unknown", text)])
    peer = cast("Any", SimpleNamespace(send=lambda **_: None))
    node_agent._examination = cast("Any", examination)
    for check in (1, 2):
        previous = agent.Disconnected(since=0.0, patience=1.0)
        node_agent._state = agent.Connected(peer, previous, check=check)
        node_agent._report_health()
    assert (
        capfd.readouterr().err
        == f"[launch] node 0 takes part, with a warning of the health check 'output': {text}\n"
    )
