"""Names that users of other frameworks type, or guess: the error suggests the right one."""

import dataclasses
import re
from collections.abc import Callable

import pytest

from mesh_lm.commands import launch, other_names, prepare
from mesh_lm.commands.command_line import parse, parse_with
from mesh_lm.commands.main import main
from mesh_lm.commands.plan_options import Plan
from mesh_lm.config import TrainConfig, load
from mesh_lm.config.files import shipped
from mesh_lm.config.run import expert
from mesh_lm.errors import ConfigError, hub_hint
from mesh_lm.launch.job import Options
from sharding_rules import PRESETS, Rules

ANSWERS = {
    "--config.lr=1e-3": "--config.lr: the config has no such field; did you mean --config.optimizer.learning_rate=1e-3?",
    "--lr=1e-3": "--lr: the config has no such field; did you mean --optimizer.learning_rate=1e-3?",
    "--learning-rate=1e-3": "--learning-rate: the config has no such field; did you mean --optimizer.learning_rate=1e-3?",
    "--config.batch_size=8": "--config.batch_size: the config has no such field; did you mean --config.train.global_batch?",
    "--hidden-size=64": "--hidden-size: the config has no such field; did you mean --model.d_model=64?",
    "--hidden-size": "--hidden-size: the config has no such field; did you mean --model.d_model?",
    "--split=9,1,0": "--split: the config has no such field; did you mean --data.split=9,1,0?",
    "--tensor-model-parallel-size=2": (
        "--tensor-model-parallel-size: the config has no such field; did you mean --mesh.tensor=2, with rules "
        "such as megatron?"
    ),
    "--save-interval=9": (
        "--save-interval: the config has no such field; did you mean --checkpoint.every=9 (only the newest stay: "
        "checkpoint.keep=2 by default)?"
    ),
    "--train.epochs=3": (
        "--train.epochs: the config has no such field; train.steps: epochs x sequences of the training text / "
        "train.global_batch; data.max_epochs is only a limit"
    ),
    "--min-lr=6e-5": (
        "--min-lr: the config has no such field; here it is optimizer.final_fraction: minimum / "
        "optimizer.learning_rate = 6e-5 / 0.008; did you mean --optimizer.final_fraction=0.0075?"
    ),
    "--swiglu": "--swiglu: the config has no such field; did you mean --model.activation=swiglu?",
    "--swiglu=false": "--swiglu: the config has no such field; here it is model.activation=swiglu",
    "--recompute-granularity=selective": (
        "--recompute-granularity: the config has no such field; model.remat: full for full; for selective "
        "save_names, which is not the same: it recomputes all but matmul and attention outputs"
    ),
    "--recompute-num-layers=4": (
        "--recompute-num-layers: the config has no such field; here it is model.remat_layers for "
        "--recompute-method=block, not with stages; uniform recomputes every layer: "
        "model.remat=full"
    ),
    "--window-size=128,0": (
        "--window-size: the config has no such field; here it is model.window, one width for every layer: left + "
        "1, as it counts the token itself (Megatron's pair is left, right) = 128 + 1; did you mean "
        "--model.window=129?"
    ),
    "--window-size=128,128": (
        "--window-size: the config has no such field; here it is model.window, one width for every layer: left + "
        "1, as it counts the token itself (Megatron's pair is left, right)"
    ),
    "--start-weight-decay=0.1": (
        "--start-weight-decay: the config has no such field; not built: optimizer.weight_decay is the same at "
        "every step"
    ),
    "--position-embedding-type=rope": "--position-embedding-type: the config has no such field; did you mean --model.positions=rotary?",
    "--position-embedding-type=none": (
        "--position-embedding-type: the config has no such field; none is not built; here it is "
        "model.positions=rotary, model.positions=learned"
    ),
    "--lr-decay-style=inverse-square-root": (
        "--lr-decay-style: the config has no such field; inverse-square-root is not built; here it is "
        "optimizer.schedule=cosine, optimizer.schedule=linear, optimizer.schedule=constant, or "
        "optimizer.schedule=wsd, which decays linearly"
    ),
    "--lr-decay-style=WSD": (  # whose decay is exponential there
        "--lr-decay-style: the config has no such field; here it is optimizer.schedule=cosine, "
        "optimizer.schedule=linear, optimizer.schedule=constant, or optimizer.schedule=wsd, which "
        "decays linearly"
    ),
    "--lr-decay-iters=9": "--lr-decay-iters: the config has no such field; the schedule ends at train.steps",
    "--rampup-batch-size=4": (
        "--rampup-batch-size: the config has no such field; not built: every step has train.global_batch sequences"
    ),
    "--num-experts=8": (
        "--num-experts: the config has no such field; did you mean --model.experts.number=8, with model.block=moe?"
    ),
    "--expert-model-parallel-size=4": (
        "--expert-model-parallel-size: the config has no such field; did you mean --mesh.expert=4, with rules such as "
        "experts_gather; mesh.data is then the other replicas?"
    ),
    "--moe-router-topk=2": (
        "--moe-router-topk: the config has no such field; did you mean --model.experts.active=2?"
    ),
    "--moe-aux-loss-coeff=1e-2": (
        "--moe-aux-loss-coeff: the config has no such field; did you mean --model.experts.balance_loss=1e-2, the loss "
        "of each sequence, as seq_aux_loss?"
    ),
    "--moe-router-load-balancing-type=aux_loss": (
        "--moe-router-load-balancing-type: the config has no such field; model.experts.balance_loss for seq_aux_loss, "
        "model.experts.bias for none; aux_loss, global_aux_loss and sinkhorn are not built"
    ),
    "--moe-router-enable-expert-bias": (
        "--moe-router-enable-expert-bias: the config has no such field; did you mean --model.experts.bias=true?"
    ),
    "--moe-token-dispatcher-type=alltoall": (
        "--moe-token-dispatcher-type: the config has no such field; rules: experts_gather for allgather, "
        "experts_padded for alltoall, in a product with the others; flex is not built"
    ),
    "--moe-grouped-gemm": (
        "--moe-grouped-gemm: the config has no such field; the experts of a device are one grouped matmul; leave it "
        "out"
    ),
    "--moe-enable-deepep": (
        "--moe-enable-deepep: the config has no such field; not built; docs/experts.md has what a mixture of "
        "experts can do"
    ),
    "--num-experts-per-tok=2": (
        "--num-experts-per-tok: the config has no such field; did you mean --model.experts.active=2?"
    ),
    "--dry-run": (
        "--dry-run: the config has no such field; mesh-lm plan shows memory, communication and time without "
        "starting the run"
    ),
    "min_lr=6e-5": (
        "min_lr=6e-5: belongs to no option; here it is optimizer.final_fraction: minimum / "
        "optimizer.learning_rate = 6e-5 / 0.008; did you mean --optimizer.final_fraction=0.0075?"
    ),
    "--model.window=None": "--model.window=None: expected int, with commas between several and nothing for none",
    "--model.segments=a": (
        "--model.segments=a: expected NAME:LAYERS[:KIND[:REMAT[:DTYPE]]], with commas between "
        "several and nothing for none"
    ),
    "config=configs/gpt_tiny.py": (
        "config=configs/gpt_tiny.py: belongs to no option; did you mean "
        "--config=configs/gpt_tiny.py?"
    ),
    "rules=tp": "rules=tp: belongs to no option; did you mean --rules=tp?",
    "train.steps=3": "train.steps=3: belongs to no option; did you mean --train.steps=3?",
    "lr=3": "lr=3: belongs to no option; did you mean --optimizer.learning_rate=3?",
    "--hlep": "--hlep: the config has no such field; did you mean --help?",
    "--optimizer=muon": "--optimizer: this is a section, not a field; did you mean --optimizer.rule=muon?",
    "--optimizer=adam": "--optimizer: this is a section, not a field; did you mean --optimizer.rule=adamw?",
    "--optimizer=sgd": (
        "--optimizer: this is a section, not a field; sgd is not built; here it is optimizer.rule: adamw "
        "for adam, which is AdamW there; the others are muon, lion and adafactor"
    ),
    "--optimizer": "--optimizer: this is a section, not a field; set its fields, as in --optimizer.rule",
}


