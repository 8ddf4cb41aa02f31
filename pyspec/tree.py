"""`DraftTree`: the tokens proposed for one sequence in one step, as flat arrays.

Node 0 is the root, the last emitted token, which the target has not read yet. Every other node is
a guess of what follows its parent. Parents come before their children, so a tree can be read from
left to right, and a chain is a tree in which every parent is the node before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyspec.config import MAX_NODES
from pyspec.errors import TreeError

_NO_SOURCE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A draft tree of n nodes.

    Attributes:
        tokens: int32 [n]; token ids.
        parents: int32 [n]; ``parents[0] == -1`` and ``0 <= parents[i] < i`` for all others.
        depths: int32 [n]; 0 at the root, else the parent's depth + 1.
        log_probs: float32 [n]; log-probability of a node given its parent, as its drafter sees it;
            0 at the root.
        sources: For every node the names of the drafters that proposed it; empty when not kept.

    Raises:
        TreeError: The arrays do not describe a tree of 1 to 64 nodes.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    sources: tuple[frozenset[str], ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in _FIELDS:
            array = _as_array(name, getattr(self, name), dtype)
            object.__setattr__(self, name, array)
            if array.shape != self.tokens.shape:
                raise TreeError(f"{name} has {array.size} entries, tokens has {self.tokens.size}")
        n = self.tokens.size
        if not 1 <= n <= MAX_NODES:
            raise TreeError(f"tree has {n} nodes, must have 1 to {MAX_NODES}")
        _check_parents(self.parents.tolist(), self.depths.tolist())
        if self.sources and len(self.sources) != n:
            raise TreeError(f"sources has {len(self.sources)} entries, tokens has {n}")

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """The tree of one node: nothing is drafted, the step is plain decoding."""
        return cls.chain([token])

    @classmethod
    def chain(
        cls, tokens: Sequence[int], log_probs: Sequence[float] | None = None, source: str = ""
    ) -> DraftTree:
        """A chain: ``tokens[0]`` is the root, each further token follows the one before."""
        n = len(tokens)
        return cls(
            np.asarray(tokens, np.int32),
            np.arange(-1, n - 1, dtype=np.int32),
            np.arange(n, dtype=np.int32),
            np.zeros(n, np.float32) if log_probs is None else np.asarray(log_probs, np.float32),
            _marks(source, n),
        )

    @classmethod
    def from_parents(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        log_probs: Sequence[float] | None = None,
        source: str = "",
    ) -> DraftTree:
        """A tree from its parent list; depths are derived from it."""
        if len(parents) != len(tokens):
            raise TreeError(f"parents has {len(parents)} entries, tokens has {len(tokens)}")
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if node > 0 and not 0 <= parent < node:
                raise TreeError(
                    f"node {node} has parent {parent}, must be between 0 and {node - 1}"
                )
            depths.append(depths[parent] + 1 if node else 0)
        n = len(tokens)
        return cls(
            np.asarray(tokens, np.int32),
            np.asarray(parents, np.int32),
            np.asarray(depths, np.int32),
            np.zeros(n, np.float32) if log_probs is None else np.asarray(log_probs, np.float32),
            _marks(source, n),
        )

    @classmethod
    def from_siblings(
        cls, root: int, tokens: ArrayLike, log_probs: ArrayLike, nodes: int, source: str = ""
    ) -> DraftTree:
        """A chain with siblings at every depth, as a drafter that ranks candidates gives them.

        Candidate 0 of every depth carries on the chain; the others end there. The most probable
        paths are kept (cumulative log-probability), up to `nodes` nodes.

        Args:
            root: The last emitted token.
            tokens: int [depth, top_k]; candidates by falling probability.
            log_probs: float [depth, top_k]; their log-probabilities.
            nodes: Most nodes of the result, the root included.
            source: Name kept as every node's source.
        """
        rows: list[list[int]] = np.asarray(tokens, np.int32).tolist()
        scores: list[list[float]] = np.asarray(log_probs, np.float32).tolist()
        out_tokens, out_parents, out_scores = [root], [-1], [0.0]
        heap: list[tuple[float, int, int]] = []  # (-cumulative, depth, rank)
        spine = [0]  # node of candidate 0 at every depth, the root first
        cumulative = 0.0
        if rows:
            heap.append((-scores[0][0], 0, 0))
        while heap and len(out_tokens) < nodes:
            negative, depth, rank = heapq.heappop(heap)
            out_tokens.append(rows[depth][rank])
            out_parents.append(spine[depth])
            out_scores.append(scores[depth][rank])
            if rank + 1 < len(rows[depth]):
                parent_score = -negative - scores[depth][rank]
                heapq.heappush(heap, (-(parent_score + scores[depth][rank + 1]), depth, rank + 1))
            if rank == 0:
                spine.append(len(out_tokens) - 1)
                cumulative = -negative
                if depth + 1 < len(rows):
                    heapq.heappush(heap, (-(cumulative + scores[depth + 1][0]), depth + 1, 0))
        return cls.from_parents(out_tokens, out_parents, out_scores, source)

    def __len__(self) -> int:
        return self.tokens.size

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 when nothing is drafted."""
        return int(self.depths.max())

    @property
    def is_chain(self) -> bool:
        """True when no node has a sibling."""
        return self.max_depth == len(self) - 1

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`, or None."""
        hits = np.flatnonzero((self.parents == node) & (self.tokens == token))
        return int(hits[0]) if hits.size else None

    def children(self, node: int) -> NDArray[np.int32]:
        """int32 [k]; the children of `node` in order."""
        return np.flatnonzero(self.parents == node).astype(np.int32)

    def path(self, node: int) -> NDArray[np.int32]:
        """int32 [depth + 1]; the nodes from the root to `node`, both included."""
        nodes = [node]
        while (node := int(self.parents[node])) >= 0:
            nodes.append(node)
        return np.asarray(nodes[::-1], np.int32)

    def path_tokens(self, node: int) -> NDArray[np.int32]:
        """int32 [depth + 1]; the tokens from the root to `node`."""
        return self.tokens[self.path(node)]

    def path_log_probs(self) -> NDArray[np.float64]:
        """float64 [n]; for every node the log-probability of its whole path."""
        total = np.zeros(len(self))
        for node in range(1, len(self)):
            total[node] = total[self.parents[node]] + float(self.log_probs[node])
        return total

    def pruned(self, nodes: int, depth: int) -> DraftTree:
        """The same tree with at most `nodes` nodes, none deeper than `depth`; best paths first."""
        if len(self) <= nodes and self.max_depth <= depth:
            return self
        score = self.path_log_probs()
        # A node can never score above its parent, so with ties broken by index parents come first.
        order = sorted(np.flatnonzero(self.depths <= depth).tolist(), key=lambda i: (-score[i], i))
        return self._take(sorted(order[: max(nodes, 1)]))

    def _take(self, keep: list[int]) -> DraftTree:
        new_index = {old: new for new, old in enumerate(keep)}
        parents = [-1, *(new_index[int(self.parents[node])] for node in keep[1:])]
        return DraftTree(
            self.tokens[keep],
            np.asarray(parents, np.int32),
            self.depths[keep],
            self.log_probs[keep],
            tuple(self.sources[node] for node in keep) if self.sources else (),
        )


def merge(
    trees: Mapping[str, DraftTree] | Iterable[DraftTree], nodes: int = MAX_NODES
) -> DraftTree:
    """One tree out of several with the same root: shared prefixes become one node.

    A node that several trees propose keeps the highest log-probability and all its sources. A
    mapping names the sources of trees that carry none. The result has at most `nodes` nodes, those
    of the best paths.

    Raises:
        TreeError: There is no tree, or two trees start from different roots.
    """
    named = list(trees.items()) if isinstance(trees, Mapping) else [("", tree) for tree in trees]
    if not named:
        raise TreeError("merge needs at least one tree, got none")
    root = int(named[0][1].tokens[0])
    tokens, parents, scores, sources = [root], [-1], [0.0], [_NO_SOURCE]
    trie: dict[tuple[int, int], int] = {}
    for name, tree in named:
        if int(tree.tokens[0]) != root:
            raise TreeError(f"trees start from tokens {root} and {int(tree.tokens[0])}, must agree")
        place = [0] * len(tree)
        for node in range(len(tree)):
            mark = tree.sources[node] if tree.sources else frozenset([name] if name else [])
            if node:
                key = (place[tree.parents[node]], int(tree.tokens[node]))
                place[node] = trie.setdefault(key, len(tokens))
                if place[node] == len(tokens):
                    tokens.append(key[1])
                    parents.append(key[0])
                    scores.append(-np.inf)
                    sources.append(_NO_SOURCE)
                scores[place[node]] = max(scores[place[node]], float(tree.log_probs[node]))
            sources[place[node]] |= mark
    return _build_merged(tokens, parents, scores, sources, nodes)


def _build_merged(
    tokens: list[int],
    parents: list[int],
    scores: list[float],
    sources: list[frozenset[str]],
    nodes: int,
) -> DraftTree:
    depths, total = [0], [0.0]
    for node in range(1, len(tokens)):
        depths.append(depths[parents[node]] + 1)
        total.append(total[parents[node]] + min(scores[node], 0.0))
    limit = max(1, min(nodes, MAX_NODES))
    keep = sorted(sorted(range(len(tokens)), key=lambda i: (-total[i], depths[i], i))[:limit])
    new_index = {old: new for new, old in enumerate(keep)}
    return DraftTree(
        np.asarray([tokens[i] for i in keep], np.int32),
        np.asarray([-1, *(new_index[parents[i]] for i in keep[1:])], np.int32),
        np.asarray([depths[i] for i in keep], np.int32),
        np.asarray([scores[i] for i in keep], np.float32),
        tuple(sources[i] for i in keep) if any(sources) else (),
    )


_FIELDS = (
    ("tokens", np.int32),
    ("parents", np.int32),
    ("depths", np.int32),
    ("log_probs", np.float32),
)


def _as_array(name: str, value: ArrayLike, dtype: type) -> NDArray:
    array: NDArray = np.ascontiguousarray(value, dtype)
    if array.ndim != 1:
        raise TreeError(f"{name} has shape {array.shape}, must have one dimension")
    return array


def _marks(source: str, n: int) -> tuple[frozenset[str], ...]:
    return (frozenset((source,)),) * n if source else ()


def _check_parents(parents: list[int], depths: list[int]) -> None:
    if parents[0] != -1 or depths[0] != 0:
        raise TreeError(f"node 0 has parent {parents[0]}, depth {depths[0]}, must have -1 and 0")
    for node in range(1, len(parents)):
        parent = parents[node]
        if not 0 <= parent < node:
            raise TreeError(f"node {node} has parent {parent}, must be between 0 and {node - 1}")
        if depths[node] != depths[parent] + 1:
            raise TreeError(
                f"node {node} has depth {depths[node]}, must be {depths[parent] + 1}, "
                f"one more than its parent {parent}"
            )
