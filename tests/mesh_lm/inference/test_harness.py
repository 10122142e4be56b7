"""Runs lm-evaluation-harness offline on a tiny checkpoint and compares scores with the model's
logits."""

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from processes import PATIENCE

from mesh_lm.commands import evaluate
from mesh_lm.errors import ConfigError
from mesh_lm.inference import Sampling, harness
from mesh_lm.inference.harness import Requests
from mesh_lm.inference.trained import TrainedModel
from mesh_lm.model import token_batch
from sharding_rules import MeshConfig

COMPILE_BUDGET = 40
SEQ, EOD = tiny_run.MODEL.seq_len, tiny_run.BYTES.eod

QUESTIONS = [
    {
        "question": "The capital of France is",
        "choices": ["Paris", "a sort of cheese", "Rome"],
        "answer": 0,
    },
    {"question": "Two and two make", "choices": ["five", "four"], "answer": 1},
    {"question": "def f(x): return", "choices": ["x", "y", "None or x"], "answer": 0},
]
PAGES = [
    "A page that is longer than the window of the model by some margin, so that it is cut.",
    "A short one: naïve.",
]
TASKS = {
    "choice": """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: TMP/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "pages": """
task: pages
dataset_path: json
dataset_kwargs: {data_files: {test: TMP/pages.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
""",
    "writing": """
task: writing
dataset_path: json
dataset_kwargs: {data_files: {test: TMP/answers.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["STOP"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    tiny_run.write(output)
    return output


@pytest.fixture(scope="module")
def logprobs(run: Path):
    """Returns log-probabilities [n, V] of the token after each of n <= SEQ tokens, from the model's
    logits."""
    trained = TrainedModel.load(run, mesh=MeshConfig(data=8))
    logits = jax.jit(lambda params, tokens: trained.layout.bind(params).logits(token_batch(tokens)))

    def after(tokens: list[int]) -> np.ndarray:
        padded = np.zeros((8, SEQ), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(jax.nn.log_softmax(logits(trained.params, padded)))[
            0, : len(tokens)
        ].astype(np.float64)

    return after


def continuation(logprobs, context: list[int], text: str) -> tuple[float, bool]:
    ids = [*context, *text.encode()][-SEQ - 1 :]
    rows, wanted = logprobs(ids[:-1])[-len(text.encode()) :], ids[-len(text.encode()) :]
    return sum(row[i] for row, i in zip(rows, wanted, strict=True)), bool(
        (rows.argmax(1) == wanted).all()
    )


def rolling(logprobs, text: str) -> float:
    """The example of the harness's documentation: later windows end with new tokens and are filled
    with context."""
    ids, total, done = [EOD, *text.encode()], 0.0, 0
    while done < len(ids) - 1:
        new = min(SEQ, len(ids) - 1 - done)
        done += new
        window = ids[max(0, done - SEQ) : done]
        rows = logprobs(window)[-new:]
        total += sum(row[i] for row, i in zip(rows, ids[done - new + 1 : done + 1], strict=True))
    return total


def greedy(logprobs, prompt: str, n: int) -> str:
    ids = list(prompt.encode())
    for _ in range(n):
        token = int(logprobs(ids)[-1].argmax())
        if token == EOD:
            break
        ids.append(token)
    return tiny_run.BYTES.decode(ids[len(prompt.encode()) :])


@pytest.mark.slow
def test_requests(run: Path, logprobs) -> None:
    """Requests without the harness: empty or overlong contexts, and answers in the order of the
    prompts."""
    requests = Requests(TrainedModel.load(run, mesh=MeshConfig(data=8)), batch=8, start=EOD)
    likeliest = chr(logprobs([97])[-1, :128].argmax())
    pairs = [
        ("a", "bcd"),
        ("", "xy"),
        ("long " * 20, "tail"),
        ("a", likeliest),
        ("a", "z" * SEQ),
        ("b", ""),
    ]
    found = requests.continuations(
        [(list(context.encode()), list(text.encode())) for context, text in pairs]
    )
    for (context, text), (logprob, is_greedy) in zip(pairs[:-1], found, strict=False):
        wanted = continuation(logprobs, list(context.encode()) or [EOD], text)
        assert (logprob, is_greedy) == (pytest.approx(wanted[0], rel=1e-5), wanted[1])
    assert found[-1] == (0.0, True)
    with pytest.raises(
        ConfigError,
        match="a task asks for a continuation of 49 tokens, more than the model's seq_len=48",
    ):
        requests.continuations([([1], [2] * 49)])
    assert requests.texts(PAGES) == pytest.approx(
        [rolling(logprobs, page) for page in PAGES], rel=1e-5
    )
    prompts = ["a longer prompt", "b", "too long " * 9]
    wanted = [greedy(logprobs, prompt[-(SEQ - 6) :], 6) for prompt in prompts]
    assert requests.answers(prompts, Sampling(0), [], 6) == wanted
    stop = next(c for c in wanted[1] if c != "\ufffd")
    assert requests.answers(prompts, Sampling(0), ["", stop], 6) == [
        text.partition(stop)[0] for text in wanted
    ]


def test_the_harness_is_missing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(
        ConfigError, match=r"^--tasks needs lm-evaluation-harness .*: pip install -e '\.\[eval\]'$"
    ):
        evaluate.main([f"--checkpoint={run}", "--compile-cache=", "--tasks=choice"])


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, logprobs) -> Path:
    pytest.importorskip(
        "lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'"
    )
    directory = tmp_path_factory.mktemp("tasks")
    answers = [
        {"question": q["question"], "answer": greedy(logprobs, q["question"], 8)} for q in QUESTIONS
    ]
    answers[1]["answer"] += "?"
    rows = {"questions": QUESTIONS, "pages": [{"text": page} for page in PAGES], "answers": answers}
    for name, each in rows.items():
        (directory / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in each), encoding="utf-8"
        )
    for name, text in TASKS.items():
        (directory / f"{name}.yaml").write_text(
            text.replace("TMP", str(directory)), encoding="utf-8"
        )
    return directory


@pytest.fixture(scope="module")
def wanted(logprobs) -> dict[str, float]:
    hits, hits_by_length = 0, 0
    for q in QUESTIONS:
        scores = [
            continuation(logprobs, list(q["question"].encode()), f" {choice}")[0]
            for choice in q["choices"]
        ]
        hits += np.argmax(scores) == q["answer"]
        hits_by_length += (
            np.argmax([s / len(c) for s, c in zip(scores, q["choices"], strict=True)])
            == q["answer"]
        )
    nats = -sum(rolling(logprobs, page) for page in PAGES) / sum(
        len(page.encode()) for page in PAGES
    )
    return {
        "acc": hits / 3, "acc_norm": hits_by_length / 3, "bits_per_byte": nats / math.log(2),
        "byte_perplexity": math.exp(nats),
        "exact_match": 2 / 3,
    }  # fmt: skip


@pytest.mark.slow
def test_scores(
    run: Path, tasks: Path, wanted: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = [
        f"--checkpoint={run}",
        "--compile-cache=",
        f"--include-path={tasks}",
        f"--json={tmp_path}/r.json",
    ]
    mesh = ["--mesh=data=2,tensor=4", "--rules=megatron_sp"]
    assert evaluate.main([*arguments, "--tasks=choice,pages,writing", *mesh]) == 0
    record = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    found = {
        name.partition(",")[0]: value
        for task in record["results"].values()
        for name, value in task.items()
    }
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    assert record["step"] == 3 and record["n-samples"]["choice"]["effective"] == 3
    assert "bits_per_byte" in capsys.readouterr().out
    assert evaluate.main([*arguments, "--tasks=choice", "--limit=1"]) == 0
    assert (
        json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["n-samples"]["choice"][
            "effective"
        ]
        == 1
    )
    with pytest.raises(
        ConfigError, match=r"--tasks: there is no task 'chioce'; did you mean 'choice'\?"
    ):
        evaluate.main([*arguments, "--tasks=chioce"])
    with pytest.raises(ConfigError, match="--include-path=no/such: no such directory"):
        evaluate.main([*arguments, "--tasks=choice", "--include-path=no/such"])


@pytest.mark.slow
def test_mistakes_in_model_args(run: Path) -> None:
    pytest.importorskip(
        "lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'"
    )
    made = harness.register()
    with pytest.raises(
        ConfigError,
        match=r"--model_args rule=fsdp: there is no such argument; did you mean 'rules'\?",
    ):
        made(str(run), rule="fsdp")
    with pytest.raises(ConfigError, match="batch_size=0 must be at least 1"):
        made(str(run), batch_size=0)


@pytest.mark.slow
def test_its_own_command_line(
    run: Path, tasks: Path, wanted: dict[str, float], tmp_path: Path
) -> None:
    command = [
        "-m",
        "mesh_lm.harness",
        "run",
        "--model",
        "mesh_lm",
        "--model_args",
        f"checkpoint={run},compile_cache=,mesh=data=-1",
    ]
    command += [
        "--tasks",
        "pages",
        "--include_path",
        str(tasks),
        "--batch_size",
        "2",
        "--output_path",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = tmp_path.rglob("results*.json")
    assert json.loads(results.read_text(encoding="utf-8"))["results"]["pages"][
        "bits_per_byte,none"
    ] == pytest.approx(wanted["bits_per_byte"], rel=1e-5)
