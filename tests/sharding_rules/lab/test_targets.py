"""Devices that are not here, in processes that say nothing to JAX, as a user's: tests/conftest.py
chooses a platform, which hides much."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE, bare

pytestmark = pytest.mark.deviceless
ASK = """
import jax
from jax_plugins import xla_cuda13

def no_cudnn(**how):
    raise RuntimeError("Unable to load cuDNN. Is it installed?")

xla_cuda13._check_cuda_versions = no_cudnn  # as with the extra aot alone, whatever else is installed here
{before}
from sharding_rules.lab import targets
{after}
print(targets.devices("h100", 8)[0].device_kind, jax.devices()[0].platform, jax.config.values["jax_platforms"])
"""


def asked(
    before: str = "", after: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """before, after: code that runs before and after the lab is imported."""
    command = [sys.executable, "-c", ASK.format(before=before, after=after)]
    return subprocess.run(
        command, env=bare(**environment), capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.fixture
def no_gpu() -> None:
    if any(Path("/dev").glob("nvidia*")):
        pytest.skip("this machine has a GPU")


@pytest.mark.usefixtures("no_gpu")
def test_the_platform_stays_the_users() -> None:
    """Neither chosen for the process, nor anything said: JAX finds its CPU, as it would without the
    lab."""
    done = asked()
    assert (done.stdout, done.stderr) == ("NVIDIA H100 80GB HBM3 cpu None\n", "")


@pytest.mark.usefixtures("no_gpu")
def test_jax_may_be_used_between() -> None:
    """After the import the plugin prints nothing, whatever uses JAX first."""
    done = asked(after="jax.numpy.arange(3).block_until_ready()")
    assert (done.stdout, done.stderr) == ("NVIDIA H100 80GB HBM3 cpu None\n", "")


@pytest.mark.usefixtures("no_gpu")
def test_jax_may_have_been_used_before() -> None:
    """The plugin then has failed its check for cuDNN, of which JAX has complained, and will not be
    asked again by JAX."""
    done = asked("jax.numpy.arange(3).block_until_ready()")
    assert done.stdout == "NVIDIA H100 80GB HBM3 cpu None\n", done.stderr


def test_beside_a_gpu_it_says_what_to_set(tmp_path: Path) -> None:
    """There JAX would take the GPU, without the libraries that it needs to."""
    (tmp_path / "nvidia0").touch()
    seen = f"targets._DEVICES = __import__('pathlib').Path({str(tmp_path)!r})"
    *_, said = asked(after=seen, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="").stderr.splitlines()
    assert said == (
        "sharding_rules.lab.report.LabError: JAX's plugin for CUDA does not start: Unable to load "
        "cuDNN. Is it installed?; on a machine with an NVIDIA GPU it needs CUDA's libraries even "
        "where it only compiles. Set JAX_PLATFORMS=cpu in the environment to leave the GPU alone, "
        "or run: pip install 'jax[cuda13]'"
    )
    assert asked(after=seen, JAX_PLATFORMS="cpu").stdout == "NVIDIA H100 80GB HBM3 cpu cpu\n"
