"""`Verifier`: the target's side of a step, for many sequences at once.

`verify` runs one forward pass over all trees and moves no state. `accept` draws along a tree.
`commit` moves each sequence to the end of its accepted path and forgets the rest of its tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyspec.accept import AcceptedPath
from pyspec.errors import TreeError
from pyspec.tree import DraftTree

if TYPE_CHECKING:
    from pyspec.native import NativeEngine, NativeSampler
    from pyspec.native.engine import CoastSteps
    from pyspec.native.pilot import Pilot


class Verifier:
    """Verifies and commits draft trees on one native engine.

    Args:
        native: The engine's core.
        max_nodes: Most nodes a tree may have, as the engine was opened.
    """

    def __init__(self, native: NativeEngine, max_nodes: int) -> None:
        self._native = native
        self.max_nodes = max_nodes

    def verify(
        self, slots: Sequence[int], trees: Sequence[DraftTree], *, greedy: bool = False
    ) -> None:
        """One forward pass over one tree per slot; the sequences themselves stay as they are.

        Args:
            slots: The sequences.
            trees: Their trees.
            greedy: Nothing but greedy tokens will be asked for, as a hint.

        Raises:
            TreeError: A tree has more nodes than the engine was opened for.
            ContextError: A tree does not fit into its sequence's context.
        """
        for tree in trees:
            if len(tree) > self.max_nodes:
                raise TreeError(
                    f"tree has {len(tree)} nodes, engine was opened for {self.max_nodes}"
                )
        self._native.verify(
            [
                (slot, tree.token_list, tree.parent_list)
                for slot, tree in zip(slots, trees, strict=True)
            ],
            greedy=greedy,
        )

    def accept(
        self,
        slot: int,
        tree: DraftTree,
        sampler: NativeSampler,
        *,
        max_tokens: int,
        stop_at_end: bool = True,
    ) -> AcceptedPath:
        """Sample-and-match along the verified tree of `slot`; equals `pyspec.accept.accept`.

        Args:
            slot: The sequence.
            tree: Its tree, as it was verified.
            sampler: The request's sampler; advances by one token per emitted one.
            max_tokens: Most tokens to draw.
            stop_at_end: End the walk at an end-of-generation token.
        """
        nodes, bonus = self._native.accept(sampler, slot, min(max_tokens, len(tree)), stop_at_end)
        tokens = tree.token_list
        drafts = [tokens[node] for node in nodes[1:]]
        return AcceptedPath.trusted(tuple(nodes), (*drafts, bonus))

    def coast(
        self,
        slot: int,
        root: int,
        sampler: NativeSampler,
        *,
        max_steps: int,
        max_tokens: int,
        stop_at_end: bool,
        max_ms: float,
        pilot: Pilot | None = None,
        text: Sequence[int] = (),
    ) -> CoastSteps:
        """Several steps of one sequence in one call; see `NativeEngine.coast`."""
        return self._native.coast(
            sampler,
            slot,
            root,
            max_steps=max_steps,
            max_tokens=max_tokens,
            stop_eog=stop_at_end,
            max_ms=max_ms,
            pilot=pilot,
            text=text,
        )

    def commit(self, slots: Sequence[int], paths: Sequence[AcceptedPath]) -> None:
        """Moves every sequence along its accepted path; only now does any state change."""
        for slot, path in zip(slots, paths, strict=True):
            self._native.commit(slot, path.nodes)

    def logits(self, slot: int, node: int) -> NDArray[np.float32]:
        """float32 [n_vocab]; the target's logits after a node of the last verified tree."""
        return self._native.logits(slot, node)

    def hidden(self, slot: int, node: int) -> NDArray[np.float32]:
        """float32 [n_embd]; the target's post-norm hidden state at a node."""
        return self._native.hidden(slot, node)
