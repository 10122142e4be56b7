"""Configs from other trainers' files.

mesh-lm convert deepspeed ds_config.json --model=CONFIG [--devices=N] [--output=FILE.py]
mesh-lm convert megatron SCRIPT.sh | ARGUMENTS [--devices=N] [--output=FILE.py]
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mesh_lm import strict_json
from mesh_lm.commands import other_names
from mesh_lm.commands.conversion import (
    Argument,
    Conversion,
    LeftOut,
    Setting,
    convert,
    left_out_lines,
    python_file,
)
from mesh_lm.commands.deepspeed_names import (
    ADAM_DEFAULTS,
    DEEPSPEED,
    DEEPSPEED_DEFAULTS,
    SCHEDULER_DEFAULTS,
)
from mesh_lm.commands.meanings import Meaning
from mesh_lm.commands.megatron_names import MEGATRON, MEGATRON_DEFAULTS, MEGATRON_LOST
from mesh_lm.commands.options import command, option_types, spelled, subcommand
from mesh_lm.config import TrainConfig, load
from mesh_lm.errors import ConfigError, did_you_mean
from mesh_lm.model import DecoderConfig
from sharding_rules import MeshConfig

GPT2_VOCABULARY = "50257"
_OUTPUT = "runs/megatron"
_LAUNCHER = {name.replace("-", "_"): name for name in other_names.TORCHRUN}
_NUMBER = re.compile(r"-[\d.]")
"""The beginning of a word that is a value, and no argument."""
_VARIABLE = re.compile(
    r"\$(?:\{(?P<braced>\w+)(?:\[[@*]\])?(?::?-(?P<default>[^{}]*))?\}|(?P<plain>\w+))"
)
_OPERATOR = re.compile(
    r"""(?P<literal>'[^']*'|"(?:\\.|[^"\\])*"|\\.)
    |(?P<redirection>
        (?:(?<!\S)\d+)?(?:&>>?|>>?[&|]?|<{1,3}&?)[ \t]*
        (?:[<>]\([^)]*\)|'[^']*'|"[^"]*"|[^\s|&;<>'"]+)
    )
    |(?P<separator>[|&;<>]+)""",
    re.VERBOSE | re.DOTALL,
)
"""Operators of a shell, which end a command or redirect its output; and quoted text, in which
there are none."""
_ASSIGNMENT = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(\w+)(?P<plus>\+?)="
    r"(?:\(\s*(?P<array>[^)]*)\)|(?P<value>\"[^\"]*\"|'[^']*'|\S*))",
    re.MULTILINE,
)
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""The keys of DeepSpeed that decide the batch together with the number of GPUs."""
_OPTIMIZER_RATE = "optimizer.params.lr"
_SCHEDULER_RATE = "scheduler.params.warmup_max_lr"
_AXES = {
    "tensor-model-parallel-size": "tensor",
    "pipeline-model-parallel-size": "pipeline",
    "context-parallel-size": "sequence",
    "expert-model-parallel-size": "expert",
}
"""An argument of Megatron-LM -> the mesh axis whose size it is."""
_RUN_LENGTHS = {"lr-decay-iters": "train-iters", "lr-decay-samples": "train-samples"}
"""The length of Megatron-LM's schedule -> the length of the run, which it has by default."""


@dataclasses.dataclass(frozen=True)
class Deepspeed:
    """Writes a config from a DeepSpeed JSON file, and the config of a model."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("file",)

    file: str
    """DeepSpeed's JSON file."""
    model: str = ""
    """The config whose model, data and output the new one has; DeepSpeed's file has none."""
    devices: int = 0
    """Number of GPUs; 0: as the batch sizes say, else all that a run finds."""
    output: str = ""
    """The config to write, FILE.py, which must not exist; empty: the screen."""
    skip_unknown: bool = False
    """Leave out keys that are in no table, instead of refusing them."""


@dataclasses.dataclass(frozen=True)
class Megatron:
    """Writes a config from the arguments of Megatron-LM's pretrain_gpt.py."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("arguments",)

    devices: int = 0
    """Number of GPUs; 0: as many as torchrun's arguments start."""
    output: str = ""
    """The config to write, FILE.py, which must not exist; empty: the screen."""
    skip_unknown: bool = False
    """Leave out arguments that are in no table, instead of refusing them."""
    arguments: tuple[str, ...] = ()
    """The arguments, in one word or in several, or one shell script that has them."""


