"""The program of one pipeline stage: the embedding on the first stage, chunks of layers on each,
the loss on the last.

It runs inside the manual region. All stages run one program, so parameters outside the segments are
replicated on every stage; a stage selects what to compute by its number, an array. Branches of a
conditional must agree on the shardings of their results, so all of these are constrained to the
rules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.errors import ConfigError
from mesh_lm.model import Batch, Context, Model, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.parallel.residuals import depends_on_first, restored, saved
from mesh_lm.parallel.stack import (
    RETURNED,
    RowRange,
    Sinks,
    add_sums,
    loss_sums,
    run_segment,
    segment_scope,
)


class Work(NamedTuple):
    """The microbatch and the chunk of a slot, int32 scalars."""

    microbatch: jax.Array
    chunk: jax.Array


class Gradients(NamedTuple):
    """The results of the backward pass of one microbatch through one virtual stage, besides the
    gradients of its layers.

    In an idle slot all are zero but x, which nothing reads.
    """

    sums: Sums
    """Scalar sums."""
    arrays: Sums
    """Arrays of sums, with one row for each row of parameters that the pass reads: [rows_per_pass,
    ...]."""
    shared: Params
    """Gradients of the other parameters that layers use."""
    loss: Params
    """Gradients of the parameters that the loss uses; zero except on the last virtual stage. They
    are separate from `shared`, because XLA copies what passes through a second conditional."""
    embed: Params
    """Gradients of the parameters that the embedding uses; zero except on the first virtual
    stage."""
    x: jax.Array
    """Gradient of the chunk's input, [B, S, D]."""


