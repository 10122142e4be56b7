"""Names of other trainers whose values mean something else here: each with the formula, and the
value where the command determines it.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from mesh_lm.commands.meanings import Asked, Meaning, NotBuiltError, given

if TYPE_CHECKING:
    from mesh_lm.config import TrainConfig


def _quotient(dividend: float, divisor: float) -> str:
    """Raises ValueError where the quotient is not a positive whole number."""
    quotient = dividend / divisor if divisor else 0
    if quotient < 1 or quotient != int(quotient):
        raise ValueError(f"{dividend} / {divisor}")
    return str(int(quotient))


def _data_parallel_size(run: TrainConfig) -> int:
    """Returns data x fsdp. Raises ValueError where one of them is what remains of the devices."""
    sizes = run.mesh.data, run.mesh.fsdp
    if -1 in sizes:
        raise ValueError("an axis of size -1")
    return math.prod(sizes)


def _microbatches(text: str, asked: Asked) -> str:
    return _quotient(asked.config.train.global_batch, int(text) * _data_parallel_size(asked.config))


def _axis(asked: Asked, axis: str) -> str:
    """Returns the size of a mesh axis; its name where it is what remains of the devices."""
    size = getattr(asked.config.mesh, axis)
    return axis if size == -1 else str(size)


def _n_layers(asked: Asked) -> int:
    """Raises ValueError for a model whose sizes are impossible."""
    if problems := asked.config.model.problems():
        raise ValueError(problems[0])
    return sum(segment.n_layers for segment in asked.config.model.stack().segments)


def _chunks(text: str, asked: Asked) -> str:
    return _quotient(_n_layers(asked), int(text) * asked.config.mesh.pipeline)


def _final_fraction(text: str, asked: Asked) -> str:
    return f"{float(text) / asked.config.optimizer.learning_rate:.6g}"


def _decay_steps(asked: Asked) -> float:
    """Returns the steps that Megatron-LM's fraction of warm-up is of: the schedule's own, else
    all.
    """
    if steps := asked.typed.get("lr_decay_iters"):
        return int(steps)
    if samples := asked.typed.get("lr_decay_samples"):
        return int(samples) / asked.config.train.global_batch
    return asked.config.train.steps


def _warmup_steps(text: str, asked: Asked) -> str:
    """Raises ValueError where the fraction is not one of whole steps."""
    steps = float(text) * _decay_steps(asked)
    if abs(steps - round(steps)) > 1e-6 * max(1.0, steps):
        raise ValueError(text)
    return str(round(steps))


def _steps_of_samples(text: str, asked: Asked) -> str:
    """Megatron-LM rounds down; too few samples for one step have no answer."""
    if not (steps := int(text) // asked.config.train.global_batch):
        raise ValueError(text)
    return str(steps)


def _warmup_of_samples(text: str, asked: Asked) -> str:
    return _quotient(int(text), asked.config.train.global_batch)


def _eval_sequences(text: str, asked: Asked) -> str:
    if int(text) < 1:
        raise ValueError("0 means all sequences here")
    return str(int(text) * asked.config.train.global_batch)


def _with_commas(text: str, _: Asked) -> str:
    """As it is: the words after an option of several values are joined by commas before."""
    return given(text)


def _of_samples(text: str, asked: Asked) -> str:
    return f"{text} / {asked.config.train.global_batch}"


def _left(text: str) -> int:
    """Returns the left width of Megatron-LM's (left, right). Raises ValueError where it is not one
    causal window.
    """
    found = re.fullmatch(r"[(\[]?\s*(\d+)[,\s]+(\d+)\s*[)\]]?", text)
    if found is None or int(found[2]):
        raise ValueError(text)
    return int(found[1])


def _window(text: str, asked: Asked) -> str:
    if "window_attn_skip_freq" in asked.typed:
        raise ValueError("a window for some layers")
    return str(_left(text) + 1)


def _remat_layers(text: str, asked: Asked) -> str:
    if asked.typed.get("recompute_method") != "block" or asked.config.mesh.pipeline != 1:
        raise ValueError("all layers, or those of each stage")
    return str(int(text))


def _vocab_multiple(text: str, asked: Asked) -> str:
    if asked.config.mesh.tensor < 1:
        raise ValueError("an axis of size -1")
    return str(int(text) * asked.config.mesh.tensor)


def _decay_fraction(text: str, asked: Asked) -> str:
    """Returns a fraction of the run that is exactly this number of steps."""
    n, steps = int(text), asked.config.train.steps
    for exact in (n, n + 0.5):
        fraction = f"{exact / steps:.6g}"
        if 1 <= n <= steps and int(float(fraction) * steps) == n and float(fraction) <= 1:
            return fraction
    raise ValueError(text)


def _schedule(text: str, asked: Asked) -> str:
    schedules = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "wsd"}
    if text and text.lower() not in schedules:
        raise NotBuiltError(text)
    if text.lower() == "wsd" and asked.typed.get("lr_wsd_decay_style") != "linear":
        raise ValueError("another decay")
    return schedules[given(text).lower()]


def _optimizer(text: str, _: Asked) -> str:
    known = {"adam": "adamw", **{name: name for name in ("adamw", "muon", "lion", "adafactor")}}
    if text not in known and ":" not in text:
        raise NotBuiltError(given(text))
    return known.get(text, text)


def _processes(text: str, _: Asked) -> str:
    return str(int(text))


def _rendezvous(text: str, asked: Asked) -> str:
    """29500 is torchrun's port."""
    return f"{given(asked.typed.get('master_addr', ''))}:{asked.typed.get('master_port', '29500')}"


