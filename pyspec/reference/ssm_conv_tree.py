"""The short causal convolution in front of a GatedDeltaNet layer, over a draft tree.

Every channel is convolved on its own with K weights, the last of which meets the token itself. The
K-1 inputs before a token come from its ancestors in the tree and, further back, from the window:
the last K-1 inputs of the committed tokens, oldest first.

Shapes, for one sequence: N nodes, C channels, weights [K, C], window [K-1, C]. The ops of ggml do
the same for several sequences, keep x of the last call on a tape and fold the accepted path into
the window at the start of the next one (`docs/gdn-tree.md`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ssm_conv(x: Floats, window: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """A chain of tokens, one after another.

    Args:
        x: [T, C]; inputs.
        window: [K-1, C].
        weights: [K, C].

    Returns:
        y [T, C] and the window after the last token.
    """
    y = np.empty_like(x)
    for t, row in enumerate(x):
        inputs = np.vstack([window, row])
        y[t] = (inputs * weights).sum(axis=0)
        window = inputs[1:]
    return y, window


def ssm_conv_tree(x: Floats, window: Floats, weights: Floats, parents: Sequence[int]) -> Floats:
    """Every node of a tree after its own ancestors.

    Args:
        x: [N, C]; inputs of the nodes.
        window: [K-1, C]; of the committed tokens.
        weights: [K, C].
        parents: [N]; -1 at node 0, else the index of an earlier node.

    Returns:
        y [N, C].
    """
    y = np.empty_like(x)
    for node in range(len(x)):
        path: list[int] = []
        ancestor = node
        while ancestor >= 0:
            path.insert(0, ancestor)
            ancestor = parents[ancestor]
        y[node] = (np.vstack([window, x[path]])[-len(weights) :] * weights).sum(axis=0)
    return y


def ssm_conv_replay(window: Floats, tape: Floats, path: Sequence[int]) -> Floats:
    """The window after the nodes of an accepted path.

    Args:
        window: [K-1, C]; before the path.
        tape: [N, C]; inputs of the nodes of the tree.
        path: Accepted nodes, root first.

    Returns:
        [K-1, C].
    """
    return np.vstack([window, tape[list(path)]])[len(path) :]