class StageProgram:
    """Forward and backward passes of one stage, for any microbatch and chunk."""

    def __init__(
        self,
        layout: ModelLayout,
        params: Params,
        batch: Batch,
        stage: Mapping[str, jax.Array],
        *,
        key: jax.Array | None = None,
        weight: jax.Array | float = 1.0,
    ) -> None:
        """Raises ConfigError for layers whose communication would deadlock.

        Args:
          params: this stage's parameters, as in memory.
          batch: this device's leaves [M, B, S].
          stage: its "number" and, for each segment and chunk, the rows "moe/start" and "moe/skip"
            and the layers "moe/first" (a number in the whole model) and "moe/count"
            (`mesh_lm.schedules.stages`).
          key: the step's key; None: without dropout.
          weight: the sum of label weights of the global batch, which divides the objective.
        """
        self.layout = layout
        self.batch = batch
        self.stage = stage
        self.key = key
        self.inverse_weight = 1.0 / weight
        self.layers = {name: x for name, x in params.items() if name in layout.stacked}
        self.shared = {name: x for name, x in params.items() if name not in layout.stacked}

        # Each part is traced once, to see which shared parameters it uses and what it returns.
        any_work = Work(jnp.int32(0), jnp.int32(0))
        embed, x = jax.make_jaxpr(partial(self._embed, any_work), return_shape=True)(self.shared)
        self.zero_input = self._pin(jnp.zeros(x.shape, x.dtype))
        layers, (_, layer_sums) = jax.make_jaxpr(
            partial(self.run, any_work, None), return_shape=True
        )(self.shared, self.zero_input)
        loss, loss_outputs = jax.make_jaxpr(partial(self._loss, any_work), return_shape=True)(
            self.shared, self.zero_input
        )
        scalar_names = {**_scalars(layer_sums), **loss_outputs}
        self.zero_sums: Sums = {name: jnp.float32(0) for name in scalar_names}
        arrays = _arrays(layer_sums)
        self.zero_arrays: Sums = {name: jnp.zeros(s.shape, s.dtype) for name, s in arrays.items()}
        self.layer_params = self._trained_inputs(layers.jaxpr)
        self.loss_params = self._trained_inputs(loss.jaxpr)
        self.embed_params = self._trained_inputs(embed.jaxpr)
        model_name = type(layout.config).__name__
        _require_no_permutes_in_branches(layers.jaxpr, [embed.jaxpr, loss.jaxpr], model_name)
        self.saved: Any = []
        if layout.pipeline.stash == "residuals" and key is not None:
            self.saved = self._saved(any_work)

    def _trained_inputs(self, jaxpr: Any) -> Params:
        """Returns the shared parameters that a jaxpr uses and that have a gradient."""
        used_params = _used_params(jaxpr, self.shared)
        return {name: x for name, x in used_params.items() if name not in self.layout.buffers}

    def with_layers(self, layers: Params) -> StageProgram:
        """Returns the program with other values of this stage's layers."""
        program = copy.copy(self)
        program.layers = layers
        return program

    # Forward.

    # Where a slot is idle, its microbatch and its chunk are -1, and these methods compute with the
    # last microbatch and the first chunk.

    def forward(self, work: Work, stashed: jax.Array) -> tuple[jax.Array, Any]:
        """Returns (the chunk's output [B, S, D], the values saved for its backward pass).

        Nothing is saved if the backward pass recomputes the forward pass; otherwise the output, the
        sums and all residuals that depend on x.

        stashed: the output of the previous stage, which the first virtual stage ignores.
        """
        x = self._input(work, stashed)
        if self.layout.pipeline.stash == "input":
            return self._pin(self.run(work, None, self.shared, x)[0]), ()
        out, pull = jax.vjp(partial(self.run, work), *self._differentiated(), x)
        return self._pin(out[0]), (out, saved(pull, self.saved))

    def evaluate(self, work: Work, stashed: jax.Array) -> tuple[jax.Array, Sums]:
        """Returns (the chunk's output [B, S, D], its scalar sums), without dropout."""
        y, layer_sums = self.run(work, None, self.shared, self._input(work, stashed))
        layer_sums = self._unless_idle(work, layer_sums)
        with jax.named_scope("loss"):
            sums = lax.cond(
                self._last(work),
                lambda: self._full(self._loss(work, self.shared, y)),
                lambda: self.zero_sums,
            )
        return self._pin(y), jax.tree.map(jnp.add, sums, self._full(_scalars(layer_sums)))

    # Backward.

    def backward(
        self,
        work: Work,
        stashed: jax.Array,
        saved: Any,
        dy: jax.Array,
        stacked_grads: Mapping[str, Any],
    ) -> Gradients:
        """Returns the gradients of a chunk, whose layers' gradients it adds to `stacked_grads`:
        Refs with a row for each row of parameters.

        stashed, saved: as in the forward pass. dy: gradient of the output, [B, S, D], ignored on
        the last virtual stage.
        """
        (y, layer_sums), pull = self._forward_vjp(work, self._input(work, stashed), saved)
        sums, loss_grads, dy = self.loss_gradient(work, y, dy)
        pull = pull.with_refs(
            dict(stacked_grads), dict.fromkeys(self.layer_params, RETURNED), RETURNED
        )
        _, shared_grads, dx = pull((dy, self._cotangents(layer_sums)))
        embed_grads = self.embed_gradient(work, dx)
        layer_sums, shared_grads = self._unless_idle(
            work, (layer_sums, self._pin_params(shared_grads))
        )
        sums = jax.tree.map(jnp.add, sums, self._full(_scalars(layer_sums)))
        return Gradients(
            sums, _arrays(layer_sums), shared_grads, loss_grads, embed_grads, self._pin(dx)
        )

    def loss_gradient(
        self, work: Work, y: jax.Array, dy: jax.Array
    ) -> tuple[Sums, Params, jax.Array]:
        """Returns (scalar sums of the loss, gradients of its parameters, gradient of y); before the
        last virtual stage zeros and dy.
        """
        with jax.named_scope("loss"):
            return lax.cond(
                self._last(work),
                lambda: self._loss_and_grad(work, y),
                lambda: (self.zero_sums, self._zeros(self.loss_params), self._pin(dy)),
            )

    def embed_gradient(self, work: Work, dx: jax.Array) -> Params:
        """Returns the gradients of the parameters that the embedding uses: zeros after the first
        virtual stage. dx: of the chunk's input.
        """
        with jax.named_scope("embed"):
            return lax.cond(
                self._first(work),
                lambda: self._embed_grad(work, dx),
                lambda: self._zeros(self.embed_params),
            )

    def _unless_idle(self, work: Work, tree: Any) -> Any:
        """Returns the tree, or zeros in an idle slot."""
        return jax.tree.map(lambda x: jnp.where(work.microbatch >= 0, x, jnp.zeros_like(x)), tree)

    def _forward_vjp(
        self, work: Work, x: jax.Array, stashed: Any
    ) -> tuple[tuple[jax.Array, Sums], Callable]:
        """Returns (output, vjp function) of the forward pass, as `jax.vjp` does: recomputed, or
        restored from what `forward` saved.
        """
        out, pull = jax.vjp(partial(self.run, work), *self._differentiated(), x)
        if self.layout.pipeline.stash == "input":
            return out, pull
        out, residuals = stashed
        # Residuals that depend on weights only, such as casts of them, are recomputed rather than
        # saved.
        return out, restored(pull, self.saved, residuals)

    def _differentiated(self) -> tuple[Params, Params]:
        """Returns the arguments of `run` to differentiate besides x: sinks of the layers'
        parameters, and the other parameters they use.
        """
        return self._sinks(), _float32(self.layer_params)

    def new_stacked_grads(self) -> dict[str, Any]:
        """Returns Refs to the sums of the gradients of this stage's layers, at zero, with a row for
        each row of the parameters.
        """
        return {name: jax.new_ref(zero) for name, zero in self._pin_params(self._sinks()).items()}

    def _sinks(self) -> Params:
        """Returns zeros that receive the gradients of this stage's layers (see
        `mesh_lm.parallel.stack.Sinks`).
        """
        return {
            name: jnp.zeros(x.shape, jnp.float32)
            for name, x in self.layers.items()
            if name not in self.layout.buffers
        }

    def _saved(self, any_work: Work) -> Any:
        """Returns, for each residual of a pass, whether it depends on x, and is saved."""

        def residuals(x: jax.Array, work: Work) -> list[jax.Array]:
            return jax.tree.leaves(jax.vjp(partial(self.run, work), *self._differentiated(), x)[1])

        return depends_on_first(residuals, self.zero_input, any_work)

    def _loss_and_grad(self, work: Work, y: jax.Array) -> tuple[Sums, Params, jax.Array]:
        sums, pull = jax.vjp(partial(self._loss, work), _float32(self.loss_params), y)
        loss_grads, dy = pull(self._cotangents(sums))
        return self._full(sums), self._pin_params(loss_grads), self._pin(dy)

    def _embed_grad(self, work: Work, dx: jax.Array) -> Params:
        _, pull = jax.vjp(partial(self._embed, work), _float32(self.embed_params))
        return self._pin_params(pull(dx)[0])

    # The model's methods. `inputs` are the shared parameters to differentiate, or all of them.

    def run(
        self, work: Work, sinks: Params | None, inputs: Params, x: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """Returns (output, sums) of the chunk's layers: of each segment, in order, the layers that
        this virtual stage has.
        """
        params = {**self.shared, **inputs, **self.layers}
        model = self._module(params)
        batch, dropout = self._microbatch(work)
        bound_sinks = None
        if sinks:
            bound_sinks = Sinks(self._module({**params, **sinks}), work.microbatch >= 0)
        ctx = Context(batch, dropout, model.prepare(batch))
        total: Sums = {}
        for segment in self.layout.segments:
            with segment_scope(segment, self.layout.segments):
                first_layer, rows = self.rows(segment.name, work)
                x, _, sums = run_segment(model, segment, x, ctx, first_layer, rows, bound_sinks)
            total = add_sums(total, sums)
        return x, total

    def rows(self, segment: str, work: Work) -> tuple[jax.Array, RowRange]:
        """Returns (the number of the first layer of a segment in the current chunk, the rows of its
        parameters).
        """
        stack = self.layout.stacks[segment]
        first_layer = self.chunk_number(segment, "first", work)
        start = self.chunk_number(segment, "start", work)
        skip = self.chunk_number(segment, "skip", work)
        count = self.chunk_number(segment, "count", work)
        if stack.rows_per_stage <= stack.rows_per_pass:
            start = 0  # a pass reads all rows
        if not stack.has_padding:
            return first_layer, RowRange(start, stack.rows_per_pass)
        return first_layer, RowRange(start, stack.rows_per_pass, skip, count)

    def chunk_number(self, segment: str, name: str, work: Work) -> jax.Array:
        """Returns one of this stage's numbers for the current chunk (see __init__)."""
        return lax.dynamic_index_in_dim(
            self.stage[f"{segment}/{name}"], jnp.maximum(work.chunk, 0), keepdims=False
        )

    def _input(self, work: Work, stashed: jax.Array) -> jax.Array:
        """Returns the chunk's input, [B, S, D]: the embedding's output, or the previous stage's
        output.
        """
        with jax.named_scope("embed"):
            return lax.cond(
                self._first(work),
                lambda: self._pin(self._embed(work, self.shared)),
                lambda: self._pin(stashed),
            )

    def _embed(self, work: Work, inputs: Params) -> jax.Array:
        model = self._module({**self.shared, **inputs, **self.layers})
        return model.embed(*self._microbatch(work))

    def _loss(self, work: Work, inputs: Params, y: jax.Array) -> Sums:
        model = self._module({**self.shared, **inputs, **self.layers})
        return loss_sums(model, y, *self._microbatch(work))

    def _module(self, params: Params) -> Model:
        return self.layout.bind(params)

    def _microbatch(self, work: Work) -> tuple[Batch, Dropout | None]:
        batch = {
            name: lax.dynamic_index_in_dim(x, work.microbatch, keepdims=False)
            for name, x in self.batch.items()
        }
        if self.key is None:
            return batch, None
        return batch, Dropout.of(self.key, batch["sample_ids"], batch["indices"])

    def _first(self, work: Work) -> jax.Array:
        return (self.stage["number"] == 0) & (work.chunk == 0)

    def _last(self, work: Work) -> jax.Array:
        last_chunk = self.layout.pipeline.chunks - 1
        return (self.stage["number"] == self.layout.n_stages - 1) & (work.chunk == last_chunk)

    def _pin(self, x: jax.Array) -> jax.Array:
        return self.layout.shard(x, "batch", "seq_resid", "embed")

    def _pin_params(self, grads: Params) -> Params:
        return self.layout.constrain(grads, "params")

    def _zeros(self, like: Mapping[str, Any]) -> Params:
        # XLA would keep a copy of plain zeros outside the loop over ticks, as large as all
        # gradients.
        zero = lax.optimization_barrier(jnp.float32(0))
        return self._pin_params({name: jnp.broadcast_to(zero, x.shape) for name, x in like.items()})

    def _full(self, sums: Sums) -> Sums:
        """Returns the sums, with zeros for missing sums of the loss or of auxiliary losses."""
        return {**self.zero_sums, **sums}

    def _cotangents(self, sums: Sums) -> Sums:
        """Returns the cotangents of the sums: 1 / weight for the objective, zero for all others."""
        cotangents: Sums = {}
        for name, x in sums.items():
            if name == "objective":
                cotangents[name] = self.inverse_weight * jnp.ones_like(x)
            else:
                cotangents[name] = jnp.zeros_like(x)
        return cotangents


def _float32(params: Params) -> Params:
    """Returns the parameters as float32, the type in which gradients are summed. Cast where used,
    because a conditional or loop would save them.
    """
    return {name: x.astype(jnp.float32) for name, x in params.items()}


def _scalars(sums: Mapping[str, Any]) -> Sums:
    return {name: x for name, x in sums.items() if x.ndim == 0}


def _arrays(sums: Mapping[str, Any]) -> Sums:
    return {name: x for name, x in sums.items() if x.ndim > 0}


def _used_params(jaxpr: Any, params: Params) -> Params:
    """Returns the parameters that a jaxpr uses. They are its first arguments, sorted by name."""
    operands = {id(operand) for equation in jaxpr.eqns for operand in equation.invars}
    inputs = zip(sorted(params), jaxpr.invars, strict=False)
    return {name: params[name] for name, x in inputs if id(x) in operands}


def _require_no_permutes_in_branches(stage: Any, ends: Sequence[Any], model: str) -> None:
    """Raises ConfigError if a stage permutes arrays among devices inside a branch, in its embedding
    or in its loss.

    For a collective-permute XLA:CPU waits for every device, including those of stages that are idle
    or have fewer layers.
    """
    _, in_branches = _primitives(stage)
    if "ppermute" in in_branches:
        raise ConfigError(
            f"{model} permutes arrays inside a conditional: it would deadlock on stages that do "
            "not take the branch; give all stages the same number of layers"
        )
    if any("ppermute" in set.union(*_primitives(end)) for end in ends):
        raise ConfigError(
            f"{model} permutes arrays in its embed or loss: only the first stage embeds and only "
            "the last computes the loss, so it would deadlock; gather instead"
        )


def _primitives(jaxpr: Any) -> tuple[set[str], set[str]]:
    """Returns (names of the primitives that always run, including those in loops; names of those
    that run in branches).
    """
    always: set[str] = set()
    in_branches: set[str] = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        always.add(name)
        for inner in _inner_jaxprs(list(equation.params.values())):
            inner_always, inner_branches = _primitives(inner)
            in_branches |= inner_branches
            if name == "cond":
                in_branches |= inner_always
            else:
                always |= inner_always
    return always, in_branches


def _inner_jaxprs(params: Sequence[Any]) -> list[Any]:
    jaxprs = (getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves(params))
    return [jaxpr for jaxpr in jaxprs if hasattr(jaxpr, "eqns")]
