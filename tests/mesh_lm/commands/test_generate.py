"""python -m mesh_lm.generate as users run it."""

import json
from pathlib import Path

import pytest
import tiny_run

from mesh_lm.commands import generate
from mesh_lm.errors import ConfigError
from mesh_lm.inference import Generator, Sampling
from mesh_lm.inference.trained import TrainedModel
from sharding_rules import MeshConfig

COMPILE_BUDGET = 40
PROMPTS = ["def ", "", "a longer prompt"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    tiny_run.write(output)
    return output


@pytest.fixture(scope="module")
def completions(run: Path) -> list:
    trained = TrainedModel.load(run, mesh=MeshConfig(data=8))
    generator = Generator(trained.layout, trained.params, trained.tokenizer, Sampling(2.0, 0))
    return generator.complete(PROMPTS, 12, seed=1)


def arguments(run: Path, *words: str) -> list[str]:
    return [
        f"--checkpoint={run}",
        "--compile-cache=",
        "--tokens=12",
        "--temperature=2",
        "--top-k=0",
        "--seed=1",
        *words,
    ]


def test_several_prompts_to_a_file(
    run: Path, completions: list, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "more.jsonl").write_text(
        '{"prompt": ""}\n\n{"prompt": "a longer prompt"}\n', encoding="utf-8"
    )
    output = tmp_path / "out.jsonl"
    words = ["--prompt=def ", f"--prompts-file={tmp_path}/more.jsonl", f"--output={output}"]
    assert generate.main(arguments(run, *words)) == 0
    assert capsys.readouterr().out == f"3 texts: {output}\n"
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    for row, prompt, completion in zip(rows, PROMPTS, completions, strict=True):
        assert row["prompt"] == prompt
        assert row["text"] == completion.text
        assert row["tokens"] == completion.tokens
        assert row["reason"] == completion.reason


def test_one_prompt_on_another_mesh(
    run: Path, completions: list, capsys: pytest.CaptureFixture
) -> None:
    words = ["--prompt", PROMPTS[0], "--mesh=data=2,tensor=4", "--rules=megatron_sp"]
    text = completions[0].text
    assert generate.main(arguments(run, *words)) == 0
    assert capsys.readouterr().out == f"{PROMPTS[0]}{text}\n"
    stop = text[5:7]
    assert generate.main(arguments(run, *words, "--stream=false", f"--stop={stop}")) == 0
    assert capsys.readouterr().out == f"{PROMPTS[0]}{text[: text.find(stop)]}\n"


def test_lines_of_a_file(
    run: Path, completions: list, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    assert generate.main(arguments(run, f"--prompts-file={tmp_path}/prompts.txt")) == 0
    expected = ""
    for i, (prompt, completion) in enumerate(zip(PROMPTS, completions, strict=True)):
        expected += f"--- {i} ({len(completion.tokens)} tokens, {completion.reason})\n"
        expected += f"{prompt}{completion.text}\n"
    assert capsys.readouterr().out == expected


def test_as_many_tokens_as_fit(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    words = ["--tokens=0", "--prompt=12345678", "--ignore-eod", f"--output={output}"]
    assert generate.main(arguments(run, *words)) == 0
    tokens = json.loads(output.read_text(encoding="utf-8"))["tokens"]
    assert len(tokens) == tiny_run.MODEL.seq_len - 8


MISTAKES = [
    (["--tokens=-1"], "--tokens=-1 must be at least 0 and --batch=16 at least 1"),
    (["--temperature=-1"], "temperature=-1.0 must be at least 0 (0: always the likeliest token)"),
    (
        ["--prompt=0123456789", "--tokens=39"],
        "prompt 0 has length 10 and 39 new tokens were requested, but model.seq_len=48; ask for 38 "
        "at most, or shorten the prompt",
    ),
    (["--prompt", "ab" * 24], "prompt 0 has 48 tokens, but model.seq_len=48; shorten the prompt"),
    (
        ["--mesh=data=2,foo=3"],
        "--mesh=data=2,foo=3: 'foo=3' is not a mesh axis and its size; give some of island, "
        "pipeline, data, fsdp, expert, sequence, tensor, as in data=2,tensor=4",
    ),
    (
        ["--prompts-file=no/such"],
        "--prompts-file=no/such: cannot be read ([Errno 2] No such file or directory: 'no/such'); "
        "give a text file in UTF-8, or a .jsonl",
    ),
    (
        ["--tokens=4", "--output=no/such/file"],
        "--output=no/such/file: the completions cannot be written (No such file or directory)",
    ),
    (["--stop="], "an empty stop string ends every text before it starts; leave it out"),
]


@pytest.mark.parametrize(
    ("words", "message"),
    MISTAKES,
    ids=lambda value: value[0][:30] if isinstance(value, list) else "",
)
def test_mistakes(run: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate.main(arguments(run, *words))
    assert str(caught.value) == message


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="holds neither checkpoints of a run nor a Hugging Face model"
    ):
        generate.main(["--checkpoint", str(tmp_path), "--compile-cache="])
    with pytest.raises(ConfigError) as caught:
        generate.main(["--propmt=a"])
    assert "did you mean --prompt?" in str(caught.value)
    assert "--checkpoint: missing" in str(caught.value)


def test_a_line_that_is_no_prompt(run: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        generate.main(arguments(run, f"--prompts-file={tmp_path}/prompts.jsonl"))
    assert str(caught.value) == (
        f'{tmp_path}/prompts.jsonl, line 2: expected a JSON object with a string "prompt", got '
        '\'{"text": "b"}\''
    )
