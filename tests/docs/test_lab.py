"""docs/lab.md: every console text and number on it is what the programs say, and its hunt ends as
it tells."""

import ast
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from processes import PATIENCE, bare

from mesh_lm.commands import plan as command
from mesh_lm.commands import plan_options
from mesh_lm.commands.main import main
from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.planning.program import compile_config
from sharding_rules import __main__ as sharding
from sharding_rules.lab import Report, lint
from sharding_rules.lab import diff as difference

COMPILE_BUDGET = 16
ROOT = Path(__file__).parents[2]
FILE, PAGE = ROOT / "docs" / "joint_qkv.py", (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ANSWERS = {
    block.split("\n", 1)[0].removeprefix("$ ").removeprefix("python "): block.split("\n", 1)[1]
    for kind, block in BLOCKS
    if kind == "console"
}
EXACT = ("over ", "sent ", "tensor", "fsdp", "data", "~ ", "+ ", "- ")
"""Beginnings of lines that hold bytes sent: the closed forms have them. All other numbers may move
with a version or a line of code."""
TRACE = ROOT / "benchmarks/results/gpu_minutes_2026-11-28_h200-jax-0.11.2_call2.json"
THIS_JAX = f"jax {jax.__version__}," in PAGE
ELSEWHERE = pytest.mark.skipif(not THIS_JAX, reason="the page was written with another jax")


def console(words: str) -> str:
    (found,) = [answer for line, answer in ANSWERS.items() if line.startswith(words)]
    return found


def without_numbers(line: str) -> str:
    return re.sub(r"[\d.,█│ ]+", " ", line)


def assert_same(said: str, shown: str) -> None:
    """Word by word; numbers of predictions, times and memory to 5 %, line numbers and times of
    compiling not at all.

    A line `...` of the page stands for the lines up to the next one of the page.
    """
    said, shown = (
        re.sub(r"<?\d+ %", "%", re.sub(r"\.py:\d+|:\d*…", ".py", text)) for text in (said, shown)
    )
    lines = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (said, shown)]
    while "  ..." in lines[1]:
        gap = lines[1].index("  ...")
        following = lines[1][gap + 1]
        end = next(
            n
            for n in range(gap, len(lines[0]))
            if without_numbers(lines[0][n]) == without_numbers(following)
        )
        assert end > gap, f"nothing is left out before {following}"
        lines = [lines[0][:gap] + lines[0][end:], lines[1][:gap] + lines[1][gap + 1 :]]
    assert len(lines[0]) == len(lines[1]), said
    for ours, page in zip(*lines, strict=True):
        if ours.startswith("compiled in"):
            continue
        if ours.strip().startswith(EXACT) and "predicted" not in page:
            assert ours.split() == page.split(), said
        numbers = [
            [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", line)]
            for line in (ours, page)
        ]
        assert without_numbers(ours) == without_numbers(page), said
        assert numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=0.02), said


@pytest.fixture
def here(reports: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """In the repository's root, 100 columns wide; the option that keeps reports with those of other
    tests."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    return f"--config.launch.compile_cache={Path(reports).parent}"


def fixed(directory: Path) -> Path:
    """The file after the page's change."""
    (change,) = [text for kind, text in BLOCKS if kind == "diff"]
    source = FILE.read_text(encoding="utf-8")
    for removed, added in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", change, re.MULTILINE):
        old, new = (re.sub(r"^[-+]", "", lines, flags=re.MULTILINE) for lines in (removed, added))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (directory / "fixed_qkv.py").write_text(source, encoding="utf-8")
    return directory / "fixed_qkv.py"


def test_every_check_is_explained() -> None:
    trees = [
        ast.parse(file.read_text(encoding="utf-8"))
        for file in (ROOT / "sharding_rules" / "lab").glob("lint*.py")
    ]
    findings = [
        call
        for tree in trees
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Finding"
    ]
    checks = {
        node.value
        for call in findings
        for keyword in call.keywords
        for node in ast.walk(keyword.value)  # one of two names is a conditional
        if keyword.arg == "check" and isinstance(node, ast.Constant)
    }
    section = PAGE[PAGE.index("## What lint finds") : PAGE.index("## Any JAX program")]
    assert (
        len(checks) >= 12 and set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)) == checks
    )


def test_options_and_members_exist() -> None:
    section = PAGE[PAGE.index("## Other forms") : PAGE.index("## If a config does not fit")]
    options = re.findall(r"^\| `(--[\w-]+(?:=[\w.,=]+)?)` \|", section, re.MULTILINE)
    assert len(options) == 12
    for option in options:
        plan_options.parse([option], "mesh-lm plan")
    members = re.findall(r"`report\.(\w+)", PAGE)
    fields = {*Report.__dataclass_fields__, *dir(Report)} | {"html", "json"}
    assert len(members) > 8 and set(members) <= fields


def test_the_change_is_to_the_file(tmp_path: Path) -> None:
    """Only the weight's shape differs: the bug is right on any mesh."""
    assert "3 * config.n_heads" in FILE.read_text(
        encoding="utf-8"
    ) and "3 * config.n_heads" not in fixed(tmp_path).read_text(encoding="utf-8")
    assert (
        f"({FILE.relative_to(ROOT)}:{FILE.read_text(encoding='utf-8').split('y.reshape')[0].count(chr(10)) + 1})"
        in PAGE
    ), "the line of the reshape"