COMMANDS: dict[str, type[Deepspeed] | type[Megatron]] = {
    "deepspeed": Deepspeed,
    "megatron": Megatron,
}


def parse(argv: Sequence[str], prog: str = "mesh-lm convert") -> Deepspeed | Megatron:
    """Raises ConfigError, and SystemExit after printing the help."""
    name = subcommand(argv, prog, COMMANDS, __doc__ or "")
    words = list(argv[1:])
    if name == "deepspeed":
        return command(Deepspeed, words, Deepspeed.__doc__ or "", f"{prog} {name}")
    # Megatron-LM's arguments are not options of this command.
    own, theirs = _own_options(words)
    options = command(Megatron, own, Megatron.__doc__ or "", f"{prog} {name}")
    return dataclasses.replace(options, arguments=(*options.arguments, *theirs))


def _own_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of this command's options, and all others."""
    names = {spelled(name) for name in option_types(Megatron)}
    own: list[str] = []
    others: list[str] = []
    takes_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        if takes_value and not word.startswith("-"):
            own.append(word)
            takes_value = False
        elif spelled(name) in {*names, "--help", "-h"}:
            own.append(word)
            takes_value = not equals and spelled(name) != "--skip-unknown"
        else:
            others.append(word)
            takes_value = False
    return own, others


def run(options: Deepspeed | Megatron) -> int:
    """Writes the config, and prints what it leaves out. Returns 0.

    Raises ConfigError for a source that cannot be read or contradicts itself; and, after writing,
    for a config that cannot run as it is.
    """
    from mesh_lm.training.check import check  # it needs modules that --help does not

    if options.output:
        _require_new_file(options.output)
    if isinstance(options, Deepspeed):
        conversion, text = from_deepspeed(options)
    else:
        conversion, text = from_megatron(options)
    if options.output:
        Path(options.output).expanduser().write_text(text, encoding="utf-8")
        print(f"wrote {options.output}: {len(conversion.settings)} fields")
        for line in left_out_lines(conversion.left_out):
            print(line)
    else:
        print(text, end="")
    config = conversion.config
    sizes = [size for size in config.mesh.sizes().values() if size != -1]
    check(config, options.devices or math.prod(sizes))
    return 0


def _require_new_file(output: str) -> None:
    path = Path(output).expanduser()
    if path.suffix != ".py":
        raise ConfigError(f"--output={output}: a config is a file that ends in .py")
    if path.exists():
        raise ConfigError(f"--output={output} exists; name another file")
    if not path.parent.is_dir():
        raise ConfigError(f"--output={output}: the directory of the config does not exist")


# DeepSpeed.


def from_deepspeed(options: Deepspeed) -> tuple[Conversion, str]:
    """Returns the conversion of a DeepSpeed file, and the text of the config. Raises ConfigError
    for a file that is not JSON or contradicts itself, and for keys that are in no table.
    """
    keys = _read_keys(options.file)
    if not options.model:
        raise ConfigError(
            f"{options.file} has no model: add --model=CONFIG, whose model and data the run takes; "
            "mesh-lm configs lists some"
        )
    base = dataclasses.replace(load(options.model), mesh=MeshConfig(data=-1))
    arguments, unknown = _known_keys(keys)
    if not options.skip_unknown:
        _require_known(options.file, unknown, list(DEEPSPEED))
    values = {argument.source.partition(":")[0]: argument.text for argument in arguments}
    _require_numbers(options.file, arguments)

    arguments += _deepspeed_defaults(values)
    left_out: list[LeftOut] = []
    if "optimizer.type" not in values:
        reason = f"fields of optimizer that no key sets are those of {options.model}"
        left_out.append(LeftOut("the file has no optimizer", reason))
    arguments, unused_rates = _with_one_rate(arguments, values)
    left_out += unused_rates
    settings = _deepspeed_settings(options, values)
    if any(setting.field == "train.microbatches" for setting in settings):
        # The three sizes have decided it together.
        arguments = [argument for argument in arguments if argument.name not in _BATCH]
    conversion = convert(arguments, DEEPSPEED, base, settings)
    conversion = dataclasses.replace(conversion, left_out=(*conversion.left_out, *left_out))
    docstring = (
        f"The model of {options.model}, trained as {Path(options.file).name} trains with "
        "DeepSpeed.\n\nmesh-lm convert wrote it; each line names its source.\n"
    )
    return conversion, python_file(conversion, docstring, options.model)


