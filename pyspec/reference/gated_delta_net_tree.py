"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) over a draft tree.

One head with a state S [dk, dv] that maps keys to values. A token with key k, query q (both of unit
length), value v, decay gate g <= 0 and step size beta does

    S <- exp(g) S                   forget
    d  = beta (v - S^T k)           the innovation: what the state does not predict yet
    S <- S + k d^T                  learn it
    o  = S^T q / sqrt(dk)

With a gate for every key channel (KDA), exp(g) scales the rows of S. A state after a token is the
state before it, decayed, plus one outer product; so the states of all nodes of a tree are known
from the committed state S0 and the (k, d, exp(g)) of their ancestors, and none of them need be
kept. With G(n) the product of exp(g) along the path from the root to node n, and G(n, m) that of
the nodes below m on the path to n,

    d(n) = beta ( v - S0^T G(n) k(n) - sum over ancestors m of (k(n) . G(n, m) k(m)) d(m) )
    o(n) =            S0^T G(n) q(n) + sum over ancestors m of (q(n) . G(n, m) k(m)) d(m)
                                     + (q(n) . k(n)) d(n)                      , over sqrt(dk)

The (d, k, exp(g)) of all nodes are the tape; it grows with N and has no dk x dv part. Committing an
accepted path replays it into S0.

Shapes, for one sequence: N nodes, Hk key heads and Hv value heads; value head h belongs to key head
h mod Hk. A state is [Hv, dk, dv], g is [N, Hv, 1] or, with KDA, [N, Hv, dk]. The ops of ggml do the
same for several sequences and keep states transposed (`docs/gdn-tree.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tape:
    """What a call keeps of its nodes.

    Attributes:
        d: [N, Hv, dv]; innovations.
        k: [N, Hk, dk]; keys.
        decay: [N, Hv, 1 or dk]; exp(g).
    """

    d: Floats
    k: Floats
    decay: Floats


def gated_delta_net(
    q: Floats, k: Floats, v: Floats, g: Floats, beta: Floats, state: Floats
) -> tuple[Floats, Floats]:
    """The recurrence itself, on a chain of tokens.

    Args:
        q: [T, Hk, dk]; queries.
        k: [T, Hk, dk]; keys.
        v: [T, Hv, dv]; values.
        g: [T, Hv, 1 or dk]; logarithm of the decay.
        beta: [T, Hv].
        state: [Hv, dk, dv].

    Returns:
        o [T, Hv, dv] and the state after the last token.
    """
    state = state.copy()
    o = np.empty_like(v)
    heads = np.arange(v.shape[1]) % k.shape[1]
    for t in range(len(v)):
        for h, hk in enumerate(heads):
            state[h] *= np.exp(g[t, h])[:, None]
            d = beta[t, h] * (v[t, h] - state[h].T @ k[t, hk])
            state[h] += np.outer(k[t, hk], d)
            o[t, h] = state[h].T @ q[t, hk] / np.sqrt(k.shape[2])
    return o, state


def gated_delta_net_tree(
    q: Floats,
    k: Floats,
    v: Floats,
    g: Floats,
    beta: Floats,
    state: Floats,
    parents: Sequence[int],
) -> tuple[Floats, Tape]:
    """All nodes of a tree from the committed state, which stays as it is.

    Args:
        q: [N, Hk, dk]; queries of the nodes.
        k: [N, Hk, dk]; keys.
        v: [N, Hv, dv]; values.
        g: [N, Hv, 1 or dk]; logarithm of the decay.
        beta: [N, Hv].
        state: [Hv, dk, dv]; of the committed tokens.
        parents: [N]; -1 at node 0, else the index of an earlier node.

    Returns:
        o [N, Hv, dv] and the tape.
    """
    n_nodes, n_heads, _ = v.shape
    decay = np.exp(g)
    d = np.empty_like(v)
    o = np.empty_like(v)
    for node in range(n_nodes):
        for h in range(n_heads):
            hk = h % k.shape[1]
            # key and query as an ancestor's update meets them: decayed on the way down to the node
            key, query = k[node, hk] * decay[node, h], q[node, hk] * decay[node, h]
            d[node, h] = v[node, h]
            o[node, h] = 0
            ancestor = parents[node]
            while ancestor >= 0:
                d[node, h] -= (key @ k[ancestor, hk]) * d[ancestor, h]
                o[node, h] += (query @ k[ancestor, hk]) * d[ancestor, h]
                key, query = key * decay[ancestor, h], query * decay[ancestor, h]
                ancestor = parents[ancestor]
            d[node, h] = beta[node, h] * (d[node, h] - state[h].T @ key)
            o[node, h] += state[h].T @ query + (q[node, hk] @ k[node, hk]) * d[node, h]
    return o / np.sqrt(k.shape[2]), Tape(d, k, decay)


def gated_delta_net_replay(state: Floats, tape: Tape, path: Sequence[int]) -> Floats:
    """The state after the nodes of an accepted path.

    Args:
        state: [Hv, dk, dv]; before the path.
        tape: Of the tree that the path belongs to.
        path: Accepted nodes, root first.

    Returns:
        [Hv, dk, dv].
    """
    state = state.copy()
    for node in path:
        for h in range(len(state)):
            state[h] *= tape.decay[node, h][:, None]
            state[h] += np.outer(tape.k[node, h % tape.k.shape[1]], tape.d[node, h])
    return state
