"""Log-probabilities of tokens under the target: the softmax of its logits, before any sampler."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprob(NamedTuple):
    """A token with its natural log-probability, and the most probable tokens at its place.

    Attributes:
        token: The token that was emitted.
        logprob: Its log-probability.
        top: Pairs of token and log-probability, the most probable first; ties by token id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(logits: NDArray[np.float32], token: int, n_top: int) -> TokenLogprob:
    """The entry of `token` among `logits`, float32 [n_vocab], with `n_top` runners-up."""
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    n_top = min(n_top, len(values))
    best = np.argpartition(-values, n_top - 1)[:n_top] if n_top else np.empty(0, np.int64)
    order = best[np.lexsort((best, -values[best]))]
    top = tuple((int(index), float(values[index])) for index in order)
    return TokenLogprob(token, float(values[token]), top)