def _read_keys(file: str) -> dict[str, Any]:
    """Returns the keys of a JSON file with their sections, as zero_optimization.stage. Sections
    that are not enabled have no keys. Raises ConfigError.
    """
    try:
        data = strict_json.read(Path(file).expanduser())
    except OSError as error:
        raise ConfigError(f"{file}: DeepSpeed's JSON cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not DeepSpeed's JSON: {error}") from error
    return dict(_leaves(data, ""))


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    if prefix and (value.get("enabled") is False or value.get("device") == "none"):
        return
    for name, inner in value.items():
        path = f"{prefix}{name}"
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{path}.")
        else:
            yield path, inner


def _known_keys(keys: Mapping[str, Any]) -> tuple[list[Argument], list[str]]:
    """Returns the keys that have a meaning, themselves or by their section, and the others."""
    arguments: list[Argument] = []
    unknown: list[str] = []
    for key, value in keys.items():
        text = _json_text(value)
        name = key
        while name and name not in DEEPSPEED:
            name = name.rpartition(".")[0]
        if not name or (name != key and _resembles(key)):
            unknown.append(key)
        else:
            arguments.append(Argument(name, text, f"{key}: {text}"))
    return arguments, unknown


def _resembles(key: str) -> bool:
    """Whether a key of a section is probably another key's typo."""
    section = key.rpartition(".")[0]
    siblings = [name for name in DEEPSPEED if name.rpartition(".")[0] == section]
    return bool(difflib.get_close_matches(key, siblings, n=1, cutoff=0.93))


def _json_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(_json_text, value))
    return str(value)


def _require_numbers(file: str, arguments: Sequence[Argument]) -> None:
    """Raises ConfigError for each "auto" whose value the config needs."""
    problems = []
    for argument in arguments:
        meaning = DEEPSPEED[argument.name]
        if argument.text == "auto" and (meaning.field or meaning.parts):
            field = meaning.field or "rules"
            problems.append(f"{argument.source.partition(':')[0]}: the value of {field}")
    if problems:
        raise ConfigError(
            "\n  - ".join(
                [
                    f'{file}: Hugging Face\'s Trainer replaces "auto" by its TrainingArguments; '
                    "write their numbers into the file",
                    *problems,
                ]
            )
        )


def _deepspeed_defaults(values: Mapping[str, str]) -> list[Argument]:
    """Returns the keys that DeepSpeed, its Adam and its scheduler have without their being in the
    file.
    """
    defaults = dict(DEEPSPEED_DEFAULTS)
    if values.get("optimizer.type", "").lower() in ("adam", "adamw"):
        defaults |= ADAM_DEFAULTS
    defaults |= SCHEDULER_DEFAULTS.get(values.get("scheduler.type", "").lower(), {})
    return [
        Argument(name, text, f"{name}: {text}, DeepSpeed's default")
        for name, text in defaults.items()
        if name not in values
    ]


def _with_one_rate(
    arguments: list[Argument], values: Mapping[str, str]
) -> tuple[list[Argument], list[LeftOut]]:
    """Returns the arguments without the peak learning rate that DeepSpeed does not use, wherever it
    stands in the file: the optimizer's, if the scheduler has one; and that rate, if the file has
    it.

    values: the keys of the file.
    """
    if not any(argument.name == _SCHEDULER_RATE for argument in arguments):
        return arguments, []
    used = _SCHEDULER_RATE
    unused = _OPTIMIZER_RATE
    if values.get("scheduler.type", "").lower() == "warmupcosinelr":
        # Its parameters are ratios to the optimizer's rate.
        used = _OPTIMIZER_RATE
        unused = _SCHEDULER_RATE
    left_out = [
        LeftOut(argument.source, f"no option: {used} is the peak")
        for argument in arguments
        if argument.name == unused and unused in values
    ]
    return [argument for argument in arguments if argument.name != unused], left_out


