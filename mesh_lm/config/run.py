"""What a run is: frozen dataclasses, one field per decision. No logic lives here but sizes that follow from others.

A config file returns one `TrainConfig`; `mesh_lm.commands.command_line` applies the command line's
overrides to it; `mesh_lm.training.check` looks at the whole.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from mesh_lm.errors import ConfigError as ConfigError
from mesh_lm.schedules.segments import Stack
from sharding_rules import PRESETS, MeshConfig, Rules

if TYPE_CHECKING:
    import jax
    from flax import nnx

    from sharding_rules import Shard


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What every model's config offers to the trainer; the decoder of this project is `mesh_lm.model.DecoderConfig`."""

    vocab_size: int = 4096
    """Token ids are 0 to vocab_size - 1."""
    seq_len: int = 256
    """Tokens in one training sequence."""

    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        """Builds the module; called under `jax.eval_shape` and `jax.jit` only. See `mesh_lm.model.Model` for what it must offer."""
        raise NotImplementedError(f"{type(self).__name__}.make")

    def sizes(self) -> dict[str, tuple[str, int]]:
        """Logical axis -> (the field that sets its size, the size), so that a size that does not divide is reported by field name."""
        return {}

    def problems(self) -> list[str]:
        """Fields that contradict one another, a sentence each."""
        return []

    def stack(self) -> Stack:
        """The segments of the model's layers, in order, and what each part costs. Without segments a pipeline cannot divide the model."""
        return Stack()

    def updated(self, buffers: dict[str, jax.Array], sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The model's buffers (`mesh_lm.model.buffer`) after a step: a pure function of them and of the step's sums over the global batch.

        Stacked buffers and the layers' arrays, such as "moe/load" [rows, E], have the same rows, some of which may be padding with zeros.
        """
        raise NotImplementedError(f"{type(self).__name__}.updated, for its buffers {', '.join(buffers)}")

    def flops_per_token(self) -> float:
        """Matmul FLOPs that one token costs in forward and backward; 0 where unknown (then no MFU is shown)."""
        return 0.0


@dataclasses.dataclass(frozen=True)
class TrainLoop:
    """How long, how much at once, and how often to look."""

    steps: int = 1000
    """Optimizer steps in the whole run."""
    global_batch: int = 32
    """Sequences per optimizer step, over all devices."""
    microbatches: int = 1
    """Equal parts the global batch is cut into; gradients are accumulated over them in fp32."""
    eval_every: int = 250
    """Steps between evaluations on the held-out text; 0: only at the end."""
    eval_sequences: int = 0
    """Held-out sequences that an evaluation reads, evenly spaced over the held-out text; 0: all."""
    log_every: int = 10
    """Steps between two lines of the log."""
    sample_tokens: int = 128
    """Length of the text generated at the end; 0: none."""


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How the layers lie on the stages of mesh.pipeline, and in which order microbatches pass through them (docs/pipeline.md)."""

    schedule: str = "1f1b"
    """gpipe, 1f1b (interleaved where chunks > 1), classic_1f1b, or a .csv or .json file with a table of one's own."""
    chunks: int = 1
    """Virtual stages on each stage: more of them make the bubble smaller, and send more."""
    layers: tuple[int, ...] = ()
    """Layers of each virtual stage, in model order; empty: as `balance` says."""
    balance: Literal["equal", "flops"] = "equal"
    """equal: as many layers on each; flops: as even a load as whole layers allow, the head and the embedding counted."""
    stash: Literal["input", "residuals"] = "input"
    """What a stage keeps of a microbatch until its backward: its input, and it computes the forward again, or what its layers keep."""
    idle: Literal["skip", "mask"] = "skip"
    """A stage without work in a slot: skip, or compute and discard, as is done anyway where layers permute arrays among devices."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, with global-norm clipping, decoupled weight decay and a learning-rate schedule."""

    name: str = "adamw"
    """adamw, muon, lion, adafactor, or module:class for one of your own (docs/optimizers.md)."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Shape after the warm-up. wsd: constant, then linear decay over the last `decay_fraction` of the run."""
    warmup_steps: int = 100
    """Steps over which the rate rises linearly from 0; a shorter run ends below the peak."""
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Part of the run that decays, for wsd."""
    beta1: float = 0.9
    """Decay rate of the first moment, for adamw, lion, and what muon leaves to AdamW."""
    beta2: float = 0.95
    """Decay rate of the second moment, for adamw and what muon leaves to AdamW; for lion, of its momentum."""
    eps: float = 1e-8
    """Added to the denominator, for adamw and muon."""
    momentum: float = 0.95
    """Decay rate of the first moment of matrices, for muon."""
    weight_decay: float = 0.1
    """Decoupled decay, for matrices only: biases, norms and other vectors (per layer) are left alone."""
    clip_norm: float = 1.0
    """Gradients with a larger global L2 norm are scaled down to it; 0: off."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What text, and how it becomes sequences."""

    path: str = "stdlib"
    """A .txt or .jsonl (also .gz, .zst), a .parquet, a directory of text files, or `stdlib`: the source of Python's standard library."""
    text_field: str = "text"
    """Field of a .jsonl line, or column of a .parquet, that holds the text."""
    tokenizer: str = ""
    """A tokenizer.json, a directory with one, a SentencePiece .model, a .tiktoken, or `bytes`; empty: trained on the training split."""
    tokenizer_vocab: int = 4096
    """Entries of the byte-level BPE vocabulary to train, where `tokenizer` is empty."""
    cache: str = "~/.cache/mesh_lm"
    """Directory for prepared corpora (tokenizer.json, train and held-out .bin/.idx)."""
    blend: tuple[str, ...] = ()
    """Megatron .bin/.idx prefixes, or weight, prefix, weight, prefix, read in Megatron's sample order; empty: the text of `path`."""
    split: str = "969,30,1"
    """Training, validation and test weights of a prefix's documents, as Megatron's --split; the second part is held out."""
    documents: Literal["joined", "separate", "packed"] = "joined"
    """joined: a sequence is one stream. separate: attention and positions restart at every document (segment ids). packed: so too, and
    sequences are filled with whole documents."""
    mask_document_start: bool = False
    """Leave the first token of each document out of the loss."""
    fim_rate: float = 0.0
    """Part of the training documents that is rearranged to fill in the middle (arXiv 2207.14255)."""
    fim_spm_rate: float = 0.5
    """Part of those that is in the order suffix, prefix, middle; the others are in the order prefix, suffix, middle."""
    threads: int = 2
    """Reader threads (Grain); 0: read between steps."""
    prefetch: int = 4
    """Batches read ahead."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save, what to keep."""

    every: int = 250
    """Steps between saves; 0: only at the end and on SIGTERM."""
    keep: int = 2
    """Newest checkpoints kept."""
    alarm: int = 3
    """Failed saves in a row from which the log says ERROR; training goes on all the same."""
    local: str = ""
    """A directory on each node's own disk, or in its memory (/dev/shm), for saves between those to the output; empty: none."""
    local_every: int = 0
    """Steps between saves there; the newest two are kept, while a third is written."""
    resume: Literal["auto", "required", "never"] = "auto"
    """auto: continue from the newest checkpoint of the output directory, if any; required: no checkpoint is an error; never: one is."""


@dataclasses.dataclass(frozen=True)
class HealthConfig:
    """What a run does about hangs, sick numbers and devices that compute wrongly (docs/operations.md)."""

    stall: float = 60.0
    """Seconds without progress after which a process gives up with status 75, or 10 median steps where those are longer; 0: never."""
    patience: float = 1800.0
    """The same while it prepares data, compiles, restores, saves or evaluates."""
    heartbeat: float = 30.0
    """Seconds of silence after which a process counts as dead to the others."""
    outlier: float = 0.0
    """Standard deviations above the recent mean at which a loss or a log gradient norm makes a step be skipped; 0: only if not finite."""
    skip_limit: int = 10
    """Steps skipped in a row that end the run, or make it go back."""
    rewinds: int = 0
    """Times that a run goes back, after `skip_limit`, to the checkpoint before them, and goes on with the batches behind them."""
    replicas: int = 0
    """Steps between comparisons of what should be the same bits on several devices, which precede each save as well; 0: never."""


@dataclasses.dataclass(frozen=True)
class ProfileConfig:
    """A jax.profiler trace of a few steps, under <output>/profile (open it in Perfetto or XProf)."""

    start_step: int = 10
    """First step traced, counted from the start of this process; 2 at least, as the first one compiles."""
    steps: int = 0
    """Steps traced; 0: no trace."""


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """The processes and devices of the run."""

    cpu_devices: int = 0
    """Devices to cut the CPU into where there is no GPU (or JAX_PLATFORMS=cpu), to try a mesh on a laptop; 0: one."""
    compile_cache: str = "~/.cache/mesh_lm/xla"
    """Directory of JAX's persistent compilation cache; empty: off."""
    coordinator: str = ""
    """host:port of process 0, where the run has several processes; empty: from MESH_LM_COORDINATOR, else from Slurm, else one process."""
    processes: int = 0
    """Processes of the run, one per node or one per GPU; 0: from MESH_LM_PROCESSES or Slurm."""
    index: int = -1
    """Number of this process, 0 to processes - 1; -1: from MESH_LM_PROCESS_INDEX or Slurm."""
    timeout: float = 300.0
    """Seconds that processes wait for one another at the start."""
    xla_flags: str = "auto"
    """XLA's flags on a GPU: auto (those vetted for it), none, or a set of sharding_rules.lab.flags; flags in XLA_FLAGS win."""
    deterministic: bool = False
    """On a GPU, only operations whose results are the same bits every time, and autotuning results kept with the run: slower."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run. See configs/ for examples; every field can be set as --config.section.field=value."""

    model: ModelConfig
    output: str
    """Directory for checkpoints, metrics, plots and samples of this run; with several hosts, on a disk that they share."""
    mesh: MeshConfig = MeshConfig(data=-1)
    rules: Rules = PRESETS["ddp"]
    """Sharding rules: a preset (ddp, zero1, zero2, distributed, fsdp, hsdp, megatron, megatron_sp) or a product such as fsdp+megatron_sp;
    with +reduce_float32 FSDP's gradients are summed in float32, with +reduce_bfloat16 all those of matrices in bfloat16."""
    train: TrainLoop = TrainLoop()
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    health: HealthConfig = HealthConfig()
    profile: ProfileConfig = ProfileConfig()
    launch: LaunchConfig = LaunchConfig()
    init_from: str = ""
    """Weights to start from, at step 0 with a fresh optimizer: a Hugging Face directory, or another run's output or checkpoint."""
    wandb: str = ""
    """Project of Weights & Biases to log to as well (extra `wandb`; offline with WANDB_MODE=offline); empty: none."""
    seed: int = 0
    """Seeds initialisation, dropout and sample order; the same seed gives the same bits on any mesh."""

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.model.seq_len


def as_dict(config: Any) -> dict[str, Any]:
    """A plain, JSON-ready description of a config, with each class's name, for metadata and logs."""
    out: dict[str, Any] = {"class": type(config).__name__}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Rules):
            value = value.as_dict()
        elif dataclasses.is_dataclass(value):
            value = as_dict(value)
        if isinstance(value, tuple):
            value = [as_dict(each) if dataclasses.is_dataclass(each) else each for each in value]
        out[field.name] = value
    return out
