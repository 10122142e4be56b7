"""Bad configs: all problems are reported at once, each with what would work."""

import dataclasses
from typing import Any

import pytest

from mesh_lm.commands.command_line import parse
from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.optim import (
    Muon,
    make_rule,
)
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, Rules, preset

TINY = "configs/gpt_tiny.py"


def problems(*overrides: str, devices: int = 8, file: str = TINY) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(
            parse([f"--config={file}", *(f"--config.{override}" for override in overrides)]),
            devices,
        )
    head, *lines = str(caught.value).split("\n  - ")
    assert head == "this config cannot run"
    return lines


@pytest.mark.parametrize("name", ["gpt_tiny", "gpt2_124m", "gpt_1_3b", "llama3_8b", "gpt_175b"])
def test_configs_can_run_somewhere(name: str) -> None:
    devices = {"gpt_tiny": 1, "gpt2_124m": 8, "gpt_1_3b": 8, "llama3_8b": 64, "gpt_175b": 1024}[
        name
    ]
    config = check(load(f"configs/{name}.py"), devices)
    assert -1 not in config.mesh.sizes().values()


def test_a_given_tokenizer_needs_no_size() -> None:
    check(
        parse(
            [
                f"--config={TINY}",
                "--config.data.tokenizer=bytes",
                "--config.data.tokenizer_vocab=9000",
            ]
        ),
        1,
    )


def test_all_problems_at_once() -> None:
    assert problems(
        "model.n_heads=6",
        "model.positions=learned",
        "model.d_ff=510",
        "mesh.tensor=4",
        "mesh.data=2",
        "rules=megatron",
        "train.global_batch=9",
        "train.steps=0",
    ) == [
        "model.d_model=128 is not divisible by model.n_heads=6; set model.head_dim, or change one",
        "train.steps=0 must be at least 1",
        (
            "model.n_heads=6 is not divisible by its number of shards, mesh.tensor=4 "
            "(rules.params: heads -> tensor); "
            "mesh.tensor can be 1, 2, 3, 6"
        ),
        (
            "model.d_ff=510 is not divisible by its number of shards, mesh.tensor=4 (rules.params: "
            "mlp -> tensor); "
            "mesh.tensor can be 1, 2, 3, 5, 6, 10, 15, 17, ..."
        ),
        (
            "train.global_batch=9 is not divisible by train.microbatches=1 x mesh.data=2; the "
            "global batch can be 8 or 10"
        ),
    ]


@pytest.mark.parametrize(("tensor", "sizes"), [(3, (2, 4)), (16, (4, 2))])
def test_only_meshes_that_run_are_said_to_fit(tensor: int, sizes: tuple[int, int]) -> None:
    """tensor=8 would fit the eight devices, and not the four heads."""
    first = problems(f"mesh.tensor={tensor}", "rules=megatron", "model.n_heads=4")[0]
    choices = " or ".join(f"mesh.tensor={size}" for size in sizes)
    assert first == (
        f"mesh has {tensor} x ? devices (data=-1 x tensor={tensor}) but the number of visible devices is 8; {choices} "
        "would fit"
    )


def test_two_axes_of_what_remains() -> None:
    """One of them may be the config's, which the user has not typed."""
    first = problems("mesh.data=-1", file="configs/gpt_1_3b.py")[0]
    assert (
        first == "only one mesh axis can be -1, not data and fsdp; set mesh.data=1 or mesh.fsdp=1"
    )