@ELSEWHERE
@pytest.mark.deviceless
def test_the_screen(here: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "docs/joint_qkv.py", here]) == 0
    assert_same(capsys.readouterr().out, console("mesh-lm plan docs/joint_qkv.py"))


@pytest.mark.exhaustive
@pytest.mark.deviceless
def test_the_hunt(here: str, reports: str, tmp_path: Path) -> None:
    def compiled(file: Path) -> Report:
        config = load(str(file))
        launch = dataclasses.replace(config.launch, compile_cache=str(Path(reports).parent))
        return compile_config(dataclasses.replace(config, launch=launch), "h100", 16)

    before, after = compiled(FILE), compiled(fixed(tmp_path))
    L, M = 24, 8
    assert before.count("all-gather", "tensor", part="layers") == 8 * L * M
    assert before.count("reduce-scatter", "tensor", part="layers") == 4 * L * M
    assert after.count("all-gather", "tensor", part="layers") == 6 * L * M
    assert before.wire_bytes("tensor") - after.wire_bytes("tensor") == 252 * 2**30
    rules = load(str(FILE)).rules
    assert [one.check for one in lint(before, rules)] == ["reshard"] and not lint(after, rules)
    (shown,) = [
        text for kind, text in BLOCKS if kind == "text" and text.startswith("joint_qkv -> ")
    ]
    if THIS_JAX:
        assert_same(str(difference(before, after)), shown)


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.deviceless
def test_the_band_of_the_step_that_a_gpu_has_run(reports: str) -> None:
    """And those of its kinds of kernel, beside what the traced step took."""
    config = load("gpt_1_3b")
    config = dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, fsdp=1),
        train=dataclasses.replace(config.train, global_batch=64, microbatches=8),
        launch=dataclasses.replace(config.launch, compile_cache=str(Path(reports).parent)),
    )
    report = compile_config(config, "h200", 1)
    band, fast, slow = report.step_band, report.timeline, report.sustained
    assert band and fast and slow
    section = PAGE[PAGE.index("## Rates and bands") : PAGE.index("## How far to trust")]
    (shown,) = re.findall(r"([\d.]+) to ([\d.]+) s a step", section)
    assert [float(end) for end in shown] == pytest.approx([us / 1e6 for us in band], abs=0.001)
    rows = re.findall(r"^\| (\w+) \| ([\d.,]+) to ([\d.,]+) \| [\d.,]+ \|$", section, re.MULTILINE)
    assert {kind for kind, *_ in rows} == fast.kinds.keys()
    for kind, *ends in rows:
        shown_ms = [float(end.replace(",", "")) for end in ends]
        predicted_ms = [line.kinds[kind] / 1e3 for line in (fast, slow)]
        assert shown_ms == pytest.approx(predicted_ms, rel=0.005)


def test_the_gpu_took_what_is_shown() -> None:
    trace = json.loads(TRACE.read_text(encoding="utf-8"))["tables"]
    for row in trace["One step by kind"]["rows"]:
        (shown,) = re.findall(rf"^\| {row['kind']} \|.*\| ([\d.,]+) \|$", PAGE, re.MULTILINE)
        assert float(shown.replace(",", "")) == pytest.approx(row["ms"], rel=0.005)
    (step,) = trace["Traced step"]["rows"]
    assert f"took {step['step_ms'] / 1e3:.3f} s" in " ".join(PAGE.split())


@ELSEWHERE
@pytest.mark.deviceless
def test_a_model_that_is_not_ours(tmp_path: Path) -> None:
    """The page's Python sessions, one after the other, as a reader's own process runs them
    elsewhere: nothing else is printed."""
    session = "".join(text for kind, text in BLOCKS if kind == "pycon")
    assert session.count(">>> ") > 15
    (tmp_path / "session.txt").write_text(session, encoding="utf-8")
    command = [sys.executable, "-m", "doctest", "session.txt"]
    done = subprocess.run(
        command, cwd=tmp_path, env=bare(), capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.deviceless
def test_a_change_of_rules(here: str, capsys: pytest.CaptureFixture) -> None:
    (line,) = [line for line in ANSWERS if line.startswith("-m sharding_rules diff")]
    assert sharding.main([*shlex.split(line)[2:], here]) == 0
    assert_same(capsys.readouterr().out, ANSWERS[line])


@ELSEWHERE
@pytest.mark.exhaustive
@pytest.mark.deviceless
def test_the_refusal(
    here: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Of all changes that are tried, the page's first, which fits, and its last, which is not
    enough, are compiled."""
    (line,) = [line for line in ANSWERS if "microbatches=1" in line]
    shown = ANSWERS[line].replace(" \\\n    ", " ").splitlines()
    every = command.fix_candidates
    first, *between, last = [row for row in shown if row.startswith("  - --config.")]
    texts = [row.removeprefix("  - ").split(": ")[0] for row in (first, last)]
    monkeypatch.setattr(
        command,
        "fix_candidates",
        lambda *about: (one for one in every(*about) if one.text in texts),
    )
    with pytest.raises(ConfigError) as caught:
        command.show(*plan_options.parse([*shlex.split(line)[2:], here], "mesh-lm plan"))
    assert_same(f"error: {caught.value}", "\n".join(row for row in shown if row not in between))
    assert "does not fit" in capsys.readouterr().out
