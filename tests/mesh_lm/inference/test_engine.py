"""Compares cached generation with a loop that reads the full text for every token, on one device
and with all kinds of rules."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import GPT, LLAMA, SEQ, VOCAB, shard_on

from mesh_lm.config import files
from mesh_lm.errors import ConfigError
from mesh_lm.inference import Engine, Sampling, Scorer
from mesh_lm.inference.engine import without_sequence_sharding
from mesh_lm.model import token_batch
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 70

# Weights large enough that texts differ and do not repeat one token.
MODELS = {
    "gpt": dataclasses.replace(GPT, init_std=0.3),
    "llama": dataclasses.replace(LLAMA, init_std=0.3, qk_norm=True),
}
PROMPTS = [[3], [7, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [0, 0, 11]]
NEW = 7
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.3, top_k=40, top_p=0.9)


@functools.cache
def weights(name: str) -> dict[str, np.ndarray]:
    return jax.tree.map(
        np.asarray, jax.jit(ModelLayout.of(MODELS[name], shard_on("ddp")).init)(jax.random.key(1))
    )


def layout_on(name: str, rules: str, **mesh: int) -> ModelLayout:
    shard = shard_on(rules, **mesh)
    # the kv heads are then replicated, and each device uses its own
    if mesh.get("tensor", 1) > MODELS[name].kv_heads:
        rows = {"kv_heads": None}
        shard = shard_on(shard.rules.replace(params=rows, activations=rows), **mesh)
    return ModelLayout.of(MODELS[name], shard)


def placed(name: str, layout: ModelLayout) -> dict[str, jax.Array]:
    return {
        n: jax.device_put(weights(name)[n], where)
        for n, where in layout.shardings("params").items()
    }


@functools.cache
def full_logits(name: str):
    """Returns a function from tokens [B, SEQ] to the logits [B, SEQ, V] of the model in
    training."""
    layout = ModelLayout.of(MODELS[name], shard_on("ddp"))
    run = jax.jit(lambda params, tokens: layout.bind(params).logits(token_batch(tokens)))
    return lambda tokens: run(weights(name), tokens)


@functools.cache
def reference(
    name: str, sampling: Sampling, seed: int = 5
) -> tuple[list[list[int]], list[list[float]]]:
    """Returns tokens and log-probabilities of each prompt, computed without a cache or left
    padding."""
    texts, logprobs = [list(p) for p in PROMPTS], [[] for _ in PROMPTS]
    choose = jax.jit(sampling.choose)
    for _ in range(NEW):
        tokens = np.zeros((len(texts), SEQ), np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        after = jnp.stack(
            [z[len(text) - 1] for z, text in zip(full_logits(name)(tokens), texts, strict=True)]
        )
        key = jax.random.key(seed)
        keys = jnp.stack(
            [
                jax.random.fold_in(jax.random.fold_in(key, row), len(text))
                for row, text in enumerate(texts)
            ]
        )
        scores = np.asarray(jax.nn.log_softmax(after))
        for row, token in enumerate(np.asarray(choose(after, keys)).tolist()):
            texts[row].append(token)
            logprobs[row].append(scores[row, token])
    return [text[-NEW:] for text in texts], logprobs


CASES = [
    ("gpt", "ddp", {}, GREEDY),
    pytest.param("gpt", "ddp", {}, SAMPLED, marks=pytest.mark.slow),
    ("llama", "ddp", {}, GREEDY),
    pytest.param("llama", "ddp", {}, SAMPLED, marks=pytest.mark.slow),
    pytest.param("gpt", "megatron", {"data": 2, "tensor": 4}, GREEDY, marks=pytest.mark.slow),
    pytest.param("gpt", "fsdp", {"fsdp": 8}, SAMPLED, marks=pytest.mark.slow),
    ("gpt", "hsdp+megatron_sp", {"data": 2, "fsdp": 2, "tensor": 2}, GREEDY),
    ("llama", "megatron_sp", {"data": 2, "tensor": 4}, SAMPLED),
    pytest.param("llama", "hsdp", {"data": 2, "fsdp": 4}, GREEDY, marks=pytest.mark.slow),
    pytest.param(
        "llama", "fsdp+megatron", {"fsdp": 4, "tensor": 2}, SAMPLED, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(
    ("name", "rules", "mesh", "sampling"), CASES, ids=lambda value: str(value).replace("'", "")
)
def test_equals_generation_without_a_cache(
    name: str, rules: str, mesh: dict[str, int], sampling: Sampling
) -> None:
    layout = layout_on(name, rules, **mesh)
    engine = Engine(layout, placed(name, layout), sampling)
    session = engine.start(PROMPTS, NEW, seed=5)
    made = session.advance(2)
    made = [a + b for a, b in zip(made, session.advance(), strict=True)]
    assert session.done
    tokens, logprobs = reference(name, sampling)
    assert [[token for token, _ in row] for row in made] == tokens
    np.testing.assert_allclose(
        [[p for _, p in row] for row in made], logprobs, rtol=1e-4, atol=1e-5
    )
    assert len({token for row in tokens for token in row}) > 10, (
        "the texts say nothing: larger weights are needed"
    )


def test_attention_named_for_training_need_not_serve_generation() -> None:
    """cuDNN supports no segment ids, and is not available here."""
    layout = ModelLayout.of(dataclasses.replace(MODELS["gpt"], attention="cudnn"), shard_on("ddp"))
    made = Engine(layout, placed("gpt", layout), GREEDY).start(PROMPTS, NEW, seed=5).advance()
    assert [[token for token, _ in row] for row in made] == reference("gpt", GREEDY)[0]


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.slow), "llama"])
def test_logits_after_each_token_equal_the_forward_pass(name: str) -> None:
    model = ModelLayout.of(MODELS[name], shard_on("ddp"))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ)).astype(np.int32)
    pads, P, T = np.array([0, 3], np.int32), 9, 13

    @jax.jit
    def run(params):
        bound, out = model.bind(params), []
        padded = jnp.stack([jnp.roll(tokens[0], 0), jnp.roll(tokens[1], 3)])[:, :T]
        cache = bound.empty_cache(2, T)
        for start, stop in ((0, P), *((t, t + 1) for t in range(P, T))):
            slots = jnp.arange(start, stop)
            batch = {
                "tokens": padded[:, start:stop],
                "positions": jnp.maximum(slots - pads[:, None], 0),
                "segment_ids": (slots >= pads[:, None]).astype(jnp.int32),
            }
            logits, cache = bound.extend(batch, cache, start)
            out.append(logits)
        return jnp.stack(out, 1)

    found, wanted = (
        np.asarray(run(weights(name))),
        np.asarray(full_logits(name)(np.pad(tokens, [(0, 2), (0, 0)]))),
    )
    for row, pad in enumerate(pads):
        np.testing.assert_allclose(
            found[row],
            wanted[row, P - 1 - pad : T - pad],
            rtol=1e-5,
            atol=1e-5 * np.abs(wanted).max(),
        )


def test_a_row_does_not_see_the_others() -> None:
    """Row 2 generates the same text alone, in another batch and with another padding; another seed
    or row number gives another text."""
    layout = layout_on("gpt", "ddp")
    engine = Engine(layout, placed("gpt", layout), SAMPLED)

    def write(prompts, **options) -> list[list[int]]:
        return [
            [token for token, _ in row] for row in engine.start(prompts, NEW, **options).advance()
        ]

    wanted = reference("gpt", SAMPLED)[0][2]
    assert write([PROMPTS[2]], seed=5, rows=[2], batch=4) == [wanted]
    assert write([PROMPTS[0], [4] * 9, PROMPTS[2]], seed=5, batch=4)[2] == wanted
    assert (
        write([PROMPTS[2]], seed=5, rows=[3], batch=4)
        != [wanted]
        != write([PROMPTS[2]], seed=6, rows=[2], batch=4)
    )


def test_a_row_ends_at_its_stop_id() -> None:
    layout = layout_on("gpt", "ddp")
    engine = Engine(layout, placed("gpt", layout), GREEDY)
    texts = reference("gpt", GREEDY)[0]
    stops = [texts[0][0], texts[1][3]]
    session = engine.start(PROMPTS, NEW, stop_ids=stops)
    for row, text in zip(session.advance(), texts, strict=True):
        end = next((i for i, token in enumerate(text) if token in stops), NEW - 1)
        assert [token for token, _ in row] == text[: end + 1]
    ended = engine.start(PROMPTS[:2], NEW, stop_ids=stops, batch=4)
    ended.advance()
    assert ended.done


def test_a_model_without_a_cache() -> None:
    """docs/custom_model.py has only `logits`, and a recurrent state that padding must not
    change."""
    config = files.load("docs/custom_model.py")
    model = dataclasses.replace(
        config.model, vocab_size=256, seq_len=SEQ, n_layers=2, d_model=32, d_state=24
    )
    layout = ModelLayout.of(model, shard_on(config.rules, fsdp=4, tensor=2))
    params = jax.jit(layout.init, out_shardings=layout.shardings("params"))(jax.random.key(0))
    texts = [list(prompt) for prompt in PROMPTS]
    for text, row in zip(
        texts, Engine(layout, params, GREEDY).start(PROMPTS, NEW).advance(), strict=True
    ):
        text += [token for token, _ in row]
    scores = Scorer(layout, params, 4)(texts)
    for text, prompt, score in zip(texts, PROMPTS, scores, strict=True):
        assert len(score.greedy) == len(text) - 1 == len(prompt) + NEW - 1
        assert score.greedy[len(prompt) - 1 :].all(), "padding or the text of another row was seen"
        assert (score.logprobs[len(prompt) - 1 :] > -np.log(model.vocab_size)).all()


@pytest.mark.parametrize(
    ("name", "rules", "mesh"),
    [("gpt", "ddp", {}), ("llama", "hsdp+megatron_sp", {"data": 2, "fsdp": 2, "tensor": 2})],
)
def test_scores(name: str, rules: str, mesh: dict[str, int]) -> None:
    """Compares scores with the logits for sequences of all lengths, in more than one batch."""
    random = np.random.default_rng(2)
    sequences = [
        random.integers(0, VOCAB, n).tolist() for n in (2, SEQ + 1, 5, 9, 3, SEQ, 7, 4, 12)
    ]
    layout = layout_on(name, rules, **mesh)
    params = placed(name, layout)
    # Make every second label the likeliest.
    tokens = np.zeros((4, SEQ), np.int32)
    tokens[0] = sequences[1][:-1]
    sequences[1][-1] = int(np.asarray(full_logits(name)(tokens))[0, -1].argmax())
    scores = Scorer(layout, params, batch=4)(sequences)
    for sequence, score in zip(sequences, scores, strict=True):
        tokens = np.zeros((4, SEQ), np.int32)
        tokens[0, : len(sequence) - 1] = sequence[:-1]
        logits = np.asarray(full_logits(name)(tokens))[0, : len(sequence) - 1]
        wanted = (logits - np.logaddexp.reduce(logits, -1, keepdims=True))[
            np.arange(len(sequence) - 1), sequence[1:]
        ]
        np.testing.assert_allclose(score.logprobs, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(score.greedy, logits.argmax(-1) == sequence[1:])
    assert scores[1].greedy[-1]


def test_sequences_are_not_sharded() -> None:
    layout = layout_on("gpt", "hsdp+megatron_sp", data=2, fsdp=2, tensor=2)
    whole = without_sequence_sharding(layout)
    assert whole.shard.axes_for("seq_resid") == () and layout.shard.axes_for("seq_resid") == (
        "tensor",
    )
    assert whole.shardings("params") == layout.shardings("params")


@pytest.mark.parametrize(
    ("prompts", "new", "answer"),
    [
        ([], 1, "there are no prompts to continue; give at least one"),
        ([[1]], 0, "0 new tokens: ask for at least 1"),
        (
            [[1], []],
            1,
            "prompt 1 has no tokens; to start without a prompt, use the end-of-document token",
        ),
        (
            [[1, VOCAB]],
            1,
            f"prompt 0 has token ids from 1 to {VOCAB}; the model has ids 0 to {VOCAB - 1}",
        ),
        (
            [[1] * 10],
            7,
            (
                "prompt 0 has length 10 and 7 new tokens were requested, but model.seq_len=16; ask "
                "for 6 at most, or shorten the prompt"
            ),
        ),
        ([[1] * 16], 1, "prompt 0 has 16 tokens, but model.seq_len=16; shorten the prompt"),
    ],
)
def test_what_cannot_be_generated(prompts: list[list[int]], new: int, answer: str) -> None:
    layout = layout_on("gpt", "ddp")
    with pytest.raises(ConfigError) as caught:
        Engine(layout, dict(layout.shapes)).start(prompts, new)
    assert str(caught.value) == answer
