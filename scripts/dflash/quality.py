"""How many tokens a step yields: chain and DDTree on recorded text, against the unigram baseline."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .data import Shard
from .gguf_file import read_drafter
from .llama import DraftContext, Model, TargetContext
from .model import Drafter

RANKS = 10  # candidates of a position that a tree may use
Ranked = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Tokens [depth, RANKS] and log-probabilities [depth, RANKS] of a block's positions, best first."""


def ddtree(log_p: NDArray[np.float32], nodes: int) -> list[tuple[int, ...]]:
    """The DDTree over marginals: rank paths, parents before children, the root left out.

    The top-1 chain comes first, then the best prefixes by cumulative log-probability.

    Args:
        log_p: [depth, ranks], best first.
        nodes: Most nodes, the root included.
    """
    depth, ranks = log_p.shape
    chain = [(0,) * d for d in range(1, depth + 1)][: nodes - 1]
    chosen = dict.fromkeys(chain)
    heap = [(-float(log_p[0, 0]), (0,))]
    while heap and len(chosen) < nodes - 1:
        cost, path = heapq.heappop(heap)
        chosen.setdefault(path)
        d, rank = len(path) - 1, path[-1]
        if rank + 1 < ranks:
            step = float(log_p[d, rank] - log_p[d, rank + 1])
            heapq.heappush(heap, (cost + step, (*path[:-1], rank + 1)))
        if d + 1 < depth:
            heapq.heappush(heap, (cost - float(log_p[d + 1, 0]), (*path, 0)))
    return list(chosen)


def accepted(tokens: NDArray[np.int64], paths: set[tuple[int, ...]], truth: Sequence[int]) -> int:
    """How many tokens of `truth` a tree holds as one path from its root."""
    path: tuple[int, ...] = ()
    for depth, token in enumerate(truth[: len(tokens)]):
        rank = np.flatnonzero(tokens[depth] == token)
        if not len(rank) or (*path, int(rank[0])) not in paths:
            break
        path = (*path, int(rank[0]))
    return len(path)


def replay(
    text: Sequence[int], begin: int, ranked: Callable[[int], Ranked], nodes: int
) -> list[int]:
    """Tokens each step yields when `text` is decoded from the anchor at `begin`; nodes 0: a chain."""
    yields = []
    while begin < len(text) - 1:
        tokens, log_p = ranked(begin)
        paths = ddtree(log_p, nodes) if nodes else [(0,) * d for d in range(1, len(tokens) + 1)]
        step = 1 + accepted(tokens, set(paths), text[begin + 1 :])
        yields.append(min(step, len(text) - 1 - begin))
        begin += step
    return yields


@torch.no_grad()
def blocks(model: Drafter, shard: Shard, row: int, size: int) -> Ranked:
    """Tokens and log-probabilities [anchors, size - 1, RANKS] for every anchor of a row's output."""
    low, high = shard.offsets[row], shard.offsets[row + 1]
    features = torch.from_numpy(shard.features[low:high].astype(np.float32))[None]
    tokens = torch.from_numpy(shard.tokens[low:high].astype(np.int64))[None]
    begins = torch.arange(int(shard.prompt_lengths[row]) - 1, tokens.shape[1] - 1)[None]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(features, tokens, begins, size)
        logits = model.logits(hidden.to(torch.bfloat16))
    best = logits[0].float().log_softmax(-1).topk(RANKS)
    return best.indices.numpy(), best.values.numpy()


