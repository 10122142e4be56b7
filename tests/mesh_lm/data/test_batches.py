"""Tests of a run's batches: blends of prefixes, their checkpoint state, and resuming with a changed
blend."""

import dataclasses
import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from mesh_lm.config import DataConfig, TrainConfig, TrainLoop
from mesh_lm.data import megatron_corpus
from mesh_lm.data.batches import Batches
from mesh_lm.data.corpus import prepare
from mesh_lm.data.digests import digests_path
from mesh_lm.data.indexed import Documents, bin_path, idx_path, seal, write_documents
from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.training.check import check

SEQ = 8
BATCH = 4
VOCAB = 1000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefixes a, b, c with 100 to 130 samples per epoch; 1% of a split is a document or two."""
    directory = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for name, n in (("a", 90), ("b", 110), ("c", 100)):
        documents = [
            np.append(random.integers(1, VOCAB, length), 0) for length in random.integers(4, 14, n)
        ]
        write_documents(directory / name, documents, vocab=VOCAB)
    return directory


def config(
    data: Path, *blend: object, steps: int = 10, seed: int = 1, seq_len: int = SEQ, **fields: object
) -> TrainConfig:
    words = tuple(str(data / word) if isinstance(word, str) else str(word) for word in blend)
    return TrainConfig(
        model=DecoderConfig(vocab_size=VOCAB, seq_len=seq_len),
        output=str(data / "run"),
        train=TrainLoop(steps=steps, global_batch=BATCH),
        data=DataConfig(blend=words, cache=str(data / "cache"), split="90,10", threads=0, **fields),  # pyright: ignore[reportArgumentType]
        seed=seed,
    )


def batches(
    train_config: TrainConfig, saved: dict | None = None, done: int | None = None
) -> Batches:
    sharding = jax.NamedSharding(
        jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,)), jax.P(None, "data")
    )
    saved = json.loads(json.dumps(saved))  # as from a checkpoint
    done = (
        saved["position"] // train_config.train.global_batch
        if saved and done is None
        else done or 0
    )
    return Batches(
        train_config,
        prepare(train_config.data, vocab=train_config.data.tokenizer_vocab),
        sharding,
        saved,
        done,
    )


def read(run: Batches, steps: int) -> list[bytes]:
    """Returns the samples of the next steps, each as the bytes of its tokens and last label, which
    are unique."""
    samples = []
    with closing(run.train()) as loader:
        for _ in range(steps):
            position, batch = next(loader)
            tokens = np.asarray(batch["tokens"])[0]
            labels = np.asarray(batch["labels"])[0]
            samples += [row.tobytes() for row in np.concatenate([tokens, labels[:, -1:]], 1)]
            ids = np.asarray(batch["sample_ids"])[0]
            assert ids.tolist() == list(range(position - BATCH, position))
    return samples


def owner(data: Path, samples: list[bytes]) -> list[str]:
    """Returns the prefix that each sample comes from."""
    streams = {name: Documents(data / name).tokens.astype(np.int32).tobytes() for name in "abc"}
    pieces = [bytes(sample) for sample in samples]
    owners = []
    for piece in pieces:
        tokens = np.frombuffer(piece, np.int32)
        # within one document
        middle = max(np.split(tokens, np.flatnonzero(tokens == 0) + 1), key=len)
        (name,) = [name for name, stream in streams.items() if middle.tobytes() in stream]
        owners.append(name)
    return owners


def test_the_same_config_gives_the_same_order_and_a_resume_continues_it(data: Path):
    mixed = config(data, 0.5, "a", 0.3, "b", 0.2, "c")
    samples = read(batches(mixed), 10)
    assert samples == read(batches(mixed), 10) and len(set(samples)) == 40
    assert Counter(owner(data, samples)) == {"a": 20, "b": 12, "c": 8}
    state = batches(mixed).state(16)
    resumed = batches(mixed, state)
    assert resumed.position == 16 and resumed.changed == []
    assert read(resumed, 6) == samples[16:]
    assert [member["consumed_now"] for member in state["blend"]["members"]] == [8, 5, 3]
    assert read(batches(dataclasses.replace(mixed, seed=2)), 2) != samples[:8]


def test_each_member_goes_on_across_changes_of_the_blend(data: Path):
    """Three successive blends, the second and third after a resume: within an epoch no sample is
    skipped or repeated."""
    alone = {name: read(batches(config(data, name, steps=20)), 20) for name in "abc"}
    first = batches(config(data, 0.5, "a", 0.5, "b"))
    samples = read(first, 6)
    second = batches(config(data, 0.2, "b", 0.8, "c", steps=14), first.state(24))
    assert second.position == 24
    assert second.changed == [
        "data.blend: a new blend from position 24",
        f"{data}/b continues after 12 samples",
        f"{data}/c is new",
        f"{data}/a left after 12 samples",
    ]
    samples += read(second, 4)
    third = batches(config(data, 0.3, "c", 0.4, "a", 0.3, "b", steps=20), second.state(40))
    assert third.changed[1:] == [
        f"{data}/{name} continues after {n} samples"
        for name, n in (("c", 12), ("a", 12), ("b", 16))
    ]
    samples += read(third, 4)
    state = third.state(56)
    # a plain resume, in the middle of the third blend
    again = batches(config(data, 0.3, "c", 0.4, "a", 0.3, "b", steps=20), state)
    assert again.changed == [] and again.state(56) == third.state(56)
    samples += read(again, 6)
    assert len(samples) == len(set(samples)) == 80
    owners = owner(data, samples)
    for name, order in alone.items():
        mine = [
            sample for sample, owner_name in zip(samples, owners, strict=True) if owner_name == name
        ]
        assert mine == order[: len(mine)] and len(mine) > 15
    assert sum(member["consumed_now"] for member in third.state(80)["blend"]["members"]) == 80


def test_a_longer_run_finishes_its_order_before_it_appends_another(data: Path):
    short = batches(config(data, "a", steps=5))
    longer = batches(config(data, "a", steps=45), short.state(20))
    order = read(short, 5) + read(longer, 40)
    epoch = 98
    # 81 of 90 documents are for training
    assert epoch == (Documents(data / "a").offsets[81] - 1) // SEQ
    assert (
        order[:96] == read(batches(config(data, "a", steps=24)), 24)
        and len(set(order[:epoch])) == epoch
    )
    assert (
        order[epoch:]
        == read(batches(config(data, "a", steps=24, seed=2)), 21)[: len(order) - epoch]
    )
    assert longer.changed == [] and longer.state(20)["blend"]["members"][0]["orders"] == (20, 82)
    shorter = batches(config(data, "a", steps=6), longer.state(40))  # appended orders stay
    assert shorter.state(40)["blend"]["members"][0]["orders"] == (20, 82)


@pytest.mark.parametrize("blend", [("a",), (0.5, "a", 0.3, "b", 0.2, "c")])
def test_a_run_that_skips_batches_reads_on_after_its_blend(data: Path, blend: tuple):
    """Eight steps are 32 samples; two rewinds of three steps leave 24 more to read."""
    short_run = config(data, *blend, steps=8)
    first = batches(short_run)
    samples = read(first, 14)
    assert len(set(samples)) == 56
    for position, done in ((28, 4), (44, 5), (52, 7)):
        state = first.state(position)
        resumed = batches(short_run, state, done)
        assert (
            resumed.changed == [] and read(resumed, (56 - position) // BATCH) == samples[position:]
        )
        assert sum(member["consumed_now"] for member in state["blend"]["members"]) == position
        assert (
            resumed.state(56)["blend"]["members"][0]["consumed_now"]
            == first.state(56)["blend"]["members"][0]["consumed_now"]
        )


def test_reading_ahead_of_the_last_batch_makes_no_longer_index(data: Path):
    """The last batch of a run of 10^9 samples must not wait for the order of 10^9 more."""
    for threads in (0, 2):
        settings = config(data, 0.5, "a", 0.3, "b", 0.2, "c")
        settings = dataclasses.replace(
            settings, data=dataclasses.replace(settings.data, threads=threads, prefetch=3)
        )
        made = batches(settings)
        index = made._order._order._index
        read(made, 10)
        assert made._order._order._index is index
        assert len(index["members"]) <= 10 * BATCH + (3 + 2) * BATCH


def test_what_is_left_is_of_the_batch_as_it_is_now(data: Path):
    """Four steps of 2 samples, then four of 4: the blend is 24 samples long, not 8 steps of either
    size."""
    settings = config(data, 0.5, "a", 0.3, "b", 0.2, "c", steps=8)
    small = dataclasses.replace(
        settings, train=dataclasses.replace(settings.train, global_batch=BATCH // 2)
    )
    state = batches(small).state(4 * BATCH // 2)
    index = batches(settings, state, 4)._order
    assert len(index) == 4 * BATCH // 2 + 4 * BATCH


def test_moved_files_are_the_same_data_without_and_with_digests(data: Path, tmp_path: Path):
    settings = config(data, 0.5, "a", 0.5, "b")
    for name in ("a.bin", "a.idx", "b.bin", "b.idx"):
        (tmp_path / name).write_bytes((data / name).read_bytes())
    moved = batches(config(tmp_path, 0.5, "a", 0.5, "b"), batches(settings).state(16))
    assert moved.changed == [] and read(moved, 6) == read(batches(settings), 10)[16:]
    for name in "ab":
        assert seal(str(tmp_path / name)).startswith(f"{tmp_path}/{name}: sealed")
    sealed = batches(config(tmp_path, 0.5, "a", 0.5, "b"), moved.state(24))
    assert sealed.changed == [] and read(sealed, 4) == read(batches(settings), 10)[24:]
    other = Documents(tmp_path / "a").tokens.copy()
    other[len(other) // 2] ^= 1
    bin_path(tmp_path / "a").write_bytes(other.tobytes())
    digests_path(tmp_path / "a").unlink()
    seal(str(tmp_path / "a"))
    again = batches(config(tmp_path, 0.5, "a", 0.5, "b"), sealed.state(24))
    assert again.changed[1:3] == [
        f"{tmp_path}/a is new",
        f"{tmp_path}/b continues after 12 samples",
    ], "sealed again: other data"


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"seq_len": 4}, {"documents": "packed"}, {"split": "80,20"}],
    ids=["seed", "seq_len", "packed", "split"],
)
def test_a_place_in_other_data_is_refused(data: Path, change: dict, tmp_path: Path):
    write_about(data, eod=0)
    saved = batches(config(data, "a")).state(8)
    changed = config(data, "a", **{k: v for k, v in change.items() if k != "split"})
    if "split" in change:
        changed = dataclasses.replace(
            changed, data=dataclasses.replace(changed.data, split=change["split"])
        )
    with pytest.raises(ConfigError) as error:
        batches(changed, saved)
    name = "Megatron prefixes, split 90,10 in sequences of 8, seed 1"
    assert str(error.value).startswith(
        f"{data}/run was trained on corpus {name}, this config reads Megatron prefixes, split "
    )
    assert str(error.value).endswith("; use a new output directory, or restore the original data")
    remove_about(data)


def write_about(data: Path, *names: str, **about: object) -> None:
    for name in names or "abc":
        (data / f"{name}.json").write_text(json.dumps(about), encoding="utf-8")


def remove_about(data: Path) -> None:
    for path in data.glob("?.json"):
        path.unlink()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(
        "".join(f"line {i * i} of the text\n" for i in range(400)), encoding="utf-8"
    )
    return tmp_path


def text_config(directory: Path, **fields: object) -> TrainConfig:
    settings = config(directory)
    data = dataclasses.replace(
        settings.data, path=str(directory / "text.txt"), tokenizer_vocab=300, blend=(), **fields
    )
    return dataclasses.replace(settings, data=data)


def test_text_keeps_its_order_and_its_old_checkpoints(text: Path):
    settings = text_config(text)
    made = batches(settings)
    assert made.state(12).items() >= {
        "position": 12,
        "corpus": made.name,
    }.items() and "blend" not in made.state(12)
    longer = dataclasses.replace(settings, train=TrainLoop(steps=500, global_batch=BATCH))
    samples = read(made, 6)
    # whatever the length of the run
    assert read(batches(longer, {"position": 12, "corpus": made.name}), 3) == samples[12:]
    with pytest.raises(
        ConfigError,
        match=(
            r"was trained on corpus another, this config reads text-.* use a new output directory, "
            r"or restore the original data"
        ),
    ):
        batches(settings, {"position": 12, "corpus": "another"})


def test_packed_text_and_packed_blends(data: Path, text: Path):
    made = batches(text_config(text, documents="packed"))
    assert "packed sequences of 8" in made.name
    with closing(made.train()) as loader:
        _, batch = next(loader)
    assert {"segment_ids", "positions"} <= set(batch)
    write_about(data, eod=0)
    settings = config(data, 0.5, "a", 0.5, "b", documents="packed")
    samples = read(batches(settings), 10)
    state = batches(settings).state(16)
    assert read(batches(settings, state), 6) == samples[16:]
    changed = batches(config(data, 0.25, "a", 0.75, "b", documents="packed"), state)
    assert len(set(samples[:16] + read(changed, 6))) == 40  # no sample repeats
    remove_about(data)
    with pytest.raises(
        ConfigError,
        match=r"data\.documents=packed: the end-of-document token .* set data\.tokenizer",
    ):
        batches(settings)


def test_heldout_is_the_validation_split_in_stored_order(data: Path):
    write_about(data, eod=0)
    for documents in ("joined", "separate", "packed"):
        made = batches(config(data, 0.9, "a", 0.1, "b", documents=documents))
        labels = [np.asarray(b["labels"])[np.asarray(b["weights"]) > 0] for b in made.heldout()]
        expected = [
            Documents(data / name).tokens[Documents(data / name).offsets[start] :]
            for name, start in (("a", 81), ("b", 99))
        ]
        assert np.concatenate(labels).tolist() == np.concatenate(expected).tolist()
    remove_about(data)


def test_what_is_known_about_prefixes(data: Path):
    plain = prepare(config(data, "a", "b").data, vocab=300)
    assert (
        plain.eod,
        plain.tokenizer(),
        plain.heldout_bytes,
        plain.train_bytes,
        plain.gzip_bits_per_byte,
    ) == (None,) * 5
    sizes = [(len(Documents(data / name).tokens), Documents(data / name).offsets) for name in "ab"]
    assert plain.train_tokens == sizes[0][1][81] + sizes[1][1][99]
    assert plain.train_tokens + plain.heldout_tokens == sizes[0][0] + sizes[1][0]

    decoded = prepare(config(data, "a", "b", tokenizer="bytes").data, vocab=300)
    assert decoded.eod == decoded.tokenizer().eod == 256
    write_about(data, "a", eod=0, tokens=sizes[0][0], bytes=4 * sizes[0][0], lost_bytes=0)
    write_about(data, "b", eod=0, tokens=sizes[1][0], bytes=4 * sizes[1][0], lost_bytes=0)
    corpus = prepare(config(data, "a", "b").data, vocab=300)
    assert (corpus.eod, corpus.heldout_bytes, corpus.train_bytes) == (
        0,
        4 * corpus.heldout_tokens,
        4 * corpus.train_tokens,
    )
    write_about(data, "b", eod=5)
    assert prepare(config(data, "a", "b").data, vocab=300).eod is None
    remove_about(data)


def test_heldout_bytes_by_decoding(tmp_path: Path):
    texts = ["höhe", "ein Text", "", "noch einer"] * 5
    write_documents(tmp_path / "x", [np.array([*text.encode(), 256]) for text in texts], vocab=257)
    settings = dataclasses.replace(config(tmp_path, "x", tokenizer="bytes").data, split="50,50")
    assert prepare(settings, vocab=300).heldout_bytes == len("".join(texts[10:]).encode())


def test_heldout_bytes_of_much_text_by_decoding_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The estimate uses a few of many documents (10 tokens, 9 bytes each), or the start of a single
    long one."""
    monkeypatch.setattr(megatron_corpus, "_COUNTED", 100)
    monkeypatch.setattr(megatron_corpus, "_LONGEST", 50)
    documents = [np.array([*b"nine byte", 256])] * 1000
    write_documents(tmp_path / "x", documents, vocab=257)
    settings = dataclasses.replace(config(tmp_path, "x", tokenizer="bytes").data, split="50,50")
    decoded = []
    decode = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids: decoded.append(len(ids)) or decode(self, ids)
    )
    assert prepare(settings, vocab=300).heldout_bytes == 500 * 9
    assert sum(decoded) <= 100
    write_documents(
        tmp_path / "y", [np.array([*b"nine byte", 256]), np.array([*b"x" * 999, 256])], vocab=257
    )
    assert (
        prepare(
            dataclasses.replace(settings, blend=(str(tmp_path / "y"),)), vocab=300
        ).heldout_bytes
        == 1000
    )


