"""Reports as files: saved, compared, as a trace for Perfetto; and the command on a plain-JAX
program with mesh axes of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import lab_report
import pytest
from processes import PATIENCE, bare

from sharding_rules.__main__ import main
from sharding_rules.lab.report import LabError
from sharding_rules.lab.saved import load
from sharding_rules.lab.trace import chrome_trace

PROGRAM = '''
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P


def program(devices):
    """An MLP, its batch over dp and its width over tp."""
    mesh = Mesh(np.array(devices).reshape(-1, 4), ("dp", "tp"))

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def loss(params, x):
        with jax.named_scope("mlp"):
            return jnp.square(jax.nn.gelu(x @ params["up"]) @ params["down"]).mean()

    params = {"up": array((1024, 4096), None, "tp"), "down": array((4096, 1024), "tp")}
    grads = jax.jit(jax.grad(loss), out_shardings={name: w.sharding for name, w in params.items()})
    return grads, (params, array((64, 512, 1024), "dp")), mesh


def broken(devices):
    return 1
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(PROGRAM, encoding="utf-8")
    return str(tmp_path / "mine.py")


@pytest.mark.deviceless
def test_a_plain_program_with_axes_of_its_own(file: str, tmp_path: Path) -> None:
    """As a reader runs it: elsewhere, with nothing in the environment, and nothing but the answer
    printed."""
    command = [sys.executable, "-m", "sharding_rules", "report", "mine.py:program", "--devices=16"]
    done = subprocess.run(
        [*command, "--out=a.json"],
        cwd=tmp_path,
        env=bare(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("wrote a.json\n")
    assert done.stdout.startswith("program: fits, ") and "(predicted)" in done.stdout
    report = load(str(tmp_path / "a.json"))
    assert report.mesh == {"dp": 4, "tp": 4} and report.count("all-reduce", "tp", part="mlp") == 1
    assert report.wire_bytes("dp") == 2 * 3 / 4 * 2 * 1024 * 4096 // 4 * 2, (
        "the gradients of two matrices, a quarter of each, in bf16"
    )


def test_two_saved_reports_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before = lab_report.report()
    assert before.timeline
    line = dataclasses.replace(
        before.timeline, step=before.timeline.step * 2, exposed=before.timeline.exposed * 3
    )
    after = dataclasses.replace(
        before, name="other", timeline=line, collectives=before.collectives[1:]
    )
    files = [str(tmp_path / f"{n}.json") for n in (1, 2)]
    Path(files[0]).write_text(before.to_json(), encoding="utf-8")
    Path(files[1]).write_text(
        json.dumps({"report": json.loads(after.to_json()), "findings": []}), encoding="utf-8"
    )  # as --plan=FILE.json writes it
    assert main(["diff", *files]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("gpt_175b -> other")
        and "- all-gather of bf16[2,2048,12288] over tensor" in said
    )
    assert "step 6.01 s -> 12 s" in " ".join(
        said.split()
    ) and "exposed 1.5 s -> 4.49 s" in " ".join(said.split())
    assert main(["diff", *files, f"--out={tmp_path / 'both.html'}"]) == 0
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    for words in ("gpt_175b → other", "<td>step</td><td>6.01 s</td><td>12 s</td><td>+ 6.01 s</td>", "<td>MFU</td><td>4 %</td><td>2 %</td>",
                  "<td>exposed share</td><td>25 %</td><td>37 %</td>", "- 31.50 GiB"):  # fmt: skip
        assert words in page, words


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["report", "nowhere.py:program"], "the file nowhere.py does not exist"),
        (["report", "mine.py"], "'mine.py' is not a program of the form FILE.py:FUNCTION"),
        (["report", "FILE:absent"], "has no function of the name absent"),
        pytest.param(
            ["report", "FILE:broken"],
            "must return (step, arguments, mesh)",
            marks=pytest.mark.deviceless,
        ),
        (
            ["report", "FILE:program", "--out=a.txt"],
            "--out=a.txt: expected a report file that ends in .html (a page), .trace.json",
        ),
        (["report", "FILE:program", "--device=4"], "unknown option --device=4"),
        (["report", "FILE:program", "--devices=12"], "12 devices do not fill whole nodes"),
        (["diff", "a.json"], "diff takes two saved reports"),
        (["diff", "--rules=fsdp"], "diff needs --config"),
        (["diff", "FILE", "FILE"], "holds no report; one is written by --plan=FILE.json"),
        (["diff", "no.json", "no.json"], "cannot read no.json: No such file or directory"),
    ],
)
def test_mistakes(argv: list[str], error: str, file: str, capsys: pytest.CaptureFixture) -> None:
    assert main([word.replace("FILE", file) for word in argv]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and error in said and "Traceback" not in said


def test_a_trace_has_each_span_in_its_row() -> None:
    report = lab_report.report()
    assert report.timeline
    events = json.loads(chrome_trace(report))["traceEvents"]
    rows = {one["args"]["name"]: one["tid"] for one in events if one["name"] == "thread_name"}
    spans = [one for one in events if one["ph"] == "X"]
    assert len(spans) == len(report.timeline.spans)
    gather = next(one for one in spans if one["name"] == "attention all-gather")
    assert (
        gather["tid"] == rows["network"]
        and gather["cat"] == "forward"
        and gather["args"]["times in a step"] == 4 * 96
    )
    assert gather["dur"] == 375.0 and "exposed in a step, µs" in gather["args"]
    assert {one["tid"] for one in spans if "matmul" in one["name"]} == {rows["compute"]}
    with pytest.raises(LabError, match="has no timeline"):
        chrome_trace(lab_report.report(timeline=None))
