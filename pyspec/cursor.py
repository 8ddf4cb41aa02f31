"""`Cursor`: one sequence that moves token by token, speculates ahead, and can go back.

`Decoder.step` draws a whole path at once. A cursor stops at every node of the tree instead, so that
between two tokens a caller can do what it likes: draw with a sampler of its own, look at logits,
stop, or go back to an earlier text. What it holds is always the text up to and with the last token
whose logits it has; the rest of the verified tree lies ahead, and is forgotten when the text goes
another way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pyspec.accept import AcceptedPath
from pyspec.drafter import DraftContext, Outcome, StepCost
from pyspec.errors import ArgumentError, ContextError
from pyspec.generate import Engine
from pyspec.prefill import PrefillPlan
from pyspec.prefix import Prefix
from pyspec.prefix_cache import PrefixCache
from pyspec.stats import Stats
from pyspec.tree import DraftTree
from pyspec.verifier import Verifier

SLOT = 0
"""A cursor's engine has this one slot, so a node's number is also the row of its logits."""

WORTH_SAVING = 32
"""Prompt tokens for whose sake a state is kept."""


class Cursor:
    """Moves through texts on an engine of one slot.

    Args:
        engine: An engine with ``n_slots=1``; the cursor alone decodes with it.
        cache_bytes: Most bytes of saved states, to which the cursor can go back.
        scores: float32 [n_ctx, n_vocab]; when given, row i receives the logits after token i of
            every text that is read.
    """

    def __init__(
        self, engine: Engine, cache_bytes: int = 0, scores: NDArray[np.float32] | None = None
    ) -> None:
        self.stats = Stats(engine.drafter.name)
        self._native = engine.native
        self._drafter = engine.drafter
        self._verifier = Verifier(engine.native, engine.max_nodes)
        self._n_ctx = engine.n_ctx
        self._scores = scores
        self._committed: list[int] = []  # read by the target for good
        self._tree: DraftTree | None = None  # verified, not committed
        self._cost = StepCost(1, 0.0, 0.0)  # of the pass that verified it
        self._proposed = False  # the drafter proposed it
        self._path: list[int] = []  # the nodes of it that the text has taken, the root first
        self._saved = PrefixCache(cache_bytes)

    # ---- where it is ----

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self._committed) + len(self._path)

    @property
    def tokens(self) -> list[int]:
        """The text."""
        return self._committed + self._drafts(len(self._path))

    @property
    def row(self) -> int | None:
        """The row of the last token's logits in the target's outputs; None: nothing was read."""
        return self._path[-1] if self._path else None

    def row_of(self, position: int) -> int | None:
        """The row of the logits after the token at `position`, where it is in the last tree."""
        node = position - len(self._committed)
        return self._path[node] if 0 <= node < len(self._path) else None

    # ---- how it moves ----

    def step(self, token: int) -> bool:
        """Takes `token` if the verified tree goes on with it; costs no pass of the target."""
        if self._tree is None:
            return False
        node = self._tree.child(self._path[-1], token)
        if node is None:
            return False
        self._path.append(node)
        self._keep_logits()
        return True

    def extend(
        self, tokens: Many[int], *, remaining: int = 1, drafts: Many[int] | None = None
    ) -> None:
        """Reads `tokens` after the text.

        Args:
            tokens: At least one.
            remaining: Tokens that will be asked for; 1 drafts nothing.
            drafts: What may follow, instead of what the drafter proposes.

        Raises:
            ContextError: They do not fit into the context.
        """
        self._check_room(self.length + len(tokens))
        with self._all_or_nothing():
            self._commit(len(self._path), tokens[0])
            self._read_prompt(tokens[:-1])
            self._open(tokens[-1], remaining, drafts)

    def read(self, tokens: Many[int], *, remaining: int = 1) -> None:
        """Makes `tokens` the text: goes back as far as needed, then reads the rest.

        Args:
            tokens: At least one.
            remaining: As for `extend`.

        Raises:
            ContextError: They do not fit into the context.
        """
        self._check_room(len(tokens))
        tokens = list(tokens)
        before = self.tokens
        shared = _shared(before, tokens)
        if shared == len(before) == len(tokens) and self._path:
            return
        shared = min(shared, len(tokens) - 1)
        with self._all_or_nothing():
            start = self._go_back(tokens, shared)
            # Texts that part once often do so again: the state in between is worth keeping.
            parts = sorted({start, max(start, shared), len(tokens) - 1})
            for begin, end in pairwise(parts):
                self._read_prompt(tokens[begin:end])
                if end - begin >= WORTH_SAVING:
                    self._save()
            self._open(tokens[-1], remaining, None)

    def begin(self, stats: Stats) -> None:
        """Counts what follows in `stats`; a new request for the drafter."""
        self.stats = stats
        self._drafter.forget(SLOT)

    # ---- states ----

    def save(self) -> bytes:
        """The state of the text without its last token, which the text loses with it."""
        with self._all_or_nothing():
            if self._path:
                self._commit(len(self._path) - 1, self._drafts(len(self._path))[-1])
            return self._native.save(SLOT)

    def load(self, tokens: Many[int], state: bytes) -> None:
        """Makes `tokens` the text, of which `state` was saved.

        Raises:
            ArgumentError: It is no state of this model and engine, or of another text.
        """
        self.clear()
        self._native.restore(SLOT, state)
        if self._native.length(SLOT) != len(tokens):
            self._native.reset(SLOT)
            raise ArgumentError(f"state is not that of a text of {len(tokens)} tokens")
        self._committed = list(tokens)

    def clear(self) -> None:
        """Forgets the text; saved states stay."""
        self._forget_tree()
        self._committed = []
        self._drafter.forget(SLOT)
        self._native.reset(SLOT)

    def _save(self) -> None:
        info = self._native.info
        share = len(self._committed) / info.n_ctx
        if info.bytes_state + (info.bytes_kv + info.bytes_mtp) * share <= self._saved.limit:
            text = self._committed
            prefix = Prefix.of(text, PrefillPlan(len(text)), len(text))
            self._saved.add(prefix, self._native.save(SLOT))

    def _go_back(self, tokens: list[int], shared: int) -> int:
        """Moves to the longest text it can that `tokens` begin with, `shared` at most of its own."""
        kept = min(shared, self.length)
        if kept >= len(self._committed):
            self._commit(kept - len(self._committed), tokens[kept])
            return kept
        # Rows of scores are right as far as the last text went the same way.
        limit = len(tokens) - 1 if self._scores is None else shared
        found = self._saved.find(np.asarray(tokens, np.int32).tobytes(), PrefillPlan(limit))
        state = None if found is None else self._saved.load(found)
        if found is None or state is None:
            self.clear()
        else:
            self.load(tokens[: found.length], state)
        return len(self._committed)

    # ---- passes ----

    def _read_prompt(self, tokens: Many[int]) -> None:
        if not tokens:
            return
        began = time.perf_counter()
        if self._scores is None:
            self._native.prefill(SLOT, tokens)
            self._committed += tokens
        else:
            self._read_with_logits(tokens, self._scores)
        self.stats.prompt_ms += 1e3 * (time.perf_counter() - began)

    def _read_with_logits(self, tokens: Many[int], scores: NDArray[np.float32]) -> None:
        """As chains that are accepted whole: only verifying keeps logits."""
        width = self._verifier.max_nodes
        for begin in range(0, len(tokens), width):
            chain = DraftTree.chain(tokens[begin : begin + width])
            self._verifier.verify([SLOT], [chain])
            for node in range(len(chain)):
                scores[len(self._committed) + node] = self._native.logits(SLOT, node)
            self._native.commit(SLOT, range(len(chain)))
            self._committed += tokens[begin : begin + width]

    def _open(self, root: int, remaining: int, drafts: Many[int] | None) -> None:
        """Verifies a tree whose root is the next token of the text."""
        self._forget_tree()
        self._proposed = not drafts and remaining > 1
        before = dict(self.stats.ms)
        free = min(self._verifier.max_nodes, self._n_ctx - len(self._committed))
        with self._timed("draft"):
            if drafts:
                tree = DraftTree.chain([root, *drafts[: free - 1]])
            elif self._proposed:
                self._committed.append(root)  # for the drafter's eyes, not copied: texts are long
                try:
                    limit = min(remaining, free) - 1
                    context = DraftContext(SLOT, self._committed, free, limit)
                    (tree,) = self._drafter.propose([context])
                finally:
                    self._committed.pop()
            else:
                tree = DraftTree.root(root)
        with self._timed("verify"):
            self._verifier.verify([SLOT], [tree])
        draft_ms, verify_ms = (self.stats.ms[name] - before[name] for name in ("draft", "verify"))
        self._cost = StepCost(len(tree), draft_ms, verify_ms)
        self._tree, self._path = tree, [0]
        self._keep_logits()

    def _commit(self, count: int, following: int) -> None:
        """Keeps `count` tokens of the path, after which the text goes on with `following`."""
        tree, drafts, nodes = self._tree, self._drafts(count), tuple(self._path[:count])
        self._forget_tree()
        if tree is None or not count:
            return
        path = AcceptedPath(nodes, (*drafts[1:], following))
        with self._timed("commit"):
            self._verifier.commit([SLOT], [path])
            self._committed += drafts
        if self._proposed:
            self._drafter.observe([Outcome(SLOT, tree, path)])
            self._drafter.observe_cost(self._cost)
        self.stats.add_path(tree, path)

    def _drafts(self, count: int) -> list[int]:
        return [] if self._tree is None else self._tree.tokens[self._path[:count]].tolist()

    def _forget_tree(self) -> None:
        self._tree, self._path = None, []  # the engine drops it with the next call

    def _keep_logits(self) -> None:
        if self._scores is not None:
            self._scores[self.length - 1] = self._native.logits(SLOT, self._path[-1])

    def _check_room(self, length: int) -> None:
        if length > self._n_ctx:
            raise ContextError(f"text has {length} tokens, context holds {self._n_ctx}")

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An exception in between leaves no text rather than one that is not the engine's."""
        try:
            yield
        except BaseException:
            if not self._native.closed:
                self.clear()
            raise

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        took = 1e3 * (time.perf_counter() - began)
        self.stats.ms[stage] += took
        self.stats.decode_ms += took


def _shared(one: list[int], other: list[int]) -> int:
    """How many tokens both texts begin with."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))
