import json
import os
import socket
import subprocess
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import pytest
from in_memory import Tokens
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from processes import PATIENCE

from mesh_lm.data.loader import Loader, heldout
from mesh_lm.data.rows import RowReader
from mesh_lm.data.sequences import Sequences
from mesh_lm.errors import ConfigError

SEQ_LEN = 8
DATA = ("data", "fsdp")
SHARDINGS = {
    "data": ((1, 4, 2, 1), PartitionSpec(None, DATA, "sequence")),
    "data, pipeline": ((4, 2, 1, 1), PartitionSpec(None, DATA, "sequence")),
    "data, sequence": ((1, 2, 2, 2), PartitionSpec(None, DATA, "sequence")),
    "replicated": ((1, 2, 2, 2), PartitionSpec()),
    "short spec": ((1, 8, 1, 1), PartitionSpec(None, "data")),
}


def make_sharding(shape: tuple[int, ...], spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(
        jax.make_mesh(
            shape, ("pipeline", "data", "fsdp", "sequence"), axis_types=(AxisType.Auto,) * 4
        ),
        spec,
    )


def make_sequences(n_tokens: int = 1000, mode="separate", shuffle=True, pad=False) -> RowReader:
    tokens = np.random.default_rng(0).integers(0, 9, n_tokens).astype(np.uint16)
    order = Sequences(Tokens(tokens), SEQ_LEN, eod=0, seed=3 if shuffle else None, pad=pad)
    return RowReader(order, eod=0, documents=mode, mask_document_start=True)


def make_loader(
    sequences, sharding, *, position=0, global_batch=16, microbatches=2, threads=2, prefetch=3
) -> Loader:
    return Loader(
        sequences,
        global_batch=global_batch,
        microbatches=microbatches,
        sharding=sharding,
        position=position,
        threads=threads,
        prefetch=prefetch,
    )


def assert_equal(batch: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> None:
    """Compares a batch with its rows, which have no token indices."""
    indices = np.arange(SEQ_LEN, dtype=np.int32)
    expected = {**expected, "indices": np.broadcast_to(indices, (len(batch["tokens"]), 1, SEQ_LEN))}
    assert set(batch) == set(expected)
    for name, leaf in batch.items():
        assert (np.asarray(leaf).reshape(expected[name].shape) == expected[name]).all(), name
        assert leaf.dtype == expected[name].dtype, name


def test_tokens_lie_in_the_order_that_is_asked_for():
    """All leaves with a token's position do, the indices too; the certificate is that of the
    text."""
    sequences = make_sequences()
    sharding = make_sharding(*SHARDINGS[next(iter(SHARDINGS))])
    order = np.random.default_rng(1).permutation(SEQ_LEN).astype(np.int32)
    options = {
        "global_batch": 16,
        "microbatches": 2,
        "sharding": sharding,
        "threads": 0,
        "prefetch": 1,
    }
    plain, moved = (
        Loader(sequences, position=5, token_order=token_order, **options)
        for token_order in (None, order)
    )
    (_, batch), (_, other) = next(plain), next(moved)
    for name, leaf in batch.items():
        expected_leaf = np.asarray(leaf)[..., order] if leaf.ndim == 3 else np.asarray(leaf)
        assert (np.asarray(other[name]) == expected_leaf).all(), name
    assert (
        np.asarray(other["indices"])[0, 0].tolist() == order.tolist()
        and plain.certificate == moved.certificate
    )
    for ours, theirs in zip(
        heldout(sequences, **options, token_order=order), heldout(sequences, **options), strict=True
    ):
        assert (np.asarray(ours["labels"]) == np.asarray(theirs["labels"])[..., order]).all()


@pytest.mark.parametrize("name", SHARDINGS)
def test_rows_are_those_of_the_positions_on_every_sharding(name: str):
    sharding = make_sharding(*SHARDINGS[name])
    sequences = make_sequences()
    loader = make_loader(sequences, sharding, position=5)
    for step in range(12):  # beyond one epoch of 125 sequences
        position, batch = next(loader)
        assert position == 5 + 16 * (step + 1)
        assert_equal(batch, sequences.rows(np.arange(position - 16, position)))
        assert batch["tokens"].shape == (2, 8, SEQ_LEN)
        assert batch["tokens"].sharding == sharding
        assert batch["sample_ids"].sharding.is_equivalent_to(
            NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:2])), 2
        )
        along_sequence = NamedSharding(sharding.mesh, PartitionSpec(None, None, *sharding.spec[2:]))
        assert batch["indices"].sharding.is_equivalent_to(along_sequence, 3)
    loader.close()


@pytest.mark.parametrize("threads, prefetch", [(0, 0), (0, 4), (1, 1), (4, 0), (8, 2)])
def test_threads_and_prefetch_change_nothing(threads: int, prefetch: int):
    sequences = make_sequences(mode="joined")
    sharding = make_sharding(*SHARDINGS["data"])
    loader = make_loader(sequences, sharding, threads=threads, prefetch=prefetch)
    for step in range(4):
        assert_equal(next(loader)[1], sequences.rows(np.arange(16 * step, 16 * step + 16)))
    loader.close()


