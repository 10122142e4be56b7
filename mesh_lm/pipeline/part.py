"""One stage's part of the model: the embedding where it is the first, a chunk of the layers, the loss where it is the last.

Lives inside the manual region. Parameters outside the stack of layers are on every stage, because stages are one program; which of them a
stage uses is decided by its number, which XLA does not know. Branches of a conditional must agree on their results' shardings: all are
pinned to the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.blueprint import Blueprint, Params
from mesh_lm.errors import ConfigError
from mesh_lm.model import Batch, Staged, Sums
from mesh_lm.model.dropout import Dropout


class Work(NamedTuple):
    """What a slot works on, int32 each."""

    microbatch: jax.Array
    chunk: jax.Array


class Gradients(NamedTuple):
    """Of one pass of one microbatch through one virtual stage."""

    sums: Sums
    layers: Params
    """Of the chunk's layers."""
    loss: Params
    """Of what the loss uses, zero but on the last virtual stage."""
    embed: Params
    """Of what the embedding uses, zero but on the first. Apart from `loss`: XLA would copy what passes through a second conditional."""
    x: jax.Array
    """Of what went into the chunk, [B, S, D]."""


class Part:
    """What a stage computes for a microbatch."""

    def __init__(
        self, blueprint: Blueprint, params: Params, batch: Batch, stage: Mapping[str, jax.Array], *,
        key: jax.Array | None = None, weight: jax.Array | float = 1.0,
    ) -> None:  # fmt: skip
        """Raises ConfigError for layers that would wait for ever.

        Args:
          params: this stage's, as the engine has them.
          batch: leaves [M, B, S], this device's.
          stage: its "number" and, by chunk, the number of its "first" layer and the "count" of them.
          key: the step's; None: without dropout.
          weight: of all labels of the global batch, by which the objective is divided.
        """
        self.blueprint, self.batch, self.stage, self.key, self.seed = blueprint, batch, stage, key, 1.0 / weight
        self.layers = {name: x for name, x in params.items() if name in blueprint.stacked}
        self.shared = {name: x for name, x in params.items() if name not in blueprint.stacked}
        some = Work(jnp.int32(0), jnp.int32(0))
        embed, like = jax.make_jaxpr(lambda shared: self._embed(shared, some), return_shape=True)(self.shared)
        self.zero_input = self._pin(jnp.zeros(like.shape, like.dtype))
        layers, (_, more) = jax.make_jaxpr(lambda x: self._run(self._chunk(some), x, some), return_shape=True)(self.zero_input)
        loss, sums = jax.make_jaxpr(lambda shared: self._loss(shared, self.zero_input, some), return_shape=True)(self.shared)
        self.zero_sums: Sums = {name: jnp.float32(0) for name in {**more, **sums}}
        self.of_loss = _used(loss.jaxpr, self.shared)
        self.of_embed = _used(embed.jaxpr, self.shared)
        self.permutes = _permutes(layers.jaxpr, [embed.jaxpr, loss.jaxpr], type(blueprint.config).__name__)

    # Forward.

    def input(self, work: Work, stashed: jax.Array) -> jax.Array:
        """What goes into the chunk, [B, S, D]: the embedding's output, or what came from the stage before."""
        with jax.named_scope("embed"):
            return lax.cond(self._first(work), lambda: self._pin(self._embed(self.shared, work)), lambda: self._pin(stashed))

    def forward(self, work: Work, x: jax.Array) -> tuple[jax.Array, Any]:
        """The chunk's output [B, S, D], and what its backward will be given: nothing, or the output and all residuals that depend on x."""
        if self.blueprint.pipeline.stash == "input":
            return self._pin(self._run(self._chunk(work), x, work)[0]), ()
        out, pull = self._vjp(work, x)
        kept = [leaf for leaf, keep in zip(jax.tree.leaves(pull), self._kept(work, x), strict=True) if keep]
        return self._pin(out[0]), (out, kept)

    def evaluate(self, work: Work, x: jax.Array) -> tuple[jax.Array, Sums]:
        """The chunk's output [B, S, D], and its sums."""
        y, more = self._run(self._chunk(work), x, work)
        with jax.named_scope("loss"):
            sums = lax.cond(self._last(work), lambda: self._full(self._loss(self.shared, y, work)), lambda: self.zero_sums)
        return self._pin(y), jax.tree.map(jnp.add, sums, self._full(more))

    # Backward.

    def backward(self, work: Work, x: jax.Array, left: Any, dy: jax.Array) -> Gradients:
        """x: as in the forward pass, [B, S, D]. left: what that left. dy: of the output, like x; not looked at where the loss is here."""
        (y, more), pull = self._recalled(work, x, left)
        with jax.named_scope("loss"):
            sums, d_loss, dy = lax.cond(
                self._last(work), lambda: self._loss_and_grad(y, work), lambda: (self.zero_sums, self._zeros(self.of_loss), self._pin(dy))
            )
        d_layers, dx = pull((dy, self._seeds(more)))
        with jax.named_scope("embed"):
            d_embed = lax.cond(self._first(work), lambda: self._embed_grad(dx, work), lambda: self._zeros(self.of_embed))
        return Gradients(jax.tree.map(jnp.add, sums, self._full(more)), self._pin_params(d_layers), d_loss, d_embed, self._pin(dx))

    def nothing(self, dx: jax.Array) -> Gradients:
        """Of no microbatch; dx stays."""
        width = self.blueprint.stages.width
        rows = {name: jax.ShapeDtypeStruct((width, *x.shape[1:]), x.dtype) for name, x in self.layers.items()}
        return Gradients(self.zero_sums, self._zeros(rows), self._zeros(self.of_loss), self._zeros(self.of_embed), self._pin(dx))

    def _recalled(self, work: Work, x: jax.Array, left: Any) -> tuple[tuple[jax.Array, Sums], Callable]:
        """The forward pass again, as `jax.vjp` gives it: computed, or from what it left."""
        out, pull = self._vjp(work, x)
        if self.blueprint.pipeline.stash == "input":
            return out, pull
        out, residuals = left[0], iter(left[1])
        leaves, structure = jax.tree.flatten(pull)
        # What follows from weights alone is taken from this second pass, and XLA leaves out the rest of it.
        recalled = [next(residuals) if keep else leaf for leaf, keep in zip(leaves, self._kept(work, x), strict=True)]
        return out, jax.tree.unflatten(structure, recalled)

    def _kept(self, work: Work, x: jax.Array) -> list[bool]:
        """Of each residual, whether it depends on x."""
        jaxpr = jax.make_jaxpr(lambda x: jax.tree.leaves(self._vjp(work, x)[1]))(x).jaxpr
        reached = set(map(id, jaxpr.invars))
        for equation in jaxpr.eqns:
            if any(id(operand) in reached for operand in equation.invars):
                reached.update(map(id, equation.outvars))
        return [id(leaf) in reached for leaf in jaxpr.outvars]

    def _vjp(self, work: Work, x: jax.Array) -> tuple[tuple[jax.Array, Sums], Callable]:
        return jax.vjp(lambda weights, x: self._run(weights, x, work), self._chunk(work), x)

    def _loss_and_grad(self, y: jax.Array, work: Work) -> tuple[Sums, Params, jax.Array]:
        sums, pull = jax.vjp(lambda used, y: self._loss(self.shared | used, y, work), self.of_loss, y)
        d_loss, dy = pull(self._seeds(sums))
        return self._full(sums), self._pin_params(d_loss), self._pin(dy)

    def _embed_grad(self, dx: jax.Array, work: Work) -> Params:
        pull = jax.vjp(lambda used: self._embed(self.shared | used, work), self.of_embed)[1]
        return self._pin_params(pull(dx)[0])

    # The model's own methods.

    def _embed(self, shared: Params, work: Work) -> jax.Array:
        return self._module(shared, self.layers).embed(*self._microbatch(work))

    def _run(self, weights: Params, x: jax.Array, work: Work) -> tuple[jax.Array, Sums]:
        first, count = (lax.dynamic_index_in_dim(self.stage[name], work.chunk, keepdims=False) for name in ("first", "count"))
        padded = self.blueprint.stages.rows != self.blueprint.stages.n_layers
        return self._module(self.shared, weights).stage(x, *self._microbatch(work), first, count if padded else None)

    def _loss(self, shared: Params, y: jax.Array, work: Work) -> Sums:
        return self._module(shared, self.layers).loss(y, *self._microbatch(work))

    def _module(self, shared: Params, layers: Params) -> Staged:
        return self.blueprint.bind({**shared, **layers})  # pyright: ignore[reportReturnType]

    def _microbatch(self, work: Work) -> tuple[Batch, Dropout | None]:
        one = {name: lax.dynamic_index_in_dim(x, work.microbatch, keepdims=False) for name, x in self.batch.items()}
        return one, None if self.key is None else Dropout.of(self.key, one["sample_ids"])

    def _chunk(self, work: Work) -> Params:
        stages = self.blueprint.stages
        if stages.chunks == 1:
            return self.layers
        return {name: lax.dynamic_slice_in_dim(x, work.chunk * stages.width, stages.width) for name, x in self.layers.items()}

    def _first(self, work: Work) -> jax.Array:
        return (self.stage["number"] == 0) & (work.chunk == 0)

    def _last(self, work: Work) -> jax.Array:
        stages = self.blueprint.stages
        return (self.stage["number"] == stages.stages - 1) & (work.chunk == stages.chunks - 1)

    def _pin(self, x: jax.Array) -> jax.Array:
        return self.blueprint.shard(x, "batch", "seq_resid", "embed")

    def _pin_params(self, grads: Params) -> Params:
        return self.blueprint.constrain(grads, "params")

    def _zeros(self, like: Mapping[str, Any]) -> Params:
        # Of plain zeros XLA would keep one copy outside the loop over ticks, as large as all gradients.
        zero = lax.optimization_barrier(jnp.float32(0))
        return self._pin_params({name: jnp.broadcast_to(zero.astype(x.dtype), x.shape) for name, x in like.items()})

    def _full(self, sums: Sums) -> Sums:
        """With those of the auxiliary losses, or of the loss, that are not among them."""
        return {**self.zero_sums, **sums}

    def _seeds(self, sums: Sums) -> Sums:
        return {name: self.seed * jnp.ones_like(x) if name == "objective" else jnp.zeros_like(x) for name, x in sums.items()}


