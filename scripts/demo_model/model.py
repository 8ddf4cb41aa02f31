"""The demo model: trunk, head and MTP block, and how it grows in depth."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .config import DemoConfig
from .layers import AttentionLayer, LinearLayer, RMSNorm, rotary

OUTPUT_PROJECTIONS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


class Trunk(nn.Module):
    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(
            AttentionLayer(cfg) if cfg.is_attention(i) else LinearLayer(cfg)
            for i in range(cfg.num_hidden_layers)
        )
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class MTP(nn.Module):
    """One multi-token-prediction block.

    (embedding of token p, hidden of p - 1) -> hidden that predicts token p + 1.
    """

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.layers = nn.ModuleList([AttentionLayer(cfg)])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            RMSNorm(cfg.hidden_size, cfg.rms_norm_eps) for _ in range(3)
        )

    def forward(
        self,
        embedding: Tensor,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        past: list[tuple[Tensor, Tensor]],
        mask: Tensor,
    ) -> Tensor:
        x = self.fc(
            torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        )
        return self.norm(self.layers[0](x.float(), cos, sin, past, mask))


def unroll_mask(length: int, step: int) -> Tensor:
    """Which keys [length, step * length] MTP step `step` (from 1) attends, as when drafting.

    A draft at depth `step` sees the keys made from the trunk's hidden up to the point where
    drafting began and, after that, one key of each earlier depth.
    """
    begin = torch.ones(length, length, dtype=torch.bool).tril(1 - step)
    depths = [
        torch.eye(length, dtype=torch.bool)
        if r == step
        else torch.diag(torch.ones(length - (step - r), dtype=torch.bool), r - step)
        for r in range(2, step + 1)
    ]
    return torch.cat([begin, *depths], 1)


class DemoModel(nn.Module):
    """Trunk, head and MTP block; `state_dict()` is the checkpoint that the GGUF converter reads."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.cfg, self.model, self.mtp = cfg, Trunk(cfg), MTP(cfg)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(OUTPUT_PROJECTIONS):
                nn.init.zeros_(weight)
            elif "embed_tokens" in name:
                nn.init.normal_(weight, std=0.3)
            elif "lm_head" in name:
                nn.init.normal_(weight, std=0.02)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=0.5 * weight.shape[1] ** -0.5)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> post-norm hidden [B, T, E]."""
        cos, sin = rotary(self.cfg, torch.arange(tokens.shape[1]))
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def drafts(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """Hidden states of chained MTP steps; step s (from 0) covers positions s + 1 .. T - 1.

        What a step tries to match is the trunk's own hidden at the same position.
        """
        embedding, length = self.model.embed_tokens(tokens[:, 1:]), tokens.shape[1] - 1
        cos, sin = rotary(self.cfg, torch.arange(1, length + 1))
        previous, past, outputs = hidden[:, :-1], [], []
        for step in range(1, steps + 1):
            out = self.mtp(embedding, previous, cos, sin, past, unroll_mask(length, step))
            outputs.append(out[:, step - 1 :])
            previous = F.pad(out[:, :-1], (0, 0, 1, 0))
        return outputs


def grow(model: DemoModel, layers: int) -> DemoModel:
    """A deeper model that computes the same function.

    Each group of four layers is followed by silent copies: their output projections are zero, so
    that they add nothing until they are trained.
    """
    cfg = model.cfg
    interval = cfg.full_attention_interval
    old_groups, new_groups = cfg.num_hidden_layers // interval, layers // interval
    deeper = DemoModel(DemoConfig(**{**cfg.__dict__, "num_hidden_layers": layers}))
    source = model.state_dict()
    weights = {
        name: value for name, value in source.items() if not name.startswith("model.layers.")
    }
    seen = set()
    for new in range(new_groups):
        old = new * old_groups // new_groups
        for offset in range(interval):
            prefix = f"model.layers.{old * interval + offset}."
            for name, value in source.items():
                if name.startswith(prefix):
                    silent = old in seen and name.endswith(OUTPUT_PROJECTIONS)
                    target = f"model.layers.{new * interval + offset}." + name.removeprefix(prefix)
                    weights[target] = torch.zeros_like(value) if silent else value.clone()
        seen.add(old)
    deeper.load_state_dict(weights)
    return deeper
