"""What the trained model is worth on held-out text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import DemoModel

DEPTHS = 3


@torch.no_grad()
def evaluate(model: DemoModel, rows: Tensor, batch: int = 8) -> dict:
    """Held-out loss (nats a token) and how often MTP depth d picks the main head's greedy token."""
    loss, correct, hits, seen = 0.0, 0, [0] * DEPTHS, [0] * DEPTHS
    for tokens in rows.split(batch):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.hidden(tokens)
            logits = model.lm_head(hidden).float()
            drafts = model.drafts(tokens, hidden, DEPTHS)
        loss += float(
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        )
        greedy = logits.argmax(-1)
        correct += int((greedy[:, :-1] == tokens[:, 1:]).sum())
        for depth, draft in enumerate(drafts):
            same = model.lm_head(draft.float()).argmax(-1) == greedy[:, depth + 1 :]
            hits[depth] += int(same.sum())
            seen[depth] += same.numel()
    predicted = rows.shape[0] * (rows.shape[1] - 1)
    return {
        "held_out_tokens": rows.numel(),
        "held_out_loss": round(loss / predicted, 4),
        "held_out_top1": round(correct / predicted, 4),
        "agreement": [round(hit / count, 4) for hit, count in zip(hits, seen, strict=True)],
    }
