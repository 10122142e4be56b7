"""lm-evaluation-harness on an exported model: our adapter against its own for transformers, which
has the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from support import shard_on
from tokenizers import decoders, models, pre_tokenizers, trainers

from mesh_lm import huggingface
from mesh_lm.commands import evaluate
from mesh_lm.data.tokenizer import load_tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.inference import Generator, Sampling, Scorer, harness
from mesh_lm.inference.harness import Requests
from mesh_lm.inference.trained import TrainedModel
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 60
TEXT = (
    "The boat left the town at dawn. The gulls cried over the quiet tower, and a small town slept "
    "by the sea.\n"
)
SPECIAL = ["<|begin|>", "<|endoftext|>", *(f"<|{i}|>" for i in range(30))]
MODEL = DecoderConfig(
    vocab_size=448, seq_len=32, n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48,
    positions="rotary", norm="rmsnorm",
    activation="swiglu", biases=False, tied=False, init_std=0.3, dtype="float32",
)  # fmt: skip
"""About one id in ten has no text, because the tokenizer ends at 400, and as many are special
tokens."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of random weights, with a tokenizer that has words such as " town"."""
    directory = tmp_path_factory.mktemp("oracle")
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT] * 20, trainer)
    bpe.save(str(directory / "tokenizer.json"))
    layout = ModelLayout.of(MODEL, shard_on("ddp"))
    params = jax.jit(layout.init)(jax.random.key(1))
    huggingface.save(
        directory / "model",
        layout,
        params,
        dtype="float32",
        tokenizer=load_tokenizer(directory / "tokenizer.json"),
    )
    return directory / "model"


@pytest.fixture(scope="module")
def trained(exported: Path) -> TrainedModel:
    return TrainedModel.load(exported, dtype="float32")


@pytest.fixture(scope="module")
def score(trained: TrainedModel) -> Callable[[list[int], list[int]], float]:
    """Returns (context, continuation) -> log-probability, from the scores of exactly these ids."""
    scorer = Scorer(trained.layout, trained.params)
    return lambda context, continuation: float(
        scorer([[*context, *continuation]])[0].logprobs[-len(continuation) :].sum()
    )


def test_a_token_across_the_join(
    trained: TrainedModel, score: Callable, capsys: pytest.CaptureFixture
) -> None:
    """Which leaves the continuation without a token of its own, but not with probability 1."""
    requests = Requests(trained, batch=8, start=trained.tokenizer.eod)
    ids = requests.encode
    assert len(ids(" town")) == 1
    eod = trained.tokenizer.eod
    wanted = {
        (" t", "own"): score(ids(" t"), ids("own")),
        ("the sea t", "own"): score(ids("the sea t"), ids("own")),
        (" t", "own slept"): score(ids(" t"), ids(" slept")),
        ("the sea ", "slept"): score(ids("the sea"), ids(" slept")),
        ("the sea ", ""): score(ids("the sea"), ids(" ")),
        ("the sea", ""): 0.0,
        ("", ""): 0.0,
        ("", "own"): score([eod], ids("own")),
        ("  ", "own"): score([eod], ids("  own")),
    }
    found = requests.loglikelihoods([*wanted])
    assert [logprob for logprob, _ in found] == pytest.approx([*wanted.values()], abs=1e-4)
    assert [pair for pair, answer in zip(wanted, found, strict=True) if answer == (0.0, True)] == [
        ("the sea", ""),
        ("", ""),
    ]
    line = (
        "2 of 9 continuations were encoded by themselves, because a token spans the end of their "
        "context\n"
    )
    assert (requests.n_joined, capsys.readouterr().out) == (2, line)


