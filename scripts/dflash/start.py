"""Where training starts: a drafter that already looks at the newest features and at its anchor.

From random weights most of a short run goes into finding the two places that matter to every
draft: the features just before the anchor, and the anchor itself. Both can be written down.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .model import Block, Drafter

CONSTANT = 4.0  # value of the encoder's constant channel; the other channels have unit variance
STRENGTH = 0.5  # of the written parts of keys and queries, times CONSTANT
NOISE = 0.35  # standard deviation of their random parts
GAIN = 1.5  # of the norms of queries and keys: sharper attention than 1
RIDGE = 1e-3


@torch.no_grad()
def focus(model: Drafter, features: Tensor, output_gain: Tensor) -> float:
    """Write the starting weights; returns the error of the constant channel, 0 to 1.

    Channel 0 of the encoder becomes nearly constant (a ridge regression of 1 on the features), so
    that keys of context differ from those of the block. In every layer the first half of the
    heads prefers near context, by the rotation's fast frequencies; the others prefer tokens of the
    block that are no masks, which is the anchor.

    Args:
        model: A fresh drafter.
        features: [n, n_features] from the data, a few thousand rows.
        output_gain: [n_embd], gain of the norm before the target's head, which the drafter's norm
            begins with.
    """
    scale = features.square().mean(0).sqrt().clamp(min=1e-6)
    x = features / scale
    gram = x.mT @ x / len(x) + RIDGE * torch.eye(x.shape[1])
    constant = torch.linalg.solve(gram, x.mean(0))
    error = float((x @ constant - 1).square().mean().sqrt())
    model.fc.weight.copy_(torch.randn_like(model.fc.weight) * x.shape[1] ** -0.5)
    model.fc.weight[0] = CONSTANT * constant
    model.fc.weight.div_(scale)
    model.output_norm.weight.copy_(output_gain)
    mask = model.embeddings[model.cfg.mask_token]
    mask = mask / mask.square().mean().sqrt()
    for block in model.blk:
        _focus_block(block, mask)
    return error


def _focus_block(block: Block, mask: Tensor) -> None:
    cfg = block.cfg
    half, width = cfg.head_dim // 2, cfg.n_embd
    fast, slow = torch.zeros(cfg.head_dim), torch.zeros(cfg.head_dim)
    fast[: half // 2] = 2**0.5
    slow[half // 2 : half] = 2**0.5
    from_mask = mask / width  # 1 on the mask's normalised embedding
    for weight in (block.attn_q.weight, block.attn_k.weight):
        weight.mul_(NOISE)
    for norm in (block.attn_q_norm, block.attn_k_norm):
        norm.weight.fill_(GAIN)
    near = max(1, cfg.n_head_kv // 2)  # key heads that look at context, where there are two
    queries = block.attn_q.weight.view(cfg.n_head_kv, -1, cfg.head_dim, width)
    keys = block.attn_k.weight.view(cfg.n_head_kv, cfg.head_dim, width)
    for head in range(cfg.n_head_kv):
        to_context = head < near
        direction = (fast if to_context else slow) * (STRENGTH * CONSTANT)
        queries[head] += torch.outer(direction, from_mask)
        if to_context:
            keys[head, :, 0] += direction / CONSTANT
        else:
            keys[head, :, 0] -= direction / CONSTANT
            keys[head] -= torch.outer(direction, from_mask)
