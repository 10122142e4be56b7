"""Options of other trainers whose values mean something else here: the formulas, and the values."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from mesh_lm.commands.meanings import Context, Meaning, NotBuiltError, require_value

if TYPE_CHECKING:
    from mesh_lm.config import TrainConfig


DEFAULT_PORT = 29500
"""torchrun's."""


def _quotient(dividend: float, divisor: float) -> str:
    """Raises ValueError if the quotient is not a positive whole number."""
    quotient = dividend / divisor if divisor else 0
    if quotient < 1 or quotient != int(quotient):
        raise ValueError(f"{dividend} / {divisor}")
    return str(int(quotient))


def _data_parallel_size(run: TrainConfig) -> int:
    """Returns data x fsdp x expert. Raises ValueError if one of them is what remains of the
    devices.
    """
    sizes = (run.mesh.data, run.mesh.fsdp, run.mesh.expert)
    if -1 in sizes:
        raise ValueError("an axis of size -1")
    return math.prod(sizes)


def _microbatches(text: str, context: Context) -> str:
    run = context.config
    return _quotient(run.train.global_batch, int(text) * _data_parallel_size(run))


def _axis(context: Context, axis: str) -> str:
    """Returns the size of a mesh axis; its name if the size is what remains of the devices."""
    size = getattr(context.config.mesh, axis)
    return axis if size == -1 else str(size)


def _microbatch_numbers(text: str, context: Context) -> str:
    global_batch = context.config.train.global_batch
    axes = " x ".join(_axis(context, axis) for axis in ("data", "fsdp", "expert"))
    return f"{global_batch} / ({text} x {axes})"


def _n_layers(context: Context) -> int:
    """Raises ValueError for a model whose sizes are impossible."""
    model = context.config.model
    problems = model.problems()
    if problems:
        raise ValueError(problems[0])
    return sum(segment.n_layers for segment in model.stack().segments)


def _chunks(text: str, context: Context) -> str:
    return _quotient(_n_layers(context), int(text) * context.config.mesh.pipeline)


def _final_fraction(text: str, context: Context) -> str:
    return f"{float(text) / context.config.optimizer.learning_rate:.6g}"


def _decay_steps(context: Context) -> float:
    """Returns the steps of which Megatron-LM's warm-up is a fraction: the schedule's, else all."""
    steps = context.typed.get("lr_decay_iters")
    if steps:
        return int(steps)
    samples = context.typed.get("lr_decay_samples")
    if samples:
        return int(samples) / context.config.train.global_batch
    return context.config.train.steps


def _warmup_steps(text: str, context: Context) -> str:
    """Raises ValueError if the fraction is not one of whole steps."""
    steps = float(text) * _decay_steps(context)
    if abs(steps - round(steps)) > 1e-6 * max(1.0, steps):
        raise ValueError(text)
    return str(round(steps))


def _steps_for_samples(text: str, context: Context) -> str:
    """Rounds down, as Megatron-LM does. Raises ValueError for too few samples for one step."""
    steps = int(text) // context.config.train.global_batch
    if not steps:
        raise ValueError(text)
    return str(steps)


def _warmup_for_samples(text: str, context: Context) -> str:
    return _quotient(int(text), context.config.train.global_batch)


def _samples_numbers(text: str, context: Context) -> str:
    return f"{text} / {context.config.train.global_batch}"


def _eval_sequences(text: str, context: Context) -> str:
    if int(text) < 1:
        raise ValueError("0 means all sequences here")
    return str(int(text) * context.config.train.global_batch)


def _comma_list(text: str, _: Context) -> str:
    """Returns the value itself: the words after an option of several values have commas by now."""
    return require_value(text)


def _left_width(text: str) -> int:
    """Returns the left width of Megatron-LM's (left, right).

    Raises ValueError if that is not one causal window.
    """
    match = re.fullmatch(r"[(\[]?\s*(\d+)[,\s]+(\d+)\s*[)\]]?", text)
    if match is None or int(match[2]):
        raise ValueError(text)
    return int(match[1])


def _window(text: str, context: Context) -> str:
    if "window_attn_skip_freq" in context.typed:
        raise ValueError("a window for some layers")
    return str(_left_width(text) + 1)


def _remat_layers(text: str, context: Context) -> str:
    if context.typed.get("recompute_method") != "block" or context.config.mesh.pipeline != 1:
        raise ValueError("all layers, or those of each stage")
    return str(int(text))


def _vocab_multiple(text: str, context: Context) -> str:
    if context.config.mesh.tensor < 1:
        raise ValueError("an axis of size -1")
    return str(int(text) * context.config.mesh.tensor)


def _local_copies(text: str, _: Context) -> str:
    return str(int(text) - 1)