@pytest.mark.parametrize("word", ANSWERS)
def test_the_answer_names_what_was_meant(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([word])
    assert str(caught.value) == f"bad command line\n  - {ANSWERS[word]}"


WARMUP = "optimizer.warmup_steps: fraction x train.steps (x --lr-decay-iters if that is given)"
FORMULAS = {
    "--micro-batch-size 4 --train.global_batch=512 --mesh.data=4": (
        "train.microbatches, a count, not a size: global batch / (micro-batch size x data x fsdp x expert) "
        "= 512 / (4 x 4 x 1 x 1); did you mean --train.microbatches=32?"
    ),
    # the batch by its name in Megatron-LM, which is refused as well
    "--micro-batch-size 4 --global-batch-size 512 --mesh.fsdp=8": (
        "train.microbatches, a count, not a size: global batch / (micro-batch size x data x fsdp x expert) "
        "= 512 / (4 x data x 8 x 1)"
    ),
    "--micro-batch-size 4 --train.global_batch=512 --mesh.data=2 --mesh.expert=8": (
        "train.microbatches, a count, not a size: global batch / (micro-batch size x data x fsdp x expert) "
        "= 512 / (4 x 2 x 1 x 8); did you mean --train.microbatches=8?"
    ),
    "--eval-iters=10 --train.global_batch=64": (
        "train.eval_sequences, sequences instead of batches: iterations x train.global_batch = 10 "
        "x 64; did you mean --train.eval_sequences=640?"
    ),
    "--train-samples=1000 --train.global_batch=64": (
        "train.steps: samples / train.global_batch, rounded down = 1000 / 64; did you mean "
        "--train.steps=15?"
    ),
    "--train-samples 1000 --global-batch-size 16": (
        "train.steps: samples / train.global_batch, rounded down = 1000 / 16; did you mean "
        "--train.steps=62?"
    ),
    "--train-samples=10 --train.global_batch=64": "train.steps: samples / train.global_batch, rounded down = 10 / 64",
    "--lr-warmup-fraction 0.5 --train-samples 1000 --global-batch-size 16": (
        f"{WARMUP} = 0.5 x 62; did you mean --optimizer.warmup_steps=31?"
    ),
    "--lr-warmup-fraction 0.01 --lr-decay-iters 2000 --train-iters 5000": (
        f"{WARMUP} = 0.01 x 2000; did you mean --optimizer.warmup_steps=20?"
    ),
    "--lr-warmup-fraction 0.01 --train-iters 5050": f"{WARMUP} = 0.01 x 5050",
    "--lr-wsd-decay-iters 3 --train-iters 7": (  # 3 / 7, rounded, would be of two steps
        "optimizer.decay_fraction: iterations / train.steps = 3 / 7; did you mean "
        "--optimizer.decay_fraction=0.5?"
    ),
    "--make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2": (
        "model.vocab_multiple: multiple x mesh.tensor = 128 x 2; did you mean "
        "--model.vocab_multiple=256?"
    ),
    "--lr-warmup-fraction=0.01 --train.steps=5000": (
        f"{WARMUP} = 0.01 x 5000; did you mean --optimizer.warmup_steps=50?"
    ),
    "--num-layers-per-virtual-pipeline-stage=3 --mesh.pipeline=2 --model.n_layers=12": (
        "pipeline.chunks, a number of virtual stages: layers / (stages x layers of a virtual "
        "stage) = 12 / (2 x 3); did you mean --pipeline.chunks=2?"
    ),
    "--micro-batch-size=many": (
        "train.microbatches, a count, not a size: global batch / (micro-batch size x data x fsdp x expert) "
        "= 16 / (many x data x 1 x 1)"
    ),
}


@pytest.mark.parametrize("words", FORMULAS)
def test_a_formula_has_the_numbers_of_the_run(words: str) -> None:
    """A size is not suggested for a number, nor batches for sequences."""
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    first = str(caught.value).split("\n  - ")[1]
    assert first.partition("; here it is ")[2] == FORMULAS[words]


def test_words_after_a_blend() -> None:
    """With spaces, with commas, or with both; by Megatron-LM's name they are one answer; and a
    config after them is the config."""
    blend = ("0.7", "data/web", "0.3", "data/code")
    for words in (
        ["--data.blend=0.7,data/web,0.3,data/code"],
        ["--data.blend", *blend],
        ["--data.blend", "0.7,data/web,", "0.3,data/code"],
    ):
        assert parse([*words, "--train.steps=3"]).data.blend == blend
        assert parse(["gpt2_124m", *words]) == parse([*words, "gpt2_124m"])
    with pytest.raises(ConfigError) as caught:
        parse(["--data-path", *blend, "stray", "--lr=1"])
    assert str(caught.value).split("\n  - ")[1:] == [
        "--data-path: the config has no such field; did you mean --data.blend=0.7,data/web,0.3,data/code,stray?",
        "--lr: the config has no such field; did you mean --optimizer.learning_rate=1?",
    ]


def test_unknown_options_come_before_stray_words() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["gpt_tiny", "stray", "--foo=1"])
    assert str(caught.value).split("\n  - ")[1:] == [
        "--foo: the config has no such field; see --help",
        "stray: belongs to no option",
    ]