class LlamaBlocks:
    """The same as `blocks`, from llama.cpp: features read anew, the GGUF file, its own cache.

    What training computes and what decoding computes are then compared as a whole.
    """

    def __init__(self, target: Path, drafter: Path, n_ctx: int, threads: int = 1) -> None:
        self.cfg, _ = read_drafter(drafter)
        self._stack = ExitStack()
        enter = self._stack.enter_context
        theirs, ours = enter(Model(target)), enter(Model(drafter))
        self.reader = enter(TargetContext(theirs, self.cfg.target_layers, n_ctx, threads))
        self.context = enter(DraftContext(ours, self.reader, n_ctx, threads))

    def __call__(self, shard: Shard, row: int, size: int) -> Ranked:
        text = shard.tokens[shard.offsets[row] : shard.offsets[row + 1]]
        features, _ = self.reader.read(text)
        self.context.forget()
        injected, tokens, log_p = 0, [], []
        for anchor in range(int(shard.prompt_lengths[row]) - 1, len(text) - 1):
            if anchor > injected:
                self.context.inject(features[injected:anchor], injected)
                injected = anchor
            logits = self.context.block(int(text[anchor]), self.cfg.mask_token, anchor, size)[1:]
            best = np.argsort(-logits, 1)[:, :RANKS]
            top = logits.max(1, keepdims=True)
            total = top + np.log(np.exp(logits - top).sum(1, keepdims=True))
            tokens.append(best)
            log_p.append(np.take_along_axis(logits - total, best, 1))
        return np.stack(tokens), np.stack(log_p)

    def close(self) -> None:
        self._stack.close()


def unigram(shards: list[Shard], n_vocab: int, depth: int) -> Ranked:
    """The marginal distribution of the text, for every position alike."""
    counts = np.bincount(np.concatenate([s.tokens for s in shards]), minlength=n_vocab)
    best = np.argsort(-counts)[:RANKS]
    log_p = np.log(counts[best] / counts.sum()).astype(np.float32)
    return np.tile(best, (depth, 1)), np.tile(log_p, (depth, 1))


def rows_of(shards: list[Shard], limit: int) -> Iterator[tuple[Shard, int]]:
    """The first rows that have any output."""
    every = ((shard, row) for shard in shards for row in range(shard.rows))
    for count, (shard, row) in enumerate(every):
        if count == limit:
            return
        if shard.offsets[row + 1] - shard.offsets[row] > shard.prompt_lengths[row]:
            yield shard, row


def evaluate(
    drafts: Callable[[Shard, int, int], Ranked],
    n_vocab: int,
    shards: list[Shard],
    size: int,
    rows: int = 10_000,
    nodes: Sequence[int] = (8, 16),
) -> dict[str, Any]:
    """Tokens a step by temperature, for blocks of `size` that `drafts` makes.

    `chain` and `tree_N` (N nodes with the root) are the mean number of tokens that a step yields,
    the target's own included: 1 is plain decoding. `unigram` is the chain of the most frequent
    token, `unigram_tree_N` the tree over the marginal distribution: a drafter that has collapsed is
    no better. `top1` says how often each position of the block is right, whatever comes before it.
    """
    marginal = unigram(shards, n_vocab, size - 1)
    results: dict[str, dict[str, list[int]]] = {}
    hits: dict[str, list[NDArray[np.float64]]] = {}
    for shard, row in rows_of(shards, rows):
        temperature = f"T={shard.temperatures[row]:g}"
        text = shard.tokens[shard.offsets[row] : shard.offsets[row + 1]].tolist()
        first = int(shard.prompt_lengths[row]) - 1
        tokens, log_p = drafts(shard, row, size)
        kinds = results.setdefault(temperature, {})

        def drafted(begin: int, t: Any = tokens, p: Any = log_p, first: int = first) -> Ranked:
            return t[begin - first], p[begin - first]

        for budget in (0, *nodes):
            name = f"tree_{budget}" if budget else "chain"
            kinds.setdefault(name, []).extend(replay(text, first, drafted, budget))
            name = f"unigram_tree_{budget}" if budget else "unigram"
            kinds.setdefault(name, []).extend(replay(text, first, lambda _: marginal, budget))
        hits.setdefault(temperature, []).append(_top1(tokens, text, first))
    return {
        temperature: {
            **{name: round(float(np.mean(steps)), 3) for name, steps in kinds.items()},
            "top1": [round(float(x), 3) for x in np.nanmean(hits[temperature], 0)],
        }
        for temperature, kinds in results.items()
    }


def _top1(tokens: NDArray[np.int64], text: list[int], first: int) -> NDArray[np.float64]:
    """Share of anchors at which each position's first choice is the text's token."""
    shares = []
    for depth in range(tokens.shape[1]):
        truth = np.asarray(text[first + 1 + depth :])
        shares.append((tokens[: len(truth), depth, 0] == truth).mean() if len(truth) else np.nan)
    return np.asarray(shares)
