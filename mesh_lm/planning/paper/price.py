"""Seconds of a step, and bytes at its peak, of many layouts at once.

Letters: T tokens of a microbatch on a device, H d_model, t tensor parallelism. All arrays have an
element for each layout. FLOPs and bytes sent are those of the closed forms (docs/closed_forms.md);
collectives are priced as in `sharding_rules.lab.prices`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from mesh_lm.planning.paper.constants import FITTED, ByRemat, Constants
from mesh_lm.planning.paper.layouts import (
    FULL,
    LIGHTER,
    NONE,
    SAVE_ATTENTION,
    SAVE_NAMES,
    ZERO1,
    ZERO3,
    Layouts,
)
from mesh_lm.planning.paper.sizes import Hardware, ModelSizes

Array = np.ndarray

_BF16 = 2.0
_F32 = 4.0

_EXPOSED_STREAM = 0.8
"""Share of the copies of weights from the host, a layer ahead, for which compute waits: 0.6 to 1 in
compiled programs (benchmarks/results/offload)."""

_GATHER = "all-gather"
_SCATTER = "reduce-scatter"
_SUM = "all-reduce"
_SEND = "collective-permute"


class Price(NamedTuple):
    """The cost of each layout on paper."""

    seconds: Array
    """The time of a step."""
    exposed: Array
    """Seconds of it during which compute waits for the network."""
    peak: Array
    """Bytes on a device of the stage that needs most."""


def price(
    sizes: ModelSizes, layouts: Layouts, hardware: Hardware, constants: Constants = FITTED
) -> Price:
    """Returns the cost of layouts.

    A policy that applies to a share of the layers costs its share between this policy's price and
    that of the next lighter one.
    """
    heavy = _Step(sizes, layouts, hardware, constants).price()
    if not len(layouts) or np.all(layouts.remat_share == 1):
        return heavy
    lighter = dataclasses.replace(layouts, remat=LIGHTER[layouts.remat.astype(int)])
    light = _Step(sizes, lighter, hardware, constants).price()
    share = layouts.remat_share
    return Price(*(share * a + (1 - share) * b for a, b in zip(heavy, light, strict=True)))


class _Layer(NamedTuple):
    """Seconds of one layer and microbatch."""

    forward: Array
    backward: Array
    """With what is recomputed."""
    exposed: Array


class _Once(NamedTuple):
    """Seconds of what is no layer."""

    compute: Array
    exposed: Array


@dataclasses.dataclass(frozen=True)
class _Step:
    sizes: ModelSizes
    layouts: Layouts
    hardware: Hardware
    constants: Constants

    def price(self) -> Price:
        layouts = self.layouts
        layer = self._layer()
        ends = self._ends()
        ticks, all_ticks = self._ticks()
        layers_of_tick = self._layers_of_chunk
        compute = ticks * layers_of_tick * (layer.forward + layer.backward)
        exposed = ticks * layers_of_tick * layer.exposed
        compute = compute + layouts.microbatches * ends.compute + self._accumulation(all_ticks)
        exposed = exposed + layouts.microbatches * ends.exposed
        exposed = exposed + self._hops(layer, ticks, all_ticks, layers_of_tick)
        once = self._once()
        exposed = exposed + once.exposed
        seconds = compute + once.compute + exposed
        return Price(seconds, exposed, self._peak())

    # Sizes of each layout.

    @property
    def _tokens(self) -> Array:
        """T, the tokens of a microbatch on a device."""
        layouts = self.layouts
        sequences = self.sizes.global_batch / layouts.microbatches / layouts.sequences
        return sequences * self.sizes.seq_len

    @property
    def _layers(self) -> Array:
        """Layers of the stage that has most."""
        return np.ceil(self.sizes.layers / self.layouts.pipeline)

    @property
    def _layers_of_chunk(self) -> Array:
        """Layers of the longest chunk, for which all stages wait."""
        layouts = self.layouts
        return np.ceil(self.sizes.layers / (layouts.pipeline * layouts.chunks))

    @property
    def _has_stages(self) -> Array:
        return self.layouts.pipeline > 1

    @property
    def _is_zero3(self) -> Array:
        """Whether layers gather their own weights, which they do not in stages."""
        return (self.layouts.replicas == ZERO3) & ~self._has_stages

    @property
    def _are_weights_hosted(self) -> Array:
        """Whether the fp32 weights are in the hosts' memory."""
        return self.sizes.is_master_hosted & (self.layouts.replicas > ZERO1)

    @property
    def _gather_ways(self) -> Array:
        """Devices over which a layer's weights are gathered."""
        return np.where(self._is_zero3, self.layouts.data, self.layouts.fsdp)

    @property
    def _recomputes_stage(self) -> Array:
        """Whether a stage's backward pass runs its forward pass again."""
        return self._has_stages & (self.layouts.keeps_residuals == 0)

    @property
    def _residual_bytes(self) -> Array:
        """Bytes of the residual stream of a microbatch on a device."""
        layouts = self.layouts
        ways = np.where(layouts.sequence_parallel > 0, layouts.tensor, 1)
        return _BF16 * self._tokens * self.sizes.d_model / ways

    @property
    def _widths(self) -> tuple[Array, Array, Array, Array]:
        """Returns the widths on a device: of the queries, of the keys, of the MLP's hidden layer,
        and of what its first matmul writes.
        """
        sizes = self.sizes
        t = self.layouts.tensor
        mlp = sizes.d_ff / t
        up = mlp * (2 if sizes.is_gated else 1)
        return sizes.heads * sizes.head_dim / t, sizes.kv_heads * sizes.head_dim / t, mlp, up

    @property
    def _layer_params(self) -> Array:
        """Elements of the layers of a stage on a device that gathers nothing."""
        sizes = self.sizes
        each = sizes.matrices / self.layouts.tensor + sizes.vectors
        return self._layers * each / self.layouts.fsdp

    @property
    def _end_params(self) -> Array:
        """Elements of embedding and head on a device, which every stage has."""
        sizes = self.sizes
        return (sizes.tables / self.layouts.tensor + sizes.positions) / self.layouts.fsdp

    def _by_remat(self, values: ByRemat) -> Array:
        return np.take(np.asarray(values), self.layouts.remat.astype(int))

    # Kernels.

    def _matmul(self, m: Array, n: Array, k: Array, result_bytes: float = _BF16) -> Array:
        """Seconds of a matmul [m, k] x [k, n]."""
        smallest = np.minimum(np.minimum(m, n), k)
        rate = self.hardware.matmul * smallest / (smallest + self.constants.ramp)
        moved = _BF16 * (m * k + n * k) + result_bytes * m * n
        busy = 2 * m * n * k / rate
        return np.maximum(busy, moved / self.hardware.memory_bandwidth) + self.hardware.kernel

    def _both_ways(self, n: Array, k: Array) -> tuple[Array, Array]:
        """Seconds of tokens [T, k] times a matrix [k, n]: forward, and both of the backward
        pass.
        """
        tokens = self._tokens
        forward = self._matmul(tokens, n, k)
        return forward, self._matmul(tokens, k, n) + self._matmul(n, k, tokens)

    def _moving(self, n_bytes: Array) -> Array:
        return n_bytes / self.hardware.memory_bandwidth

    # Links.

    def _group(self, ways: Array, stride: Array) -> tuple[Array, Array]:
        """Returns (members of a group in one node, nodes that it spans) of `ways` devices that are
        `stride` apart.
        """
        # A group that neither fills nodes nor divides one has together what divides both.
        together = np.gcd((ways * stride).astype(np.int64), self.hardware.node)
        inside = np.clip(np.floor(together / stride), 1, ways)
        return inside, ways / inside

    def _collective(self, payload: Array, ways: Array, stride: Array, *kinds: str) -> Array:
        """Seconds of a collective; of several kinds, which differ in what was measured, the mean.

        payload: bytes of the whole array.
        """
        if not self.hardware.measured:
            return self._of_kind(payload, ways, stride, kinds[0])
        each = [self._of_kind(payload, ways, stride, kind) for kind in kinds]
        return np.mean(each, axis=0)

    def _of_kind(self, payload: Array, ways: Array, stride: Array, kind: str) -> Array:
        hardware = self.hardware
        inside, nodes = self._group(ways, stride)
        rounds = 2 if kind == _SUM else 1
        wire = rounds * payload * (ways - 1) / ways
        bandwidth = self._bandwidth(kind, inside, nodes)
        steps = 2 * np.ceil(np.log2(np.maximum(nodes, 1))) if kind == _SUM else nodes - 1
        latency = hardware.start + hardware.nvlink_step * (inside - 1)
        latency = latency + hardware.network_step * steps
        latency = latency + np.where(nodes > 1, hardware.start_between_nodes, 0)
        latency = latency * self._latency_scale(kind, nodes)
        return np.where(ways > 1, wire / bandwidth + latency, 0.0)

    def _bandwidth(self, kind: str, inside: Array, nodes: Array) -> Array:
        """Bytes/s of what a device sends in a ring, `inside` members of which are in each node."""
        hardware = self.hardware
        nvlink = hardware.nvlink
        network = np.minimum(hardware.nvlink, inside * hardware.network)
        measured_nvlink = hardware.measured.get((kind, "NVLink"))
        if measured_nvlink:
            nvlink = measured_nvlink.bandwidth
        measured_network = hardware.measured.get((kind, "network"))
        if measured_network:
            ports = inside * measured_network.bandwidth
            network = np.minimum(measured_network.most, ports)
        return np.where(nodes > 1, network, nvlink)

    def _latency_scale(self, kind: str, nodes: Array) -> Array:
        """The latency that was measured, over the assumed one."""
        nvlink = self.hardware.measured.get((kind, "NVLink"))
        network = self.hardware.measured.get((kind, "network"))
        return np.where(
            nodes > 1, network.latency if network else 1.0, nvlink.latency if nvlink else 1.0
        )

    def _hop(self, payload: Array) -> Array:
        """Seconds of a send from one stage to the next."""
        layouts = self.layouts
        hardware = self.hardware
        stride = layouts.data * layouts.fsdp * layouts.tensor
        is_far = stride >= hardware.node
        nodes = np.where(is_far, 2, 1)
        bandwidth = self._bandwidth(_SEND, np.ones_like(stride), nodes)
        scale = self._latency_scale(_SEND, nodes)
        near_latency = hardware.start + hardware.nvlink_step
        far_latency = hardware.start_between_nodes + hardware.network_step
        if not hardware.measured:
            # In the order in which the formulas have always added them, to the last bit.
            seconds = payload / bandwidth + hardware.start + hardware.nvlink_step
            return seconds + far_latency * is_far
        return payload / bandwidth + scale * (near_latency + far_latency * is_far)

    # Parts of a step.

    def _layer(self) -> _Layer:
        sizes = self.sizes
        layouts = self.layouts
        q, kv, mlp, up = self._widths
        d_model = np.full_like(q, sizes.d_model)
        if sizes.heads == sizes.kv_heads:
            inputs = [self._both_ways(q + 2 * kv, d_model)]
        else:
            inputs = [self._both_ways(q, d_model), self._both_ways(2 * kv, d_model)]
        first = self._both_ways(up, d_model)
        second = self._both_ways(d_model, mlp)
        matmuls = [*inputs, self._both_ways(d_model, q), first, second]
        forward = sum((one[0] for one in matmuls), np.zeros_like(q))
        backward = sum((one[1] for one in matmuls), np.zeros_like(q))

        # Causal: half of the pairs, two matmuls forward; the backward has five.
        attention_flops = 2 * self._tokens * sizes.seq_len * q
        attention = attention_flops / self.hardware.attention
        attention_backward = 2.5 * attention_flops / self.hardware.attention_backward

        is_full = layouts.remat == FULL
        again = self._recomputes_stage
        elementwise = self._moving(self._elementwise_bytes())
        recomputed = np.where(is_full, forward - second[0] + attention, 0)
        recomputed = np.where(layouts.remat == SAVE_ATTENTION, first[0], recomputed)
        recomputed = recomputed + again * (forward + attention)
        forward = forward + attention + 0.35 * elementwise
        backward = backward + attention_backward + recomputed + 0.65 * elementwise
        return _Layer(forward, backward, self._exposed_of_layer(forward + backward))

    def _elementwise_bytes(self) -> Array:
        """Bytes that a layer's kernels without matmuls move in a microbatch."""
        constants = self.constants
        q, kv, mlp, up = self._widths
        tokens = self._tokens
        moved = self._by_remat(constants.residual_traffic) * self._residual_bytes
        attention_bytes = _BF16 * tokens * (2 * q + 2 * kv)
        moved = moved + self._by_remat(constants.attention_traffic) * attention_bytes
        moved = moved + self._by_remat(constants.mlp_traffic) * _BF16 * tokens * (up + mlp)
        moved = moved * np.where(self.layouts.unroll > 0, constants.unrolled_traffic, 1)
        gathers, scatters, _ = self._tensor_collectives()
        whole = _BF16 * tokens * self.sizes.d_model
        has_several = tokens > self.sizes.seq_len
        transposed = constants.gathered_traffic * (gathers + scatters) * whole
        return moved + np.where((self.layouts.tensor > 1) & has_several, transposed, 0)

    def _tensor_collectives(self) -> tuple[Array, Array, Array]:
        """Returns how many all-gathers, reduce-scatters and all-reduces over `tensor` a layer has
        in a microbatch.
        """
        layouts = self.layouts
        is_parallel = layouts.sequence_parallel > 0
        again = 2 * self._recomputes_stage
        is_full = layouts.remat == FULL
        gathers = np.where(is_parallel, 4 + 2 * (layouts.remat != NONE) + again, 0)
        sums = 4 + is_full + again
        return gathers, np.where(is_parallel, sums, 0), np.where(is_parallel, 0, sums)

    def _exposed_of_layer(self, compute: Array) -> Array:
        """Seconds that a layer and microbatch waits for its collectives."""
        sizes = self.sizes
        layouts = self.layouts
        constants = self.constants
        t = layouts.tensor
        is_zero3 = self._is_zero3
        again = self._recomputes_stage

        activations = _BF16 * self._tokens * sizes.d_model
        ones = np.ones_like(t)
        half = self._collective(activations, t, ones, _GATHER, _SCATTER)
        whole = self._collective(activations, t, ones, _SUM)
        gathers, scatters, sums = self._tensor_collectives()
        tensor = (gathers + scatters) * half + sums * whole
        hidden_share = self._by_remat(constants.hidden_tensor)
        hidden_share = np.where(is_zero3, constants.hidden_tensor_zero3, hidden_share)
        most = np.where(again, constants.hidden_tensor_recomputed, 1)
        tensor_hidden = tensor * np.minimum(hidden_share, most)

        ways = self._gather_ways
        weights = _BF16 * sizes.matrices / t
        # The matrices of a layer are gathered one by one, and scattered together.
        n_matrices = 4 if sizes.heads == sizes.kv_heads else 5
        gather = n_matrices * self._collective(weights / n_matrices, ways, t, _GATHER)
        gather = gather * (2 + again - layouts.kept_share)
        # Layers that make their own sums make them in float32, XLA in the type of the matmul.
        sum_bytes = np.where(is_zero3, _F32, _BF16)
        if self.sizes.reduction != "auto":
            sum_bytes = _F32 if self.sizes.reduction == "float32" else _BF16
        scatter = self._collective(weights / _BF16 * sum_bytes, ways, t, _SCATTER)
        is_far = self._group(ways, t)[1] > 1
        gather_share = np.where(
            is_far, constants.hidden_gather_network, constants.hidden_gather_nvlink
        )
        scatter_share = np.where(
            is_far, constants.hidden_scatter_network, constants.hidden_scatter_nvlink
        )
        gather_hidden = gather * np.where(is_zero3, constants.hidden_zero3, gather_share)
        scatter_hidden = scatter * np.where(is_zero3, constants.hidden_zero3, scatter_share)

        weights_hidden = gather_hidden + scatter_hidden
        together = np.minimum(tensor_hidden + weights_hidden, constants.window * compute)
        # The flags for zero3 let collectives of both kinds run at once.
        apart = np.minimum(tensor_hidden, compute) + np.minimum(weights_hidden, compute)
        return tensor + gather + scatter - np.where(is_zero3, apart, together)

    def _ends(self) -> _Once:
        """Returns the costs of embedding, head and loss in a microbatch."""
        sizes = self.sizes
        layouts = self.layouts
        constants = self.constants
        t = layouts.tensor
        tokens = self._tokens
        vocab = sizes.vocab / t
        d_model = np.full_like(t, sizes.d_model)
        chunk = np.minimum(tokens, sizes.loss_chunk)
        n_chunks = np.ceil(tokens / sizes.loss_chunk)
        loss = self._matmul(chunk, vocab, d_model, _F32) + self._matmul(chunk, d_model, vocab)
        loss = loss + self._matmul(vocab, d_model, chunk, 2 * _F32)
        loss = n_chunks * (loss + self._moving(chunk * vocab * constants.logit_bytes))
        table = _BF16 * sizes.vocab * sizes.d_model / t
        activations = _BF16 * tokens * sizes.d_model
        compute = loss + self._moving(8 * activations + 2 * table / layouts.fsdp)

        ones = np.ones_like(t)
        rounds = 4 * self._collective(activations, t, ones, _GATHER, _SCATTER)
        of_chunks = n_chunks * 3 * self._collective(_F32 * chunk, t, ones, _SUM)
        n_tables = 1 if sizes.is_tied else 2
        gather = self._collective(table, layouts.fsdp, t, _GATHER)
        scatter = self._collective(2 * table, layouts.fsdp, t, _SCATTER)
        waited = constants.exposed_tables * (n_tables * gather + 2 * scatter)
        return _Once(compute, rounds + of_chunks + waited)

    def _ticks(self) -> tuple[Array, Array]:
        """Returns the ticks in which some stage goes forward, of which there are as many backward,
        and the ticks in all.
        """
        layouts = self.layouts
        p, v = layouts.pipeline, layouts.chunks
        work = layouts.microbatches * v
        forward = np.where(self._has_stages, work + p - 1, work)
        every = np.where(self._has_stages, work + 2 * (p - 1) + (v - 1) * p, work)
        return forward, every

    def _hops(self, layer: _Layer, ticks: Array, every: Array, layers_of_tick: Array) -> Array:
        """Seconds that stages wait for each other's activations."""
        send = np.where(self._has_stages, self._hop(self._residual_bytes), 0)
        alone = 2 * (every - ticks)
        beside = np.maximum(send - layers_of_tick * layer.forward, 0)
        beside = beside + np.maximum(send - layers_of_tick * layer.backward, 0)
        return np.where(self._has_stages, alone * send + (every - alone) * beside, 0)

    def _accumulation(self, every_tick: Array) -> Array:
        """Seconds for adding up gradients of microbatches, and for a pipeline's stash."""
        layouts = self.layouts
        constants = self.constants
        params = self._layer_params + self._end_params
        added = np.where(layouts.microbatches > 1, layouts.microbatches * params, 0)
        added = added * constants.accumulated_bytes / np.where(self._is_zero3, layouts.data, 1)
        per_tick = self._layers_of_chunk
        stash = np.where(
            layouts.keeps_residuals > 0,
            4 * per_tick * self._kept_bytes(),
            4 * self._residual_bytes,
        )
        chunk_params = self._layer_params / layouts.chunks
        in_tick = chunk_params * constants.accumulated_bytes + 24 * self._end_params + stash
        # Weights and gradients of a chunk with several layers are slices of the stack.
        is_sliced = (layouts.chunks > 1) & (per_tick > 1)
        in_tick = in_tick + np.where(is_sliced, 24 * chunk_params, 0)
        in_ticks = constants.tick_share * every_tick * in_tick
        return self._moving(np.where(self._has_stages, in_ticks, added))

    def _once(self) -> _Once:
        """Returns the costs of the sums over replicas and of the optimizer."""
        layouts = self.layouts
        constants = self.constants
        stride = layouts.fsdp * layouts.tensor
        sum_bytes = _BF16 if self.sizes.reduction == "bfloat16" else _F32
        summed = self._layer_params + np.where(self._has_stages, 0, self._end_params)
        gradients = sum_bytes * summed
        data = layouts.data
        scatter = self._collective(gradients, data, stride, _SCATTER)
        gather_weights = self._collective(_BF16 * summed, data, stride, _GATHER)
        all_reduce = self._collective(gradients, data, stride, _SUM)
        is_sharded = layouts.replicas > ZERO1
        sums = np.where(is_sharded, scatter + gather_weights, all_reduce)
        sums = sums + np.where(layouts.replicas == ZERO1, 2 * gather_weights, 0)
        # With zero3 each layer has made its own, and only those of the tables are left.
        tables = self._collective(sum_bytes * self._end_params, data, stride, _SCATTER)
        tables = tables + self._collective(_BF16 * self._end_params, data, stride, _GATHER)
        sums = np.where(self._is_zero3, 0, sums)
        of_ends = self._collective(_F32 * self._end_params, data * layouts.pipeline, stride, _SUM)
        sums = sums + np.where(self._has_stages, of_ends, 0)
        sharded = np.where(layouts.replicas >= ZERO1, data, 1)
        params = (self._layer_params + self._end_params) / sharded
        update = self._moving(params * constants.updated_bytes)
        exposed = sums * (1 - constants.hidden_sums)
        exposed = exposed + self._is_zero3 * constants.exposed_tables_zero3 * tables
        return _Once(update + self._host_copies(params), exposed)

    def _host_copies(self, params: Array) -> Array:
        """Returns the seconds of a step for which compute waits for copies from and to the host.

        params: elements of the optimizer's state on a device.
        """
        sizes = self.sizes
        layouts = self.layouts
        updated = 2 * params * (sizes.hosted_moments + _F32 * self._are_weights_hosted)
        # With zero3 each microbatch copies the weights of each layer twice, a layer ahead.
        streams = self._are_weights_hosted & self._is_zero3
        layers = _F32 * self._layer_params / np.where(self._is_zero3, layouts.data, 1)
        streamed = streams * 2 * layouts.microbatches * layers
        return (updated + _EXPOSED_STREAM * streamed) / self.hardware.pcie

    # Memory.

    def _kept_bytes(self) -> Array:
        """Bytes of a layer's residuals in a microbatch."""
        sizes = self.sizes
        layouts = self.layouts
        q, kv, mlp, up = self._widths
        tokens = self._tokens
        stream = self._residual_bytes
        statistics = _F32 * tokens * sizes.heads / layouts.tensor
        names = 2 * stream + _BF16 * tokens * (2 * q + 2 * kv + up) + statistics
        everything = names + 4 * tokens * sizes.d_model + _BF16 * tokens * mlp
        kept = np.where(layouts.remat == FULL, stream, everything)
        kept = np.where(layouts.remat == SAVE_ATTENTION, names - _BF16 * tokens * up, kept)
        return np.where(layouts.remat == SAVE_NAMES, names, kept)

    def _peak(self) -> Array:
        """Bytes at the peak: the most of three phases, in the loss, in the layers' backward pass
        and in the optimizer.
        """
        sizes = self.sizes
        layouts = self.layouts
        t = layouts.tensor
        q, kv, mlp, up = self._widths
        tokens = self._tokens
        stream = self._residual_bytes
        has_stages = self._has_stages
        is_zero3 = self._is_zero3
        moment_ways = np.where(layouts.replicas >= ZERO1, layouts.data, 1)

        params = self._layer_params + self._end_params
        # The layers of distributed, and of zero3 in stages, use a copy in bf16 of sharded weights.
        has_copy = (layouts.replicas > ZERO1) & ~is_zero3
        sharded_ways = np.where(layouts.replicas > ZERO1, layouts.data, 1)
        weights = np.where(self._are_weights_hosted, 0, _F32 * params / sharded_ways)
        stored = weights + np.where(has_copy, _BF16 * params, 0)
        moments = (2 * _F32 - sizes.hosted_moments) * params / moment_ways
        gradient_ways = np.where(is_zero3, layouts.data, 1)
        layer_gradients = _F32 * self._layer_params / gradient_ways
        # Without stages the gradients of layers are added in place.
        summed_apart = np.where(has_stages, params, self._end_params)
        accumulated = np.where(layouts.microbatches > 1, _F32 * summed_apart / gradient_ways, 0)

        kept = self._kept_bytes()
        per_chunk = self._layers_of_chunk
        p, v, m = layouts.pipeline, layouts.chunks, layouts.microbatches
        interleaved = np.minimum(m * v, 2 * (p - 1) + (v - 1) * p + 1)
        in_flight = 1 + np.where(v > 1, interleaved, np.minimum(m, 2 * p - 1))
        stash = np.where(
            layouts.keeps_residuals > 0,
            in_flight * (per_chunk * kept + stream),
            in_flight * stream + per_chunk * kept,
        )
        residuals = np.where(has_stages, stash, self._layers * kept)
        hidden = _BF16 * tokens * up
        unrolled = self._by_remat(self.constants.unrolled_memory) * self._layers * hidden
        residuals = residuals + layouts.unroll * unrolled

        layer_weights = _BF16 * sizes.matrices / t
        gathers = self._gather_ways > 1
        in_use = np.where(gathers, 2, 1) * layer_weights
        in_use = in_use + layouts.kept_share * self._layers * layer_weights
        table = _BF16 * sizes.vocab * sizes.d_model / t
        logits = 10.0 * np.minimum(tokens, sizes.loss_chunk) * sizes.vocab / t
        is_transposed = (t > 1) & (layouts.sequence_parallel > 0)
        work = _BF16 * tokens * (2 * sizes.d_model + 3 * q + 2 * kv + 2 * up + mlp) + 2 * stream
        work = work + np.where(is_transposed, 4 * tokens * sizes.d_model, 0)

        base = stored + moments + 8 * tokens * m
        head = np.where(gathers, 4 * table, 2 * table + np.minimum(logits, table))
        in_loss = base + accumulated + residuals + head + np.where(has_stages, 0, layer_gradients)
        in_loss = in_loss + layouts.kept_share * self._layers * layer_weights
        end_gradients = np.where(gathers, 2 * table, _F32 * sizes.tables / t)
        chunk_gradients = layer_gradients / np.where(has_stages, v, 1)
        sliced = np.where(has_stages & (v > 1), chunk_gradients, 0)
        in_layers = base + accumulated + residuals + chunk_gradients + sliced
        in_layers = in_layers + end_gradients + in_use + work
        in_update = base + _F32 * params / gradient_ways
        most = np.maximum(np.maximum(in_loss, in_layers), in_update)
        return (1 + self.constants.fragmentation_share) * most
