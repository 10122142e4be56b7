"""The output that users see: numbers by hand, a fake clock, files read back."""

from __future__ import annotations

import io
import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

from mesh_lm.config import ProfileConfig
from mesh_lm.distributed.phases import Phases
from mesh_lm.report import plot
from mesh_lm.report.flops import mfu, peak_flops
from mesh_lm.report.memory import Memory, device_memory_gib
from mesh_lm.report.plot import loss_curve
from mesh_lm.report.progress import Progress
from mesh_lm.report.writer import Writer
from mesh_lm.training.monitor import Profile


class Clock:
    """A clock that only moves when the test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(path: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(progress: Progress, clock: Clock, start: int, total: int) -> dict[int, dict[str, float]]:
    """A first step of 10 s, then 0.5 s each, with an evaluation of 3 s after step 20."""
    rows = {}
    with progress:
        for step in range(start + 1, total + 1):
            clock.now += 10.0 if step == start + 1 else 0.5
            row = progress.step(step, {"loss": np.float32(8 - step / 8), "skipped": 0})
            if row:
                rows[step] = row
            if step == 20:
                with progress.paused():
                    clock.now += 3.0
                progress.note("held-out [bold]2.5[/bold]")
    return rows


def test_mfu_by_hand() -> None:
    # 1e6 tokens/s x 6e9 FLOPs = 6e15 FLOP/s on 8 x 989.4e12 = 7.9152e15.
    assert mfu(1e6, 6e9, 8, "NVIDIA H100 80GB HBM3") == pytest.approx(6 / 7.9152)
    assert mfu(1e6, 6e9, 8, "cpu") is None
    assert mfu(1e6, 0.0, 8, "NVIDIA H100 80GB HBM3") is None


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
    ],
)
def test_peaks(kind: str, tera: float) -> None:
    assert peak_flops(kind) == tera * 1e12


@pytest.mark.parametrize(("start_step", "first"), [(0, 2), (1, 2), (2, 2), (4, 4), (9, None)])
def test_which_steps_are_traced(
    start_step: int, first: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are counted from the start of the process, here at step 20, which runs five; the trace
    has the steps from start to stop."""
    said: list[tuple[str, int]] = []
    done = 20
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: said.append(("start", done)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: said.append(("stop", done)))
    profile = Profile(ProfileConfig(start_step=start_step, steps=2), tmp_path, 20)
    for done in range(21, 26):
        profile.step(done, {}, Phases())
    profile.stop()
    assert said == ([("start", 20 + first - 1), ("stop", min(25, 20 + first + 1))] if first else [])
    assert profile.missed == (None if first else 29)


def test_memory_says_whose() -> None:
    memory = device_memory_gib()
    assert memory.of in ("device", "process")
    assert 0.01 < memory.gib < 1000


def test_rates_are_of_the_last_interval_without_compilation_or_evaluation() -> None:
    clock = Clock()
    rows = run(
        Progress(
            32, 3, tokens_per_step=4096, flops_per_token=1e9, n_devices=8,
            device_kind="NVIDIA H200", enabled=False,
            bits_per_byte=lambda nats: nats / 2,
            clock=clock, memory=lambda: Memory(1.5, "device"),
        ),
        clock, 3, 32,
    )  # fmt: skip
    assert list(rows) == [4, 10, 20, 30, 32]
    first = {
        "loss": 7.5,
        "mean_loss": 7.5,
        "train_bpb": 3.75,
        "mean_train_bpb": 3.75,
        "skipped": 0,
        "memory_gib": 1.5,
        "tokens": 4 * 4096,
    }
    assert rows[4] == first
    # The loss falls by 1/8 a step: the mean of steps 5 to 10 is that of 7.5.
    assert rows[10]["mean_loss"] == pytest.approx(8 - 7.5 / 8) and rows[10][
        "mean_train_bpb"
    ] == pytest.approx((8 - 7.5 / 8) / 2)
    for step in (10, 20, 30, 32):
        assert rows[step]["step_ms"] == pytest.approx(500)
        assert rows[step]["tokens_per_s"] == pytest.approx(8192)
        assert rows[step]["mfu"] == pytest.approx(8192e9 / (8 * 989.4e12))


