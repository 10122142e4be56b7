"""`mesh-lm plan bytes`: what one step sends, without a compiler."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_lm.commands import plan_options
from mesh_lm.commands.main import main
from mesh_lm.commands.plan_bytes import Bytes
from mesh_lm.commands.plan_options import Plan
from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.planning.closed_forms.config import expected_of
from mesh_lm.planning.closed_forms.terms import by_axes, total
from mesh_lm.training.check import check

ROOT = Path(__file__).parents[3]
GIB = 2**30


def test_the_first_word_chooses_it() -> None:
    words = "bytes gpt_175b --devices=1024 --output=bytes.json --config.output=runs/mine"
    options, config = plan_options.parse(words.split(), "mesh-lm plan")
    assert options == Bytes(devices=1024, output="bytes.json")
    assert config.output == "runs/mine"


@pytest.mark.parametrize("words", ["./bytes.py", "bytes.py", "--config=bytes.py"])
def test_a_config_may_have_that_name(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.py").write_text("from configs.gpt_tiny import get_config", encoding="utf-8")
    options, _ = plan_options.parse([words], "mesh-lm plan")
    assert isinstance(options, Plan)
    options, _ = plan_options.parse(["bytes", words], "mesh-lm plan")
    assert options == Bytes()


def test_the_table_has_every_axis_and_its_total(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bytes", "gpt_175b", "--devices=1024"]) == 0
    out = capsys.readouterr().out
    terms = expected_of(check(load("gpt_175b"), 1024))
    assert out.startswith("gpt_175b on 1,024 devices: what each sends in one step, on paper\n")
    for axes, sent in by_axes(terms).items():
        if sent > 0.01 * GIB:
            assert f"\n{' x '.join(axes)}" in out
            assert f" {sent / GIB:,.2f}" in out
    assert f"{total(terms) / GIB:,.2f}" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_file_has_every_collective_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "bytes.json"
    assert main(["plan", "bytes", "llama3_8b", "--devices=64", f"--output={file}"]) == 0
    written = json.loads(file.read_text(encoding="utf-8"))
    terms = expected_of(check(load("llama3_8b"), 64))
    assert written["devices"] == 64
    assert [one["why"] for one in written["collectives"]] == [term.why for term in terms]
    assert sum(written["wire_bytes"].values()) == pytest.approx(total(terms))
    least = total(terms, field="least_wire_bytes")
    assert sum(written["least_wire_bytes"].values()) == pytest.approx(least)


def test_one_device_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "bytes", "gpt2_124m", "--devices=1"]) == 0
    assert "nothing: no axis of the mesh has a second device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpt_tiny --devices=-1", "--devices=-1: a step is made by at least 1 device"),
        ("gpt_tiny --output=a.html", "--output=a.html: the bytes are a file that ends in .json"),
        ("gpt_tiny --model.layers=8", "--model.layers: the config has no such field"),
    ],
)
def test_mistakes_are_told(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_options.parse(["bytes", *words.split()], "mesh-lm plan")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        ("gpt2_124m --optimizer.rule=muon", "optimizer.rule=Muon"),
        ("gpt2_124m --model.dtype=float32", "model.dtype=float32"),
        ("gpt2_124m --data.documents=separate", "data.documents=separate with learned positions"),
        ("mixtral_8x7b --model.experts.shared=1", "model.experts.shared=1"),
        ("gpt_tiny_moe", "2 segments of layers"),
    ],
)
def test_what_has_no_form_is_one_line(
    words: str, subject: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "bytes", *words.split(), "--devices=8"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {words.split()[0]}: this config has no closed form for {subject}"
    )
    assert line.endswith("; `mesh-lm plan` compiles the step instead")


def test_it_needs_no_plugin_and_no_gpu() -> None:
    """No backend of JAX is started, and XLA's compiler for CUDA may be missing."""
    code = (
        "import sys\n"
        "sys.modules['jax_cuda13_plugin'] = None\n"
        "from mesh_lm.commands import plan_options\n"
        "plan_options.run(plan_options.parse(['bytes', 'gpt_175b'], 'mesh-lm plan'))\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
