"""The `Drafter` interface, and the drafter that drafts nothing.

A drafter guesses what follows each sequence; the target decides. Drafts can only change speed,
never text. `pyspec.registry` says how built-in and other drafters are found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from pyspec.config import DraftConfig, DraftLimits
from pyspec.model_file import ModelFile
from pyspec.tree import DraftTree

if TYPE_CHECKING:
    from pyspec.accept import AcceptedPath
    from pyspec.native import NativeEngine
    from pyspec.native.pilot import Pilot


class Text(Protocol):
    """What a sequence holds, and where."""

    @property
    def slot(self) -> int:
        """The sequence's slot in the engine."""

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output so far."""


class DraftContext(NamedTuple):
    """What a drafter may know of one sequence, and how much it may draft.

    Attributes:
        slot: The sequence's slot in the engine.
        tokens: Prompt and output so far; the last one is the root, not yet read by the target.
        max_nodes: Most nodes the tree may have, the root included.
        max_depth: Deepest node allowed; 0 asks for the root alone.
        min_prob: Paths less probable than this are not worth another drafting pass.
        only: Names of the drafters that may draft for it; None for all.
    """

    slot: int
    tokens: Sequence[int]
    max_nodes: int
    max_depth: int
    min_prob: float = 0.0
    only: frozenset[str] | None = None

    @property
    def root(self) -> int:
        """The last emitted token, node 0 of the tree."""
        return self.tokens[-1]

    @property
    def depth(self) -> int:
        """Deepest node that fits into all limits."""
        return min(self.max_depth, self.max_nodes - 1)


class Outcome(NamedTuple):
    """What became of one sequence's tree in a step."""

    slot: int
    tree: DraftTree
    path: AcceptedPath


class StepCost(NamedTuple):
    """What a step cost.

    Attributes:
        columns: Tokens in the target's pass: sequences times nodes of the largest tree.
        draft_ms: Wall time of drafting.
        rest_ms: Wall time of everything else: verification, sampling, commit.
        other_ms: What of that is neither the target's pass nor the drawing of tokens.
    """

    columns: int
    draft_ms: float
    rest_ms: float
    other_ms: float = 0.0


class Coast(NamedTuple):
    """Steps for which a drafter need not be asked.

    Attributes:
        steps: So many from here on, at most.
        pilot: Drafts in them; without one they are plain.
        source: Whose drafts the pilot's are.
    """

    steps: int
    pilot: Pilot | None = None
    source: frozenset[str] = frozenset()


class Passed(NamedTuple):
    """Steps of a coast, all alike.

    Attributes:
        steps: Their number.
        n: Sequences in each.
        columns: Tokens in the target's pass of each.
        tokens: Tokens of all of them.
        ms: Wall time of all of them.
    """

    steps: int
    n: int
    columns: int
    tokens: int
    ms: float


_FOR_EVER = Coast(1 << 30)


class Drafter(ABC):
    """Proposes a draft tree for every sequence in every step.

    Class attributes:
        name: What ``--draft`` calls it.
        uses_mtp: Opens the model's MTP block.
        auto: Takes part in ``--draft auto`` when nothing is missing.
        auto_limits: Depth and candidates when a controller chooses how much of it is used.
        free: Drafts in next to no time, so there is no reason to leave it out.

    Attributes:
        pass_ms: Milliseconds that going one node deeper takes, as lately measured; 0 when a draft
            costs the same however deep it is.
    """

    name: ClassVar[str]
    uses_mtp: ClassVar[bool] = False
    auto: ClassVar[bool] = False
    auto_limits: ClassVar[tuple[int, int]] = (8, 3)
    free: ClassVar[bool] = False
    pass_ms: float = 0.0

    def __init__(self, native: NativeEngine, config: DraftConfig) -> None:
        """Keeps the engine's native core and the options; subclasses prepare theirs here."""
        self.native = native
        self.config = config
        self.limits = self.limits_of(config)

    @property
    def names(self) -> frozenset[str]:
        """Names of the drafters that it is made of."""
        return frozenset((self.name,))

    @classmethod
    def missing(cls, file: ModelFile, config: DraftConfig) -> str | None:
        """What is lacking for this drafter, or None when it can be used on `file`."""
        return None

    @classmethod
    def configured(cls, file: ModelFile, config: DraftConfig) -> DraftConfig:
        """`config`, completed with what the file says."""
        return config

    @classmethod
    def limits_of(cls, config: DraftConfig) -> DraftLimits:
        """The limits of this drafter's trees under `config`."""
        return config.limits() if config.fixed else config.limits(*cls.auto_limits)

    @classmethod
    def max_nodes(cls, config: DraftConfig) -> int:
        """Most nodes that this drafter's trees can have under `config`, the root included."""
        return cls.limits_of(config).nodes

    def coast(self, texts: Sequence[Text], alone: bool) -> Coast | None:
        """The steps from here on for which it need not be asked, if there are any.

        Asked first in every step. In the steps of a coast neither `propose` nor `observe` nor
        `observe_cost` is called, but `coasted`.

        Args:
            texts: The sequences.
            alone: Whether it is one sequence without limits of its own that may go several steps
                without anybody looking at it. Only then a pilot can be used.
        """
        return None

    def coasted(self, passed: Sequence[Passed]) -> None:  # noqa: B027 - optional
        """Steps of a coast went by, perhaps fewer than it allowed."""

    def pilot(self, slot: int) -> Pilot | None:
        """What can stand for it in a coast, for each slot the same; None where nothing can."""
        return None

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """One tree per context, in order, within each context's limits.

        The root of every tree is the context's last token. Called once per step for all sequences
        that take part in it.
        """

    def depth_of(self, context: DraftContext) -> int:
        """Deepest node that fits into the context's limits and the drafter's own."""
        return min(self.limits.depth, context.depth)

    def warm_up(self) -> None:  # noqa: B027 - optional
        """Drafts a few times for nothing, to learn what it costs; slot 0 is unused and stays so."""

    def listen(self, on: bool) -> None:  # noqa: B027 - optional
        """Whether it is asked now or soon; what it does to keep up with the text can rest if not.

        It may be asked nevertheless, and drafts from what it has.
        """

    def observe(self, outcomes: Sequence[Outcome]) -> None:  # noqa: B027 - optional
        """Learns what was accepted; called after the commit of every step."""

    def observe_cost(self, cost: StepCost) -> None:  # noqa: B027 - optional
        """Learns what a step cost; called at the end of every step."""

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

    def coast(self, texts: Sequence[Text], alone: bool) -> Coast | None:
        return _FOR_EVER if type(self) is PlainDecoding else None

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        return [DraftTree.root(context.root) for context in contexts]