def test_a_single_device_may_be_a_cpu() -> None:
    simulated = "without a GPU, launch.cpu_devices=4 simulates 4"
    open_mesh = problems("mesh.tensor=4", "rules=megatron", devices=1)
    assert open_mesh == [
        (
            "mesh has 4 x ? devices (data=-1 x tensor=4) but the number of visible devices is 1; mesh.tensor=1 would "
            f"fit; {simulated}"
        )
    ]
    assert problems("mesh.data=4", devices=1) == [
        f"mesh has 4 devices (data=4) but the number of visible devices is 1; mesh.data=1 would fit; {simulated}"
    ]
    assert not any(
        "simulates" in problem
        for problem in problems("mesh.data=4") + problems("mesh.data=0", devices=1)
    )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["mesh.data=4"],
            "mesh has 4 devices (data=4) but the number of visible devices is 8; mesh.data=8 would fit",
        ),
        (
            ["mesh.data=2", "mesh.tensor=4"],
            "mesh.tensor=4, but rules 'ddp' shard no activation over tensor; set mesh.tensor=1 or "
            "rules such as ddp+megatron or ddp+megatron_sp",
        ),
        (
            ["mesh.data=4", "mesh.expert=2"],
            "mesh.expert=2: this model has no experts; set mesh.expert=1, or model.block=moe",
        ),
        (
            ["mesh.data=4", "mesh.expert=2", "model.block=moe"],
            "mesh.expert=2, but rules 'ddp' shard no activation over expert; set mesh.expert=1 or "
            "rules such as ddp+experts_gather or ddp+experts_padded",
        ),
        (
            ["mesh.data=4", "mesh.pipeline=2", "pipeline.chunks=0"],
            "pipeline.chunks=0 must be at least 1",
        ),
        (
            ["mesh.data=4", "mesh.pipeline=2", "model.n_layers=0"],
            "model.n_layers=0 must be at least 1",
        ),
        (
            ["mesh.data=4", "mesh.pipeline=2", "pipeline.schedule=forward"],
            (
                "pipeline.schedule=forward has F, and the engine runs F and B: gradients need B; "
                "use 1f1b"
            ),
        ),
        (
            ["mesh.data=4", "mesh.pipeline=2", "pipeline.schedule=zb_h1"],
            (
                "pipeline.schedule=zb_h1 has FBW, and the engine runs F and B: separate weight "
                "gradients (W) are for study; use 1f1b"
            ),
        ),
        (
            ["mesh.data=4", "mesh.pipeline=2", "pipeline.stash=residuals", "model.remat=offload"],
            (
                "pipeline.stash=residuals keeps on the device what model.remat=offload moves to "
                "the host; change one of them"
            ),
        ),
        (
            ["mesh.data=4", "mesh.pipeline=2", "pipeline.pair_layers=True"],
            (
                "pipeline.pair_layers=True runs layers one by one, whose residuals "
                "pipeline.stash=input drops; set pipeline.stash=residuals"
            ),
        ),
        (
            ["pipeline.pair_layers=True", "pipeline.stash=residuals"],
            (
                "pipeline.pair_layers=True, but mesh.pipeline=1 has no stage that goes forward and "
                "backward in one tick; set it to False"
            ),
        ),
        (
            ["mesh.data=1", "mesh.pipeline=8"],
            "model.n_layers=4 is too few for the 8 virtual stages of mesh.pipeline=8 x "
            "pipeline.chunks=1: each needs at least 1; lower mesh.pipeline or pipeline.chunks",
        ),
        (
            ["mesh.data=4", "mesh.pipeline=2", "pipeline.layers=3,2"],
            "pipeline.layers=3,2 sums to 5, not to model.n_layers=4",
        ),
        (
            ["mesh.data=4", "mesh.pipeline=2", "pipeline.chunks=2"],
            (
                "pipeline schedule 1f1b: with chunks=2, microbatches=1 must be a multiple of "
                "stages=2, as 2 is"
            ),
        ),
        (
            ["mesh.data=4", "mesh.pipeline=2", "pipeline.schedule=1f2b"],
            "there is no pipeline schedule '1f2b'; did you mean '1f1b'?",
        ),
        (
            ["rules=zero1", "model.d_model=28", "model.head_dim=32"],
            (
                "model.d_model=28 is not divisible by its number of shards, mesh.data=8 "
                "(rules.optimizer: embed -> "
                "data); mesh.data can be 1, 2, 4, 7, 14, 28"
            ),
        ),
        (
            ["train.microbatches=3"],
            (
                "train.global_batch=16 is not divisible by train.microbatches=3 x mesh.data=8; the "
                "global batch can be 24"
            ),
        ),
        (
            ["data.tokenizer_vocab=9000"],
            "data.tokenizer_vocab=9000 makes ids outside model.vocab_size=4096; set "
            "data.tokenizer_vocab=4096, or model.vocab_size=9000 or more",
        ),
        (
            ["model.vocab_size=200"],
            (
                "data.tokenizer_vocab=4096 makes ids outside model.vocab_size=200; set "
                "model.vocab_size=4096 or more"
            ),
        ),
        (
            ["model.window=64,0,0"],
            "model.n_layers=4 is not a multiple of the 3 entries of model.window",
        ),
        (["model.n_kv_heads=3"], "model.n_heads=4 is not divisible by model.n_kv_heads=3"),
        (["model.n_heads=0"], "model.n_heads=0 must be at least 1"),
        (
            ["model.window=-3,0"],
            "model.window=(-3, 0) must be widths of at least 1, or 0 for all earlier tokens",
        ),
        (["optimizer.rule.eps=0"], "optimizer.rule.eps=0.0 must be above 0 and finite"),
        (
            ["optimizer.weight_decay=nan"],
            "optimizer.weight_decay=nan must be at least 0 and finite",
        ),
        (["health.outlier=nan"], "health.outlier=nan must be at least 0"),
        (["health.replay_every=-1"], "health.replay_every=-1 must be at least 0"),
        (
            ["health.replay_every=100"],
            (
                "health.replay_every=100 needs launch.deterministic=True: without it, two runs of "
                "one step may differ in bits on a GPU"
            ),
        ),
        (["model.vocab_multiple=0"], "model.vocab_multiple=0 must be at least 1"),
        (["model.dropout=1"], "model.dropout=1.0 must be in [0, 1)"),
        (["optimizer.rule.beta2=1"], "optimizer.rule.beta2=1.0 must be at least 0 and below 1"),
        (
            ["optimizer.learning_rate=nan"],
            "optimizer.learning_rate=nan must be at least 0 and finite",
        ),
        (["data.threads=-1"], "data.threads=-1 must be at least 0"),
    ],
)
def test_one_problem(overrides: list[str], problem: str) -> None:
    assert problems(*overrides) == [problem]