def test_a_model_without_all_ids_of_the_tokenizer(data: Path):
    """Otherwise the run would fail at its last step, when it writes a sample, or train on missing
    ids."""
    settings = config(data, "a", tokenizer="bytes").data
    with pytest.raises(
        ConfigError,
        match=r"the tokenizer of data\.blend has ids up to 256, which model\.vocab_size=256 does not",
    ):
        prepare(settings, vocab=0, model_vocab=256)
    assert prepare(settings, vocab=0, model_vocab=257).eod == 256
    write_about(data, "a", eod=7)
    with pytest.raises(
        ConfigError,
        match=(
            r"the data's end-of-document token is 7, which model\.vocab_size=7 does not have; set "
            r".*=8"
        ),
    ):
        prepare(config(data, "a").data, vocab=0, model_vocab=7)
    remove_about(data)


def test_errors(data: Path, tmp_path: Path):
    small = dataclasses.replace(config(data, "a"), model=DecoderConfig(vocab_size=500, seq_len=SEQ))
    with pytest.raises(
        ConfigError,
        match=r"/a\.bin, document \d+: token id \d+, but model\.vocab_size=500 has ids 0 to 499",
    ):
        read(batches(small), 10)
    with pytest.raises(ConfigError, match=r"cannot read .*/none\.bin: No such file"):
        batches(config(data, "none"))
    for name in ("a.bin", "a.idx"):
        (tmp_path / name).write_bytes((data / name).read_bytes())
    idx_path(tmp_path / "a").write_bytes((data / "a.idx").read_bytes()[:-5])
    with pytest.raises(
        ConfigError, match=r"/a\.idx is truncated or not a Megatron \.bin/\.idx file"
    ):
        batches(config(tmp_path, "a"))
    with pytest.raises(
        ConfigError,
        match=r"data\.documents=separate: the end-of-document token of this data is not known",
    ):
        batches(config(data, "a", documents="separate"))
    with pytest.raises(
        ConfigError,
        match=r"data\.fim_rate=0\.5 splits documents between characters, which needs data\.tokenizer",
    ):
        batches(config(data, "a", fim_rate=0.5))
    with pytest.raises(
        ConfigError,
        match=r"data\.fim_rate=0\.5: the tokenizer lacks the special tokens <\|fim_prefix\|>, ",
    ):
        batches(config(data, "a", fim_rate=0.5, tokenizer="bytes"))
    write_about(data, "a", tokenizer_fingerprint="1" * 64)
    write_about(data, "b", tokenizer_fingerprint="2" * 64)
    with pytest.raises(
        ConfigError,
        match=r"different tokenizers\n  - .*/a: 1{16}\n  - .*/b: 2{16}\nprepare all of it with one",
    ):
        batches(config(data, "a", "b"))
    (data / "a.json").write_text("{", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"a\.json cannot be read .* prepare the data again, or remove it"
    ):
        batches(config(data, "a"))
    remove_about(data)


def test_the_check_lists_every_problem_of_the_data(data: Path):
    settings = config(data, 0.5, "a", "b", fim_rate=1.5, fim_spm_rate=-1.0, documents="packed")
    settings = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, split="all"),
        train=TrainLoop(steps=1, global_batch=1),
    )
    with pytest.raises(ConfigError) as error:
        check(settings, 1)
    assert str(error.value).splitlines()[1:] == [
        f"  - data.blend=0.5 {data}/a {data}/b: give prefixes only, or a weight before each prefix",
        (
            "  - data.split='all' must be up to three weights of training, validation and test "
            "documents, as 969,30,1"
        ),
        "  - data.fim_rate=1.5 must be a fraction in [0, 1]",
        "  - data.fim_spm_rate=-1.0 must be a fraction in [0, 1]",
        (
            "  - data.fim_rate=1.5 makes documents longer, but packed ones have no room; set "
            "data.documents=separate"
        ),
    ]