def test_lines_of_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file, clock = io.StringIO(), Clock()
    progress = Progress(
        120,
        0,
        log_every=20,
        tokens_per_step=4096,
        file=file,
        clock=clock,
        memory=lambda: Memory(1.5, "process"),
    )
    run(progress, clock, 0, 40)
    assert file.getvalue().splitlines() == [
        "step   1/120  loss 7.8750  1.5 GiB process  first step 10.0 s",
        "step  20/120  loss 6.6250  8,192 tok/s  500 ms/step  1.5 GiB process  eta 0:00:50",
        "held-out [bold]2.5[/bold]",
        # 80 steps are left; the 39 since the first took 19.5 s and the evaluation 3 s: 80 x 22.5 /
        # 39 = 46.2.
        "step  40/120  loss 4.1875  8,192 tok/s  500 ms/step  1.5 GiB process  eta 0:00:47",
    ]


def test_a_log_file_has_the_lines_that_a_terminal_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    log, clock = io.StringIO(), Clock()
    run(
        Progress(
            40,
            0,
            log_every=20,
            file=Terminal(),
            log=log,
            clock=clock,
            memory=lambda: Memory(1.5, "process"),
        ),
        clock,
        0,
        40,
    )
    lines = log.getvalue().splitlines()
    assert [line[:10] for line in lines] == ["step  1/40", "step 20/40", "held-out [", "step 40/40"]


def test_a_mean_leaves_out_what_is_not_finite() -> None:
    progress = Progress(3, log_every=3, enabled=False)
    rows = [progress.step(n, {"loss": loss}) for n, loss in ((1, 5.0), (2, math.nan), (3, 4.0))]
    assert rows[2]["loss"] == rows[2]["mean_loss"] == 4.0


def test_every_metric_of_the_loop_has_its_place() -> None:
    file, clock = io.StringIO(), Clock()
    progress = Progress(
        9, 7, tokens_per_step=10, flops_per_token=1e12, device_kind="NVIDIA A100-SXM4-80GB",
        file=file, clock=clock,
        memory=lambda: Memory(70.04, "device"), bits_per_byte=lambda nats: 0.45 * nats,
    )  # fmt: skip
    metrics = {"skipped": 2, "loss": 2.0, "grad_norm": 1.234, "learning_rate": 3e-4}
    metrics |= {"heldout_loss": 2.1, "heldout_bpb": 0.95, "expert_load": 1.5, "expert_idle": 0.25}
    progress.step(8, metrics)
    clock.now += 0.0625
    progress.step(9, metrics)
    assert file.getvalue().splitlines()[1] == (
        "step 9/9  loss 2.0000  bpb 0.9000  held-out loss 2.1000  held-out bpb 0.9500  grad 1.23  "
        "lr 3.00e-04  160 tok/s  62.5 ms/step  mfu 51.3%  70.0 GiB device  "
        "expert load 1.50  idle experts 25.0%  skipped 2  eta 0:00:00"
    )


def test_arrays_are_not_waited_for_between_rows() -> None:
    class Pending:
        def __float__(self) -> float:
            raise AssertionError("waited")

    progress = Progress(100, enabled=False)
    assert progress.step(1, {"loss": 1.0})
    assert progress.step(2, {"loss": Pending()}) == {}
    with pytest.raises(AssertionError, match="waited"):
        progress.step(10, {"loss": Pending()})


def test_a_terminal_gets_a_bar_and_notes_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    file, clock = Terminal(), Clock()
    run(
        Progress(
            120,
            3,
            log_every=20,
            tokens_per_step=4096,
            file=file,
            clock=clock,
            memory=lambda: Memory(1.5, "process"),
        ),
        clock,
        3,
        40,
    )
    text = file.getvalue()
    assert "\x1b[?25l" in text and text.rstrip().endswith("\x1b[?25h")  # the cursor comes back
    assert "held-out [bold]2.5[/bold]" in text
    last = text[text.rindex("step 40/120") :]
    assert (
        "33%" in last
        and "eta 0:00:" in last
        and "loss 4.1875  8,192 tok/s  500 ms/step  1.5 GiB process" in last
    )


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file, clock = Terminal(), Clock()
    run(Progress(30, file=file, clock=clock), clock, 0, 30)
    assert "\x1b" not in file.getvalue() and "\r" not in file.getvalue()
    assert len(file.getvalue().splitlines()) == 5