def _used(jaxpr: Any, params: Params) -> Params:
    """Those of the parameters, which are all that the jaxpr takes, that it does something with."""
    used = {id(operand) for equation in jaxpr.eqns for operand in equation.invars}
    return {name: params[name] for name, taken in zip(sorted(params), jaxpr.invars, strict=True) if id(taken) in used}


def _permutes(stage: Any, ends: Sequence[Any], model: str) -> bool:
    """Whether a stage sends arrays to neighbours. Raises ConfigError where it does so in a branch, as embedding and loss are.

    For a collective-permute XLA:CPU waits for every device, also for those of stages that are idle or have fewer layers.
    """
    always, in_branches = _primitives(stage)
    if "ppermute" in in_branches:
        fix = "stages that do not take the branch would be waited for, for ever; give all stages as many layers"
        raise ConfigError(f"{model} permutes arrays inside a conditional: {fix}")
    if any("ppermute" in set.union(*_primitives(end)) for end in ends):
        fix = "only the first stage embeds and only the last computes the loss, and all would be waited for; gather instead"
        raise ConfigError(f"{model} permutes arrays in its embed or loss: {fix}")
    return "ppermute" in always


def _primitives(jaxpr: Any) -> tuple[set[str], set[str]]:
    """Names of what a jaxpr does always, in loops too, and of what it does in branches only."""
    always, in_branches = set(), set()
    for equation in jaxpr.eqns:
        always.add(equation.primitive.name)
        for below, branches in map(_primitives, _inside(list(equation.params.values()))):
            (in_branches if equation.primitive.name == "cond" else always).update(below)
            in_branches |= branches
    return always, in_branches


def _inside(params: Sequence[Any]) -> list[Any]:
    jaxprs = (getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(params))
    return [each for each in jaxprs if hasattr(each, "eqns")]
