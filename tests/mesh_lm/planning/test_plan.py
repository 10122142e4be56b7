"""--plan on real programs, compiled for H100s without a GPU."""

import json
import os
import re
from pathlib import Path

import pytest

import train
from mesh_lm.commands import plan as command
from mesh_lm.errors import ConfigError

pytestmark = pytest.mark.deviceless
COMPILE_BUDGET = 20

SMALL = {
    "model.n_layers": 2, "model.d_model": 512, "model.n_heads": 8, "model.vocab_size": 4096,
    "model.seq_len": 1024,
    "model.vocab_multiple": 128, "mesh.pipeline": 1, "mesh.data": 2, "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "rules": "hsdp+megatron_sp", "train.global_batch": 16, "train.microbatches": 2,
    "data.tokenizer_vocab": 4096, "model.remat": "full",
}  # fmt: skip


@pytest.fixture
def plan(reports: str):
    def words(config: str, *more: str, **fields: object) -> list[str]:
        return [
            f"--config=configs/{config}.py",
            f"--config.launch.compile_cache={os.path.dirname(reports)}",
            *more,
        ] + [f"--config.{name}={value}" for name, value in fields.items()]

    return lambda *args, **fields: train.main(words(*args, **fields))


def test_one_command_three_forms(plan, tmp_path: Path, capsys) -> None:
    assert plan("gpt_175b", "--plan", "--devices=8", **SMALL) == 0
    said = capsys.readouterr().out
    assert (
        "8 x H100" in said
        and "hsdp+megatron_sp" in said
        and "fits" in said
        and "reduce-scatter" in said
    )
    page, data = tmp_path / "new" / "report.html", tmp_path / "report.json"
    assert plan("gpt_175b", f"--plan={page}", "--devices=8", **SMALL) == 0
    assert plan("gpt_175b", f"--plan={data}", "--devices=8", **SMALL) == 0
    assert "<html" in page.read_text(encoding="utf-8")
    found = json.loads(data.read_text(encoding="utf-8"))
    memory = found["report"]["memory"]
    assert sum(buffer["bytes"] for buffer in memory["buffers"]) == memory["peak"]
    assert (
        memory["arguments"]
        <= memory["peak"]
        <= (memory["arguments"] + memory["temporaries"] + memory["outputs"]) * 1.001
    )
    assert {axis for one in found["report"]["collectives"] for axis in one["axes"]} == {
        "data",
        "fsdp",
        "tensor",
    }
    assert found["facts"]["rules"] == "hsdp+megatron_sp"
    gradients = (
        r"summed in f32 \([\d.]+ MiB\) over data, f32 \([\d.]+ MiB\) and bf16 \([\d.]+ MiB\) over "
        r"fsdp \(rules.reduction=auto\)"
    )
    assert re.fullmatch(gradients, found["facts"]["gradients"])
    assert (
        found["state"].keys() == {"params", "mu", "nu"} and len(set(found["state"].values())) == 1
    )
    assert sum(found["state"].values()) == sum(
        a["bytes"] for a in found["report"]["arguments"] if a["kind"] in ("params", "moments")
    )
    assert re.fullmatch(
        r"params (.* MiB) fp32, mu \1 fp32, nu \1 fp32", state := found["facts"]["state"]
    )
    assert state in page.read_text(encoding="utf-8") and state in " ".join(said.split())
    assert not [finding for finding in found["findings"] if finding["severity"] == "error"]


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
    saved, other = tmp_path / "full.json", SMALL | {"train.global_batch": 64}
    assert plan("gpt_175b", f"--plan={saved}", "--devices=8", **SMALL) == 0
    assert plan("gpt_175b", "--plan", f"--against={saved}", "--devices=8", **SMALL) == 0
    assert "take the same time" in capsys.readouterr().out
    assert plan("gpt_175b", "--plan", f"--against={saved}", "--devices=8", **other) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"^this takes [\d.]+ x as long as the other, .*: it computes .* longer, with .* more in ",
        said,
        re.MULTILINE,
    ), said
    with pytest.raises(ConfigError, match="no such file"):
        plan("gpt_175b", "--plan", "--against=gpt_nope", "--devices=8", **SMALL)


@pytest.mark.exhaustive
def test_too_large_is_refused_with_a_fix_that_fits(
    plan, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten per cent over the memory: the report shows the largest buffers and fixes of at least four
    kinds, and the first fix fits.

    Only the first change of each kind is compiled, not all eleven.
    """
    every = command.candidates
    monkeypatch.setattr(
        command,
        "candidates",
        lambda *about: list({one.kind: one for one in reversed(list(every(*about)))}.values()),
    )
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
    largest = int(
        json.loads(file.read_text(encoding="utf-8"))["facts"]["largest microbatch"].split()[0]
    )
    over = fields | {"train.global_batch": 8 * round(largest * 1.1 / 4) * 4}
    with pytest.raises(ConfigError) as caught:
        plan("gpt_175b", f"--plan={file}", "--devices=8", **over)
    said = str(caught.value)
    assert "on each device, and h100 has 72.8" in said and "in the way: " in said
    fixes = json.loads(file.read_text(encoding="utf-8"))["fixes"]
    assert (
        len({fix["kind"] for fix in fixes}) >= 4
        and fixes[0]["fits"]
        and f"  - {fixes[0]['text']}: " in said
    )
    fitting = [fix["cost"] for fix in fixes if fix["fits"]]
    assert fitting == sorted(fitting), "the cheapest first"
    changed = dict(
        word.removeprefix("--config.").split("=", 1) for word in fixes[0]["text"].split()
    )
    assert plan("gpt_175b", f"--plan={file}", "--devices=8", **{**over, **changed}) == 0
    assert (
        json.loads(file.read_text(encoding="utf-8"))["report"]["memory"]["peak"]
        == fixes[0]["peak_bytes"]
    )
