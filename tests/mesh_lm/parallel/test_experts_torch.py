"""Thirty steps of a mixture of experts on eight devices against PyTorch in float64, which computes
every expert of every token in a loop, and has none of the project's code."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from experts_model import EXPERTS, MODEL
from support import SEQ, host_batch, initial, on_devices, shard_on

from mesh_lm.config import OptimizerConfig
from mesh_lm.optim import AdamW, Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state.initial import fresh_state
from mesh_lm.training.step import train_step

COMPILE_BUDGET = 20
pytestmark = pytest.mark.slow
STEPS = 30
RATE = 1e-2
RULE = AdamW(eps=1e-3)
"""With an eps that does not amplify the rounding of gradients near 0."""


def losses_on_devices() -> list[float]:
    layout = ModelLayout.of(MODEL, shard_on("experts_padded", data=2, expert=4))
    config = OptimizerConfig(
        RULE, learning_rate=RATE, warmup_steps=0, schedule="constant", clip_norm=0, weight_decay=0
    )
    optimizer = Optimizer(config, STEPS)
    params = initial(ModelLayout.of(MODEL, shard_on("ddp")))
    everywhere = jax.NamedSharding(layout.shard.mesh, jax.P())
    weights = {name: jax.device_put(x, everywhere) for name, x in params.items()}
    state = fresh_state(layout, optimizer, weights)
    step = train_step(layout, optimizer, seed=0)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, on_devices(host_batch(1, number % 4), layout))
        losses.append(float(metrics["loss"]))
    return losses


class Twin:
    """The same model in PyTorch."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        arrays = initial(ModelLayout.of(MODEL, shard_on("ddp")))
        arrays = {name: torch.tensor(x, dtype=torch.float64) for name, x in arrays.items()}
        self.bias = arrays.pop("blocks.experts.bias")
        self.params = {name: x.requires_grad_() for name, x in arrays.items()}

    def norm(self, x: Any, scale: Any) -> Any:
        return x / self.torch.sqrt((x**2).mean(-1, keepdim=True) + MODEL.norm_eps) * scale

    def attention(self, x: Any, layer: int) -> Any:
        torch = self.torch
        own = {
            name.removeprefix("blocks.attention."): array[layer]
            for name, array in self.params.items()
            if name.startswith("blocks.attention.")
        }
        half = MODEL.d_head // 2
        angles = torch.arange(SEQ, dtype=torch.float64)[:, None, None] * torch.tensor(
            [MODEL.rope_theta ** (-i / half) for i in range(half)], dtype=torch.float64
        )

        def rotated(x: Any) -> Any:
            a, b = x[..., :half], x[..., half:]
            cos, sin = torch.cos(angles), torch.sin(angles)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q = rotated(torch.einsum("bsd,dnh->bsnh", x, own["q.weight"]))
        kv = torch.einsum("bsd,dfkh->bsfkh", x, own["kv.weight"])
        k, v = rotated(kv[:, :, 0]), kv[:, :, 1]
        group = MODEL.n_heads // MODEL.kv_heads
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        scores = torch.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(MODEL.d_head)
        future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        p = torch.softmax(scores.masked_fill(future, -math.inf), -1)
        return torch.einsum("bnst,btnh,dnh->bsd", p, v, own["out.weight"])

    def mlp(self, x: Any, up: Any, down: Any) -> Any:
        """up: [D, 2, F]; down: [F, D]."""
        hidden = self.torch.nn.functional.silu(x @ up[:, 0]) * (x @ up[:, 1])
        return hidden @ down

    def experts(self, x: Any, weights: Any, layer: int) -> tuple[Any, Any, Any]:
        """Returns (outputs, auxiliary losses, loads)."""
        torch = self.torch
        own = {
            name.removeprefix("blocks."): array[layer]
            for name, array in self.params.items()
            if name.startswith(("blocks.experts.", "blocks.shared_expert."))
        }
        logits = x @ own["experts.router"]
        scores = torch.sigmoid(logits)
        y = self.mlp(x, own["shared_expert.up.weight"], own["shared_expert.down.weight"].T)
        chosen = torch.zeros_like(scores)
        for b in range(x.shape[0]):
            for s in range(x.shape[1]):
                rank = (scores[b, s] + self.bias[layer]).detach().reshape(EXPERTS.groups, -1)
                best = rank.topk(2, -1).values.sum(-1).topk(EXPERTS.active_groups).indices
                outside = torch.full_like(rank, -math.inf)
                outside[best] = rank[best]
                chosen[b, s, outside.reshape(-1).topk(EXPERTS.active).indices] = 1
        gates = chosen * scores
        gates = EXPERTS.scale * gates / gates.sum(-1, keepdim=True)
        for e in range(EXPERTS.number):
            each = self.mlp(x, own["experts.up"][e], own["experts.down"][e])
            y = y + gates[..., e, None] * each
        z = EXPERTS.z_loss * (weights * torch.logsumexp(logits, -1) ** 2).sum()
        frequency = chosen.mean(1) * EXPERTS.number / EXPERTS.active
        mean_scores = (scores / scores.sum(-1, keepdim=True)).mean(1)
        balance = ((frequency * mean_scores).sum(-1) * weights.sum(1)).sum()
        return y, z + EXPERTS.balance_loss * balance, chosen.sum((0, 1))

    def step_loss(self, batch: dict[str, Any]) -> tuple[Any, Any, list[Any]]:
        """Returns (mean loss, mean objective, loads of each layer)."""
        torch = self.torch
        params = self.params
        x = params["embedding"][batch["tokens"]]
        weights = batch["weights"]
        auxiliary, loads = 0.0, []
        for layer in range(MODEL.n_layers):
            h = self.norm(x, params["blocks.attention_norm.scale"][layer])
            x = x + self.attention(h, layer)
            h = self.norm(x, params["blocks.mlp_norm.scale"][layer])
            y, losses, load = self.experts(h, weights, layer)
            x = x + y
            auxiliary = auxiliary + losses
            loads.append(load)
        x = self.norm(x, params["norm.scale"])
        logits = (x @ params["head"].T)[..., : MODEL.vocab_size]
        p = torch.log_softmax(logits, -1).gather(-1, batch["labels"][..., None])[..., 0]
        loss = -(weights * p).sum()
        return loss / weights.sum(), (loss + auxiliary) / weights.sum(), loads

    def losses(self) -> list[float]:
        torch = self.torch
        moments = {
            name: (torch.zeros_like(x), torch.zeros_like(x)) for name, x in self.params.items()
        }
        losses = []
        for number in range(STEPS):
            raw = host_batch(1, number % 4)
            batch = {
                "tokens": torch.tensor(raw["tokens"][0], dtype=torch.long),
                "labels": torch.tensor(raw["labels"][0], dtype=torch.long),
                "weights": torch.tensor(raw["weights"][0], dtype=torch.float64),
            }
            loss, objective, loads = self.step_loss(batch)
            losses.append(float(loss.detach()))
            grads = torch.autograd.grad(objective, list(self.params.values()))
            with torch.no_grad():
                for (name, x), g in zip(self.params.items(), grads, strict=True):
                    mu, nu = moments[name]
                    mu.mul_(RULE.beta1).add_((1 - RULE.beta1) * g)
                    nu.mul_(RULE.beta2).add_((1 - RULE.beta2) * g**2)
                    mu_hat = mu / (1 - RULE.beta1 ** (number + 1))
                    nu_hat = nu / (1 - RULE.beta2 ** (number + 1))
                    x -= RATE * mu_hat / (nu_hat.sqrt() + RULE.eps)
                for layer, load in enumerate(loads):
                    self.bias[layer] += EXPERTS.bias_rate * torch.sign(load.mean() - load)
        return losses


def test_thirty_steps_equal_torch() -> None:
    torch = pytest.importorskip("torch")
    wanted = Twin(torch).losses()
    assert wanted[-1] < wanted[0] - 0.5, "the model learns"
    np.testing.assert_allclose(losses_on_devices(), wanted, rtol=1e-6)