@pytest.mark.parametrize(
    ("column", "rows", "problem"),
    [
        (
            "params",
            {"embed": "data"},
            "weights are replicated over data; to shard them over replicas use the mesh axis 'fsdp'",
        ),
        (
            "activations",
            {"batch": ("data", "pipeline")},
            "every stage needs the full batch; remove 'pipeline'",
        ),
    ],
)
def test_rules_that_would_train_wrongly(column: str, rows: dict[str, Any], problem: str) -> None:
    config = load(TINY)
    config = dataclasses.replace(config, rules=config.rules.replace(**{column: rows}))
    with pytest.raises(ConfigError) as caught:
        check(config, 8)
    ((row, axis),) = rows.items()
    assert f"  - rules.{column}[{row!r}]={axis!r}: {problem}" in str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ({"flat": "data"}, "'flat']='data'"),
        ({"blocks/flat": ("data",)}, "'blocks/flat']=('data',)"),
    ],
)
def test_flat_vectors_are_for_rules_that_are_elementwise(rows: dict[str, Any], shown: str) -> None:
    config = dataclasses.replace(
        load(TINY), rules=preset("megatron").replace("x", optimizer=rows), mesh=MeshConfig(data=8)
    )
    for name in ("muon", "adafactor"):
        with pytest.raises(ConfigError) as caught:
            check(
                dataclasses.replace(
                    config,
                    optimizer=dataclasses.replace(config.optimizer, rule=make_rule(name)),
                ),
                8,
            )
        assert str(caught.value).split("\n  - ")[1:] == [
            f"optimizer.rule={name} needs full matrices, but rules 'x' store its state as flat "
            f"vectors (rules.optimizer[{shown}); use the rule adamw or lion, or rules without "
            "that row, such as zero2"
        ]
    for name in ("adamw", "lion"):
        check(
            dataclasses.replace(
                config,
                optimizer=dataclasses.replace(config.optimizer, rule=make_rule(name)),
            ),
            8,
        )
    unused = preset("ddp").replace(optimizer=dict.fromkeys(rows))
    check(
        dataclasses.replace(
            config, rules=unused, optimizer=dataclasses.replace(config.optimizer, rule=Muon())
        ),
        8,
    )


REPLICAS = "flat vectors are sharded over replicas, whose axes are pipeline, data, expert, sequence"