def test_a_continuation_without_tokens(
    trained: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(trained, batch=8, start=trained.tokenizer.eod)
    monkeypatch.setattr(requests, "encode", lambda text: list(text.replace("\u65e5", "").encode()))
    with pytest.raises(
        ConfigError,
        match=r"^a task asks for the continuation '日', for which the tokenizer has no token$",
    ):
        requests.loglikelihoods([("the sea", "日")])


def ask(model: Any, kind: str, arguments: list[tuple]) -> list[Any]:
    """Returns the answers of a model of the harness to requests of a kind."""
    from lm_eval.api.instance import Instance

    return getattr(model, kind)([Instance(kind, {}, each, i) for i, each in enumerate(arguments)])


def random_pairs(encode: Callable[[str], list[int]], n: int) -> list[tuple[str, str]]:
    """Returns pieces of a text and what follows them, which the adapter for transformers accepts:
    it has a token for the continuation.

    Every third context ends with white space. Some contexts are longer than the model's window, and
    some are empty.
    """
    random = np.random.default_rng(0)
    text = TEXT * 4 + "naïve 日本 🎉 zzz\n"
    pairs = []
    while len(pairs) < n:
        middle = int(random.integers(4, len(text) - 4))
        context = text[max(0, middle - int(random.integers(1, 200))) : middle]
        continuation = text[middle : middle + int(random.integers(1, 30))]
        if len(pairs) % 3 == 0:
            context = context.rstrip() + str(random.choice([" ", "  ", "\n", " \n "]))
        if len(pairs) % 20 == 7:
            context = ""
        stripped = context.rstrip()
        n_ids = len(encode(context + continuation)) - len(encode(stripped))
        if bool(context) == bool(stripped) and 0 < n_ids <= MODEL.seq_len:
            pairs.append((context, continuation))
    return pairs


@pytest.mark.slow
def test_answers_of_the_adapter_for_transformers(exported: Path, trained: TrainedModel) -> None:
    pytest.importorskip("torch", reason="the oracle needs torch: pip install -e '.[oracle]'")
    pytest.importorskip(
        "accelerate", reason="the adapter needs accelerate: pip install -e '.[oracle]'"
    )
    pytest.importorskip(
        "lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'"
    )
    from lm_eval.models.huggingface import HFLM

    ours = harness.adapter(trained, batch=32, start=trained.tokenizer.eod)
    # Without its cache, which takes the wrong logits for two requests of the same ids that are
    # divided at different places.
    theirs: Any = HFLM(
        pretrained=str(exported), device="cpu", batch_size=16, dtype="float32", logits_cache=False
    )
    assert (theirs.max_length, theirs.prefix_token_id) == (MODEL.seq_len, trained.tokenizer.eod)

    pairs = random_pairs(ours.requests.encode, 200)
    assert sum(context != context.rstrip() for context, _ in pairs) >= 50
    found = ask(ours, "loglikelihood", pairs)
    wanted = ask(theirs, "loglikelihood", pairs)
    assert [logprob for logprob, _ in found] == pytest.approx(
        [logprob for logprob, _ in wanted], abs=1e-4
    )
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
    assert ours.requests.n_joined == 0

    texts = [(TEXT[:n] * repeats,) for n, repeats in ((1, 1), (40, 1), (100, 1), (100, 3), (83, 7))]
    assert ask(ours, "loglikelihood_rolling", texts) == pytest.approx(
        ask(theirs, "loglikelihood_rolling", texts), abs=1e-4
    )

    limits = {"max_gen_toks": MODEL.seq_len // 2, "do_sample": False}
    prompts = [
        (context, limits | {"until": [stop]})
        for context, _ in pairs[:24]
        for stop in ("\n\n", "a")
        if context
    ]
    answers = ask(ours, "generate_until", prompts)
    assert answers == ask(theirs, "generate_until", prompts)
    assert len(set(answers)) > 20


@pytest.mark.parametrize("start", ["<|begin|>", "<|endoftext|>"])
def test_the_start_token_is_before_every_context(
    trained: TrainedModel, score: Callable, start: str
) -> None:
    """And stays there where a context is truncated."""
    first = trained.tokenizer.special(start)
    assert first is not None
    requests = Requests(trained, batch=8, start=first, starts_context=True)
    ids, seq_len = requests.encode, MODEL.seq_len
    long = TEXT * 3
    whole = ids(TEXT * 2)[:seq_len]
    pairs = [("the sea", " slept"), ("", "slept"), (long, "The"), ("the sea t", "own")]
    wanted = [
        score([first, *ids("the sea")], ids(" slept")),
        score([first], ids("slept")),
        score(
            [first, *ids(long.rstrip() + "\nThe")[: len(ids(long.rstrip()))][-(seq_len - 2) :]],
            ids("\nThe"),
        ),
        score([first, *ids("the sea t")], ids("own")),
    ]
    found = requests.loglikelihoods(pairs)
    assert [logprob for logprob, _ in found] == pytest.approx(wanted, abs=1e-4)
    ((filled, _),) = requests.continuations([(ids("the sea"), whole)])
    assert filled == pytest.approx(score([first], whole), abs=1e-4)

    prompts = ["the sea", "", long]
    new = 6
    prompt_ids = [[first, *ids(prompt)[-(seq_len - new - 1) :]] for prompt in prompts]
    completions = Generator(
        trained.layout, trained.params, trained.tokenizer, Sampling(0.0)
    ).complete(prompt_ids, new)
    assert requests.answers(prompts, Sampling(0.0), [], new) == [
        requests._answer(completion.tokens, []) for completion in completions
    ]


def test_only_a_token_that_was_named_starts_contexts(
    trained: TrainedModel, score: Callable
) -> None:
    """The end-of-document token stands in place of an empty context."""
    eod = trained.tokenizer.eod
    requests = Requests(trained, batch=8, start=eod)
    ids = requests.encode
    found = requests.loglikelihoods([("the sea", " slept"), ("", "slept")])
    assert [logprob for logprob, _ in found] == pytest.approx(
        [score(ids("the sea"), ids(" slept")), score([eod], ids("slept"))], abs=1e-4
    )


def test_a_start_token_that_the_model_lacks(trained: TrainedModel) -> None:
    """A tokenizer may have more ids than the model, such as one for padding that was added
    later."""
    requests = Requests(trained, batch=8, start=MODEL.vocab_size, starts_context=True)
    with pytest.raises(
        ConfigError,
        match=(
            r"^sequence 0 has token ids from \d+ to 448, and the model has 0 to 447: the tokenizer "
            r"is not"
        ),
    ):
        requests.loglikelihoods([("the sea", " slept")])


@pytest.mark.slow
@pytest.mark.parametrize("start", ["", "<|endoftext|>", "<|begin|>"])
def test_the_option_start(exported: Path, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "lm_eval", reason="lm-evaluation-harness is not installed: pip install -e '.[eval]'"
    )
    adapters = []
    monkeypatch.setattr(harness, "find_tasks", lambda *_: None)
    monkeypatch.setattr(
        harness, "run", lambda adapter, *_, limit: (adapters.append(adapter), ({}, ""))[1]
    )
    assert (
        evaluate.main(
            [
                f"--checkpoint={exported}",
                "--compile-cache=",
                "--dtype=float32",
                "--tasks=any",
                f"--start={start}",
            ]
        )
        == 0
    )
    adapters.append(harness.register()(str(exported), compile_cache="", start=start))
    for adapter in adapters:
        assert adapter.requests.starts_context == bool(start)
        assert adapter.requests.start == adapter.requests.trained.tokenizer.special(
            start or "<|endoftext|>"
        )