def test_other_processes_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    run(Progress(30, enabled=False), Clock(), 0, 30)
    assert capsys.readouterr() == ("", "")


def test_writer_appends_and_flushes_every_line(tmp_path: Path) -> None:
    with Writer(tmp_path / "run") as writer:
        writer.write(1, {"loss": np.float32(2.5), "skipped": 0})
        assert lines(tmp_path / "run" / "metrics.jsonl") == [
            {"step": 1, "loss": 2.5, "skipped": 0.0}
        ]
        writer.write(2, {"loss": math.nan, "grad_norm": math.inf})
    assert (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[
        1
    ] == '{"step": 2, "loss": null, "grad_norm": null}'


def test_writer_of_another_process_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Writer(None, 5) as writer:
        writer.write(6, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_resume_takes_back_what_the_killed_run_wrote(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Writer(tmp_path) as writer:
        for step in (10, 20, 30, 40):
            writer.write(step, {"loss": float(step)})
    path.write_text(path.read_text(encoding="utf-8") + '{"step": 20, "lo', encoding="utf-8")
    with Writer(tmp_path, start_step=20) as writer:
        assert [line["step"] for line in lines(path)] == [10, 20]
        writer.write(30, {"loss": 31.0})
    assert lines(path) == [
        {"step": 10, "loss": 10.0},
        {"step": 20, "loss": 20.0},
        {"step": 30, "loss": 31.0},
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "metrics.sha256",
        "tensorboard",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [('"loss": 2.0', '"loss": 3.0'), ('{"step": 20, "loss": 2.0}\n', ""), ("step", "stap")],
)
def test_damaged_rows_are_counted_and_left_out(tmp_path: Path, old: str, new: str) -> None:
    """Another digit is still JSON, and a missing row still leaves a file of JSON: the digests
    beside it tell."""
    path = tmp_path / "metrics.jsonl"
    with Writer(tmp_path) as writer:
        for step in (10, 20, 30):
            writer.write(step, {"loss": step / 10})
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with Writer(tmp_path, start_step=20) as writer:
        assert writer.damaged == (2 if old == "step" else 1)
    assert lines(path) == ([] if old == "step" else [{"step": 10, "loss": 1.0}])
    (tmp_path / "metrics.sha256").unlink()  # as of an older version
    with Writer(tmp_path, start_step=20) as writer:
        assert writer.damaged == 0


def test_a_run_that_starts_over_has_no_past(tmp_path: Path) -> None:
    for loss in (2.0, 3.0):
        with Writer(tmp_path) as writer:
            writer.write(0, {"heldout_loss": loss})
            writer.write(1, {"loss": loss})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "heldout_loss": 3.0},
        {"step": 1, "loss": 3.0},
    ]


def test_the_file_is_whole_if_the_resume_is_killed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(tmp_path) as writer:
        writer.write(10, {"loss": 1.0})
        writer.write(20, {"loss": 2.0})
    before = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")

    def killed(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        Writer(tmp_path, start_step=10)
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == before


def events(directory: Path) -> Iterator[Event]:
    """TFRecords: length, its CRC, the event, its CRC."""
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def test_tensorboard(tmp_path: Path) -> None:
    with Writer(tmp_path, start_step=20) as writer:
        writer.write(30, {"loss": 2.5, "grad_norm": math.inf, "heldout_bpb": 0.5})
    found = list(events(tmp_path / "tensorboard"))
    # purge what is at or past it
    assert [event.step for event in found if event.session_log.status == SessionLog.START] == [21]
    scalars = {
        value.tag: (event.step, value.simple_value)
        for event in found
        for value in event.summary.value
    }
    assert scalars == {
        "train/loss": (30, 2.5),
        "train/grad_norm": (30, math.inf),
        "eval/bpb": (30, 0.5),
    }


def test_arrays_are_in_the_file_alone(tmp_path: Path) -> None:
    """They survive a resume, which verifies the rows; three decimals are enough for a picture."""
    loads = np.array([[0.12345, 2.0], [math.nan, 1 / 3]], np.float32)
    with Writer(tmp_path) as writer:
        writer.write(10, {"loss": 2.5}, {"expert_loads": loads})
        writer.write(20, {"loss": 2.0}, {"expert_loads": loads})
    with Writer(tmp_path, start_step=10) as writer:
        assert not writer.damaged
        writer.write(20, {"loss": 1.5}, {"expert_loads": 2 * loads})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 10, "loss": 2.5, "expert_loads": [[0.123, 2.0], [None, 0.333]]},
        {"step": 20, "loss": 1.5, "expert_loads": [[0.247, 4.0], [None, 0.667]]},
    ]
    tags = {
        value.tag for event in events(tmp_path / "tensorboard") for value in event.summary.value
    }
    assert tags == {"train/loss"}