@pytest.mark.parametrize(
    ("column", "rows", "problem"),
    [
        (
            "optimizer",
            {"flat": ("data", "tensor")},
            f"rules.optimizer['flat']=('data', 'tensor'): {REPLICAS}; remove 'tensor'",
        ),
        (
            "optimizer",
            {"blocks/flat": "fsdp"},
            f"rules.optimizer['blocks/flat']='fsdp': {REPLICAS}; remove 'fsdp'",
        ),
        (
            "optimizer",
            {"flat": ("data", "data")},
            "rules.optimizer['flat']=('data', 'data'): has 'data' twice; name each mesh axis once",
        ),
        (
            "optimizer",
            {"flt": "data"},
            "rules.optimizer['flt']='data': no parameter has such an axis; did you mean 'flat'?",
        ),
        (
            "optimizer",
            {"moe/flat": "data"},
            (
                "rules have the scope 'moe' (moe/flat), which the model does not have; the model "
                "has 'blocks', 'tables'"
            ),
        ),
        (
            "optimizer",
            {"flat": "dat"},
            (
                "rules.optimizer['flat']: mesh axis 'dat' is neither a standard mesh axis nor "
                "declared in rules.axes; did you mean 'data'?"
            ),
        ),
        *(
            (
                column,
                {"flat": "data"},
                (
                    f"rules.{column}['flat']='data': flat vectors are the optimizer's; set "
                    "rules.optimizer['flat']"
                ),
            )
            for column in ("gathered", "gradients")
        ),
    ],
)
def test_rows_of_flat_vectors_that_cannot_be(
    column: str, rows: dict[str, Any], problem: str
) -> None:
    """Each problem is one line, before anything is compiled."""
    config = dataclasses.replace(
        load(TINY), rules=preset("hsdp+megatron").replace("x", **{column: rows})
    )
    with pytest.raises(ConfigError) as caught:
        check(dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2)), 8)
    assert str(caught.value).split("\n  - ")[1:] == [problem]


def test_mesh_axes_that_rules_declare() -> None:
    rules = preset("megatron").replace(
        "mine", axes={"tensor_y": "auto"}, params={"mlp": ("tensor", "tensor_y")}
    )
    config = dataclasses.replace(load(TINY), rules=rules)

    def said(**mesh: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            check(dataclasses.replace(config, mesh=MeshConfig(**mesh)), 8)
        return str(caught.value).split("\n  - ")[1:]

    cut = {"mlp": ("tensor", "tensor_y")}
    fits = dataclasses.replace(
        config,
        rules=rules.replace(activations=cut),
        mesh=MeshConfig(data=2, tensor=2, extra=("tensor_y=2",)),
    )
    assert check(fits, 8).mesh == fits.mesh
    assert said(data=4, tensor=2) == [
        (
            "rules 'mine' declare the mesh axis 'tensor_y', which this mesh lacks; give it a size: "
            "mesh.extra=tensor_y=2"
        )
    ]
    assert said(data=8, extra=("tensr_y=1", "tensor_y=1")) == [
        (
            "mesh.extra=tensr_y=1: rules 'mine' declare no mesh axis 'tensr_y'; declare it, as in "
            "rules.replace(axes={'tensr_y': 'auto'})"
        )
    ]
    assert said(data=4, extra=("tensor_y=2",)) == [
        "mesh.extra=tensor_y=2, but rules 'mine' shard no activation over tensor_y; set "
        "mesh.extra=tensor_y=1 or rules such as mine+megatron_2d"
    ]
    config = dataclasses.replace(fits, model=dataclasses.replace(config.model, d_ff=509))
    assert said(extra=("tensor_y=8",)) == [
        (
            "model.d_ff=509 is not divisible by its number of shards, mesh.extra=tensor_y=8 "
            "(rules.params: mlp -> "
            "tensor_y); mesh.extra=tensor_y can be 1, 509"
        )
    ]


def test_rules_of_a_part_are_checked_as_all_others() -> None:
    rows = {"blocks/mlp": "data", "blocks/embed": "tensor", "blocks/head": "tensr"}
    rules = preset("megatron").replace(params={"blocks/mlp": "data"}, activations=rows)
    config = dataclasses.replace(load(TINY), rules=rules, mesh=MeshConfig(data=4, tensor=2))
    with pytest.raises(ConfigError) as caught:
        check(config, 8)
    assert str(caught.value).split("\n  - ")[1:] == [
        "rules.activations['blocks/head']: mesh axis 'tensr' is neither a standard mesh axis nor "
        "declared in rules.axes; did you mean 'tensor'?",
        (
            "rules.params['blocks/mlp']='data': weights are replicated over data; to shard them "
            "over replicas use the mesh axis 'fsdp'"
        ),
        (
            "rules.activations['blocks/mlp']='data': only the batch is sharded over the axis "
            "data; remove 'data'"
        ),
        (
            "rules.activations['blocks/embed']='tensor': all layers have one residual stream; set "
            "it to None, as 'embed'"
        ),
    ]
    odd = dataclasses.replace(config.model, d_ff=510)
    config = dataclasses.replace(
        config,
        model=odd,
        rules=preset("ddp").replace(params={"blocks/mlp": "fsdp"}),
        mesh=MeshConfig(fsdp=4, data=2),
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"model\.d_ff=510 is not divisible by its number of shards, mesh\.fsdp=4 "
            r"\(rules\.params: blocks/mlp -> "
            r"fsdp\)"
        ),
    ):
        check(config, 8)