def _one_key(text: str, _: Asked) -> str:
    if len(given(text).split()) > 1:
        raise ValueError("several keys")
    return text


MICROBATCHES = Meaning(
    "`train.microbatches`, a count, not a size: global batch / (micro-batch size x data x fsdp)",
    "train.microbatches",
    _microbatches,
    lambda text, asked: (
        f"{asked.config.train.global_batch} / ({text} x {_axis(asked, 'data')} x "
        f"{_axis(asked, 'fsdp')})"
    ),
)
BLEND = Meaning(
    "`data.blend`: prefixes, or weight,prefix,weight,prefix", "data.blend", _with_commas
)
FINAL_FRACTION = Meaning(
    "`optimizer.final_fraction`: minimum / `optimizer.learning_rate`",
    "optimizer.final_fraction",
    _final_fraction,
    lambda text, asked: f"{text} / {asked.config.optimizer.learning_rate:g}",
)
EVAL_SEQUENCES = Meaning(
    "`train.eval_sequences`, sequences instead of batches: iterations x `train.global_batch`",
    "train.eval_sequences",
    _eval_sequences,
    lambda text, asked: f"{text} x {asked.config.train.global_batch}",
)
WARMUP_FRACTION = Meaning(
    "`optimizer.warmup_steps`: fraction x `train.steps` (x `--lr-decay-iters` if that is given)",
    "optimizer.warmup_steps",
    _warmup_steps,
    lambda text, asked: f"{text} x {_decay_steps(asked):g}",
)
CHUNKS = Meaning(
    "`pipeline.chunks`, a number of virtual stages: layers / (stages x layers of a virtual stage)",
    "pipeline.chunks",
    _chunks,
    lambda text, asked: f"{_n_layers(asked)} / ({asked.config.mesh.pipeline} x {text})",
)
WINDOW = Meaning(
    (
        "`model.window`, one width for every layer: left + 1, as it counts the token itself "
        "(Megatron's pair is left, right)"
    ),
    "model.window",
    _window,
    lambda text, _: f"{_left(text)} + 1",
)
VOCAB_MULTIPLE = Meaning(
    "`model.vocab_multiple`: multiple x `mesh.tensor`",
    "model.vocab_multiple",
    _vocab_multiple,
    lambda text, asked: f"{text} x {_axis(asked, 'tensor')}",
)
REMAT_LAYERS = Meaning(
    (
        "`model.remat_layers` for `--recompute-method=block`, not with stages; uniform recomputes "
        "every layer: `model.remat=full`"
    ),
    "model.remat_layers",
    _remat_layers,
    note=", with `model.remat=full`; the other layers recompute as save_names does",
)
TRAIN_SAMPLES = Meaning(
    "`train.steps`: samples / `train.global_batch`, rounded down",
    "train.steps",
    _steps_of_samples,
    _of_samples,
)
OPTIMIZER = Meaning(
    (
        "`optimizer.name`: adamw for adam, which is AdamW there; the others are muon, lion and "
        "adafactor"
    ),
    "optimizer.name",
    _optimizer,
)
SCHEDULE = Meaning(
    "`optimizer.schedule=cosine`, `optimizer.schedule=linear`, `optimizer.schedule=constant`, or "
    "`optimizer.schedule=wsd`, which decays linearly",
    "optimizer.schedule",
    _schedule,
)
DECAY_FRACTION = Meaning(
    "`optimizer.decay_fraction`: iterations / `train.steps`",
    "optimizer.decay_fraction",
    _decay_fraction,
    lambda text, asked: f"{text} / {asked.config.train.steps}",
)
WARMUP_SAMPLES = Meaning(
    "`optimizer.warmup_steps`: samples / `train.global_batch`",
    "optimizer.warmup_steps",
    _warmup_of_samples,
    _of_samples,
)
VALID_BLEND = Meaning("`data.valid_blend`, as `data.blend`", "data.valid_blend", _with_commas)
ENDPOINT = Meaning(
    "`--rendezvous=ADDRESS:PORT` of node 0, for several nodes", "rendezvous", _rendezvous
)
PER_NODE = Meaning(
    "`--per-node`; without it one process drives all GPUs of its node", "per-node", _processes
)
NODES = Meaning(
    "`--nodes`, and `--min-nodes` for the smaller number of MIN:MAX", "nodes", _processes
)
TEXT_FIELD = Meaning("`--text-field`, a single one", "text-field", _one_key)
