"""A decoder in plain PyTorch with the shapes of mesh_lm's, GPT or Llama, to compare with
torch.compile and SDPA."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FIELDS = (
    "vocab_size", "seq_len", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "positions",
    "rope_theta", "norm", "norm_eps",
    "activation", "biases", "tied",
)  # fmt: skip
"""Fields of mesh_lm's DecoderConfig, with derived ones filled in."""


class Decoder(nn.Module):
    """Returns the mean cross-entropy of the next tokens of `tokens` [B, S + 1]."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        f = {name: fields[name] for name in FIELDS}
        self.embedding = nn.Embedding(f["vocab_size"], f["d_model"])
        self.positions = (
            nn.Embedding(f["seq_len"], f["d_model"]) if f["positions"] == "learned" else None
        )
        self.blocks = nn.ModuleList(Block(f) for _ in range(f["n_layers"]))
        self.norm = _norm(f)
        self.head = nn.Linear(f["d_model"], f["vocab_size"], bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(
                    parameter, std=0.02 / (math.sqrt(2 * f["n_layers"]) if "into" in name else 1)
                )
        if f["tied"]:
            self.head.weight = self.embedding.weight
        if f["positions"] == "rotary":
            width = f["d_model"] // f["n_heads"]
            frequency = f["rope_theta"] ** (-torch.arange(0, width, 2) / width)
            angles = torch.arange(f["seq_len"])[:, None] * frequency
            self.register_buffer("cos", angles.cos()[None, :, None], persistent=False)
            self.register_buffer("sin", angles.sin()[None, :, None], persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs)
        rope = None if self.positions is not None else (self.cos, self.sin)
        if self.positions is not None:
            x = x + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x, rope)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


class Block(nn.Module):
    def __init__(self, f: dict[str, Any]) -> None:
        super().__init__()
        d, bias = f["d_model"], f["biases"]
        self.heads, self.kv_heads, self.width = f["n_heads"], f["n_kv_heads"], d // f["n_heads"]
        self.qkv = nn.Linear(d, (self.heads + 2 * self.kv_heads) * self.width, bias=bias)
        self.attention_into = nn.Linear(d, d, bias=bias)
        self.swiglu = f["activation"] == "swiglu"
        self.up = nn.Linear(d, f["d_ff"] * (2 if self.swiglu else 1), bias=bias)
        self.mlp_into = nn.Linear(f["d_ff"], d, bias=bias)
        self.norm1, self.norm2 = _norm(f), _norm(f)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        B, S, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, S, -1, self.width)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if rope is not None:
            q, k = _rotate(q, *rope), _rotate(k, *rope)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + self.attention_into(y.transpose(1, 2).reshape(B, S, -1))
        up = self.up(self.norm2(x))
        if self.swiglu:
            gate, up = up.chunk(2, dim=-1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(up, approximate="tanh")
        return x + self.mlp_into(h)


def _norm(f: dict[str, Any]) -> nn.Module:
    if f["norm"] == "rmsnorm":
        return nn.RMSNorm(f["d_model"], eps=f["norm_eps"])
    return nn.LayerNorm(f["d_model"], eps=f["norm_eps"], bias=f["biases"])


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
