"""`OracleDrafter`: drafts the recorded plain output, right with a given probability at every node.

It measures verification on any model, apart from how good a drafter is: random weights draft
nothing that would be accepted. For `bench` alone; there is no way to ask `serve` for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from pyspec.config import DraftConfig
from pyspec.drafter import DraftContext, Drafter
from pyspec.drafts.mtp import MtpDrafter
from pyspec.errors import ArgumentError
from pyspec.model_file import ModelFile
from pyspec.tree import DraftTree

if TYPE_CHECKING:
    from pyspec.native import NativeEngine

PREFIX = "oracle:"


class OracleDrafter(Drafter):
    """A chain along the recorded text; every node is right with probability `accept`.

    What is wrong stays wrong: whether the node at a position of the text is right is drawn from
    the position and a seed, so that all settings see the same luck.
    """

    name = "oracle"

    def __init__(self, native: NativeEngine, config: DraftConfig) -> None:
        super().__init__(native, config)
        self.accept, cost = parse(config.name)
        self._scripts: dict[int, Sequence[int]] = {}
        self.name = config.name  # type: ignore[misc]
        self._cost = MtpDrafter(native, config) if cost else None

    def record(self, tokens: Sequence[int], slot: int = 0) -> None:
        """The whole sequence (prompt and output) that the next request in `slot` is going to be."""
        self._scripts[slot] = list(tokens)

    @property
    def pass_ms(self) -> float:  # type: ignore[override]
        """Of the drafter whose cost is paid."""
        return self._cost.pass_ms if self._cost else 0.0

    def warm_up(self) -> None:
        if self._cost is not None:
            self._cost.warm_up()

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        contexts = [
            one._replace(max_depth=min(one.max_depth, self._depth(one))) for one in contexts
        ]
        if self._cost is not None:
            self._cost.propose([context._replace(min_prob=0.0) for context in contexts])
        return [self._chain(context) for context in contexts]

    def _depth(self, context: DraftContext) -> int:
        """As deep as it pays, for a drafter that knows how often it is right."""
        if context.min_prob <= 0:
            return self.limits.depth
        if not 0 < self.accept < 1:
            return self.limits.depth if self.accept else 1
        return min(self.limits.depth, 1 + int(math.log(context.min_prob) / math.log(self.accept)))

    def _chain(self, context: DraftContext) -> DraftTree:
        at = len(context.tokens)
        script = self._scripts.get(context.slot, ())
        depth = min(self.limits.depth, context.depth, len(script) - at)
        belief = math.log(min(max(self.accept, 1e-3), 0.999))
        tokens, log_probs = [context.root], [0.0]
        right = True
        for position in range(at, at + max(depth, 0)):
            right = right and _chance(position) < self.accept
            token = script[position]
            tokens.append(token if right else (token + 1) % self.native.info.n_vocab)
            log_probs.append(belief)
        n = len(tokens)
        return DraftTree.trusted(tokens, list(range(-1, n - 1)), list(range(n)), log_probs)

    def forget(self, slot: int) -> None:
        if self._cost is not None:
            self._cost.forget(slot)


class OracleMtpDrafter(OracleDrafter):
    """The oracle that also runs the MTP block, and pays its price."""

    uses_mtp = True

    @classmethod
    def missing(cls, file: ModelFile, config: DraftConfig) -> str | None:
        return MtpDrafter.missing(file, config)


@cache
def _chance(position: int) -> float:
    return random.Random(position * 7919 + 1).random()


def parse(name: str) -> tuple[float, bool]:
    """Acceptance, and whether MTP's price is paid, of ``oracle:0.8`` or ``oracle:0.8+mtp``.

    Raises:
        ArgumentError: It is no such name.
    """
    text, plus, cost = name.removeprefix(PREFIX).partition("+")
    try:
        accept = float(text)
    except ValueError:
        accept = -1.0
    if not name.startswith(PREFIX) or not 0 <= accept <= 1 or (plus and cost != "mtp"):
        raise ArgumentError(
            f"draft is {name!r}, an oracle is oracle:A or oracle:A+mtp with A between 0 and 1"
        )
    return accept, bool(cost)