def test_fewer_kv_heads_than_tensor_ways() -> None:
    """The suggested fix passes the check."""
    many = [
        "model.n_heads=8",
        "model.n_kv_heads=2",
        "mesh.data=2",
        "mesh.tensor=4",
        "model.head_dim=16",
    ]
    said = (
        "model.n_kv_heads=2 is not divisible by its number of shards, mesh.tensor=4 (rules.params: "
        "kv_heads -> tensor); "
        "mesh.tensor can be 1, 2; or set kv_heads to None in rules.params and {}rules.activations: "
        "each device then has all kv heads"
    )
    assert problems(*many, "rules=megatron") == [said.format("")]
    assert problems(*many, "rules=zero1+megatron") == [
        said.format("rules.gradients and rules.optimizer and ")
    ]
    config = parse([f"--config={TINY}", *(f"--config.{override}" for override in many)])
    whole: dict[str, Any] = {kind: {"kv_heads": None} for kind in ("params", "activations")}
    check(dataclasses.replace(config, rules=preset("megatron").replace(**whole)), 8)
    # A device's three query heads would share one and a half kv heads.
    (found,) = problems(
        "model.n_heads=6",
        "model.n_kv_heads=3",
        "model.head_dim=16",
        "mesh.data=4",
        "mesh.tensor=2",
        "rules=megatron",
    )
    assert found.endswith("mesh.tensor can be 1, 3")


def test_cuts_that_would_permute_arrays_in_a_pipeline() -> None:
    """Both would hang in a pipeline, because XLA's permutes are in branches that some stages skip.
    Without stages both are correct."""
    stored: dict[str, Any] = {"params": {"embed": None, "mlp": ("fsdp", "tensor")}}
    crossed = stored | {
        "gathered": {"mlp": ("fsdp", "tensor")},
        "activations": {"batch": "data", "mlp": ("tensor", "fsdp")},
    }
    train = dataclasses.replace(load(TINY).train, microbatches=2)
    said = []
    for columns in (stored, crossed):
        config = dataclasses.replace(
            load(TINY), rules=preset("hsdp+megatron").replace(**columns), train=train
        )
        check(dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2)), 8)
        with pytest.raises(ConfigError) as caught:
            check(dataclasses.replace(config, mesh=MeshConfig(pipeline=2, fsdp=2, tensor=2)), 8)
        said += str(caught.value).split("\n  - ")[1:]
    wait = "XLA would permute arrays in a branch that some stages skip, and deadlock"
    assert said == [
        (
            "mesh.pipeline=2: rules.params['mlp']=('fsdp', 'tensor') does not start with "
            f"rules.gathered['mlp']=('tensor',); {wait}"
        ),
        "mesh.pipeline=2: rules.activations['mlp']=('tensor', 'fsdp') and "
        "rules.gathered['mlp']=('fsdp', 'tensor') differ in the axes that they start with; " + wait,
    ]


