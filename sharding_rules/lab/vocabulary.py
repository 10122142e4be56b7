"""The names of a trainer's scopes, folders and options.

The lab itself knows only JAX and XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sharding_rules.scopes import EXPERTS


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The names that one trainer uses.

    The defaults are right for a plain-JAX program: they name nothing that it would have to have.
    `compile_report(..., vocabulary=...)` puts it into the report, so that lint, the screen and the
    page read it from there.
    """

    forward_slot: str = ""
    """Named scope of the conditional that runs a pipeline's forward pass in each tick. It is not a
    part of the model."""
    backward_slot: str = ""
    """Named scope of the conditional that runs a pipeline's backward pass in each tick."""
    loss_parts: tuple[str, ...] = ("loss", "head", "logits")
    """Named scopes of the loss, whose gradients may be computed in the forward pass."""
    stash_parts: tuple[str, ...] = ("stash",)
    """Named scopes in which a pipeline stores what its backward pass needs of a forward pass."""
    optimizer_part: str = "optimizer"
    """Named scope of the update."""
    experts_part: str = EXPERTS
    """Named scope of a layer's mixture of experts, with the exchange of tokens."""
    tables: tuple[str, ...] = ("embed", "head", "vocab", "wte", "output")
    """Words in the names of parameters that have the vocabulary as a dimension."""
    source_roots: tuple[str, ...] = ()
    """Folders from which the path of a source line is shown: "trainer/" turns
    /home/me/src/trainer/model.py into trainer/model.py."""
    manual_axes: tuple[str, ...] = ()
    """Mesh axes along which the trainer itself moves activations (pipeline stages, experts, rings):
    no rule says when."""
    expert_axis: str = "expert"
    """Mesh axis whose devices hold different experts."""
    pipeline_axis: str = "pipeline"
    """Mesh axis whose devices run different stages."""
    sequence_axis: str = "sequence"
    """Mesh axis that shards the sequence of every activation."""
    tensor_axis: str = "tensor"
    """Mesh axis whose collectives are beside every matmul, and which therefore must not leave a
    node."""
    page_option: str = ""
    """The option that writes the whole report as a page: --plan=report.html; empty without one."""
    fixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The trainer's own words for a fix, by the name of a lint check or of a cause of an abort;
    they may name its options and files."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The named scopes of a pipeline's tick; empty where there is no pipeline."""
        return tuple(filter(None, (self.forward_slot, self.backward_slot)))

    def fix(self, name: str, neutral: str, **values: object) -> str:
        """Returns the trainer's own text of a fix, else the neutral one.

        `values` are filled in for {name}: fix("idle-axis", ..., axis="data").
        """
        return self.fixes.get(name, neutral).format(**values)


NEUTRAL = Vocabulary()
"""The vocabulary of a program that belongs to no trainer."""
