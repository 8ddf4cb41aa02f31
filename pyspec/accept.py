"""`accept()`: sample-and-match along a draft tree, a pure function of a tree and a sampler.

At every node the target's token is drawn with the request's own sampler. If a child carries that
token the walk goes on there, otherwise it ends, and the drawn token is the bonus. Whatever the
drafts were, each emitted token was drawn from the target at its place, in the order of plain
decoding: exact at every temperature, and the same seed gives the same text.

`pyspec.verifier` runs the same walk in native code; a test keeps the two equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyspec.errors import TreeError
from pyspec.tree import DraftTree


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """What one step keeps of a tree.

    Attributes:
        nodes: The accepted nodes, the root first; these enter the target's state.
        tokens: The tokens emitted, one per node: the accepted drafts, then the bonus.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes or self.nodes[0] != 0 or len(self.nodes) != len(self.tokens):
            raise TreeError(
                f"path has nodes {self.nodes} and {len(self.tokens)} tokens, "
                "must start at node 0 and emit one token per node"
            )

    @classmethod
    def trusted(cls, nodes: tuple[int, ...], tokens: tuple[int, ...]) -> AcceptedPath:
        """A path that is known to be one."""
        path = object.__new__(cls)
        object.__setattr__(path, "nodes", nodes)
        object.__setattr__(path, "tokens", tokens)
        return path

    @property
    def bonus_token(self) -> int:
        """The last token: drawn by the target, not in its state yet, root of the next tree."""
        return self.tokens[-1]

    @property
    def accepted(self) -> int:
        """Number of drafts accepted (the root is none)."""
        return len(self.nodes) - 1

    def truncate(self, stop: int | None = None, remaining: int | None = None) -> AcceptedPath:
        """The path cut so that it emits at most `stop` and at most `remaining` tokens.

        Args:
            stop: Number of tokens up to and with the one that ends generation; None for no end.
            remaining: Number of tokens the request may still emit; None for no limit.
        """
        keep = len(self.tokens)
        if stop is not None and stop < keep:
            keep = stop
        if remaining is not None and remaining < keep:
            keep = remaining
        if keep < 1:
            raise TreeError(f"path cannot be cut to {keep} tokens, a step emits at least 1")
        if keep == len(self.tokens):
            return self
        return AcceptedPath(self.nodes[:keep], self.tokens[:keep])


def accept(
    tree: DraftTree,
    sample: Callable[[int], int],
    *,
    max_tokens: int | None = None,
    stop_tokens: Sequence[int] | frozenset[int] = (),
) -> AcceptedPath:
    """Walks `tree` from the root, drawing the target's token at every node it reaches.

    Args:
        tree: The verified tree.
        sample: Draws the target's token at a node; called once per node walked, in order.
        max_tokens: Ends the walk after so many draws.
        stop_tokens: Tokens that end the walk as the bonus even where a child carries them.
    """
    node: int | None = 0
    nodes: list[int] = []
    tokens: list[int] = []
    while node is not None:
        token = sample(node)
        nodes.append(node)
        tokens.append(token)
        if token in stop_tokens or len(tokens) == max_tokens:
            break
        node = tree.child(node, token)
    return AcceptedPath(tuple(nodes), tuple(tokens))