FLAT_NOT_ALONG = (
    "flat vectors are sharded over replicas, whose axes are pipeline, data, expert, sequence; "
    "remove"
)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            {"optimizer": {"flat": ("data", "fsdp")}},
            f"rules.optimizer['flat']=('data', 'fsdp'): {FLAT_NOT_ALONG} 'fsdp'",
        ),
        (
            {"optimizer": {"blocks/flat": "tensor"}},
            f"rules.optimizer['blocks/flat']='tensor': {FLAT_NOT_ALONG} 'tensor'",
        ),
        (
            {"optimizer": {"flat": ("data", "data")}},
            "rules.optimizer['flat']=('data', 'data'): has 'data' twice; name each mesh axis once",
        ),
        (
            {"optimizer": {"flatt": "data"}},
            "rules.optimizer['flatt']='data': no parameter has such an axis; did you mean 'flat'?",
        ),
        (
            {"gradients": {"flat": "data"}},
            (
                "rules.gradients['flat']='data': flat vectors are the optimizer's; set "
                "rules.optimizer['flat']"
            ),
        ),
        # Without a column of the optimizer, that of params is its column, too.
        (
            {"params": {"flat": ("data", "fsdp")}},
            f"rules.params['flat']=('data', 'fsdp'): {FLAT_NOT_ALONG} 'fsdp'",
        ),
        (
            {"params": {"flat": ("data", "data")}},
            "rules.params['flat']=('data', 'data'): has 'data' twice; name each mesh axis once",
        ),
        (
            {"params": {"flat": "data"}, "optimizer": {}},
            "rules.params['flat']='data': layers gather what the optimizer keeps, and "
            "rules.optimizer['flat']=None; set rules.optimizer['flat'] to ('pipeline', 'data')",
        ),
        (
            {
                "params": {"blocks/flat": ("data", "expert")},
                "optimizer": {"flat": ("pipeline", "expert", "data")},
            },
            "rules.params['blocks/flat']=('data', 'expert'): layers gather what the optimizer "
            "keeps, and rules.optimizer['blocks/flat']=('pipeline', 'expert', 'data'); set "
            "rules.optimizer['blocks/flat'] to ('pipeline', 'data', 'expert')",
        ),
        (
            {"params": {"flat": "data"}, "optimizer": {"flat": ("pipeline", "sequence")}},
            "rules.params['flat']='data': layers gather what the optimizer keeps, and "
            "rules.optimizer['flat']=('pipeline', 'sequence'); set rules.optimizer['flat'] to "
            "('pipeline', 'data')",
        ),
        (
            {"optimizer": {"flat": "replica"}},
            "rules.optimizer['flat']: mesh axis 'replica' is neither a standard mesh axis nor "
            "declared in rules.axes; known: data, expert, fsdp, island, pipeline, sequence, tensor",
        ),
        (
            {"optimizer": {"moe/flat": "data"}},
            (
                "rules have the scope 'moe' (moe/flat), which the model does not have; the model "
                "has 'blocks', 'tables'"
            ),
        ),
        (
            {"optimizer": {"flat": "data"}, "params": {"layers": "fsdp", "embed": None}},
            (
                "rules.optimizer['flat']='data': each flat vector holds one layer, but "
                "rules.params['layers']='fsdp'; set that to 'pipeline'"
            ),
        ),
    ],
    ids=str,
)
def test_rows_of_flat_vectors(columns: dict[str, Any], problem: str) -> None:
    config = dataclasses.replace(
        load(TINY), rules=preset("hsdp+megatron").replace("mine", **columns)
    )
    config = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    with pytest.raises(ConfigError) as caught:
        check(config, 8)
    assert str(caught.value) == f"this config cannot run\n  - {problem}"


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        (preset("zero3"), MeshConfig(data=8)),
        (preset("zero3"), MeshConfig(pipeline=2, data=4)),
        (
            preset("hsdp+megatron").replace(params={"flat": "data"}),
            MeshConfig(data=2, fsdp=2, tensor=2),
        ),
        (
            preset("hsdp").replace(
                params={"blocks/flat": "data"}, optimizer={"flat": ("pipeline", "data")}
            ),
            MeshConfig(data=2, fsdp=4),
        ),
    ],
    ids=["zero3", "zero3 with stages", "params only", "one segment"],
)
def test_layers_may_gather_what_the_optimizer_keeps(rules: Rules, mesh: MeshConfig) -> None:
    config = dataclasses.replace(load(TINY), rules=rules, mesh=mesh)
    check(config, 8)
    offloaded = dataclasses.replace(
        config, model=dataclasses.replace(config.model, remat="offload")
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"layers that gather their matrices cannot offload; set model.remat \(of 'blocks'\) to "
            r"save_names"
        ),
    ):
        check(offloaded, 8)
