"""`mesh-lm convert`: the files that it writes load, and are the run that the other trainer's
arguments describe; what contradicts itself or is unknown is one error."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from mesh_lm.commands import command_line, convert, other_names
from mesh_lm.commands.deepspeed_names import (
    ADAM_DEFAULTS,
    DEEPSPEED,
    DEEPSPEED_DEFAULTS,
    SCHEDULER_DEFAULTS,
)
from mesh_lm.commands.main import main
from mesh_lm.commands.meanings import RULES_SLOTS, NotBuiltError
from mesh_lm.commands.megatron_names import MEGATRON, MEGATRON_DEFAULTS, MEGATRON_LOST
from mesh_lm.config import TrainConfig, load
from mesh_lm.training.check import check
from sharding_rules import PRESETS, preset

TOUR = Path(__file__).parents[3] / "docs" / "tours" / "from_megatron.md"
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 8192 --bf16"


def converted(words: list[str], directory: Path) -> TrainConfig:
    """The config that the written file makes; the file is there only once."""
    file = directory / f"converted_{len(list(directory.iterdir()))}.py"
    assert main(["convert", *words, f"--output={file}"]) == 0
    return load(str(file))


def megatron(arguments: str, directory: Path) -> TrainConfig:
    return converted(["megatron", arguments], directory)


def deepspeed(data: object, directory: Path, *words: str) -> TrainConfig:
    file = directory / "ds_config.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    return converted(["deepspeed", str(file), "--model=gpt2_124m", *words], directory)


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["convert", *words]) == 1
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.removeprefix("error: ").removesuffix("\n")


def test_the_run_of_the_tour(tmp_path: Path) -> None:
    """Megatron-LM's command of the tour becomes the run of the command below it."""
    theirs, ours = (
        text.replace("\\\n", " ")
        for text in re.findall(
            r"^```bash\n(.*?)^```$", TOUR.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    )
    config = megatron(f"{theirs.strip()} --vocab-size 151936", tmp_path)
    words = shlex.split(ours)
    expected = check(command_line.parse(words[words.index("train") + 1 :]), 8)
    assert config.mesh == expected.mesh
    assert config.rules == expected.rules
    assert config.optimizer == expected.optimizer
    assert config.data.blend == expected.data.blend
    assert config.train.microbatches == expected.train.microbatches == 32
    # gpt_1_3b has a layout of its own.
    layout = {"unroll": False, "vocab_multiple": 256}
    assert config.model == dataclasses.replace(
        expected.model, **{**layout, "loss_chunk": vars(config.model)["loss_chunk"]}
    )
    for name in ("output", "seed", "checkpoint"):
        assert getattr(config, name) == getattr(expected, name)


SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8  # a comment
NODES=2
CHECKPOINTS=$1 #<a path>
PREFIX=${2:-"data/web"}
MODEL_ARGS=(
    --num-layers 8
    --hidden-size 1024
    # --num-layers 9 \\
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --swiglu
)
if [ -n "$MORE" ]; then
    MODEL_ARGS+=(
        "--normalization RMSNorm"
    )
fi
echo --this is not the command
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes ${NODES} --node_rank 0 pretrain_gpt.py \\
    ${MODEL_ARGS[@]} --seq-length 512 --vocab-size 32000 --bf16 --position-embedding-type rope \\
    --micro-batch-size 2 --global-batch-size 64 --lr 1e-4 --min-lr 1e-5 --train-samples 6400 \\
    --lr-warmup-samples 640 --tensor-model-parallel-size 2 --context-parallel-size 2 --num-experts 8 \\
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --sequence-parallel \\
    --data-path $PREFIX --save $CHECKPOINTS --rotary-percent 1.0 --attention-dropout 0
"""


def test_a_script_with_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT, encoding="utf-8")
    config = converted(["megatron", str(script)], tmp_path)
    model = vars(config.model)
    assert (model["n_layers"], model["n_kv_heads"], model["norm"]) == (8, 4, "rmsnorm")
    assert model["d_ff"] == 2688, "8 / 3 of 1024, in steps of 64"
    assert (model["block"], model["experts"].number, model["dropout"]) == ("moe", 8, 0.1)
    assert config.mesh.sizes() | {"data": 2, "tensor": 2, "sequence": 2, "expert": 2} == (
        config.mesh.sizes()
    )
    assert config.rules.name == "megatron_sp+ring+experts_padded"
    assert (config.train.global_batch, config.train.microbatches) == (64, 8)
    assert (config.train.steps, config.optimizer.warmup_steps) == (100, 10)
    assert config.optimizer.final_fraction == pytest.approx(0.1)
    assert (config.data.blend, config.output) == (("data/web",), "runs/megatron")
    out = capsys.readouterr().out
    assert "--save $1: the script does not assign the variable; set output" in out
    assert "attention-dropout" not in out and "rotary-percent" not in out


def test_variables_without_braces() -> None:
    """A name ends where bash ends it, and only braces have a default."""
    script = "NAME=gpt\nSIZE=1b\nrun --save ck/$NAME-tp8 --lr 1 --wandb-project $NAME-$SIZE"
    words = convert.script_words(script, "train.sh")
    assert words == shlex.split("run --save ck/gpt-tp8 --lr 1 --wandb-project gpt-1b")
    script = "NAME=gpt\nrun --save ${NAME:-x}-tp8 --load ${DIR:-ck/${NAME}} --seed ${SEED-3}"
    words = convert.script_words(script, "train.sh")
    assert words == shlex.split("run --save gpt-tp8 --load ck/gpt --seed 3")


SHELL_LINES = {
    "2>&1 | tee train.log": "",
    ">> train.log 2>&1 &": "",
    ">train.log": "",
    "&> train.log": "",
    "> >(tee train.log) 2> >(tee errors.log >&2)": "",
    "; echo --done": "",
    "&& echo --done": "",
    "|& tee train.log": "",
    "< /dev/null --lr 1": "--lr 1",
    "2> errors.log --lr 1": "--lr 1",
    "--seed 2 > train.log": "--seed 2",
    "--load 'a | b' --wandb-project \"a & b\"": "--load 'a | b' --wandb-project 'a & b'",
}
"""The rest of a line behind --save ck/x -> the arguments in it."""


@pytest.mark.parametrize("rest", SHELL_LINES)
def test_a_command_ends_where_the_shell_ends_it(rest: str) -> None:
    expected = shlex.split(f"--bf16 --save ck/x {SHELL_LINES[rest]}")
    line = f"--bf16 --save ck/x {rest}"
    assert convert.megatron_words([line]) == expected
    assert convert.script_words(f"cd /work && run {line}", "train.sh") == ["run", *expected]


def test_a_command_in_a_variable() -> None:
    script = 'command="run --bf16 --save ck/x 2>&1 | tee train.log"\neval "$command"\n'
    assert convert.script_words(script, "train.sh")[-3:] == ["--bf16", "--save", "ck/x"]


def test_query_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM groups queries by --group-query-attention alone."""
    switch = "--group-query-attention"
    assert vars(megatron(f"{SMALL} {switch}", tmp_path).model)["n_kv_heads"] == 1
    both = megatron(f"{SMALL} {switch} --num-query-groups 2", tmp_path)
    assert vars(both.model)["n_kv_heads"] == 2
    assert "--num-query-groups" not in capsys.readouterr().out
    assert vars(megatron(f"{SMALL} --num-query-groups 2", tmp_path).model)["n_kv_heads"] == 0
    line = "  --num-query-groups 2: Megatron-LM ignores it without --group-query-attention\n"
    assert line in capsys.readouterr().out


LOST = {
    "--train-iters 100 --lr-decay-iters 90": "--lr-decay-iters 90: not built: the schedule ends at",
    "--train-samples 64 --global-batch-size 1 --lr-decay-samples 32": (
        "--lr-decay-samples 32: not built: the schedule ends at"
    ),
    "--lr-decay-iters $STEPS": "--lr-decay-iters $STEPS: not built: the schedule ends at",
    "--moe-expert-capacity-factor 1.25": "1.25: not built: experts have no capacity, and no token",
    "--exit-duration-in-mins 230": "--exit-duration-in-mins 230: not built: a run ends at",
}


@pytest.mark.parametrize("arguments", LOST)
def test_what_changes_a_run_is_lost(
    arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron(f"{SMALL} {arguments}", tmp_path)
    lost, _, unneeded = capsys.readouterr().out.partition("needs no field here:")
    assert LOST[arguments] in lost
    assert not unneeded


def test_a_schedule_as_long_as_the_run_needs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron(f"{SMALL} --train-iters 100 --lr-decay-iters 100", tmp_path)
    lost, _, unneeded = capsys.readouterr().out.partition("needs no field here:")
    assert "--lr-decay-iters 100" in unneeded
    assert "--lr-decay-iters" not in lost


def test_defaults_of_megatron(tmp_path: Path) -> None:
    config = megatron(SMALL.replace(" --bf16", ""), tmp_path)
    assert vars(config.model)["dtype"] == "float32"
    assert vars(config.model)["dropout"] == 0.1
    optimizer = config.optimizer
    assert (optimizer.schedule, optimizer.weight_decay, optimizer.warmup_steps) == (
        "linear",
        0.01,
        0,
    )
    assert vars(optimizer.rule)["beta2"] == 0.999
    assert config.mesh.data == -1
    without = megatron(f"{SMALL} --lr-warmup-fraction 0.5 --train-iters 10", tmp_path)
    assert without.optimizer.warmup_steps == 5


MEGATRON_REFUSALS = {
    "": "name a shell script, or give Megatron-LM's arguments: mesh-lm convert megatron",
    "--num-layer 3 --vocab-size 9": "\n  - --num-layer: unknown; did you mean --num-layers?",
    "--num-layers 3 --bf16": "the size of the vocabulary is not among the arguments; add --vocab-size N",
    f"{SMALL} --micro-batch-size 2": "--micro-batch-size 2: the number of microbatches depends on",
    f"{SMALL} --num-layers two": "\n  - --num-layers two: model.n_layers=two: expected int",
    f"{SMALL} --micro-batch-size 3 --global-batch-size 64 --devices=8": (
        "--global-batch-size 64 is not divisible by --micro-batch-size x replicas = 3 x 8"
    ),
    f"{SMALL} --devices=6 --tensor-model-parallel-size 4": "6 GPUs are not divisible by tensor 4",
    f"{SMALL} --seq-length $LENGTH": "the script does not assign these variables; replace them",
    f"{SMALL} --hidden-size sixty": "hidden-size: sixty: expected a whole number of at least 1",
    "nowhere.sh": "nowhere.sh: the script cannot be read: No such file or directory",
    f"{SMALL} --output=run.txt": "--output=run.txt: a config is a file that ends in .py",
    f"{SMALL} --output=nowhere/run.py": "--output=nowhere/run.py: the directory of the config does not exist",
}


@pytest.mark.parametrize("words", MEGATRON_REFUSALS)
def test_arguments_that_cannot_be_converted(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert MEGATRON_REFUSALS[words] in refusal(["megatron", *words.split()], capsys)
    assert not list(tmp_path.iterdir())


def test_what_is_unknown_can_be_left_out(tmp_path: Path) -> None:
    words = ["megatron", *SMALL.split(), "--my-own-flag", "3", "--skip-unknown"]
    assert vars(converted(words, tmp_path).model)["n_layers"] == 2


def test_a_config_that_cannot_run_is_written_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.py"
    words = f"{SMALL} --tensor-model-parallel-size 8 --devices=8 --output={file}"
    assert main(["convert", "megatron", *words.split()]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith(f"wrote {file}: ")
    assert "model.n_heads=4 is not divisible by its number of shards" in captured.err
    assert load(str(file)).mesh.tensor == 8
    assert main(["convert", "megatron", *words.split()]) == 1
    assert capsys.readouterr().err == f"error: --output={file} exists; name another file\n"


DS_CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "eps": 1e-7}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": 3e-4,
            "warmup_num_steps": 100,
            "total_num_steps": 2000,
            "warmup_type": "linear",
        },
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
    },
    "gradient_clipping": 0.5,
    "wall_clock_breakdown": False,
}


