"""The layers of a Qwen3.5 text model, for training on a CPU.

The parameters carry the names of transformers' `Qwen3_5ForCausalLM` and the mathematics is the same
(`tests/test_demo_training.py` compares logits). What differs is the cost of a step: projections
that read the same input are one matrix product, the triangular system of the delta rule is inverted
by squaring, work that needs no recurrent state is done for all chunks at once, and every matrix
product may run in bfloat16 under `torch.autocast`.
"""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .config import DemoConfig

CHUNK = 32


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain of 1 + weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight, self.eps)


class GatedRMSNorm(nn.Module):
    """Root-mean-square norm with a plain gain, then multiplied by silu(gate)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps) * F.silu(
            gate.float()
        )


def fused_linear(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """The outputs of several linear layers on one input, from a single matrix product."""
    out = F.linear(x, torch.cat([layer.weight for layer in layers]))
    return out.split([layer.out_features for layer in layers], dim=-1)


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower triangular L [..., n, n].

    It is the product (I + N)(I + N^2)(I + N^4)... with N = -L, for N^n is zero.
    """

    @staticmethod
    def forward(ctx, lower: Tensor) -> Tensor:
        n = lower.shape[-1]
        power = -lower
        inverse = power + torch.eye(n, dtype=lower.dtype)
        for _ in range(math.ceil(math.log2(n)) - 1):
            power = power @ power
            inverse = inverse + inverse @ power
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.mT
        return -(transposed @ grad.to(inverse.dtype) @ transposed)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK
) -> Tensor:
    """The gated delta rule in chunk form, from a zero state.

    q, k: [B, T, Hk, D] (not yet normalised); v: [B, T, Hv, D]; g (log decay), beta: [B, T, Hv].
    Returns [B, T, Hv, D]. Value head h uses key head h // (Hv // Hk).
    """
    batch, length, key_heads, dim = q.shape
    heads = v.shape[2]
    group = heads // key_heads
    pad = -length % chunk
    chunks = (length + pad) // chunk

    def chunked(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [B, H, chunks, chunk, ...]
        if pad:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, pad))
        return x.reshape(batch, chunks, chunk, *x.shape[2:]).movedim(3, 1)

    def per_value_head(x: Tensor) -> Tensor:
        return x if group == 1 else x.repeat_interleave(group, dim=1)

    q, k = (
        x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)
    )
    q, k, v, g, beta = (chunked(x) for x in (q * dim**-0.5, k, v.float(), g, beta))
    total = g.cumsum(-1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    reach = total.exp()[..., None]

    system = per_value_head(k @ k.mT).float() * decay * beta[..., None]
    with torch.autocast("cpu", enabled=False):
        inverse = UnitLowerInverse.apply(system.tril(-1))
    intra = per_value_head(q @ k.mT) * decay
    q, k = per_value_head(q), per_value_head(k)
    values = inverse @ (v * beta[..., None])
    reads = inverse @ (k * (beta[..., None] * reach))
    writes = (k * (total[..., -1:] - total).exp()[..., None]).mT
    keep = reach[..., -1:, :]

    state = torch.zeros(batch, heads, dim, dim)
    states, updates = [], []
    for value, read, write, kept in zip(
        values.unbind(2), reads.unbind(2), writes.unbind(2), keep.unbind(2), strict=True
    ):
        update = value - read @ state
        states.append(state)
        updates.append(update)
        state = state * kept + write @ update
    out = (q * reach) @ torch.stack(states, 2) + intra @ torch.stack(updates, 2)
    return out.movedim(1, 3).reshape(batch, chunks * chunk, heads, dim)[:, :length]


class GatedDeltaNet(nn.Module):
    """The linear-attention mixer: causal convolution, gated delta rule, gated norm."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.dim, self.key_heads, self.heads = (
            cfg.linear_head_dim,
            cfg.linear_num_key_heads,
            cfg.linear_num_value_heads,
        )
        keys, values = self.dim * self.key_heads, self.dim * self.heads
        self.in_proj_qkv = nn.Linear(cfg.hidden_size, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(cfg.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(cfg.hidden_size, self.heads, bias=False)
        self.in_proj_a = nn.Linear(cfg.hidden_size, self.heads, bias=False)
        self.conv1d = nn.Conv1d(
            2 * keys + values, 2 * keys + values, 4, groups=2 * keys + values, bias=False
        )
        steps = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(
            steps + torch.log(-torch.expm1(-steps))
        )  # inverse softplus of the step
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.norm = GatedRMSNorm(self.dim, cfg.rms_norm_eps)
        self.out_proj = nn.Linear(values, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv, z, b, a = fused_linear(
            x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        )
        padded, taps = F.pad(qkv, (0, 0, 3, 0)), self.conv1d.weight[:, 0].to(qkv.dtype)
        qkv = F.silu(sum(padded[:, i : i + length] * taps[:, i] for i in range(4)))
        keys = self.dim * self.key_heads
        q, k, v = (
            y.reshape(batch, length, -1, self.dim)
            for y in qkv.split([keys, keys, self.dim * self.heads], -1)
        )
        g = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        out = gated_delta_rule(q, k, v, g, b.float().sigmoid())
        out = self.norm(out, z.reshape(batch, length, self.heads, self.dim))
        return self.out_proj(out.reshape(batch, length, -1))


def rotary(cfg: DemoConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, rotary_dim] for text positions (where M-RoPE equals plain RoPE)."""
    steps = torch.arange(0, cfg.rotary_dim, 2, dtype=torch.float32)
    angles = positions[:, None].float() / cfg.rope_theta ** (steps / cfg.rotary_dim)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the leading part of x [B, H, T, D]."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


class Attention(nn.Module):
    """Gated grouped-query attention with norms on queries and keys."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.dim, self.heads, self.kv_heads = (
            cfg.head_dim,
            cfg.num_attention_heads,
            cfg.num_key_value_heads,
        )
        self.q_proj = nn.Linear(cfg.hidden_size, 2 * self.dim * self.heads, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, self.dim * self.kv_heads, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, self.dim * self.kv_heads, bias=False)
        self.o_proj = nn.Linear(self.dim * self.heads, cfg.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(self.dim, cfg.rms_norm_eps),
            RMSNorm(self.dim, cfg.rms_norm_eps),
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        past: list[tuple[Tensor, Tensor]] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over x or, with `past`, masked attention over past calls' keys too.

        `past` is extended by this call's keys and values; `mask` is [T, all keys], True where
        attended.
        """
        batch, length, _ = x.shape
        q, k, v = fused_linear(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = q.reshape(batch, length, self.heads, 2, self.dim).unbind(3)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(
            self.k_norm(k.reshape(batch, length, self.kv_heads, self.dim)).transpose(1, 2), cos, sin
        )
        v = v.reshape(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if past is not None:
            past.append((k, v))
            k, v = (torch.cat(parts, 2) for parts in zip(*past, strict=True))
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj((out.transpose(1, 2) * gate.sigmoid()).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = fused_linear(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class AttentionLayer(nn.Module):
    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(cfg), MLP(cfg)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        past: list[tuple[Tensor, Tensor]] | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class LinearLayer(nn.Module):
    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.linear_attn, self.mlp = GatedDeltaNet(cfg), MLP(cfg)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.linear_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))
