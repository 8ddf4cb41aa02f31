"""The `Drafter` interface, and the drafter that drafts nothing.

A drafter guesses what follows each sequence; the target decides. Drafts can only change speed,
never text. `pyspec.registry` says how built-in and other drafters are found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pyspec.config import DraftConfig
from pyspec.model_file import ModelFile
from pyspec.tree import DraftTree

if TYPE_CHECKING:
    from pyspec.accept import AcceptedPath


class DraftContext(NamedTuple):
    """What a drafter may know of one sequence, and how much it may draft.

    Attributes:
        slot: The sequence's slot in the engine.
        tokens: Prompt and output so far; the last one is the root, not yet read by the target.
        max_nodes: Most nodes the tree may have, the root included.
        max_depth: Deepest node allowed; 0 asks for the root alone.
    """

    slot: int
    tokens: Sequence[int]
    max_nodes: int
    max_depth: int

    @property
    def root(self) -> int:
        """The last emitted token, node 0 of the tree."""
        return self.tokens[-1]


class Outcome(NamedTuple):
    """What became of one sequence's tree in a step."""

    slot: int
    tree: DraftTree
    path: AcceptedPath


class Drafter(ABC):
    """Proposes a draft tree for every sequence in every step.

    Class attributes:
        name: What ``--draft`` calls it.
        uses_mtp: Opens the model's MTP block.
        auto_rank: Order of preference for ``--draft auto``; the highest that the file offers wins.
    """

    name: ClassVar[str]
    uses_mtp: ClassVar[bool] = False
    auto_rank: ClassVar[int] = 0

    def __init__(self, native: Any, config: DraftConfig) -> None:
        """Keeps the engine's native core and the options; subclasses prepare theirs here."""
        self.native = native
        self.config = config

    @classmethod
    def missing(cls, file: ModelFile) -> str | None:
        """What `file` lacks for this drafter, or None when it offers all that is needed."""
        return None

    @classmethod
    def max_nodes(cls, config: DraftConfig) -> int:
        """Most nodes that this drafter's trees can have under `config`, the root included."""
        return config.nodes

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One tree per context, in order, within each context's limits.

        The root of every tree is the context's last token. Called once per step for all sequences
        that take part in it.
        """

    def observe(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027 - optional
        """Learns what was accepted; called after the commit of every step."""

    def forget(self, slot: int) -> None:  # noqa: B027 - optional
        """Drops what is known of a slot; called when its sequence ends or is replaced."""

    def close(self) -> None:  # noqa: B027 - optional
        """Frees what the drafter holds."""


class PlainDecoding(Drafter):
    """Drafts nothing: trees of one node, plain decoding through the same loop."""

    name = "none"

    @classmethod
    def max_nodes(cls, config: DraftConfig) -> int:
        return 1

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [DraftTree.root(context.root) for context in contexts]
