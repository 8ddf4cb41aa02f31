"""`DraftTree`: the tokens proposed for one sequence in one step, as flat arrays.

Node 0 is the root, the last emitted token, which the target has not read yet. Every other node is
a guess of what follows its parent. Parents come before their children, so a tree can be read from
left to right, and a chain is a tree in which every parent is the node before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyspec.config import MAX_NODES
from pyspec.errors import TreeError

_NO_SOURCE: frozenset[str] = frozenset()


class DraftTree:
    """A draft tree of n nodes; it does not change.

    Attributes:
        sources: For every node the names of the drafters that proposed it; empty when not kept.
        token_list: `tokens` as a list; so are the next three. Steps are made of these.
        parent_list: `parents` as a list.
        depth_list: `depths` as a list.
        log_prob_list: `log_probs` as a list.

    Raises:
        TreeError: The arrays do not describe a tree of 1 to 64 nodes.
    """

    __slots__ = (
        "_arrays",
        "depth_list",
        "log_prob_list",
        "parent_list",
        "sources",
        "token_list",
    )

    def __init__(
        self,
        tokens: ArrayLike,
        parents: ArrayLike,
        depths: ArrayLike,
        log_probs: ArrayLike,
        sources: tuple[frozenset[str], ...] = (),
    ) -> None:
        arrays = {
            "tokens": _as_array("tokens", tokens, np.int32),
            "parents": _as_array("parents", parents, np.int32),
            "depths": _as_array("depths", depths, np.int32),
            "log_probs": _as_array("log_probs", log_probs, np.float32),
        }
        n = arrays["tokens"].size
        for name, array in arrays.items():
            if array.size != n:
                raise TreeError(f"{name} has {array.size} entries, tokens has {n}")
        if not 1 <= n <= MAX_NODES:
            raise TreeError(f"tree has {n} nodes, must have 1 to {MAX_NODES}")
        if sources and len(sources) != n:
            raise TreeError(f"sources has {len(sources)} entries, tokens has {n}")
        self.token_list: list[int] = arrays["tokens"].tolist()
        self.parent_list: list[int] = arrays["parents"].tolist()
        self.depth_list: list[int] = arrays["depths"].tolist()
        self.log_prob_list: list[float] = arrays["log_probs"].tolist()
        self.sources = sources
        self._arrays: dict[str, NDArray] = arrays
        _check_parents(self.parent_list, self.depth_list)

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """The tree of one node: nothing is drafted, the step is plain decoding."""
        return cls.trusted([token], [-1], [0], [0.0])

    @classmethod
    def trusted(
        cls,
        tokens: list[int],
        parents: list[int],
        depths: list[int],
        log_probs: list[float],
        sources: tuple[frozenset[str], ...] = (),
    ) -> DraftTree:
        """A tree from lists that are known to describe one, and that it keeps."""
        tree = object.__new__(cls)
        tree.token_list = tokens
        tree.parent_list = parents
        tree.depth_list = depths
        tree.log_prob_list = log_probs
        tree.sources = sources
        tree._arrays = {}
        return tree

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [n]; token ids."""
        return self._array("tokens", self.token_list, np.int32)

    @property
    def parents(self) -> NDArray[np.int32]:
        """int32 [n]; ``parents[0] == -1`` and ``0 <= parents[i] < i`` for all others."""
        return self._array("parents", self.parent_list, np.int32)

    @property
    def depths(self) -> NDArray[np.int32]:
        """int32 [n]; 0 at the root, else the parent's depth + 1."""
        return self._array("depths", self.depth_list, np.int32)

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """float32 [n]; log-probability of a node given its parent, as its drafter sees it.

        0 at the root.
        """
        return self._array("log_probs", self.log_prob_list, np.float32)

    def _array(self, name: str, values: list, dtype: type) -> NDArray:
        array = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = np.array(values, dtype)
            array.flags.writeable = False  # the lists would not follow
        return array

    @classmethod
    def chain(
        cls, tokens: Sequence[int], log_probs: Sequence[float] | None = None, source: str = ""
    ) -> DraftTree:
        """A chain: ``tokens[0]`` is the root, each further token follows the one before."""
        n = len(tokens)
        return cls(
            tokens,
            np.arange(-1, n - 1),
            np.arange(n),
            np.zeros(n) if log_probs is None else log_probs,
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
            tokens,
            parents,
            depths,
            np.zeros(n) if log_probs is None else log_probs,
            _marks(source, n),
        )

    def __len__(self) -> int:
        return len(self.token_list)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 when nothing is drafted."""
        return max(self.depth_list)

    @property
    def is_chain(self) -> bool:
        """True when no node has a sibling."""
        return self.max_depth == len(self) - 1

    def child(self, node: int, token: int) -> int | None:
        """The first child of `node` that carries `token`, or None."""
        for one in range(node + 1, len(self)):
            if self.parent_list[one] == node and self.token_list[one] == token:
                return one
        return None

    def children(self, node: int) -> NDArray[np.int32]:
        """int32 [k]; the children of `node` in order."""
        return np.flatnonzero(self.parents == node).astype(np.int32)

    def path(self, node: int) -> NDArray[np.int32]:
        """int32 [depth + 1]; the nodes from the root to `node`, both included."""
        nodes = [node]
        while (node := self.parent_list[node]) >= 0:
            nodes.append(node)
        return np.asarray(nodes[::-1], np.int32)

    def path_tokens(self, node: int) -> NDArray[np.int32]:
        """int32 [depth + 1]; the tokens from the root to `node`."""
        return self.tokens[self.path(node)]

    def path_log_probs(self) -> NDArray[np.float64]:
        """float64 [n]; for every node the log-probability of its whole path."""
        total = np.zeros(len(self))
        for node in range(1, len(self)):
            total[node] = total[self.parent_list[node]] + self.log_prob_list[node]
        return total

    def pruned(self, nodes: int, depth: int) -> DraftTree:
        """The same tree with at most `nodes` nodes, none deeper than `depth`; best paths first."""
        if len(self) <= nodes and self.max_depth <= depth:
            return self
        score = self.path_log_probs()
        # A node can never score above its parent, so with ties broken by index parents come first.
        nodes_in = [node for node in range(len(self)) if self.depth_list[node] <= depth]
        nodes_in.sort(key=lambda node: (-score[node], node))
        return self.take(nodes_in[: max(nodes, 1)])

    def take(self, keep: Iterable[int]) -> DraftTree:
        """The tree of the nodes `keep`, which hold every one's parent."""
        kept = sorted(keep)
        if len(kept) == len(self):
            return self
        n = len(kept)
        if kept[-1] == n - 1:  # the first ones
            return DraftTree.trusted(
                self.token_list[:n],
                self.parent_list[:n],
                self.depth_list[:n],
                self.log_prob_list[:n],
                self.sources[:n],
            )
        place = {old: new for new, old in enumerate(kept)}
        parents = self.parent_list
        return DraftTree.trusted(
            [self.token_list[node] for node in kept],
            [-1, *(place[parents[node]] for node in kept[1:])],
            [self.depth_list[node] for node in kept],
            [self.log_prob_list[node] for node in kept],
            tuple(self.sources[node] for node in kept) if self.sources else (),
        )

    def marked(self, sources: frozenset[str]) -> DraftTree:
        """The same tree; nodes without sources of their own have `sources`."""
        if self.sources:
            return self
        return DraftTree.trusted(
            self.token_list,
            self.parent_list,
            self.depth_list,
            self.log_prob_list,
            (sources,) * len(self),
        )


