"""`DraftTree`: the tokens proposed for one sequence in one step, as flat arrays.

Node 0 is the root, the last emitted token, which the target has not read yet. Every other node is
a guess of what follows its parent. Parents come before their children, so a tree can be read from
left to right, and a chain is a tree in which every parent is the node before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyspec.config import MAX_NODES
from pyspec.errors import TreeError

_NO_SOURCE: frozenset[str] = frozenset()


_ROOT_PARENTS = np.array([-1], np.int32)
_ROOT_DEPTHS = np.zeros(1, np.int32)
_ROOT_LOG_PROBS = np.zeros(1, np.float32)
for _array in (_ROOT_PARENTS, _ROOT_DEPTHS, _ROOT_LOG_PROBS):
    _array.flags.writeable = False  # all trees of one node share them


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
        tree = object.__new__(cls)
        put = object.__setattr__
        put(tree, "tokens", np.array((token,), np.int32))
        put(tree, "parents", _ROOT_PARENTS)
        put(tree, "depths", _ROOT_DEPTHS)
        put(tree, "log_probs", _ROOT_LOG_PROBS)
        put(tree, "sources", ())
        return tree

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
    def _trusted(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        depths: Sequence[int],
        log_probs: Sequence[float],
        sources: tuple[frozenset[str], ...],
    ) -> DraftTree:
        """A tree from lists that are known to describe one: every step makes some."""
        tree = object.__new__(cls)
        put = object.__setattr__
        put(tree, "tokens", np.array(tokens, np.int32))
        put(tree, "parents", np.array(parents, np.int32))
        put(tree, "depths", np.array(depths, np.int32))
        put(tree, "log_probs", np.array(log_probs, np.float32))
        put(tree, "sources", sources)
        return tree

    def __len__(self) -> int:
        return self.tokens.size

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 when nothing is drafted."""
        return max(self.depths.tolist())

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


class TreeBuilder:
    """Collects candidates into a tree whose nodes share prefixes, then keeps the best of it.

    Attributes:
        tokens: Token of every node; the root is node 0.
        parents: Parent of every node; -1 at the root.
        depths: Depth of every node.
        log_probs: Log-probability of every node given its parent; the highest that was proposed.
        sources: Names of the drafters that proposed a node.
    """

    __slots__ = ("_known", "depths", "log_probs", "parents", "sources", "tokens")

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.log_probs = [0.0]
        self.sources = [_NO_SOURCE]
        self._known: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self, parent: int, token: int, log_prob: float, sources: frozenset[str] = _NO_SOURCE
    ) -> int:
        """Proposes `token` behind the node `parent`; returns its node, which may exist already."""
        key = (parent, token)
        node = self._known.get(key)
        if node is None:
            node = self._known[key] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.log_probs.append(log_prob)
            self.sources.append(sources)
        else:
            if log_prob > self.log_probs[node]:
                self.log_probs[node] = log_prob
            if sources:
                self.sources[node] |= sources
        return node

    def add_tree(self, tree: DraftTree, sources: frozenset[str] = _NO_SOURCE) -> list[int]:
        """Proposes all of `tree`; returns the place of each of its nodes.

        Raises:
            TreeError: It starts from another root.
        """
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        if tokens[0] != self.tokens[0]:
            raise TreeError(f"trees start from tokens {self.tokens[0]} and {tokens[0]}, must agree")
        own = tree.sources
        if own or sources:
            self.sources[0] |= own[0] if own else sources
        log_probs = tree.log_probs.tolist()
        place = [0]
        for node in range(1, len(tokens)):
            mark = own[node] if own else sources
            place.append(self.add(place[parents[node]], tokens[node], log_probs[node], mark))
        return place

    def path_log_probs(self) -> list[float]:
        """For every node the log-probability of its whole path."""
        total = [0.0]
        for parent, log_prob in zip(self.parents[1:], self.log_probs[1:], strict=True):
            total.append(total[parent] + min(log_prob, 0.0))
        return total

    def best(self, nodes: int = MAX_NODES) -> DraftTree:
        """The tree of the at most `nodes` nodes with the most probable paths."""
        return self.take(self.ranked(nodes))

    def ranked(self, nodes: int = MAX_NODES) -> list[int]:
        """The at most `nodes` nodes with the most probable paths, in that order; the root first."""
        total, depths = self.path_log_probs(), self.depths
        # A node never scores above its parent: with ties broken by depth, parents come first.
        order = sorted(range(len(total)), key=lambda node: (-total[node], depths[node], node))
        return order[: max(1, min(nodes, MAX_NODES))]

    def take(self, keep: Iterable[int]) -> DraftTree:
        """The tree of the nodes `keep`, which hold every one's parent."""
        kept = sorted(keep)
        place = {old: new for new, old in enumerate(kept)}
        parents = [-1]
        parents += [place[self.parents[node]] for node in kept[1:]]
        sources = [self.sources[node] for node in kept]
        return DraftTree._trusted(
            [self.tokens[node] for node in kept],
            parents,
            [self.depths[node] for node in kept],
            [self.log_probs[node] for node in kept],
            tuple(sources) if any(sources) else (),
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
    builder = TreeBuilder(int(named[0][1].tokens[0]))
    for name, tree in named:
        builder.add_tree(tree, frozenset([name] if name else []))
    return builder.best(nodes)


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
