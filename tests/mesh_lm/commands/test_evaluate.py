"""Perplexity of texts compared with one forward pass per token, and the command that measures it."""

import gzip
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from mesh_lm.commands import evaluate, prepare
from mesh_lm.errors import ConfigError
from mesh_lm.inference import perplexity
from mesh_lm.inference.perplexity import read_texts, windows
from mesh_lm.inference.trained import TrainedModel
from mesh_lm.model import token_batch
from mesh_lm.training import evaluation
from sharding_rules import MeshConfig

COMPILE_BUDGET = 30
SEQ = tiny_run.MODEL.seq_len
TEXTS = [
    "A text of more than one window: " + "naïve and long, long, long. " * 4,
    "short",
    "x" * 48,
    "y" * 49,
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    tiny_run.write(output)
    return output


@pytest.fixture(scope="module")
def cost(run: Path):
    """Returns (tokens before it, at most SEQ; token) -> nats, from the model's logits for that
    context alone."""
    trained = TrainedModel.load(run, mesh=MeshConfig(data=8))
    logits = jax.jit(lambda params, tokens: trained.layout.bind(params).logits(token_batch(tokens)))

    def nats(cases: list[tuple[list[int], int]]) -> float:
        tokens = np.zeros((256, SEQ), np.int32)
        for row, (context, _) in enumerate(cases):
            tokens[row, : len(context)] = context
        scores = np.asarray(jax.nn.log_softmax(logits(trained.params, tokens)))
        return -sum(
            float(scores[row, len(context) - 1, token])
            for row, (context, token) in enumerate(cases)
        )

    return nats


def test_the_mean_is_over_all_labels() -> None:
    """The mean over all tokens, not the last batch's, nor the mean of the batches' means."""
    batches = [
        {"loss": np.float32(loss), "weight": np.float32(weight)}
        for loss, weight in ((6, 1), (1, 2), (3, 5))
    ]
    assert evaluation.mean_loss(lambda params, batch: {**params, **batch}, {}, batches) == 10 / 8
    assert math.isnan(evaluation.mean_loss(lambda params, batch: batch, {}, []))


def test_compressors_of_much_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "_COMPRESSED", 2**20)
    random = np.random.default_rng(0).integers(0, 128, 2**20, np.uint8).tobytes().decode()
    texts = iter([random[: 2**19], random[: 2**19 + 1], "never read"])
    bits = perplexity.compressed_bits_per_byte(texts)
    assert list(bits) == ["gzip -9 of the first 1 MiB", "xz -9 of the first 1 MiB"]
    assert next(texts) == "never read"
    read = random[: 2**19] * 2
    n_bits = 8 * len(gzip.compress(read.encode(), 9))
    assert bits["gzip -9 of the first 1 MiB"] == n_bits / 2**20


@given(st.integers(1, 200), st.integers(1, 20), st.data())
def test_windows(n: int, seq_len: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, seq_len))
    done = 1
    for window, scored in windows(range(n), seq_len, stride):
        assert list(window) == list(range(window[0], done + scored)), (
            "tokens are left out or scored twice"
        )
        assert scored >= 1 and len(window) <= seq_len + 1
        assert len(window) - scored >= min(done, seq_len - stride + 1), "a token sees too little"
        done += scored
    assert done == n