@pytest.mark.parametrize("metric", ["train_bpb", "loss"])
def test_plot(tmp_path: Path, metric: str) -> None:
    rows = [{"step": step, metric: 2 + 3 / step if step != 7 else None} for step in range(1, 300)]
    rows += [{"step": step, metric.replace("train", "heldout"): 2.1} for step in (100, 200)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png", {"gzip -9": 2.3, "xz -9": 2.29})
    png = (tmp_path / "loss.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", png[16:24]) == (1800, 1080)


@pytest.mark.parametrize("known_last", [True, False])
def test_a_plot_shows_the_newest_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_last: bool
) -> None:
    """The bytes of the text may be unknown after a restart, or known from then on: the curve is in
    the unit of the last row."""
    parts = [{"loss": 4.0}, {"loss": 3.0}]
    parts[known_last]["train_bpb"] = 1.0
    rows = [{"step": 1 + part * 50 + i, **parts[part]} for part in (0, 1) for i in range(50)] + [
        {"step": 100, "heldout_loss": 3.1}
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    shown: list[str] = []
    monkeypatch.setattr(
        plot, "_draw_labels", lambda axes, labels: shown.extend(text for _, text, _ in labels)
    )
    loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png", {"gzip -9": 2.3})
    assert shown == (
        ["training 1.000", "gzip -9 2.300"] if known_last else ["training 3.000", "held-out 3.100"]
    )


def with_loads(n_rows: int, n_layers: int, n_experts: int) -> list[dict[str, object]]:
    """Rows of a run in which the first expert of layer 2 takes ever more tokens."""
    rows = []
    for i in range(n_rows):
        share = np.ones((n_layers, n_experts))
        share[1, 1:] = 1 - i / n_rows
        share[1, 0] += n_experts - share[1].sum()
        rows.append({"step": 10 * i + 1, "loss": 4.0, "expert_loads": share.tolist()})
    return rows


def test_a_run_with_experts_has_a_heat_map_below_the_curve(tmp_path: Path) -> None:
    rows = with_loads(5, 3, 4)
    figure = plot.drawn([*rows, {"step": 41, "heldout_loss": 4.0}], {})
    assert figure is not None
    curve, heat_map, bar = figure.axes
    (mesh,) = heat_map.collections
    values = np.asarray(mesh.get_array())
    wanted = np.array([row["expert_loads"] for row in rows]).reshape(5, 12).T
    np.testing.assert_allclose(values, wanted)
    assert mesh.get_clim() == (0, 2)
    assert heat_map.get_xlim() == curve.get_xlim()
    assert len(bar.get_yticklabels()) == 3
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png", {})
    assert struct.unpack(">II", (tmp_path / "loss.png").read_bytes()[16:24]) == (1800, 1640)

    dense = [{name: row[name] for name in ("step", "loss")} for row in rows]
    without = plot.drawn(dense, {})
    assert without is not None and len(without.axes) == 1


def test_many_experts_have_a_row_for_each_layer() -> None:
    """A column is the mean of neighbouring rows; a layer that collapses fades to 0."""
    n_rows = 2 * plot.MAX_COLUMNS
    figure = plot.drawn(with_loads(n_rows, 3, 64), {})
    assert figure is not None
    values = np.asarray(figure.axes[1].collections[0].get_array())
    assert values.shape == (3, plot.MAX_COLUMNS)
    np.testing.assert_allclose(values[[0, 2]], 1)
    np.testing.assert_allclose(values[1], 1 - (2 * np.arange(plot.MAX_COLUMNS) + 0.5) / n_rows)


def test_plot_of_nothing_is_no_plot(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n', encoding="utf-8")
    loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.png", {})
    assert not (tmp_path / "loss.png").exists()
