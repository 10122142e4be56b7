"""Wrong commands, as new users type them: each is answered by one error that names the field, or
what would work."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mesh_lm.commands.main import main

ANSWERS = {
    "trian": "mesh-lm has no command of the name 'trian'; did you mean mesh-lm train?",
    "train gpt_tinny": "--config=gpt_tinny: there is no such config; did you mean gpt_tiny?",
    "train my_config.py": "--config=my_config.py: cannot find a file of this name in ",
    "train --config=llama.yaml": (
        "a config is a .py file with get_config(), or the config.json of a run; `mesh-lm configs` "
        "lists"
    ),
    "train meta-llama/Llama-3.2-1B": (
        "hf download meta-llama/Llama-3.2-1B --local-dir=meta-llama/Llama-3.2-1B, then import it: mesh-lm "
        "import"
    ),
    "train .": "--config=.: a directory; a run's config is ./config.json",
    "train --lr=1e-3": "--lr: the config has no such field; did you mean --optimizer.learning_rate=1e-3?",
    "train lr=1e-3": "lr=1e-3: belongs to no option; did you mean --optimizer.learning_rate=1e-3?",
    "train --train.step=10": "--train.step: the config has no such field; did you mean --train.steps?",
    "train --steps 10": "--steps: the config has no such field; did you mean --train.steps or --profile.steps?",
    "train --train.steps=1e3": "--train.steps=1e3: expected int",
    "train --train.steps": "--train.steps: this option needs a value; expected int",
    "train --epochs=3": "train.steps: epochs x sequences of the training text / train.global_batch",
    "train --batch-size=8": "did you mean --train.global_batch?",
    "train --micro-batch-size=4 --mesh.data=2": "= 16 / (4 x 2 x 1 x 1); did you mean --train.microbatches=2?",
    "train --min-lr=8e-4": "did you mean --optimizer.final_fraction=0.1?",
    "train --eval-iters=10": "did you mean --train.eval_sequences=160?",
    "train --data-path 0.7 data/web 0.3 data/code": "did you mean --data.blend=0.7,data/web,0.3,data/code?",
    "train --num-experts=8": "did you mean --model.experts.number=8, with model.block=moe?",
    "train --fp16": "--fp16: the config has no such field; not built: model.dtype is bfloat16 or float32",
    "train --dry-run": "mesh-lm plan shows memory, communication and time without starting the run",
    "train --rules=fspd": "--rules=fspd: there is no rules preset 'fspd'; did you mean 'fsdp'?",
    "train --rules=tp": "--rules=tp: there is no such rules preset; did you mean megatron?",
    "train --optimizer=muon": "--optimizer: this is a section, not a field; did you mean --optimizer.rule=muon?",
    "train --rampup-batch-size 2 2 100": (
        "--rampup-batch-size: the config has no such field; not built: every step has train.global_batch sequences"
    ),
    "train --hidden-size 64": "--hidden-size: the config has no such field; did you mean --model.d_model=64?",
    "train --optimizer.schedule=cosin": "expected one of cosine, wsd, linear, constant; did you mean cosine?",
    "train --model.window=None": "expected int, with commas between several and nothing for none",
    "train llama3_8b": (
        "it has no data: set data.path to a text (.txt, .jsonl, .parquet, or a directory of such "
        "files)"
    ),
    "train gpt2_124m --data.blend=data/web": "mesh-lm prepare --input=TEXT --output=data/web writes both",
    "train --data.path=nope.txt": "data.path=nope.txt",
    "train --data.tokenizer=nope.json": "tokenizer nope.json: no such tokenizer file or directory",
    "train --data.path=nope.txt --data.tokenizer=nope.json": "\n  - tokenizer nope.json: no such tokenizer file or directory",
    "train --output=/proc/run": "output=/proc/run cannot be written",
    "generate runs/x --cpu_device=2": "--cpu_device: there is no such option; did you mean --cpu-devices?",
    "evaluate runs/x --text=x text_field=body": "text_field=body: belongs to no option; did you mean --text-field=body?",
    "launch --per_node=x train": "--per_node=x: expected int",
    "launch --node=x train": "--node=x: expected int",
    "plan gpt_175b --max_microbatch=7": "--max_microbatch=7: expected true or false",
    "plan gpt_175b --target=h1000": "--target=h1000: expected one of the targets h100, h200, a100, b200",
    "plan gpt_175b --output=report.pdf": "report.pdf: the report is a file that ends in .html or .json",
    "plan gpt_175b --against=gpt_nope --devices=1024": "--config=gpt_nope: there is no such config",
    "study": "mesh-lm study needs one of its commands: bytes, strategies, scaling, not nothing",
    "study byte": "not byte; did you mean bytes?",
    "study bytes gpt_nope": "--config=gpt_nope: there is no such config",
    "study bytes --gpus=256..1": "--gpus=256..1: these numbers of GPUs fall; write 1..256",
    "study bytes gpt_tiny": "there is no closed form for this model: model.dtype=float32",
    "study strategies --sizes=big": "--sizes=big: expected a range of sizes, as 1b..1t, or sizes, as 7b,70b",
    "study strategies --target=h1000": "--target=h1000: expected one of the targets h100, h200, a100, b200",
    "study strategies --size=1b": "--size: there is no such option; did you mean --sizes?",
    "study scaling": "name a config, as mesh-lm study scaling megatron_177b, or add --weak",
    "study scaling megatron_177": "--config=megatron_177: there is no such config; did you mean megatron_177b?",
    "study scaling gpt_175b": "--gpus: missing; a range of GPUs, as 8..64",
    "study scaling --weak --gpus=7": "--gpus=7: none of Megatron-LM's models is published for these; they are for 48,",
    "study scaling gpt_175b --gpus=8 --keep=tensor=8": "--keep=tensor=8: the fields that a search can keep are",
    "study scaling gpt_175b --gpus=8 --compiles=0": "--compiles=0: each point of a study needs at least 1 program",
    "study scaling gpt_1_3b --gpus=8 --weak": "--weak: the mesh of gpt_1_3b has an axis of -1",
    "generate": "--checkpoint: missing",
    "generate --checkpoint=nope": "nope",
    "evaluate --checkpoint=nope --text=notes.txt": "--text=notes.txt: no such text file or directory",
    "export nope --output=there": "nope",
    "prepare --input=nope --output=data/web": "--tokenizer: missing; A tokenizer.json, a directory that has one",
    "prepare --input=nope --output=data/web --tokenizer=bytes": "nope",
    "prepare --output-prefix=data/web": "--output-prefix: there is no such option; did you mean --output=data/web, without",
    "checkpoint verify nope": "nope",
    "launch --nproc-per-node=8 train": "--nproc-per-node: there is no such option; did you mean --per-node=8?",
    "launch trian.py": "trian.py: there is no such script in",
    "explain": "name the collective first, as in mesh-lm explain all-gather-start.12",
    "explain all-reduce.3": "add --report=FILE.json of mesh-lm plan, or --config=CONFIG",
    "explain all-reduce.3 --report=nope.json": "cannot read nope.json: No such file or directory",
    "explain all-reduce.3 --target=h1000": "--target=h1000: a collective is compiled for one of h100",
    "convert deepspeed": "--file: missing; DeepSpeed's JSON file",
    "convert megatron --num-layer=3": "--num-layer: unknown; did you mean --num-layers?",
    "train --zero_optimization.stage=3": "rules: ddp, zero1, zero2 or zero3 for 0 to 3",
    "configs --all": "--all: there is no such option",
}


@pytest.mark.parametrize("words", ANSWERS)
def test_one_error_says_what_would_work(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written by it."""
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(words)) in (1, 2, 64)
    captured = capsys.readouterr()
    assert (
        ANSWERS[words] in captured.err
        and captured.err.count("error: ") == 1
        and "Traceback" not in captured.err
    )
    assert not captured.out and not list(tmp_path.iterdir())