def _deepspeed_settings(options: Deepspeed, values: Mapping[str, str]) -> list[Setting]:
    """Returns the mesh, the batch, the type and the schedule, where they follow from several keys
    or from the lack of one.

    Raises ConfigError for sizes that contradict each other.
    """
    settings: list[Setting] = []
    if "bf16.enabled" not in values and "fp16.enabled" not in values:
        settings.append(Setting("model.dtype", "float32", "neither bf16 nor fp16 is enabled"))
    if "optimizer.type" in values and "scheduler.type" not in values:
        source = "the file has no scheduler"
        settings.append(Setting("optimizer.schedule", "constant", source))
        settings.append(Setting("optimizer.warmup_steps", "0", source))
    shards = _whole(values, "tensor_parallel.autotp_size") or 1
    shards *= _whole(values, "sequence_parallel_size") or 1

    batch = _whole(values, "train_batch_size")
    micro = _whole(values, "train_micro_batch_size_per_gpu")
    steps = _whole(values, "gradient_accumulation_steps")
    replicas = options.devices // shards
    if options.devices % shards:
        raise ConfigError(
            f"--devices={options.devices} is not divisible by autotp_size x "
            f"sequence_parallel_size = {shards}"
        )
    if batch and micro and steps:
        product = f"{micro} x {steps} x replicas"
        if batch % (micro * steps):
            raise ConfigError(
                f"train_batch_size={batch} is not train_micro_batch_size_per_gpu x "
                f"gradient_accumulation_steps x replicas = {product}, for any number of replicas"
            )
        implied = batch // (micro * steps)
        if replicas and replicas != implied:
            raise ConfigError(
                f"train_batch_size={batch} = {product} needs {implied} replicas, and "
                f"--devices={options.devices} has {replicas}; one of these four numbers is wrong"
            )
        replicas = implied
    elif micro and not replicas:
        missing = "gradient_accumulation_steps" if batch else "train_batch_size"
        raise ConfigError(
            f"{options.file} has no {missing}, which depends on the number of GPUs; add --devices=N"
        )
    source = _batch_source(values)
    if micro and not batch:
        steps = steps or 1
        batch = micro * steps * replicas
    elif batch and micro and not steps:
        if batch % (micro * replicas):
            raise ConfigError(
                f"train_batch_size={batch} is not divisible by train_micro_batch_size_per_gpu x "
                f"replicas = {micro} x {replicas}"
            )
        steps = batch // (micro * replicas)
    if replicas:
        settings.append(Setting("mesh.data", str(replicas), f"{replicas * shards} GPUs"))
    if batch:
        settings.append(Setting("train.global_batch", str(batch), source))
        settings.append(Setting("train.microbatches", str(steps or 1), source))
    return settings