class TreeBuilder:
    """Collects candidates into a tree whose nodes share prefixes, then keeps the best of it.

    The tree may keep the builder's lists: nothing is added once there is one.

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
        tokens, parents = tree.token_list, tree.parent_list
        if tokens[0] != self.tokens[0]:
            raise TreeError(f"trees start from tokens {self.tokens[0]} and {tokens[0]}, must agree")
        if len(tokens) == 1:
            return [0]
        own = tree.sources
        if own or sources:
            self.sources[0] |= own[0] if own else sources
        if len(self.tokens) == 1 and self._copy(tree, sources):
            return list(range(len(tokens)))
        log_probs = tree.log_prob_list
        place = [0]
        for node in range(1, len(tokens)):
            mark = own[node] if own else sources
            place.append(self.add(place[parents[node]], tokens[node], log_probs[node], mark))
        return place

    def _copy(self, tree: DraftTree, sources: frozenset[str]) -> bool:
        """Takes all of `tree` over into a builder that has a root only, unless nodes are alike."""
        tokens, parents = tree.token_list, tree.parent_list
        known = {key: node for node, key in enumerate(zip(parents, tokens, strict=True))}
        if len(known) != len(tokens):
            return False
        self._known = known
        self.tokens = tokens.copy()
        self.parents = parents.copy()
        self.depths = tree.depth_list.copy()
        self.log_probs = tree.log_prob_list.copy()
        self.sources[1:] = tree.sources[1:] if tree.sources else [sources] * (len(tokens) - 1)
        return True

    def path_log_probs(self) -> list[float]:
        """For every node the log-probability of its whole path."""
        total = [0.0]
        for parent, log_prob in zip(self.parents[1:], self.log_probs[1:], strict=True):
            total.append(total[parent] + min(log_prob, 0.0))
        return total

    def best(self, nodes: int = MAX_NODES) -> DraftTree:
        """The tree of the at most `nodes` nodes with the most probable paths."""
        if len(self.tokens) <= min(nodes, MAX_NODES):
            return self.tree()
        return self.take(self.ranked(nodes))

    def ranked(self, nodes: int = MAX_NODES) -> list[int]:
        """The at most `nodes` nodes with the most probable paths, in that order; the root first."""
        total, depths = self.path_log_probs(), self.depths
        # A node never scores above its parent: with ties broken by depth, parents come first.
        order = sorted(range(len(total)), key=lambda node: (-total[node], depths[node], node))
        return order[: max(1, min(nodes, MAX_NODES))]

    def take(self, keep: Iterable[int]) -> DraftTree:
        """The tree of the nodes `keep`, which hold every one's parent."""
        return self.tree().take(keep)

    def tree(self) -> DraftTree:
        """The tree of all nodes."""
        sources = tuple(self.sources) if any(self.sources) else ()
        return DraftTree.trusted(self.tokens, self.parents, self.depths, self.log_probs, sources)


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
    builder = TreeBuilder(named[0][1].token_list[0])
    for name, tree in named:
        builder.add_tree(tree, frozenset([name] if name else []))
    return builder.best(nodes)


def _as_array(name: str, value: ArrayLike, dtype: type) -> NDArray:
    array: NDArray = np.array(value, dtype)
    array.flags.writeable = False
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