def test_resuming_equals_continuing_also_with_another_batch_and_mesh():
    loader = make_loader(make_sequences(), make_sharding(*SHARDINGS["data"]))
    stream = [next(loader) for _ in range(6)]
    position = stream[1][0]
    assert position == 32
    resumed = make_loader(make_sequences(), make_sharding(*SHARDINGS["data"]), position=position)
    for expected_position, expected in stream[2:]:
        position, batch = next(resumed)
        assert position == expected_position
        assert_equal(batch, {name: np.asarray(leaf) for name, leaf in expected.items()})
    elastic = make_loader(
        make_sequences(),
        make_sharding(*SHARDINGS["data, sequence"]),
        position=32,
        global_batch=32,
        microbatches=4,
    )
    tokens = np.concatenate(
        [np.asarray(next(elastic)[1]["tokens"]).reshape(-1, SEQ_LEN) for _ in range(2)]
    )
    assert (
        tokens
        == np.concatenate([np.asarray(b["tokens"]).reshape(-1, SEQ_LEN) for _, b in stream[2:]])
    ).all()


@pytest.mark.parametrize("limit", [0, 3, 16, 20, 10_000])
def test_heldout_is_one_pass_of_equal_batches(limit: int):
    sharding = make_sharding(*SHARDINGS["data, sequence"])
    # 38 sequences, the last of them partial
    sequences = make_sequences(299, shuffle=False, pad=True)
    n_read = min(limit or 38, 38)
    batches = list(
        heldout(
            sequences,
            global_batch=16,
            microbatches=2,
            sharding=sharding,
            threads=2,
            prefetch=2,
            limit=limit,
        )
    )
    assert len(batches) == -(-n_read // 16)
    for batch in batches:
        assert batch["tokens"].shape == (2, 8, SEQ_LEN)
        assert batch["tokens"].sharding == sharding
    expected = sequences.rows(np.arange(n_read) * 38 // n_read)  # evenly spaced
    assert all(set(batch) == {*expected, "indices"} for batch in batches)
    rows = {
        name: np.concatenate([np.asarray(b[name]).reshape(16, -1) for b in batches])
        for name in expected
    }
    for name in rows:
        assert (rows[name][:n_read] == expected[name].reshape(n_read, -1)).all()
    assert (rows["weights"][n_read:] == 0).all()
    assert (rows["tokens"][n_read:] == expected["tokens"][-1]).all()


def test_errors():
    sharding = make_sharding(*SHARDINGS["data"])
    with pytest.raises(ConfigError, match=r"12 sequences of 8 tokens.*global_batch=16"):
        make_loader(make_sequences(100), sharding)
    with pytest.raises(ConfigError, match=r"global_batch=16.*microbatches=3"):
        make_loader(make_sequences(), sharding, microbatches=3)
    with pytest.raises(ConfigError, match=r"\(4, 4, 8\) does not divide"):
        make_loader(make_sequences(), sharding, microbatches=4)


@pytest.mark.parametrize("threads", [0, 2])
def test_errors_of_the_reader_threads_arrive(threads: int):
    class Broken(RowReader):
        def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
            raise OSError("disk gone")

    order = Sequences(Tokens(np.zeros(1000)), 8, eod=0, seed=None)
    with pytest.raises(OSError, match="disk gone"):
        next(make_loader(Broken(order, eod=0), make_sharding(*SHARDINGS["data"]), threads=threads))
    tokens = np.zeros(1000)
    tokens[300] = 70  # in the third batch, and reported when that is read
    loader = make_loader(
        RowReader(Sequences(Tokens(tokens, vocab=70), 8, eod=0, seed=None), eod=0),
        make_sharding(*SHARDINGS["data"]),
        threads=threads,
    )
    with pytest.raises(ConfigError) as error:
        for _ in range(3):
            next(loader)
    assert str(error.value).startswith(
        "the given token ids, document 0: token id 70, but model.vocab_size=70 has ids 0 to 69;"
    )


TWO_PROCESSES = """
import json, sys
import jax, numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from test_loader import SHARDINGS, make_loader, make_sequences, make_sharding
from mesh_lm.data.rows import RowReader

class Recording(RowReader):
    def rows(self, indices):
        self.asked = sorted(indices.tolist())
        return super().rows(indices)

out = {}
for name, (shape, spec) in SHARDINGS.items():
    sequences = make_sequences()
    sequences.__class__ = Recording
    loader = make_loader(sequences, make_sharding(shape, spec), position=32, threads=0)
    _, batch = next(loader)
    sequences.asked = None
    next(loader)  # makes the third batch, 64 to 79
    expected = make_sequences().rows(np.arange(32, 48))
    for leaf in expected:
        whole = expected[leaf].reshape(2, 8, *expected[leaf].shape[1:])
        for shard in batch[leaf].addressable_shards:
            assert (np.asarray(shard.data) == whole[shard.index]).all(), (name, leaf)
    out[name] = [i - 64 for i in sequences.asked]
print(json.dumps(out), flush=True)
"""


def test_two_processes_read_the_rows_of_their_devices():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = os.pathsep.join([os.path.dirname(__file__), *(p for p in sys.path if p)])
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(i)], stdout=subprocess.PIPE, env=env
        )
        for i in range(2)
    ]
    try:
        first, second = (
            json.loads(p.communicate(timeout=PATIENCE)[0].splitlines()[-1]) for p in processes
        )
    finally:
        for process in processes:
            process.kill()
    everything = list(range(16))
    # jax.make_mesh puts the first half of the devices into process 0; rows m * 8 + b with b in the
    # first half of the batch are theirs.
    assert (
        first["data"]
        == first["short spec"]
        == first["data, sequence"]
        == [0, 1, 2, 3, 8, 9, 10, 11]
    )
    assert (
        second["data"]
        == second["short spec"]
        == second["data, sequence"]
        == [4, 5, 6, 7, 12, 13, 14, 15]
    )
    for name in ("replicated", "data, pipeline"):  # both processes hold the same rows
        assert first[name] == second[name] == everything