def _batch_source(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {values[name]}" for name in _BATCH if name in values)


def _whole(values: Mapping[str, str], name: str) -> int:
    """Returns the value of a key as a number of at least 1; 0 if it is not there.

    Raises ConfigError.
    """
    text = values.get(name, "")
    if text in ("", "0"):
        return 0
    if not text.isdecimal():
        raise ConfigError(f"{name}: {text}: expected a whole number of at least 1")
    return int(text)


# Megatron-LM.


def from_megatron(options: Megatron) -> tuple[Conversion, str]:
    """Returns the conversion of Megatron-LM's arguments, and the text of the config. Raises
    ConfigError for arguments that contradict each other or are in no table.
    """
    words = megatron_words(options.arguments)
    typed = list(_typed_arguments(words))
    launcher = {a.name: a for a in typed if a.name in other_names.TORCHRUN}
    unknown = [a.name for a in typed if a.name not in MEGATRON and a.name not in launcher]
    if not options.skip_unknown:
        names = [f"--{name}" for name in unknown]
        _require_known("Megatron-LM's arguments", names, [f"--{name}" for name in MEGATRON])
    arguments = [argument for argument in typed if argument.name in MEGATRON]
    _require_known_variables(arguments)
    open_paths = [argument for argument in arguments if _is_variable(argument)]
    arguments = [argument for argument in arguments if not _is_variable(argument)]
    values = {argument.name: argument.text for argument in arguments}

    settings = _megatron_settings(options, values, launcher)
    ignored: list[LeftOut] = []
    if "group-query-attention" not in values:
        reason = "no option: Megatron-LM ignores it without --group-query-attention"
        ignored = [LeftOut(a.source, reason) for a in arguments if a.name == "num-query-groups"]
        arguments = [a for a in arguments if a.name != "num-query-groups"]
    arguments += _megatron_defaults(arguments)
    base = TrainConfig(DecoderConfig(), output=_OUTPUT, mesh=MeshConfig(data=-1))
    conversion = convert(arguments, MEGATRON, base, settings)
    conversion = _without_equal_defaults(conversion, base)
    conversion = _with_open_paths(conversion, open_paths)
    conversion = dataclasses.replace(conversion, left_out=(*conversion.left_out, *ignored))
    conversion = _with_lost(conversion, [*arguments, *open_paths], values)
    docstring = (
        "A run of Megatron-LM.\n\nmesh-lm convert wrote it from the arguments of its command; each "
        "line names its source.\n"
    )
    return conversion, python_file(conversion, docstring)


def megatron_words(arguments: Sequence[str]) -> list[str]:
    """Returns the words of Megatron-LM's command: of one text, of several words, or in a shell
    script. Raises ConfigError.
    """
    if not arguments:
        raise ConfigError(
            "name a shell script, or give Megatron-LM's arguments: mesh-lm convert megatron "
            '"--num-layers 24 ..."'
        )
    if len(arguments) > 1:
        return list(arguments)
    (text,) = arguments
    if text.startswith("-") or len(text.split()) > 1:
        return _split_words(text, "the arguments")
    path = Path(text).expanduser()
    try:
        return script_words(path.read_text(encoding="utf-8"), text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{text}: the script cannot be read: {reason}") from error


def script_words(script: str, file: str) -> list[str]:
    """Returns the words of the command of a shell script that starts Megatron-LM, with the
    variables that the script itself assigns. Conditions are not evaluated: each assignment counts.

    Raises ConfigError if there is no such command.
    """
    script = re.sub(r"(?m)(^|\s)#.*$", r"\1", script).replace("\\\n", " ")
    variables: dict[str, str] = {}
    for match in _ASSIGNMENT.finditer(script):
        value = match["array"] if match["array"] is not None else match["value"].strip("\"'")
        before = f"{variables.get(match[1], '')} " if match["plus"] else ""
        variables[match[1]] = before + " ".join(value.split())
    commands = [
        _expanded(line, variables)
        for line in _ASSIGNMENT.sub("", script).splitlines()
        if line.strip()
    ]
    commands = [line for line in commands if "--" in line]
    if not commands:
        raise ConfigError(f"{file}: no line has arguments such as --num-layers")
    words = _split_words(max(commands, key=lambda line: line.count("--")), file)
    # Bash splits the words of an array without quotes around it, and of eval's command, once more.
    return [part for word in words for part in (_command(word).split() if "--" in word else [word])]


def _command(text: str) -> str:
    """Returns the command with the most arguments in a line of a shell, without redirections and
    without the commands behind its pipes.
    """

    def replacement(match: re.Match[str]) -> str:
        if match["literal"]:
            return match[0]
        return "\0" if match["separator"] else " "

    commands = _OPERATOR.sub(replacement, text).split("\0")
    return max(commands, key=lambda command: command.count("--"))


def _split_words(text: str, name: str) -> list[str]:
    try:
        return shlex.split(_command(text), comments=True)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Returns the text with the values of shell variables; unknown ones stay as they are."""

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        default = (match["default"] or "").strip("\"'")
        return variables.get(name, default or match[0])

    for _ in range(8):  # variables of variables
        expanded = _VARIABLE.sub(value, text)
        if expanded == text:
            break
        text = expanded
    return text


def _typed_arguments(words: Sequence[str]) -> Iterator[Argument]:
    """Yields the arguments, the last of those that are given twice. Words that belong to none, such
    as the program, are left out.
    """
    texts: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            option, equals, value = word.removeprefix("--").partition("=")
            name = _table_name(option)
            texts[name] = [value] if equals else []
        elif name and _is_value(word):
            texts[name].append(word)
    for name, values in texts.items():
        separator = "," if f"--{name.replace('-', '_')}" in other_names.LIST_OPTIONS else " "
        yield Argument(name, separator.join(values), " ".join([f"--{name}", *values]))


def _is_value(word: str) -> bool:
    """Whether a word is an argument's value, and neither an option of one letter nor a program."""
    if word.endswith(".py"):
        return False
    return not word.startswith("-") or bool(_NUMBER.match(word))


def _table_name(option: str) -> str:
    """Returns an argument's name as the tables spell it: most have hyphens."""
    if option in MEGATRON:
        return option
    hyphened = option.replace("_", "-")
    return _LAUNCHER.get(option.replace("-", "_"), hyphened)


def _require_known_variables(arguments: Sequence[Argument]) -> None:
    """Raises ConfigError for numbers and choices that are variables which the script does not
    assign. Paths may be: they are left out.
    """
    problems = []
    for argument in arguments:
        meaning = MEGATRON[argument.name]
        if _is_variable(argument) and not _is_path(meaning) and (meaning.field or meaning.parts):
            problems.append(argument.source)
    if problems:
        head = "the script does not assign these variables; replace them by their values"
        raise ConfigError("\n  - ".join([head, *problems]))


def _is_variable(argument: Argument) -> bool:
    return "$" in argument.text


def _is_path(meaning: Meaning) -> bool:
    """Whether the field is a path or a name, which a script often takes from its caller."""
    return meaning.field in ("output", "init_from", "wandb", "checkpoint.local") or (
        meaning.field.startswith("data.") and meaning.field != "data.threads"
    )


def _megatron_settings(
    options: Megatron, values: Mapping[str, str], launcher: Mapping[str, Argument]
) -> list[Setting]:
    """Returns the fields that follow from several arguments, or from the lack of one.

    Raises ConfigError for sizes that contradict each other.
    """
    settings: list[Setting] = []
    devices = _devices(options, launcher)
    axes = {axis: _whole(values, name) or 1 for name, axis in _AXES.items()}
    shards = math.prod(axes.values())
    used = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
    if devices % shards:
        raise ConfigError(f"{devices} GPUs are not divisible by {used}; add --devices=N")
    replicas = devices // shards
    micro = _whole(values, "micro-batch-size")
    if replicas:
        source = f"{devices} GPUs / ({used})" if used else f"{devices} GPUs"
        settings.append(Setting("mesh.data", str(replicas), source))
    elif micro:
        raise ConfigError(
            f"--micro-batch-size {micro}: the number of microbatches depends on the number of "
            "GPUs; add --devices=N"
        )
    batch = _whole(values, "global-batch-size")
    data_parallel = replicas * axes["expert"]
    if micro and batch % (micro * data_parallel):
        raise ConfigError(
            f"--global-batch-size {batch} is not divisible by --micro-batch-size x replicas = "
            f"{micro} x {data_parallel}"
        )
    if micro and "global-batch-size" not in values:
        batch = micro * data_parallel
        source = "--micro-batch-size x replicas, without --global-batch-size"
        settings.append(Setting("train.global_batch", str(batch), source))
    settings += _megatron_model(values)
    return settings


def _devices(options: Megatron, launcher: Mapping[str, Argument]) -> int:
    """Returns the number of GPUs: that of the command, or torchrun's; 0 if neither is known."""
    if options.devices:
        return options.devices
    nodes = launcher.get("nnodes")
    counts = [launcher["nproc-per-node"].text] if "nproc-per-node" in launcher else ["0"]
    counts.append(nodes.text if nodes is not None else "1")
    if not all(count.isdecimal() for count in counts):
        return 0
    return math.prod(map(int, counts))


def _megatron_model(values: Mapping[str, str]) -> list[Setting]:
    """Returns fields of the model for arguments that are not there. Raises ConfigError if nothing
    says how large the vocabulary is.
    """
    settings: list[Setting] = []
    if "save" not in values:
        settings.append(Setting("output", _OUTPUT, "the value of --save is not known"))
    if "vocab-size" not in values:
        if values.get("tokenizer-type") != "GPT2BPETokenizer":
            raise ConfigError(
                "the size of the vocabulary is not among the arguments; add --vocab-size N, that "
                "of the tokenizer"
            )
        source = "--tokenizer-type GPT2BPETokenizer"
        settings.append(Setting("model.vocab_size", GPT2_VOCABULARY, source))
    if "bf16" not in values and "fp16" not in values:
        settings.append(Setting("model.dtype", "float32", "neither --bf16 nor --fp16"))
    if "group-query-attention" in values and "num-query-groups" not in values:
        source = "--group-query-attention without --num-query-groups, 1 by default"
        settings.append(Setting("model.n_kv_heads", "1", source))
    width = _whole(values, "hidden-size")
    if "swiglu" in values and "ffn-hidden-size" not in values and width:
        # int(4 d 2 / 3 / 64) 64, as megatron/training/arguments.py computes it.
        d_ff = int((4 * width * 2 / 3) / 64) * 64
        source = "--swiglu without --ffn-hidden-size: 8/3 of --hidden-size, in steps of 64"
        settings.append(Setting("model.d_ff", str(d_ff), source))
    return settings


def _megatron_defaults(arguments: Sequence[Argument]) -> list[Argument]:
    """Returns the arguments that Megatron-LM has without their being on its command line."""
    fields = {MEGATRON[argument.name].field for argument in arguments}
    names = {argument.name for argument in arguments}
    defaults = []
    for name, text in MEGATRON_DEFAULTS.items():
        if name in names or MEGATRON[name].field in fields - {""}:
            continue
        defaults.append(Argument(name, text, f"--{name} {text}, Megatron-LM's default"))
    return defaults


def _with_open_paths(conversion: Conversion, arguments: Sequence[Argument]) -> Conversion:
    """Returns the conversion with arguments left out whose values the script does not have."""
    left_out = list(conversion.left_out)
    for argument in arguments:
        meaning = MEGATRON[argument.name]
        reason = meaning.ours.replace("`", "")
        if meaning.field:
            reason = f"the script does not assign the variable; set {meaning.field}"
        left_out.append(LeftOut(argument.source, reason))
    return dataclasses.replace(conversion, left_out=tuple(left_out))


def _with_lost(
    conversion: Conversion, arguments: Sequence[Argument], values: Mapping[str, str]
) -> Conversion:
    """Returns the conversion that lists the arguments of MEGATRON_LOST as lost, unless a schedule
    is as long as the run.
    """
    reasons: dict[str, str] = {}
    for argument in arguments:
        run_length = values.get(_RUN_LENGTHS.get(argument.name, ""))
        if argument.name in MEGATRON_LOST and argument.text != run_length:
            reasons[argument.source] = MEGATRON_LOST[argument.name]
    left_out = [
        item._replace(reason=reasons.get(item.source, item.reason)) for item in conversion.left_out
    ]
    return dataclasses.replace(conversion, left_out=tuple(left_out))


def _without_equal_defaults(conversion: Conversion, base: TrainConfig) -> Conversion:
    """Returns the conversion without fields that have the same default here and there."""
    settings = [
        setting
        for setting in conversion.settings
        if not setting.source.endswith("'s default")
        or _value(conversion.config, setting.field) != _value(base, setting.field)
    ]
    return dataclasses.replace(conversion, settings=tuple(settings))


def _value(config: Any, field: str) -> Any:
    for name in field.split("."):
        config = getattr(config, name, None)
    return config


def _require_known(source: str, unknown: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError that lists names which are in no table, each with the nearest ones."""
    lines = []
    for name in unknown:
        similar = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
        lines.append(f"\n  - {name}: unknown{did_you_mean(similar)}")
    if lines:
        raise ConfigError(
            f"{source}: these names are in no table; leave them out with --skip-unknown"
            f"{''.join(lines)}"
        )
