"""One stage's part of the model: the embedding where it is the first, a chunk of the layers, the loss where it is the last.

Lives inside the manual region. Parameters outside the stack of layers are on every stage, because stages are one program; which of them a
stage uses is decided by its number, which XLA does not know. Branches of a conditional must agree on their results' shardings: all are
pinned to the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.errors import ConfigError
from mesh_lm.model import Batch, Context, Model, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.model.stack import RowRange, add_sums, loss_sums, run_segment
from mesh_lm.parallel.layout import ModelLayout, Params, segment_of


class Work(NamedTuple):
    """What a slot works on, int32 each."""

    microbatch: jax.Array
    chunk: jax.Array


class Gradients(NamedTuple):
    """Of one pass of one microbatch through one virtual stage."""

    sums: Sums
    """Scalars."""
    arrays: Sums
    """Of each layer that the chunk has rows for: [width, ...]."""
    layers: Params
    """Of those layers' parameters."""
    shared: Params
    """Of what layers use of the other parameters."""
    loss: Params
    """Of what the loss uses, zero but on the last virtual stage. Apart from `shared`: XLA would copy what passes through a second
    conditional."""
    embed: Params
    """Of what the embedding uses, zero but on the first."""
    x: jax.Array
    """Of what went into the chunk, [B, S, D]."""