def test_a_deepspeed_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = deepspeed(DS_CONFIG, tmp_path)
    base = load("gpt2_124m")
    assert config.model == base.model and config.data == base.data
    assert (config.rules.name, config.mesh.data) == ("zero3", 8)
    assert (config.train.global_batch, config.train.microbatches, config.train.steps) == (
        *(64, 2),
        2000,
    )
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.final_fraction) == (
        3e-4,
        "linear",
        0.0,
    )
    assert (optimizer.clip_norm, optimizer.weight_decay) == (0.5, 0.0)
    assert vars(optimizer.rule) == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-7}
    out = capsys.readouterr().out
    lost, _, unneeded = out.partition("needs no field here:")
    assert "zero_optimization.offload_optimizer.device: cpu" in lost
    assert "zero_optimization.overlap_comm: true" in unneeded
    assert "loss_scale" not in out and "offload_param" not in out and "breakdown" not in out


def test_defaults_of_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Schedule, warm-up and clipping are DeepSpeed's, not those of the model's config."""
    adam = {"type": "AdamW", "params": {"lr": 2e-4}}
    params = {"total_num_steps": 2000}
    cosine = deepspeed(
        {"optimizer": adam, "scheduler": {"type": "WarmupCosineLR", "params": params}}, tmp_path
    )
    optimizer = cosine.optimizer
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.clip_norm) == ("cosine", 1000, 0)
    assert (optimizer.final_fraction, optimizer.learning_rate) == (1e-4, 2e-4)
    lost = capsys.readouterr().out.partition("needs no field here:")[0]
    assert "warmup_type: log, DeepSpeed's default: log is not built; here it is always" in lost

    optimizer = deepspeed({"optimizer": adam}, tmp_path).optimizer
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.clip_norm) == ("constant", 0, 0)
    assert optimizer.learning_rate == 2e-4
    assert "warmup" not in capsys.readouterr().out
    optimizer = deepspeed({"optimizer": {"type": "Adam"}}, tmp_path).optimizer
    assert optimizer.learning_rate == 1e-3


def test_a_file_without_an_optimizer_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = deepspeed({}, tmp_path).optimizer
    assert optimizer == dataclasses.replace(load("gpt2_124m").optimizer, clip_norm=0.0)
    line = (
        "  the file has no optimizer: fields of optimizer that no key sets are those of gpt2_124m\n"
    )
    assert line in capsys.readouterr().out


PEAKS = {
    ("WarmupDecayLR", 3e-4, 1e-4): 3e-4,
    ("WarmupDecayLR", 3e-4, None): 3e-4,
    ("WarmupDecayLR", None, 1e-4): 1e-3,
    ("WarmupLR", 3e-4, 1e-4): 3e-4,
    ("WarmupLR", None, 1e-4): 1e-4,
    ("WarmupCosineLR", None, 1e-4): 1e-4,
    ("WarmupCosineLR", 3e-4, 1e-4): 1e-4,
}
"""(scheduler, its warmup_max_lr, the optimizer's lr) -> the peak in DeepSpeed."""


@pytest.mark.parametrize("rates", PEAKS)
@pytest.mark.parametrize("order", [1, -1])
def test_the_peak_does_not_depend_on_the_order_of_keys(
    rates: tuple[str, float | None, float | None], order: int, tmp_path: Path
) -> None:
    name, of_scheduler, of_optimizer = rates
    scheduler = {"warmup_max_lr": of_scheduler} if of_scheduler else {}
    adam = {"lr": of_optimizer} if of_optimizer else {}
    sections = {
        "optimizer": {"type": "Adam", "params": adam},
        "scheduler": {"type": name, "params": {**scheduler, "total_num_steps": 2000}},
    }
    file = dict([*sections.items()][::order])
    assert deepspeed(file, tmp_path).optimizer.learning_rate == PEAKS[rates]


def test_an_axis_of_size_0_is_off(tmp_path: Path) -> None:
    config = deepspeed({"tensor_parallel": {"autotp_size": 0}}, tmp_path)
    assert (config.mesh.tensor, config.rules.name) == (1, "ddp")
    config = deepspeed({"tensor_parallel": {"autotp_size": 2}}, tmp_path)
    assert (config.mesh.tensor, config.rules.name) == (2, "megatron")


def test_each_line_names_its_source(tmp_path: Path) -> None:
    deepspeed(DS_CONFIG, tmp_path)
    (file,) = tmp_path.glob("*.py")
    text = file.read_text(encoding="utf-8")
    assert 'rules=preset("zero3"),  # zero_optimization.stage: 3' in text
    assert "clip_norm=0.5,  # gradient_clipping: 0.5" in text
    assert "beta2=0.999,  # optimizer.params.betas: 0.9,0.999, DeepSpeed's default" in text
    assert max(map(len, text.splitlines())) <= 100


BATCHES = {
    (64, 4, 2, 0): (64, 2, 8),
    (64, 4, 2, 8): (64, 2, 8),
    (64, 4, 0, 8): (64, 2, 8),
    (0, 4, 2, 8): (64, 2, 8),
    (0, 4, 0, 8): (32, 1, 8),
    (64, 0, 2, 0): (64, 2, -1),
    (64, 0, 0, 8): (64, 1, 8),
}
"""(batch, micro-batch, accumulation, --devices) -> (global batch, microbatches, data)."""


def batch_keys(batch: int, micro: int, steps: int) -> dict[str, int]:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {name: value for name, value in zip(names, (batch, micro, steps), strict=True) if value}


@pytest.mark.parametrize("sizes", BATCHES)
def test_two_sizes_give_the_third(sizes: tuple[int, int, int, int], tmp_path: Path) -> None:
    config = deepspeed(batch_keys(*sizes[:3]), tmp_path, f"--devices={sizes[3]}")
    found = (config.train.global_batch, config.train.microbatches, config.mesh.data)
    assert found == BATCHES[sizes]


DEEPSPEED_REFUSALS = {
    '{"train_batch_size": 65, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}': (
        "train_batch_size=65 is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas"
    ),
    '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}': (
        "train_batch_size=64 = 4 x 4 x replicas needs 4 replicas, and --devices=8 has 8; one of these four numbers is wrong"
    ),
    '{"train_batch_size": 60, "train_micro_batch_size_per_gpu": 4}': (
        "train_batch_size=60 is not divisible by train_micro_batch_size_per_gpu x replicas = 4 x 8"
    ),
    '{"train_batch_size": "auto", "optimizer": {"params": {"lr": "auto"}}}': (
        'ds.json: Hugging Face\'s Trainer replaces "auto" by its TrainingArguments; write their numbers '
        "into the file\n  - train_batch_size: the value of train.global_batch\n"
        "  - optimizer.params.lr: the value of optimizer.learning_rate"
    ),
    '{"zero_optimization": {"stge": 3}}': (
        "\n  - zero_optimization.stge: unknown; did you mean zero_optimization.stage"
    ),
    '{"zero_optimisation": {"stage": 3}}': "did you mean zero_optimization.stage",
    '{"train_batch_size": -3}': "train_batch_size: -3: expected a whole number of at least 1",
    '{"steps_per_print": "often"}': "\n  - steps_per_print: often: train.log_every=often: expected int",
    "stage: 3": "ds.json is not DeepSpeed's JSON: Expecting value",
    "[]": "ds.json is not DeepSpeed's JSON: expected an object, got list",
}


@pytest.mark.parametrize("text", DEEPSPEED_REFUSALS)
def test_files_that_cannot_be_converted(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(text, encoding="utf-8")
    words = ["deepspeed", "ds.json", "--model=gpt2_124m", "--devices=8"]
    assert DEEPSPEED_REFUSALS[text] in refusal(words, capsys)


def test_deepspeed_needs_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}", encoding="utf-8")
    assert refusal(["deepspeed", "ds.json"], capsys) == (
        "ds.json has no model: add --model=CONFIG, whose model and data the run takes; mesh-lm "
        "configs lists some"
    )
    assert refusal(["deepspeed", "no.json", "--model=gpt_tiny"], capsys) == (
        "no.json: DeepSpeed's JSON cannot be read: No such file or directory"
    )
    assert refusal(["deepspede"], capsys).endswith("did you mean deepspeed?")


def test_parts_lead_to_fields() -> None:
    """Of every meaning, for the values that its text names."""
    fields = command_line.field_types(load("gpt2_124m"))
    meanings = [*MEGATRON.items(), *DEEPSPEED.items()]
    n_parts = 0
    for name, meaning in meanings:
        if meaning.field and name != "optimizer.params.momentum":  # of another rule than adamw
            assert meaning.field in fields, name
        words = re.findall(r"[\w+]+", meaning.ours)
        for value in {"", "0", "1", "2", "3", *words} if meaning.parts else ():
            try:
                parts = meaning.parts(value) if meaning.parts else {}
            except NotBuiltError:
                continue
            for field, text in parts.items():
                n_parts += 1
                section, _, slot = field.partition(".")
                if section == "rules" and slot:
                    assert slot in RULES_SLOTS, name
                    assert not text or preset(text if text in PRESETS else f"ddp+{text}"), name
                else:
                    assert field in {"", *fields}, name
    assert n_parts > 30
    assert MEGATRON_DEFAULTS.keys() <= MEGATRON.keys()
    assert MEGATRON_LOST.keys() <= MEGATRON.keys()
    for defaults in (DEEPSPEED_DEFAULTS, ADAM_DEFAULTS, *SCHEDULER_DEFAULTS.values()):
        assert defaults.keys() <= DEEPSPEED.keys()


def test_suggestions_know_deepspeed() -> None:
    """From the same table."""
    meaning = other_names.look_up("zero_optimization.stage")
    assert meaning is DEEPSPEED["zero_optimization.stage"]
    assert other_names.look_up("zero-optimization.offload-optimizer") is not None
    assert other_names.look_up("pipeline") is None, "a section of our own config"


def test_words_of_the_launcher_and_of_one_letter() -> None:
    words = "python -m torch.distributed.run --nnodes=2 pretrain_gpt.py --lr -1 -x --bf16"
    typed = list(convert._typed_arguments(words.split()))
    assert [(a.name, a.text) for a in typed] == [("nnodes", "2"), ("lr", "-1"), ("bf16", "")]
