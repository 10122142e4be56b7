"""--plan on real programs, compiled for H100s without a GPU."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import train
from mesh_lm.commands import plan as command
from mesh_lm.errors import ConfigError
from sharding_rules.lab.fixes import Candidate

pytestmark = pytest.mark.deviceless
COMPILE_BUDGET = 20

SMALL = {
    "model.n_layers": 2,
    "model.d_model": 512,
    "model.n_heads": 8,
    "model.vocab_size": 4096,
    "model.seq_len": 1024,
    "model.vocab_multiple": 128,
    "model.remat": "full",
    "mesh.pipeline": 1,
    "mesh.data": 2,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "rules": "hsdp+megatron_sp",
    "train.global_batch": 16,
    "train.microbatches": 2,
    "data.tokenizer_vocab": 4096,
}


@pytest.fixture
def plan(reports: str):
    def run(config: str, *words: str, **fields: object) -> int:
        return train.main(
            [
                f"--config=configs/{config}.py",
                f"--config.launch.compile_cache={os.path.dirname(reports)}",
                *words,
                *(f"--config.{name}={value}" for name, value in fields.items()),
            ]
        )

    return run


def read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def test_one_command_three_forms(plan, tmp_path: Path, capsys) -> None:
    assert plan("gpt_175b", "--plan", "--devices=8", **SMALL) == 0
    printed = capsys.readouterr().out
    for words in ("8 x H100", "hsdp+megatron_sp", "fits", "reduce-scatter"):
        assert words in printed
    page = tmp_path / "new" / "report.html"
    data = tmp_path / "report.json"
    assert plan("gpt_175b", f"--plan={page}", "--devices=8", **SMALL) == 0
    assert plan("gpt_175b", f"--plan={data}", "--devices=8", **SMALL) == 0
    html = page.read_text(encoding="utf-8")
    assert "<html" in html
    saved = read_json(data)
    report = saved["report"]
    facts = saved["facts"]

    memory = report["memory"]
    assert sum(buffer["bytes"] for buffer in memory["buffers"]) == memory["peak"]
    live_bytes = memory["arguments"] + memory["temporaries"] + memory["outputs"]
    assert memory["arguments"] <= memory["peak"] <= live_bytes * 1.001
    axes = {axis for collective in report["collectives"] for axis in collective["axes"]}
    assert axes == {"data", "fsdp", "tensor"}
    assert facts["rules"] == "hsdp+megatron_sp"
    gradients = (
        r"summed in f32 \([\d.]+ MiB\) over data, f32 \([\d.]+ MiB\) and bf16 \([\d.]+ MiB\) over "
        r"fsdp \(rules.reduction=auto\)"
    )
    assert re.fullmatch(gradients, facts["gradients"])

    state = saved["state"]
    assert state.keys() == {"params", "mu", "nu"}
    assert len(set(state.values())) == 1
    assert sum(state.values()) == sum(
        a["bytes"] for a in report["arguments"] if a["kind"] in ("params", "moments")
    )
    assert re.fullmatch(r"params (.* MiB) fp32, mu \1 fp32, nu \1 fp32", facts["state"])
    assert facts["state"] in html
    assert facts["state"] in " ".join(printed.split())
    assert not [finding for finding in saved["findings"] if finding["severity"] == "error"]


def test_a_page_that_cannot_be_written_is_one_error(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is compiled for it."""
    monkeypatch.setattr(command.Program, "of", lambda *about: pytest.fail("compiles"))
    with pytest.raises(ConfigError, match=r"^cannot write /proc/report\.html: "):
        plan("gpt_175b", "--plan=/proc/report.html", "--devices=8", **SMALL)


def test_devices_that_are_no_whole_nodes(plan) -> None:
    """Refused before the mesh, for which sizes of a part of a node would be suggested."""
    with pytest.raises(
        ConfigError, match=r"^12 devices do not fill whole nodes of 8 h100; take 8 or 16$"
    ):
        plan("gpt_175b", "--plan", "--devices=12", **SMALL)


def test_another_plan_is_compared(plan, tmp_path: Path, capsys) -> None:
    """With a saved report of the same config, and of one with a quarter of the sequences."""
    saved = tmp_path / "full.json"
    other = SMALL | {"train.global_batch": 64}
    assert plan("gpt_175b", f"--plan={saved}", "--devices=8", **SMALL) == 0
    assert plan("gpt_175b", "--plan", f"--against={saved}", "--devices=8", **SMALL) == 0
    assert "take the same time" in capsys.readouterr().out
    assert plan("gpt_175b", "--plan", f"--against={saved}", "--devices=8", **other) == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"^this takes [\d.]+ x as long as the other, .*: it computes .* longer, with .* more in ",
        printed,
        re.MULTILINE,
    ), printed
    with pytest.raises(ConfigError, match="there is no such config"):
        plan("gpt_175b", "--plan", "--against=gpt_nope", "--devices=8", **SMALL)