def _decay_fraction(text: str, context: Context) -> str:
    """Returns a fraction of the run that is exactly this number of steps."""
    n = int(text)
    steps = context.config.train.steps
    for numerator in (n, n + 0.5):
        fraction = f"{numerator / steps:.6g}"
        if 1 <= n <= steps and int(float(fraction) * steps) == n and float(fraction) <= 1:
            return fraction
    raise ValueError(text)


def _schedule(text: str, context: Context) -> str:
    schedule = text.lower()
    if text and schedule not in ("cosine", "linear", "constant", "wsd"):
        raise NotBuiltError(text)
    if schedule == "wsd" and context.typed.get("lr_wsd_decay_style") != "linear":
        raise ValueError("another decay")
    return require_value(schedule)


def _optimizer(text: str, _: Context) -> str:
    if text == "adam":
        return "adamw"
    if text not in ("adamw", "muon", "lion", "adafactor") and ":" not in text:
        raise NotBuiltError(require_value(text))
    return text


def _processes(text: str, _: Context) -> str:
    return str(int(text))


def _rendezvous(text: str, context: Context) -> str:
    address = require_value(context.typed.get("master_addr", ""))
    return f"{address}:{context.typed.get('master_port', DEFAULT_PORT)}"


def _single_key(text: str, _: Context) -> str:
    if len(require_value(text).split()) > 1:
        raise ValueError("several keys")
    return text


MICROBATCHES = Meaning(
    "`train.microbatches`, a count, not a size: global batch / (micro-batch size x data x fsdp x "
    "expert)",
    "train.microbatches",
    _microbatches,
    _microbatch_numbers,
)
BLEND = Meaning("`data.blend`: prefixes, or weight,prefix,weight,prefix", "data.blend", _comma_list)
FINAL_FRACTION = Meaning(
    "`optimizer.final_fraction`: minimum / `optimizer.learning_rate`",
    "optimizer.final_fraction",
    _final_fraction,
    lambda text, context: f"{text} / {context.config.optimizer.learning_rate:g}",
)
EVAL_SEQUENCES = Meaning(
    "`train.eval_sequences`, sequences instead of batches: iterations x `train.global_batch`",
    "train.eval_sequences",
    _eval_sequences,
    lambda text, context: f"{text} x {context.config.train.global_batch}",
)
WARMUP_FRACTION = Meaning(
    "`optimizer.warmup_steps`: fraction x `train.steps` (x `--lr-decay-iters` if that is given)",
    "optimizer.warmup_steps",
    _warmup_steps,
    lambda text, context: f"{text} x {_decay_steps(context):g}",
)
CHUNKS = Meaning(
    "`pipeline.chunks`, a number of virtual stages: layers / (stages x layers of a virtual stage)",
    "pipeline.chunks",
    _chunks,
    lambda text, context: f"{_n_layers(context)} / ({context.config.mesh.pipeline} x {text})",
)
WINDOW = Meaning(
    (
        "`model.window`, one width for every layer: left + 1, as it counts the token itself "
        "(Megatron's pair is left, right)"
    ),
    "model.window",
    _window,
    lambda text, _: f"{_left_width(text)} + 1",
)
VOCAB_MULTIPLE = Meaning(
    "`model.vocab_multiple`: multiple x `mesh.tensor`",
    "model.vocab_multiple",
    _vocab_multiple,
    lambda text, context: f"{text} x {_axis(context, 'tensor')}",
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
    _steps_for_samples,
    _samples_numbers,
)
OPTIMIZER = Meaning(
    (
        "`optimizer.rule`: adamw for adam, which is AdamW there; the others are muon, lion and "
        "adafactor"
    ),
    "optimizer.rule",
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
    lambda text, context: f"{text} / {context.config.train.steps}",
)
WARMUP_SAMPLES = Meaning(
    "`optimizer.warmup_steps`: samples / `train.global_batch`",
    "optimizer.warmup_steps",
    _warmup_for_samples,
    _samples_numbers,
)
VALID_BLEND = Meaning("`data.valid_blend`, as `data.blend`", "data.valid_blend", _comma_list)
ENDPOINT = Meaning(
    "`--rendezvous=ADDRESS:PORT` of node 0, for several nodes", "rendezvous", _rendezvous
)
PER_NODE = Meaning(
    "`--per-node`; without it one process drives all GPUs of its node", "per-node", _processes
)
NODES = Meaning(
    "`--nodes`, and `--min-nodes` for the smaller number of MIN:MAX", "nodes", _processes
)
TEXT_FIELD = Meaning("`--text-field`, a single one", "text-field", _single_key)
LOCAL_COPIES = Meaning(
    "`checkpoint.local_copies`: factor - 1", "checkpoint.local_copies", _local_copies
)