class StageProgram:
    """What a stage computes for a microbatch."""

    def __init__(
        self, layout: ModelLayout, params: Params, batch: Batch, stage: Mapping[str, jax.Array], *,
        key: jax.Array | None = None, weight: jax.Array | float = 1.0,
    ) -> None:  # fmt: skip
        """Raises ConfigError for layers that would wait for ever.

        Args:
          params: this stage's, as the engine has them.
          batch: leaves [M, B, S], this device's.
          stage: its "number" and, for each segment and chunk, of its rows "moe/start" and "moe/skip", and of its layers "moe/first", which
            counts from the model's first layer, and "moe/count" (`mesh_lm.schedules.stages`).
          key: the step's; None: without dropout.
          weight: of all labels of the global batch, by which the objective is divided.
        """
        self.layout, self.batch, self.stage, self.key, self.seed = layout, batch, stage, key, 1.0 / weight
        self.layers = {name: x for name, x in params.items() if name in layout.stacked}
        self.shared = {name: x for name, x in params.items() if name not in layout.stacked}
        some = Work(jnp.int32(0), jnp.int32(0))
        embed, like = jax.make_jaxpr(partial(self._embed, some), return_shape=True)(self.shared)
        self.zero_input = self._pin(jnp.zeros(like.shape, like.dtype))
        layers, (_, more) = jax.make_jaxpr(partial(self.run, some, None), return_shape=True)(self.shared, self.zero_input)
        loss, sums = jax.make_jaxpr(partial(self._loss, some), return_shape=True)(self.shared, self.zero_input)
        self.zero_sums: Sums = {name: jnp.float32(0) for name in {**_scalars(more), **sums}}
        self.zero_arrays: Sums = {name: jnp.zeros(s.shape, s.dtype) for name, s in _arrays(more).items()}
        self.of_layers, self.of_loss, self.of_embed = (self._trained(made.jaxpr) for made in (layers, loss, embed))
        self.permutes = _permutes(layers.jaxpr, [embed.jaxpr, loss.jaxpr], type(layout.config).__name__)
        self.kept = self._depends_on_x(some) if layout.pipeline.stash == "residuals" and key is not None else []

    def _trained(self, jaxpr: Any) -> Params:
        """Those of the shared parameters that a jaxpr uses and a gradient is taken of."""
        return {name: x for name, x in _used(jaxpr, self.shared).items() if name not in self.layout.buffers}

    # Forward.

    def forward(self, work: Work, stashed: jax.Array) -> tuple[jax.Array, Any]:
        """The chunk's output [B, S, D], and what its backward will be given: nothing, or the output, the sums and all residuals that depend
        on x.

        stashed: what came from the stage before, which the first virtual stage does not look at.
        """
        x = self._input(work, stashed)
        if self.layout.pipeline.stash == "input":
            return self._pin(self.run(work, None, self.shared, x)[0]), ()
        out, pull = jax.vjp(partial(self.run, work), *self._differentiated(), x)
        left = [leaf for leaf, keep in zip(jax.tree.leaves(pull), self.kept, strict=True) if keep]
        return self._pin(out[0]), (out, left)

    def evaluate(self, work: Work, stashed: jax.Array) -> tuple[jax.Array, Sums]:
        """The chunk's output [B, S, D], and its scalar sums."""
        y, more = self.run(work, None, self.shared, self._input(work, stashed))
        with jax.named_scope("loss"):
            sums = lax.cond(self._last(work), lambda: self._full(self._loss(work, self.shared, y)), lambda: self.zero_sums)
        return self._pin(y), jax.tree.map(jnp.add, sums, self._full(_scalars(more)))

    # Backward.

    def backward(self, work: Work, stashed: jax.Array, left: Any, dy: jax.Array) -> Gradients:
        """stashed: as in the forward pass, [B, S, D]. left: what that left. dy: of the output, not looked at where the loss is here."""
        (y, more), pull = self._recalled(work, self._input(work, stashed), left)
        with jax.named_scope("loss"):
            sums, d_loss, dy = lax.cond(
                self._last(work), lambda: self._loss_and_grad(work, y), lambda: (self.zero_sums, self._zeros(self.of_loss), self._pin(dy))
            )
        d_layers, d_shared, dx = pull((dy, self._seeds(more)))
        with jax.named_scope("embed"):
            d_embed = lax.cond(self._first(work), lambda: self._embed_grad(work, dx), lambda: self._zeros(self.of_embed))
        sums = jax.tree.map(jnp.add, sums, self._full(_scalars(more)))
        layers, shared = self._pin_params(d_layers), self._pin_params(d_shared)
        return Gradients(sums, _arrays(more), layers, shared, d_loss, d_embed, self._pin(dx))

    def nothing(self, dx: jax.Array) -> Gradients:
        """Of no microbatch; dx stays."""
        layers, shared, loss, embed = map(self._zeros, (jax.eval_shape(self._sinks), self.of_layers, self.of_loss, self.of_embed))
        return Gradients(self.zero_sums, self.zero_arrays, layers, shared, loss, embed, self._pin(dx))

    def _recalled(self, work: Work, x: jax.Array, left: Any) -> tuple[tuple[jax.Array, Sums], Callable]:
        """The forward pass again, as `jax.vjp` gives it: computed, or from what it left."""
        out, pull = jax.vjp(partial(self.run, work), *self._differentiated(), x)
        if self.layout.pipeline.stash == "input":
            return out, pull
        (out, residuals), (leaves, structure) = left, jax.tree.flatten(pull)
        # What follows from weights alone is taken from this second pass, and XLA leaves out the rest of it.
        kept = iter(residuals)
        recalled = [next(kept) if keep else leaf for leaf, keep in zip(leaves, self.kept, strict=True)]
        return out, jax.tree.unflatten(structure, recalled)

    def _differentiated(self) -> tuple[Params, Params]:
        """What a gradient is taken of besides x: what stands for the layers' parameters, and the others that they use, as float32."""
        return self._sinks(), _wide(self.of_layers)

    def _sinks(self) -> Params:
        """Of the parameters of the layers that a pass reads: what stands for their gradients (`mesh_lm.model.stack.run_segment`)."""
        trained = {name: x for name, x in self.layers.items() if name not in self.layout.buffers}
        return {name: jnp.zeros((self.layout.stack_of(name).rows_per_pass, *x.shape[1:]), jnp.float32) for name, x in trained.items()}

    def _depends_on_x(self, some: Work) -> list[bool]:
        """Of each residual of a pass, whether it depends on x."""

        def residuals(x: jax.Array, work: Work) -> list[jax.Array]:
            return jax.tree.leaves(jax.vjp(partial(self.run, work), *self._differentiated(), x)[1])

        jaxpr = jax.make_jaxpr(residuals)(self.zero_input, some).jaxpr
        reached = {id(jaxpr.invars[0])}
        for equation in jaxpr.eqns:
            if any(id(operand) in reached for operand in equation.invars):
                reached.update(map(id, equation.outvars))
        return [id(leaf) in reached for leaf in jaxpr.outvars]

    def _loss_and_grad(self, work: Work, y: jax.Array) -> tuple[Sums, Params, jax.Array]:
        sums, pull = jax.vjp(partial(self._loss, work), _wide(self.of_loss), y)
        d_loss, dy = pull(self._seeds(sums))
        return self._full(sums), self._pin_params(d_loss), self._pin(dy)

    def _embed_grad(self, work: Work, dx: jax.Array) -> Params:
        return self._pin_params(jax.vjp(partial(self._embed, work), _wide(self.of_embed))[1](dx)[0])

    # The model's own methods. `used` are those of the shared parameters that a gradient is taken of, or all.

    def run(self, work: Work, sinks: Params | None, used: Params, x: jax.Array) -> tuple[jax.Array, Sums]:
        """x through the chunk's layers: of each segment, in order, those that the virtual stage has."""
        params = {**self.shared, **used, **self.layers}
        model, (batch, dropout) = self._module(params), self._microbatch(work)
        below = self._module({**params, **sinks}) if sinks else None
        ctx, total = Context(batch, dropout, model.prepare(batch)), {}
        for segment in self.layout.segments:
            stack = self.layout.stacks[segment.name]
            first, start, skip, count = (self.at(segment.name, what, work) for what in ("first", "start", "skip", "count"))
            start = start if stack.rows_per_stage > stack.rows_per_pass else 0
            rows = RowRange(start, stack.rows_per_pass, *((skip, count) if stack.has_padding else ()))
            x, _, sums = run_segment(model, segment, x, ctx, first, rows, below)
            total = add_sums(total, sums)
        return x, total

    def rows(self, work: Work, name: str, x: jax.Array) -> jax.Array:
        """Of a gradient or an array of sums the rows that a pass makes: [height, ...] to [width, ...]."""
        width = self.layout.stack_of(name).rows_per_pass
        return x if len(x) == width else lax.dynamic_slice_in_dim(x, self.at(segment_of(name), "start", work), width)

    def at(self, segment: str, what: str, work: Work) -> jax.Array:
        """One of this stage's numbers, for the chunk at work (see __init__)."""
        return lax.dynamic_index_in_dim(self.stage[f"{segment}/{what}"], jnp.maximum(work.chunk, 0), keepdims=False)

    def _input(self, work: Work, stashed: jax.Array) -> jax.Array:
        """What goes into the chunk, [B, S, D]: the embedding's output, or what came from the stage before."""
        with jax.named_scope("embed"):
            return lax.cond(self._first(work), lambda: self._pin(self._embed(work, self.shared)), lambda: self._pin(stashed))

    def _embed(self, work: Work, used: Params) -> jax.Array:
        return self._module({**self.shared, **used, **self.layers}).embed(*self._microbatch(work))

    def _loss(self, work: Work, used: Params, y: jax.Array) -> Sums:
        return loss_sums(self._module({**self.shared, **used, **self.layers}), y, *self._microbatch(work))

    def _module(self, params: Params) -> Model:
        return self.layout.bind(params)

    def _microbatch(self, work: Work) -> tuple[Batch, Dropout | None]:
        one = {name: lax.dynamic_index_in_dim(x, work.microbatch, keepdims=False) for name, x in self.batch.items()}
        return one, None if self.key is None else Dropout.of(self.key, one["sample_ids"], one["indices"])

    def _first(self, work: Work) -> jax.Array:
        return (self.stage["number"] == 0) & (work.chunk == 0)

    def _last(self, work: Work) -> jax.Array:
        last = self.layout.pipeline.chunks - 1
        return (self.stage["number"] == self.layout.n_stages - 1) & (work.chunk == last)

    def _pin(self, x: jax.Array) -> jax.Array:
        return self.layout.shard(x, "batch", "seq_resid", "embed")

    def _pin_params(self, grads: Params) -> Params:
        return self.layout.constrain(grads, "params")

    def _zeros(self, like: Mapping[str, Any]) -> Params:
        # Of plain zeros XLA would keep one copy outside the loop over ticks, as large as all gradients.
        zero = lax.optimization_barrier(jnp.float32(0))
        return self._pin_params({name: jnp.broadcast_to(zero, x.shape) for name, x in like.items()})

    def _full(self, sums: Sums) -> Sums:
        """With those of the auxiliary losses, or of the loss, that are not among them."""
        return {**self.zero_sums, **sums}

    def _seeds(self, sums: Sums) -> Sums:
        return {name: self.seed * jnp.ones_like(x) if name == "objective" else jnp.zeros_like(x) for name, x in sums.items()}


def _wide(params: Params) -> Params:
    """As float32, which their gradients are added up in. Made where it is used: a conditional or a loop would keep them."""
    return {name: x.astype(jnp.float32) for name, x in params.items()}


def _scalars(sums: Mapping[str, Any]) -> Sums:
    return {name: x for name, x in sums.items() if not x.ndim}


def _arrays(sums: Mapping[str, Any]) -> Sums:
    return {name: x for name, x in sums.items() if x.ndim}


def _used(jaxpr: Any, params: Params) -> Params:
    """Those of the parameters, which are the first that the jaxpr takes, that it does something with."""
    used = {id(operand) for equation in jaxpr.eqns for operand in equation.invars}
    return {name: params[name] for name, taken in zip(sorted(params), jaxpr.invars, strict=False) if id(taken) in used}


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
