"""The description that processes compare before they start: what is in it, and what is not."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import PATIENCE

import mesh_lm
from mesh_lm.distributed import description, gpu
from mesh_lm.distributed.description import describe
from mesh_lm.errors import ConfigError
from mesh_lm.network.process_slot import ProcessSlot
from mesh_lm.network.rendezvous import Description, meet
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import free_port


def test_a_description_names_code_and_versions() -> None:
    described = describe({"seed": 1})
    assert {
        "train.py",
        "mesh_lm/training/step.py",
        "sharding_rules/rules.py",
        "pallas_kernels/attention/api.py",
    } <= described["code"].keys()
    assert described["config"] == {"seed": 1}
    assert described["versions"]["jax"]


def test_a_process_may_have_imported_more_of_mesh_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its files are compared, imported or not; process 0 alone may have looked at a
    tokenizer before."""
    code = describe({})["code"]
    path = Path(mesh_lm.__file__).with_name("errors.py")
    monkeypatch.setitem(sys.modules, "mesh_lm.another", SimpleNamespace(__file__=str(path)))
    assert describe({})["code"] == code
    monkeypatch.setitem(sys.modules, "my_model", SimpleNamespace(__file__=__file__))
    assert describe({})["code"].keys() - code.keys() == {"my_model"}


def difference(first: Description, second: Description) -> str:
    """The first line about a difference in the error of process 0."""
    address = f"127.0.0.1:{free_port()}"
    secret = Secret.new()

    def error(index: int, described: Description) -> str:
        with pytest.raises(ConfigError) as caught:
            meet(ProcessSlot(address, 2, index), PATIENCE, described, secret)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        message, _ = pool.map(error, (0, 1), (first, second))
    return message.splitlines()[1]


def test_a_host_that_has_lost_its_gpus_or_has_another_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error comes before JAX waits for devices that do not come, or compiles programs that do
    not fit."""
    compiler = {"jax-cuda13-pjrt": "0.12.0"}
    monkeypatch.setattr(description, "_compiler_versions", compiler.copy)
    monkeypatch.setattr(gpu, "visible", lambda environment: "")
    without_gpus = describe({})
    monkeypatch.setattr(gpu, "visible", lambda environment: "NVIDIA H100 80GB HBM3")
    usual = describe({})
    compiler["jax-cuda13-pjrt"] = "0.12.0.1"
    other_compiler = describe({})
    assert (
        difference(usual, other_compiler)
        == "  - versions.jax-cuda13-pjrt: 0.12.0 on process 0, 0.12.0.1 there"
    )
    without_gpus["versions"] = usual["versions"]
    assert (
        difference(usual, without_gpus)
        == "  - devices: NVIDIA GPUs on process 0, no NVIDIA GPU there"
    )
