"""The DFlash drafter in PyTorch: what llama.cpp's `dflash` graphs compute, for many blocks at once.

A block is an anchor token and masks at the positions after it. Every token of a block attends to
the keys and values of the features before the anchor and, in both directions, to its own block.
Parameters carry the names of the GGUF tensors.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .config import DrafterConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm with a plain gain."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding, NeoX pairs. x: [..., H, D]; positions: [...]. Returns [..., H, D]."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=torch.float32) / half
    angles = positions[..., None, None].float() * base**-steps
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    """One transformer block; attention over injected context and the own block."""

    def __init__(self, cfg: DrafterConfig) -> None:
        super().__init__()
        self.cfg = cfg
        q, kv = cfg.n_head * cfg.head_dim, cfg.n_head_kv * cfg.head_dim
        self.attn_norm, self.ffn_norm = (RMSNorm(cfg.n_embd, cfg.eps) for _ in range(2))
        self.attn_q_norm, self.attn_k_norm = (RMSNorm(cfg.head_dim, cfg.eps) for _ in range(2))
        self.attn_q = nn.Linear(cfg.n_embd, q, bias=False)
        self.attn_k = nn.Linear(cfg.n_embd, kv, bias=False)
        self.attn_v = nn.Linear(cfg.n_embd, kv, bias=False)
        self.attn_output = nn.Linear(q, cfg.n_embd, bias=False)
        self.ffn_gate = nn.Linear(cfg.n_embd, cfg.n_ff, bias=False)
        self.ffn_up = nn.Linear(cfg.n_embd, cfg.n_ff, bias=False)
        self.ffn_down = nn.Linear(cfg.n_ff, cfg.n_embd, bias=False)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., n_head_kv, head_dim] of x [..., n_embd] at positions [...]."""
        shape = (*x.shape[:-1], self.cfg.n_head_kv, self.cfg.head_dim)
        k = self.attn_k_norm(self.attn_k(x).reshape(shape))
        v = self.attn_v(x).reshape(shape)
        return rotate(k, positions, self.cfg.rope_base).to(v.dtype), v

    def attend(self, x: Tensor, context: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Attention output [B, N, K, n_head * head_dim] of normalised blocks x [B, N, K, n_embd].

        context: encoder output [B, L, n_embd]; positions: [B, N, K]; visible: [B, N, L].
        """
        cfg, group = self.cfg, self.cfg.n_head // self.cfg.n_head_kv
        batch, blocks, size, _ = x.shape
        q = self.attn_q(x).reshape(batch, blocks, size, cfg.n_head, cfg.head_dim)
        q = rotate(self.attn_q_norm(q), positions, cfg.rope_base) * cfg.head_dim**-0.5
        ctx_k, ctx_v = self.keys_values(context, torch.arange(context.shape[1]))
        own_k, own_v = self.keys_values(x, positions)
        q = q.to(ctx_v.dtype).reshape(batch, blocks, size, cfg.n_head_kv, group, cfg.head_dim)
        q = q.permute(0, 3, 1, 4, 2, 5)  # [B, Hkv, N, G, K, D]
        ctx_k, ctx_v = ctx_k.transpose(1, 2), ctx_v.transpose(1, 2)  # [B, Hkv, L, D]
        own_k, own_v = (y.permute(0, 3, 1, 2, 4) for y in (own_k, own_v))  # [B, Hkv, N, K, D]

        far = q.flatten(2, 4) @ ctx_k.mT  # [B, Hkv, N * G * K, L]
        far = far.reshape(batch, cfg.n_head_kv, blocks, group * size, -1)
        far = far.masked_fill(~visible[:, None, :, None], float("-inf"))
        near = q.flatten(3, 4) @ own_k.mT  # [B, Hkv, N, G * K, K]
        share = torch.cat([far, near], -1).softmax(-1)
        far, near = share.split([far.shape[-1], size], -1)
        out = (far.flatten(2, 3) @ ctx_v).reshape(*near.shape[:-1], cfg.head_dim) + near @ own_v
        out = out.reshape(batch, cfg.n_head_kv, blocks, group, size, cfg.head_dim)
        return out.permute(0, 2, 4, 1, 3, 5).reshape(batch, blocks, size, -1)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        x = x + self.attn_output(self.attend(self.attn_norm(x), context, positions, visible))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


class Drafter(nn.Module):
    """The drafter and the target's frozen embeddings and head.

    Args:
        cfg: Shapes.
        embeddings: [V, n_embd], the target's.
        head: [V, n_embd], the target's.
    """

    def __init__(self, cfg: DrafterConfig, embeddings: Tensor, head: Tensor) -> None:
        super().__init__()
        for name, value in (("token embeddings", embeddings), ("head", head)):
            if value.shape != (cfg.n_vocab, cfg.n_embd):
                raise ValueError(
                    f"the target's {name} are {tuple(value.shape)}, "
                    f"must be {(cfg.n_vocab, cfg.n_embd)}"
                )
        self.cfg = cfg
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.fc = nn.Linear(cfg.n_features, cfg.n_embd, bias=False)
        self.enc = nn.ModuleDict({"output_norm": RMSNorm(cfg.n_embd, cfg.eps)})
        self.blk = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.output_norm = RMSNorm(cfg.n_embd, cfg.eps)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                std = 0.02 if name.endswith(("attn_output.weight", "ffn_down.weight")) else None
                nn.init.normal_(weight, std=std or weight.shape[1] ** -0.5)

    def encode(self, features: Tensor) -> Tensor:
        """Fused features: [B, L, n_features] -> [B, L, n_embd]."""
        return self.enc["output_norm"](self.fc(features))

    def inputs(self, anchors: Tensor, size: int) -> Tensor:
        """Block inputs [B, N, size]: the anchor token [B, N] and masks. No other token enters."""
        masks = torch.full((*anchors.shape, size - 1), self.cfg.mask_token)
        return torch.cat([anchors[..., None], masks], -1)

    def forward(self, features: Tensor, tokens: Tensor, begins: Tensor, size: int) -> Tensor:
        """Hidden states [B, N, size - 1, n_embd] of the masks of blocks that begin at `begins`.

        features: [B, L, n_features]; tokens: [B, L]; begins: [B, N], positions of the anchors. A
        block sees the features before its anchor. Row k (from 0) predicts token begin + k + 1.
        """
        context = self.encode(features)
        positions = begins[..., None] + torch.arange(size)
        visible = torch.arange(features.shape[1]) < begins[..., None]
        x = self.embeddings[self.inputs(tokens.gather(1, begins), size)]
        for block in self.blk:
            x = block(x, context, positions, visible)
        return self.output_norm(x[:, :, 1:])

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the target's vocabulary, by the target's head."""
        return F.linear(hidden, self.head.to(hidden.dtype))