@pytest.mark.parametrize("stride", [1, 20, SEQ])
def test_perplexity(
    run: Path,
    cost,
    stride: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate, "_PROGRESS_SECONDS", 0.0)
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8"
    )
    arguments = [
        f"--checkpoint={run}",
        "--compile-cache=",
        f"--text={tmp_path}/texts.jsonl",
        f"--stride={stride}",
        f"--json={tmp_path}/r",
    ]
    assert evaluate.main([*arguments, "--mesh=data=2,tensor=4", "--rules=megatron_sp"]) == 0
    nats = 0.0
    n_tokens = 0
    for text in TEXTS:
        ids = [tiny_run.BYTES.eod, *text.encode()]
        cases = []
        for i in range(1, len(ids)):
            # The end of the window that scores token i.
            end = i
            if i > SEQ:
                n_strides = math.ceil((i - SEQ) / stride)
                end = min(len(ids) - 1, SEQ + n_strides * stride)
            cases.append((ids[max(0, end - SEQ) : i], ids[i]))
        nats += cost(cases)
        n_tokens += len(cases)
    n_bytes = sum(len(text.encode()) for text in TEXTS)
    gzip_bits = 8 * len(gzip.compress("".join(TEXTS).encode(), 9)) / n_bytes

    result = json.loads((tmp_path / "r").read_text(encoding="utf-8"))
    assert result["texts"] == len(TEXTS) == 4
    assert result["tokens"] == n_tokens
    assert result["bytes"] == n_bytes
    assert result["stride"] == stride
    assert result["step"] == 3
    assert result["nats_per_token"] == pytest.approx(nats / n_tokens, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nats / n_tokens), rel=1e-4)
    bits = result["bits_per_byte"]
    assert bits == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-5)
    assert result["gzip -9 bits_per_byte"] == gzip_bits

    out, progress = capsys.readouterr()
    assert progress.splitlines()[-1] == (
        f"4 texts, {n_tokens} tokens so far: {bits:.4f} bits per byte"
    ), "the last group has all"
    assert f"{bits:.4f} bits per byte (gzip -9 {gzip_bits:.4f}, xz -9 " in out
    assert (
        f"4 texts, {n_tokens} tokens, {n_bytes} bytes; windows of 48 tokens, stride {stride}" in out
    )


def test_the_field_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command names the option that it has."""
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text('{"body": "a text"}\n', encoding="utf-8")
    has = r'line 1: this JSON object has no "text"; it has "body": choose one with --'
    with pytest.raises(ConfigError, match=has + "text-field$"):
        evaluate.main(["nowhere", "--text=x.jsonl"])
    with pytest.raises(ConfigError, match="nowhere"):
        evaluate.main(["nowhere", "--text=x.jsonl", "--text-field=body"])
    with pytest.raises(ConfigError, match=has + "text-field$"):
        prepare.main(["x.jsonl", "--output=x", "--tokenizer=bytes", "--workers=1"])
    assert [*read_texts("x.jsonl", "body")] == ["a text"]


def test_any_file_is_a_text(run: Path, tmp_path: Path) -> None:
    """One line, an unknown suffix, a compressed file, or a directory: the numbers are the same."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.md").write_text(TEXTS[0], encoding="utf-8")
    (tmp_path / "notes.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode()))
    results = []
    for text in ("a/notes.md", "a", "notes.txt.gz"):
        options = [f"--checkpoint={run}", "--compile-cache=", f"--text={tmp_path}/{text}"]
        assert evaluate.main([*options, f"--json={tmp_path}/r"]) == 0
        result = json.loads((tmp_path / "r").read_text(encoding="utf-8"))
        del result["text"]
        results.append(result)
    assert results[0] == results[1] == results[2]
    assert results[0]["stride"] == SEQ // 2


MISTAKES = [
    (
        [],
        (
            "give either --text=FILE, for perplexity and bits per byte, or --tasks=NAME,... of "
            "lm-evaluation-harness"
        ),
    ),
    (
        ["--text=a", "--tasks=b"],
        (
            "give either --text=FILE, for perplexity and bits per byte, or --tasks=NAME,... of "
            "lm-evaluation-harness"
        ),
    ),
    (
        ["--text=a", "--batch=0"],
        "--batch=0 must be at least 1, --stride=0 and --limit=0 at least 0",
    ),
    (["--text=no/such"], "--text=no/such: no such text file or directory"),
    (["--text=TMP/binary"], "--text=TMP/binary is not UTF-8 (byte 2); convert it to UTF-8 first"),
    (["--text=TMP/empty"], "there is no text to evaluate: every text is empty"),
    (
        ["--text=TMP/good", "--stride=49"],
        "--stride=49 is more than the model's seq_len=48: tokens between windows would be left out",
    ),
    (["--text=TMP/good", "--start=<s>"], "--start=<s>: the tokenizer has no such special token"),
    (
        ["--text=TMP/good", "--json=no/such/file"],
        "--json=no/such/file: the result cannot be written (No such file or directory)",
    ),
]


@pytest.mark.parametrize(
    ("words", "message"),
    MISTAKES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(run: Path, words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    (tmp_path / "empty").write_text("", encoding="utf-8")
    (tmp_path / "good").write_text("some text", encoding="utf-8")
    words = [word.replace("TMP", str(tmp_path)) for word in words]
    with pytest.raises(ConfigError) as caught:
        evaluate.main([f"--checkpoint={run}", "--compile-cache=", *words])
    assert str(caught.value) == message.replace("TMP", str(tmp_path))
