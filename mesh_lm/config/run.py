"""The config of a run: frozen dataclasses, one field per decision. The only logic here is sizes
that follow from others.

A config file returns one `TrainConfig`; `mesh_lm.commands.command_line` applies the command line's
overrides to it; `mesh_lm.training.check` looks at the whole.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from mesh_lm.errors import ConfigError as ConfigError
from mesh_lm.fields import expert, option
from mesh_lm.optim.config import DilocoConfig, OptimizerConfig
from mesh_lm.schedules.segments import Stack
from sharding_rules import MeshConfig, Rules, preset

if TYPE_CHECKING:
    import jax
    from flax import nnx

    from sharding_rules import Shard


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The interface of every model's config. This project's own decoder is
    `mesh_lm.model.DecoderConfig`.
    """

    vocab_size: int = option(4096, least=2)
    """Token ids run from 0 to vocab_size - 1."""
    seq_len: int = option(256, least=1)
    """Tokens in one training sequence."""

    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        """Builds the module; called under `jax.eval_shape` and `jax.jit` only. See
        `mesh_lm.model.Model` for what it must offer.
        """
        raise ConfigError(
            f"{type(self).__name__} has no make(shard, rngs), which builds its module "
            "(docs/custom_model.md)"
        )

    def sizes(self) -> dict[str, tuple[str, int]]:
        """Returns (the field that sets its size, the size) of logical axes, so that a size that
        does not divide is reported by field name.
        """
        return {}

    def problems(self) -> list[str]:
        """Returns a sentence for each contradiction between fields."""
        return []

    def stack(self) -> Stack:
        """Returns the segments of the model's layers, in order, with their costs. Without segments
        a pipeline cannot divide the model.
        """
        return Stack()

    def updated(
        self, buffers: dict[str, jax.Array], sums: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns the model's buffers (`mesh_lm.model.buffer`) after a step: a pure function of
        them and of the step's sums over the global batch.

        Stacked buffers and the layers' arrays, such as "moe/load" [rows, E], have the same rows,
        some of which may be padding with zeros.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.updated, for its buffers {', '.join(buffers)}"
        )

    def metrics(self, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns what to log besides the step's scalar sums, such as how evenly experts are
        loaded, from the step's sums over the global batch, the layers' arrays among them.

        Those have a row for each layer of their segment, in model order. Scalars are logged
        everywhere; arrays only in metrics.jsonl, and "expert_loads" [L, E] in loss.png as well.
        """
        return {}

    def flops_per_token(self) -> float:
        """Returns the matmul FLOPs of one token, forward and backward; 0 where unknown (then no MFU
        is shown).
        """
        return 0.0

    def attention_flops_per_token(self) -> float:
        """Returns attention's share of `flops_per_token`, which costs more time for each. 0: none,
        or not known.
        """
        return 0.0


@dataclasses.dataclass(frozen=True)
class TrainLoop:
    """Length of the run, batch size, and how often to evaluate and log."""

    steps: int = option(1000, least=1)
    """Optimizer steps of the whole run."""
    global_batch: int = option(32, least=1)
    """Sequences per optimizer step, summed over all devices."""
    microbatches: int = option(1, least=1)
    """Microbatches per step: the global batch is split into this many equal parts, whose gradients
    are accumulated in fp32."""
    eval_every: int = option(250, least=0)
    """Evaluate on the held-out text every N steps; 0: only at the end."""
    eval_sequences: int = option(0, least=0)
    """Sequences per evaluation, evenly spaced over the held-out text; 0: all of them."""
    log_every: int = option(10, least=1)
    """Log a line every N steps."""
    noise_scale: bool = expert(False)
    """Whether to log the gradient noise scale (arXiv 1812.06162), the batch in sequences above
    which more sequences hardly improve a step (docs/optimizers.md). It needs replicas along
    mesh.data."""
    sample_tokens: int = option(128, least=0)
    """Tokens of the text that is generated at the end of the run; 0: none."""


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How layers are assigned to the pipeline stages of mesh.pipeline, and the schedule of their
    microbatches (docs/pipeline.md).
    """

    schedule: str = "1f1b"
    """gpipe, 1f1b (interleaved if chunks > 1), classic_1f1b, or a .csv or .json file with a
    schedule of your own."""
    chunks: int = option(1, least=1)
    """Virtual stages per pipeline stage (interleaving). More of them shrink the bubble and send
    more activations."""
    layers: tuple[int, ...] = expert(())
    """Number of layers of each virtual stage, in model order; empty: as `balance` decides."""
    balance: Literal["equal", "flops"] = "equal"
    """equal: the same number of layers on each stage; flops: the most even FLOPs per stage, with
    head and embedding counted."""
    stash: Literal["input", "residuals"] = expert("input")
    """What a stage stores of a microbatch until its backward pass. input: its input, and the
    forward pass is recomputed; residuals: everything that the backward pass needs."""
    pair_layers: bool = expert(False)
    """Whether a stage that goes forward and backward in the same tick runs a layer of each at once,
    so that the collectives of one are hidden behind the matmuls of the other. Needs
    stash=residuals. Faster by prediction only (docs/pipeline.md)."""


MegatronFlag = Literal["no_extra_token", "drop_last_partial", "mask_document_start"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The training text, and how it becomes sequences."""

    path: str = ""
    """Text to train on: a .txt, .jsonl or .json (also .gz, .zst, .bz2, .xz), a .parquet, a
    directory of text files, or `stdlib`, the 10 MB source code of Python's standard library, which
    is enough for a tiny model. Without it `blend` must name the data."""
    text_field: str = "text"
    """The field of .jsonl lines, or the column of .parquet files, that holds the text."""
    tokenizer: str = ""
    """A tokenizer.json, a directory that has one, a SentencePiece .model, a .tiktoken, or `bytes`;
    empty: train one on the text."""
    tokenizer_vocab: int = 4096
    """Vocabulary size of the byte-level BPE tokenizer that is trained if `tokenizer` is empty."""
    max_lost_bytes: float = expert(0.01)
    """Fraction of the text's bytes that the tokens may fail to spell, because the tokenizer drops
    or rewrites characters."""
    cache: str = expert("~/.cache/mesh_lm")
    """Directory for tokenized corpora (tokenizer.json, train and held-out .bin/.idx)."""
    blend: tuple[str, ...] = ()
    """Megatron .bin/.idx prefixes, or weight,prefix,weight,prefix, read in Megatron's sample order;
    empty: the text of `path`."""
    split: str = "969,30,1"
    """Shares of the documents of `blend` for training, validation and test, as Megatron's --split.
    The second share is held out."""
    valid_blend: tuple[str, ...] = ()
    """Prefixes that are the held-out text, as Megatron's --valid-data-path; all of `blend` is then
    for training, without `split`."""
    max_epochs: float = option(4.0, least=0)
    """Refuse a run that would read the training text more often than this, or any one prefix of a
    weighted blend; 0: no limit."""
    documents: Literal["joined", "separate", "megatron", "packed"] = "joined"
    """joined: documents are concatenated into one stream. separate: attention and positions restart
    at every document (segment ids). megatron: as separate, but after the end-of-document token
    instead of at it, as Megatron's --reset-position-ids and --reset-attention-mask do. packed: as
    separate, and each sequence is filled with complete documents."""
    megatron: tuple[MegatronFlag, ...] = expert(())
    """Habits of Megatron-LM. no_extra_token: sequences of `blend` do not overlap by one token, so
    that the last input has no label (add_extra_token_to_sequence=False). drop_last_partial: the
    last, partial sequence of each held-out text is left out instead of padded (Megatron's default).
    mask_document_start: the first token of each document is not in the loss (--eod-mask-loss)."""
    fim_rate: float = 0.0
    """Fraction of training documents in fill-in-the-middle order (FIM, arXiv
    2207.14255)."""
    fim_spm_rate: float = expert(0.5)
    """Fraction of FIM documents in suffix-prefix-middle order; the others are in
    prefix-suffix-middle order."""
    threads: int = expert(2, least=0)
    """Reader threads (Grain); 0: batches are read between steps."""
    prefetch: int = expert(4, least=1)
    """Batches to read ahead."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save checkpoints, which to keep, and whether to resume."""

    every: int = option(250, least=0)
    """Save every N steps; 0: only at the end and on SIGTERM or Ctrl-C."""
    keep: int = option(2, least=1)
    """Keep the newest N checkpoints."""
    local: str = expert("")
    """Directory on each node's own disk, or in memory (/dev/shm), for extra, more frequent
    checkpoints; empty: off."""
    local_every: int = expert(0, least=0)
    """Save to `local` every N steps. The newest two are kept, and a third exists while it is
    written."""
    local_copies: int = expert(0, least=0)
    """Copy each node's `local` checkpoints to N other nodes in the background; a run then survives
    the loss of any N nodes; 0: off."""
    resume: Literal["auto", "required", "never"] = "auto"
    """auto: resume from the newest checkpoint of the output, if any; required: fail if there is
    none; never: fail if there is one."""


@dataclasses.dataclass(frozen=True)
class HealthConfig:
    """The reaction of a run to hangs, outliers in the loss and devices that compute wrong numbers
    (docs/operations.md).
    """

    stall: float = option(60.0, least=0)
    """Exit with status 75 after this many seconds without progress, or after 10 median steps if
    those take longer; 0: never."""
    patience: float = expert(1800.0, least=1)
    """The same limit while the run prepares data, compiles, restores, saves or evaluates."""
    heartbeat: float = expert(30.0, least=1)
    """Seconds without a heartbeat before the other processes declare a process dead."""
    outlier: float = option(0.0, least=0)
    """Skip a step whose loss, or log gradient norm, is this many standard deviations above the
    recent mean; 0: only if it is not finite."""
    skip_limit: int = expert(10, least=1)
    """Skipped steps in a row that end the run, or roll it back if `rewinds` allows that."""
    rewinds: int = option(0, least=0)
    """How often a run may roll back to the checkpoint before a streak of skipped steps; it then
    skips their batches."""
    replicas: int = option(0, least=0)
    """Check every N steps, and before each save, that replicated state is bit-identical on all
    devices; 0: never."""
    replay_every: int = option(0, least=0)
    """Make every N-th step twice and compare the bits, on any mesh and rules; needs
    launch.deterministic; 0: never."""


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """A jax.profiler trace of a few steps, written to <output>/profile; open it in Perfetto or
    XProf.
    """

    start_step: int = option(10, least=0)
    """First step to trace, counted from the start of this process; at least 2, because the first
    step compiles."""
    steps: int = option(0, least=0)
    """Number of steps to trace; 0: none."""


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Processes, devices and XLA flags of the run."""

    cpu_devices: int = option(0, least=0)
    """Number of CPU devices that JAX simulates if there is no GPU (or JAX_PLATFORMS=cpu), to try a
    mesh on a laptop; 0: one."""
    compile_cache: str = expert("~/.cache/mesh_lm/xla")
    """Directory of JAX's persistent compilation cache, whose entries are verified (SHA-256); empty:
    off."""
    coordinator: str = expert("")
    """host:port of process 0, if the run has several processes; empty: from MESH_LM_COORDINATOR,
    else from Slurm, else a single process."""
    processes: int = expert(0)
    """Number of processes, one per node or one per GPU; 0: from MESH_LM_PROCESSES or Slurm."""
    index: int = expert(-1)
    """Rank of this process, from 0 to processes - 1; -1: from MESH_LM_PROCESS_INDEX or Slurm."""
    timeout: float = expert(300.0)
    """Seconds that processes wait for one another at the start."""
    xla_flags: str = expert("auto")
    """XLA flags on a GPU: auto (those vetted for it), none, or a set of sharding_rules.lab.flags.
    Flags in XLA_FLAGS take precedence."""
    deterministic: bool = False
    """On a GPU, use only operations that give the same bits every time, and keep autotuning results
    with the run. Slower."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. See configs/ for examples. Every field can be set on the command line, as
    --config.section.field=value.
    """

    model: ModelConfig
    output: str
    """Directory for checkpoints, metrics, plots and samples. With several hosts it must be on a
    disk that they share."""
    # A config file may give the name of a saved layout, which `load` replaces.
    mesh: MeshConfig = MeshConfig(data=-1)
    rules: Rules = dataclasses.field(default_factory=lambda: preset("ddp"))
    """Sharding rules: a preset, or a product of presets such as fsdp+megatron_sp
    (docs/sharding.md). The presets are ddp, zero1, zero2, distributed, zero3, fsdp, hsdp, megatron,
    megatron_sp, megatron_2d, context_gather, ulysses, ring, usp, by_node and diloco.
    +reduce_float32 sums FSDP's gradients in float32, +reduce_bfloat16 sums the gradients of all
    matrices in bfloat16, +reduce_int8 those along data in int8 with error feedback
    (docs/gradients.md)."""
    train: TrainLoop = TrainLoop()
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    diloco: DilocoConfig = DilocoConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    health: HealthConfig = HealthConfig()
    profile: ProfileConfig = ProfileConfig()
    launch: LaunchConfig = LaunchConfig()
    init_from: str = ""
    """Initial weights, for step 0 with a fresh optimizer: a Hugging Face model directory, or
    another run's output or checkpoint."""
    wandb: str = ""
    """Weights & Biases project to log to (pip install -e '.[wandb]'; offline with
    WANDB_MODE=offline); empty: none."""
    seed: int = 0
    """Seed of initialisation, dropout and sample order. The same seed gives the same initial bits
    on any mesh."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all devices."""
        return self.train.global_batch * self.model.seq_len

    @property
    def outputs(self) -> dict[str, str]:
        """Field -> each directory that the run writes to. What is in them is not text to train
        on.
        """
        directories = {
            "output": self.output,
            "data.cache": self.data.cache,
            "checkpoint.local": self.checkpoint.local,
            "launch.compile_cache": self.launch.compile_cache,
        }
        return {field: directory for field, directory in directories.items() if directory}


def as_dict(config: Any) -> dict[str, Any]:
    """Returns a plain, JSON-ready description of a config, with each class's name, for metadata and
    logs.
    """
    fields = {
        field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)
    }
    if isinstance(config, OptimizerConfig):
        # A rule may be the user's own, with any module, and need not be a dataclass.
        rule = config.rule
        hyperparameters = dataclasses.asdict(rule) if dataclasses.is_dataclass(rule) else {}
        cls = type(rule)
        fields["rule"] = {"class": cls.__qualname__, "module": cls.__module__} | hyperparameters
    return {"class": type(config).__name__, **fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Rules):
        return value.as_dict()
    if dataclasses.is_dataclass(value):
        return as_dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