def problems_of(words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    return str(caught.value).split("\n  - ")[1:]


def test_words_after_an_unknown_option_belong_to_it() -> None:
    """Unless they name a config, which its answer may depend on."""
    rampup = "--rampup-batch-size: the config has no such field; not built: every step has train.global_batch sequences"
    unknown = "--foo: the config has no such field; see --help"
    assert (
        problems_of("--rampup-batch-size 2 2 100")
        == problems_of("--rampup-batch-size=2 2 100")
        == [rampup]
    )
    assert problems_of("--rampup-batch-size 2 2 100 --foo 1 -2 3") == [rampup, unknown]
    assert problems_of("--foo 1 2 --train.steps 3 4") == [unknown, "4: belongs to no option"]
    assert problems_of("--window-size 128 0")[0].endswith("did you mean --model.window=129?")
    with_config = problems_of("--swiglu gpt2_124m --min-lr 6e-5")
    assert (
        with_config[0]
        == "--swiglu: the config has no such field; did you mean --model.activation=swiglu?"
    )
    assert with_config[1].endswith(" = 6e-5 / 0.0006; did you mean --optimizer.final_fraction=0.1?")
    assert problems_of("--mesh.data -1 2 --train.steps 3") == ["2: belongs to no option"]
    assert parse(["--mesh.data", "-1", "gpt2_124m"]).mesh.data == -1
    assert parse(["--train.steps", "3", "gpt2_124m"]) == parse(["gpt2_124m", "--train.steps=3"])


def test_answers_that_depend_on_another_option() -> None:
    assert problems_of("--recompute-num-layers 4 --recompute-method block")[0] == (
        "--recompute-num-layers: the config has no such field; did you mean --model.remat_layers=4, with "
        "model.remat=full; the other layers recompute as save_names does?"
    )
    assert (
        "did you mean"
        not in problems_of("--recompute-num-layers 4 --recompute-method block --mesh.pipeline 2")[0]
    )
    assert "did you mean" not in problems_of("--window-size 128,0 --window-attn-skip-freq 4")[0]
    assert problems_of("--lr-decay-style WSD --lr-wsd-decay-style linear")[0].endswith(
        "did you mean --optimizer.schedule=wsd?"
    )


def test_names_whose_value_is_spelled_differently_get_none() -> None:
    assert problems_of("--precision bf16") == [
        "--precision: the config has no such field; did you mean --model.dtype?"
    ]
    assert problems_of("batch_size=8") == [
        "batch_size=8: belongs to no option; did you mean --train.global_batch?"
    ]


@pytest.mark.parametrize("text", ["", "=", "=0", "=-1", "=none", "=1e9", " 8 8", "=1:2"])
def test_no_value_is_too_strange_for_an_answer(text: str) -> None:
    names = [
        name
        for name in (*other_names.MEGATRON, *other_names.OTHERS)
        if name not in ("seed", "wandb")
    ]
    assert len(problems_of(" ".join(f"--{name}{text}" for name in names))) == len(names)


def test_a_formula_reads_stray_words() -> None:
    assert problems_of("lr=4e-3 min-lr=4e-4")[1].endswith(
        " = 4e-4 / 0.004; did you mean --optimizer.final_fraction=0.1?"
    )


def answers_of(command: Callable[[list[str]], object], words: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        command(words.split())
    return dict(line.split(": ", 1) for line in str(caught.value).split("\n  - ")[1:])


def test_prepare_knows_the_options_of_preprocess_data() -> None:
    """One that stands for a required option counts as given."""
    answers = answers_of(
        prepare.parse,
        "--input a.jsonl --output-prefix data/web --json-keys content --append-eod "
        "--tokenizer-model gpt2 --workers 8 --sauce",
    )
    assert answers == {
        "--output-prefix": (
            "there is no such option; did you mean --output=data/web, without the _text_document that "
            "Megatron appends?"
        ),
        "--json-keys": "there is no such option; did you mean --text-field=content?",
        "--append-eod": "there is no such option; the end-of-document token is always appended; leave it out",
        "--tokenizer-model": "there is no such option; did you mean --tokenizer=gpt2?",
        "--sauce": "there is no such option; see --help",
    }
    several = answers_of(
        prepare.parse, "--input a.jsonl --output b --tokenizer bytes --json_keys text title"
    )
    assert several == {
        "--json_keys": "there is no such option; here it is --text-field, a single one"
    }


def test_launch_knows_the_options_of_torchrun() -> None:
    answers = answers_of(
        launch.parse,
        "--nproc-per-node=8 --nnodes 2 --node_rank 1 --master-addr 10.0.0.1 --master-port 6000 "
        "--standalone train gpt_tiny",
    )
    assert answers == {
        "--nproc-per-node": "there is no such option; did you mean --per-node=8?",
        "--nnodes": "there is no such option; did you mean --nodes=2?",
        "--node_rank": "there is no such option; did you mean --node=1?",
        "--master-addr": "there is no such option; did you mean --rendezvous=10.0.0.1:6000?",
        "--master-port": "there is no such option; did you mean --rendezvous=10.0.0.1:6000?",
        "--standalone": "there is no such option; one node needs no rendezvous; leave it out",
    }
    assert answers_of(launch.parse, "--nproc-per-node=gpu --master-port=1 --nnodes=1:4 train") == {
        "--nproc-per-node": (
            "there is no such option; here it is --per-node; without it one process drives all GPUs of its "
            "node"
        ),
        "--master-port": "there is no such option; here it is --rendezvous=ADDRESS:PORT of node 0, for several nodes",
        "--nnodes": "there is no such option; here it is --nodes, and --min-nodes for the smaller number of MIN:MAX",
    }


def test_the_options_of_commands_exist() -> None:
    for meanings, cls in (
        (other_names.PREPROCESS, prepare.Prepare),
        (other_names.TORCHRUN, Options),
    ):
        options = {field.name.replace("_", "-") for field in dataclasses.fields(cls)}
        assert not meanings.keys() & options
        for meaning in meanings.values():
            assert meaning.field in ("", *options)
            assert set(re.findall(r"`--([a-z-]+)", meaning.ours)) <= options


def test_rules_of_other_names() -> None:
    presets = {
        "tp": "megatron",
        "fsdp2": "fsdp",
        "zero3+tp": "zero3+megatron",
        "fsdp2+tp": "fsdp+megatron",
        "TP": "megatron",
        "tp+sp": "megatron_sp",
    }
    for name, expected in presets.items():
        assert problems_of(f"--rules={name}") == [
            f"--rules={name}: there is no such rules preset; did you mean {expected}?"
        ]
    assert not other_names.RULES.keys() & PRESETS.keys(), "names of presets are no guesses"


def test_a_model_that_lacks_the_field_of_another_name() -> None:
    with pytest.raises(ConfigError) as raised:
        parse(["docs/custom_model.py", "--num-attention-heads=3", "--min-lr=1e-5"])
    assert "--num-attention-heads: the config has no such field; see --help" in str(raised.value)
    assert "did you mean --optimizer.final_fraction=0.0033" in str(raised.value)


def test_a_config_by_its_name() -> None:
    assert parse(["--config=gpt2_124m"]) == parse(["gpt2_124m"]) == load("configs/gpt2_124m.py")
    with pytest.raises(
        ConfigError, match=r"^--config=gpt_tinny: there is no such config; did you mean gpt_tiny\?$"
    ):
        parse(["gpt_tinny"])
    with pytest.raises(
        ConfigError,
        match=r"^--config=x: there is no such config; give the path of a \.py file, or one of gpt2_124m, ",
    ):
        parse(["--config=x"])


def test_both_spellings_are_one() -> None:
    """With --config. or without it; if a command has an option with a field's name, only the long
    form is the config's."""
    words = ["train.steps=3", "model.d_model=64", "output=runs/mine", "rules=fsdp"]
    assert parse([f"--{word}" for word in words]) == parse([f"--config.{word}" for word in words])

    @dataclasses.dataclass(frozen=True)
    class Beside:
        output: str = ""

    config, given = parse_with(Beside, ["--output=a", "--config.output=b"])
    assert (config.output, given) == ("b", {"output": "a"})


def leaves(section: object, prefix: str = "") -> dict[str, bool]:
    """section.field -> whether only --help-all shows it."""
    hidden: dict[str, bool] = {}
    for field in dataclasses.fields(section):  # pyright: ignore[reportArgumentType]
        value = getattr(section, field.name)
        is_section = dataclasses.is_dataclass(value) and not isinstance(value, Rules)
        if is_section:
            hidden |= leaves(value, f"{prefix}{field.name}.")
        if not is_section or field.name == "rule":
            hidden[f"{prefix}{field.name}"] = bool(field.metadata.get("expert"))
    return hidden


def test_every_meaning_leads_somewhere() -> None:
    fields = leaves(load("gpt_tiny"))
    sections = {name.partition(".")[0] for name in fields}
    meanings = [*other_names.MEGATRON.values(), *other_names.OTHERS.values()]
    explained = set()
    for meaning in meanings:
        assert meaning.field in ("", *fields)
        assert meaning.field or not meaning.convert
        explained.update(re.findall(r"`([a-z_]+(?:\.\w+)+)", meaning.ours))
    for name in explained:
        if name.partition(".")[0] in (*sections, "runs"):
            assert name in fields
    assert len(explained) > 50
    assert set(other_names.RULES.values()) <= set(PRESETS)
    assert not set(other_names.OTHERS) & {name.rpartition(".")[2] for name in fields}, (
        "a field's own name is found without a guess"
    )
    plan_options = {field.name for field in dataclasses.fields(Plan)}
    assert not plan_options & sections, "options of train.py"


def test_names_of_megatron_that_people_type() -> None:
    """Those that a pretraining script of Megatron-LM has, and that changed their meaning or had no
    answer before."""
    typed = """lr-decay-iters lr-warmup-fraction rampup-batch-size train-samples init-method-std vocab-file merge-file tensorboard-dir
        exit-duration-in-mins mock-data ckpt-format async-save num-experts expert-model-parallel-size moe-router-topk
        use-rotary-position-embeddings exit-interval data-cache-path grad-reduce-in-bf16 no-load-optim no-load-rng transformer-impl
        use-mcore-models no-bias-swiglu-fusion override-opt_param-scheduler lr-warmup-init lr-wsd-decay-iters lr-wsd-decay-style
        moe-ffn-hidden-size moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff moe-token-dispatcher-type
        moe-router-score-function moe-router-enable-expert-bias moe-router-bias-update-rate moe-router-num-groups
        moe-router-group-topk moe-shared-expert-intermediate-size moe-router-topk-scaling-factor moe-grouped-gemm
        squared-relu add-qkv-bias rotary-percent dataloader-type test-data-path log-throughput skip-train loss-scale initial-loss-scale
        check-for-nan-in-loss-and-grad decoder-first-pipeline-num-layers end-weight-decay weight-decay-incr-style recompute-method"""
    assert set(typed.split()) <= set(other_names.MEGATRON)


def test_few_fields_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """At most 90; expert fields are shown on request, and set like any other."""
    hidden = leaves(load("gpt_tiny"))
    shown = {}
    for flag in ("--help", "--help-all", "--help=all"):
        with pytest.raises(SystemExit):
            parse([flag])
        text = capsys.readouterr().out
        options = [word for word in text.split() if word.startswith("--")]
        shown[flag] = {word.removeprefix("--").partition("=")[0] for word in options}
        assert flag != "--help" or text.count("\n") < 210
    assert shown["--help-all"] == shown["--help=all"]
    assert hidden.keys() <= shown["--help-all"]
    for name, is_hidden in hidden.items():
        assert (name in shown["--help"]) != is_hidden
    assert list(hidden.values()).count(False) <= 90
    assert parse(["--model.z_loss=0.5"]).model.z_loss == 0.5  # pyright: ignore[reportAttributeAccessIssue]
    config = TrainConfig(model=load("gpt_tiny").model, output="x")
    assert config.data.threads == 2, "a default like any other"
    assert isinstance(expert(3), dataclasses.Field)


def test_names_on_the_hub() -> None:
    assert (
        hub_hint("gpt2")
        == ". For a name on the Hugging Face Hub: hf download gpt2 --local-dir=gpt2"
    )
    assert hub_hint("hf://datasets/org/texts", "dataset").endswith(
        "hf download --repo-type=dataset org/texts --local-dir=org/texts"
    )
    for path in (
        "/data/x",
        "~/corpus.txt",
        "runs/gpt_tiny",
        "my.txt",
        "./x",
        "data/web",
        "a/b/c",
        "../gpt2",
    ):
        assert hub_hint(path) == "", path


def test_what_is_no_config() -> None:
    """YAML, and a model of the Hub: one line with what to do."""
    with pytest.raises(
        ConfigError,
        match=r"^--config=x\.yaml: a config is a \.py file with get_config\(\).*`mesh-lm configs`",
    ):
        parse(["--config=x.yaml"])
    with pytest.raises(
        ConfigError,
        match=(
            r"hf download meta-llama/Llama-3\.2-1B .*then import it: mesh-lm import meta-llama/Llama-3\.2-1B "
            r"--output="
        ),
    ):
        parse(["--config=meta-llama/Llama-3.2-1B"])


def test_configs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*shipped()] and len(lines) > 10
    assert all(len(line.split()) > 5 for line in lines)
