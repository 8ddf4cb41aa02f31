"""`Sequence`: everything that is known of one request while it is decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pyspec.accept import AcceptedPath
from pyspec.drafter import DraftContext, PlainDecoding
from pyspec.errors import PyspecError
from pyspec.logprobs import TokenLogprob
from pyspec.prefill import PrefillPlan
from pyspec.stats import Stats
from pyspec.text import TextStream
from pyspec.tree import DraftTree

if TYPE_CHECKING:
    from pyspec.native import NativeSampler


_ALL = (None, "auto")  # what stands for all drafters of the engine


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-generation token or a stop string."""
    LENGTH = "length"
    """The limit on tokens, or the end of the context."""
    ABORTED = "aborted"
    """Given up by the caller."""
    ERROR = "error"
    """Its sampler or grammar failed; see `Sequence.error`."""


@dataclass(slots=True)
class Sequence:
    """One request.

    Attributes:
        slot: Its place in the engine.
        tokens: Prompt and output; the last token is the root of the next tree.
        prompt_length: How many of `tokens` are prompt.
        sampler: The request's own sampler chain.
        seed: What its random numbers start from.
        text: Turns tokens into text.
        max_tokens: Most tokens to emit.
        room: Most tokens that the context holds.
        is_end: Tells end-of-generation tokens; None when they do not end this request.
        stats: Counters.
        finish_reason: Set when the request has ended.
        error: What made it fail.
        prefilled: How many prompt tokens the target has read.
        draft: What drafts for this request, where it asks for something else than the engine.
        draft_nodes: Most nodes of its trees, where it asks for less than the engine allows.
        top_logprobs: Runners-up to record with every token's log-probability; None records nothing.
        logprobs: One entry per generated token when recorded.
        plan: In which passes it reads them.
        begun: Whether reading has begun, or what is known of the prompt was looked up.
        intact: False once a failed call may have damaged the target's state.
    """

    slot: int
    tokens: list[int]
    prompt_length: int
    sampler: NativeSampler
    seed: int
    text: TextStream
    max_tokens: int
    room: int
    is_end: Callable[[int], bool] | None
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None
    error: PyspecError | None = None
    prefilled: int = 0
    draft: str | None = None
    draft_nodes: int | None = None
    top_logprobs: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    plan: PrefillPlan = field(default_factory=lambda: PrefillPlan(0))
    begun: bool = False
    intact: bool = True

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted; all but the last need a place in the context."""
        emitted = len(self.tokens) - self.prompt_length
        return min(self.max_tokens - emitted, self.room - len(self.tokens) + 1)

    @property
    def may_coast(self) -> bool:
        """Whether nothing but its end must be looked at between one token and the next."""
        return (
            not self.text.has_stops and self.top_logprobs is None and not self.sampler.has_grammar
        )

    @property
    def may_be_piloted(self) -> bool:
        """Whether it may coast, and sets no limits of its own to drafting."""
        return self.may_coast and self.draft in _ALL and self.draft_nodes is None

    def draft_context(self, max_nodes: int) -> DraftContext:
        """What the drafter gets: at most `max_nodes` nodes, no deeper than can be emitted."""
        free = self.room - len(self.tokens) + 1
        asked = 1 if self.draft == PlainDecoding.name else self.draft_nodes or max_nodes
        nodes = min(max_nodes, asked, free)
        only = None if self.draft in _ALL else frozenset((self.draft,))
        return DraftContext(self.slot, self.tokens, nodes, self.remaining - 1, only=only)

    def cut(self, path: AcceptedPath) -> AcceptedPath:
        """`path` up to the first end token or stop string, within the limit on tokens."""
        stop = self.text.count_until_stop(path.tokens)
        return path.truncate(stop, self.remaining)

    def emit(self, tree: DraftTree, path: AcceptedPath, plain: tuple[int, ...] = ()) -> str:
        """Takes over a committed path, and the tokens of plain steps behind it.

        Returns:
            The text that is now safe to show.
        """
        self.stats.add_path(tree, path)
        self.stats.add_plain(len(plain))
        emitted = path.tokens + plain
        if self.is_end is not None and self.is_end(emitted[-1]):
            emitted = emitted[:-1]
            self.finish_reason = FinishReason.STOP
        self.tokens.extend(emitted)
        del self.logprobs[len(self.tokens) - self.prompt_length :]
        self.stats.generated += len(emitted)
        piece = self.text.push(emitted)
        if self.text.stopped_by is not None:
            self.finish_reason = FinishReason.STOP
        elif self.finish_reason is None and self.remaining <= 0:
            self.finish_reason = FinishReason.LENGTH
        return piece + self.text.finish() if self.finish_reason else piece

    def fail(self, error: PyspecError) -> None:
        """Ends this request alone; the others of its step go on."""
        self.error = error
        self.finish_reason = FinishReason.ERROR
