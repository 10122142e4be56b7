"""What is compiled without assembly is the program that would have run."""

import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from sharding_rules.lab.assembler import unassembled
from sharding_rules.lab.compile import _uncached
from sharding_rules.lab.targets import devices

COMPILE_BUDGET = 2


def test_a_device_that_is_here_gets_machine_code(tmp_path: Path) -> None:
    assert unassembled(jax.devices()[0], str(tmp_path / "cuda")) == {} and not list(
        tmp_path.iterdir()
    )


@pytest.mark.deviceless
def test_a_gpu_that_is_here_runs_what_is_assembled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA tries kernels on it while it compiles for another."""
    (absent,) = devices("h100", 1)
    assert "xla_gpu_cuda_data_dir" in unassembled(absent, str(tmp_path / "cuda"))
    monkeypatch.setattr(jax, "devices", lambda platform: [platform])
    assert unassembled(absent, str(tmp_path / "other")) == {} and not (tmp_path / "other").exists()


@pytest.mark.deviceless
def test_the_same_program_and_memory(tmp_path: Path) -> None:
    mesh = Mesh(np.array(devices("h100", 2)), ("data",))
    x = jax.ShapeDtypeStruct((256, 256), "float32", sharding=jax.NamedSharding(mesh, jax.P("data")))
    lowered = jax.jit(lambda x: (jax.nn.softmax(x @ x.T), x.sum())).lower(x)
    # A folder whose name is no word of the shell.
    option = unassembled(mesh.devices.flat[0], str(tmp_path / "it's here"))
    with _uncached():
        assembled, quick = lowered.compile(), lowered.compile(compiler_options=option)
    assert quick.as_text() == assembled.as_text()
    assert (
        quick.memory_analysis().temp_size_in_bytes == assembled.memory_analysis().temp_size_in_bytes
    )

    tool = Path(option["xla_gpu_cuda_data_dir"]) / "bin" / "ptxas"
    made = tmp_path / "made"
    subprocess.run([tool, "program.ptx", "-o", made, "-arch=sm_90a"], check=True)
    assert made.read_text(encoding="utf-8") == "none\n"
    version = subprocess.run([tool, "--version"], check=True, capture_output=True, text=True).stdout
    assert "assembler" in version