@pytest.mark.exhaustive
def test_too_large_is_refused_with_a_fix_that_fits(
    plan, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten per cent over the memory: the report shows the largest buffers and fixes of at least four
    kinds, and the first fix fits.

    Only the first change of each kind is compiled, not all eleven.
    """
    candidates = command.candidates

    def first_of_each_kind(*arguments: Any) -> list[Candidate]:
        by_kind: dict[str, Candidate] = {}
        for candidate in candidates(*arguments):
            by_kind.setdefault(candidate.kind, candidate)
        return list(by_kind.values())

    monkeypatch.setattr(command, "candidates", first_of_each_kind)
    fields = SMALL | {
        "mesh.data": 8,
        "mesh.fsdp": 1,
        "mesh.tensor": 1,
        "rules": "ddp",
        "train.microbatches": 1,
        "model.remat": "none",
    }
    file = tmp_path / "report.json"
    assert plan("gpt_175b", f"--plan={file}", "--devices=8", "--max-microbatch", **fields) == 0
    largest = int(read_json(file)["facts"]["largest microbatch"].split()[0])
    too_large = fields | {"train.global_batch": 8 * round(largest * 1.1 / 4) * 4}
    with pytest.raises(ConfigError) as caught:
        plan("gpt_175b", f"--plan={file}", "--devices=8", **too_large)
    message = str(caught.value)
    assert "on each device, and h100 has 72.8" in message
    assert "in the way: " in message
    fixes = read_json(file)["fixes"]
    assert len({fix["kind"] for fix in fixes}) >= 4
    assert fixes[0]["fits"]
    assert f"  - {fixes[0]['text']}: " in message
    costs = [fix["cost"] for fix in fixes if fix["fits"]]
    assert costs == sorted(costs), "the cheapest first"

    options = [word.removeprefix("--config.") for word in fixes[0]["text"].split()]
    changes = dict(option.split("=", 1) for option in options)
    assert plan("gpt_175b", f"--plan={file}", "--devices=8", **{**too_large, **changes}) == 0
    assert read_json(file)["report"]["memory"]["peak"] == fixes[0]["peak_bytes"]


def test_the_best_of_two_layouts_is_saved_and_read(plan, tmp_path: Path, capsys) -> None:
    """The config as it is recomputes everything; the first layout that is tried does not."""
    saved = tmp_path / "plan.json"
    words = ("--plan", "--best", "--devices=8", "--compiles=1", f"--save={saved}", "--max-tensor=2")
    assert plan("gpt_175b", *words, **SMALL) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "0 " in printed and "the config as it is" in printed and "recompute" in printed
    assert "2 compiled: the best of these, not the best there is" in printed
    assert "tokens/s" in printed
    assert re.search(r"against the config as it is: -\d", printed)
    assert f"wrote {saved}; --mesh={saved} reads it" in printed
    layout = read_json(saved)
    assert layout["devices"] == 8 and layout["step_s"][0] <= layout["step_s"][1]
    # The same step, planned by the file's name: no slower than what the search has found.
    model = {name: value for name, value in SMALL.items() if not name.startswith("mesh.")}
    for name in ("rules", "train.microbatches", "model.remat"):
        model.pop(name)
    data = tmp_path / "report.json"
    assert plan("gpt_175b", f"--plan={data}", "--devices=8", f"--mesh={saved}", **model) == 0
    step = read_json(data)["report"]["timeline"]["step"] / 1e6
    assert step == pytest.approx(layout["step_s"][0], rel=1e-6)


def test_options_of_a_search_go_with_it(plan) -> None:
    for word in ("--save=a.json", "--keep=mesh.tensor=2", "--max-tensor=2", "--compiles=2"):
        with pytest.raises(ConfigError, match=f"{word.partition('=')[0]} is an option of a search"):
            plan("gpt_175b", "--plan", word)
    for word in ("--against=gpt_175b", "--max-microbatch", "--flags=default"):
        with pytest.raises(ConfigError, match=f"{word.partition('=')[0]} does not go with --best"):
            plan("gpt_175b", "--plan", "--best", word)
    with pytest.raises(ConfigError, match=r"--compiles=-1: a search compiles at least 1"):
        plan("gpt_175b", "--plan", "--best", "--compiles=-1")
