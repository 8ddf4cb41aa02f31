"""From a request, in no API's words, to jobs of the scheduler and back to pieces of an answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request

from pyspec.config import SamplingConfig
from pyspec.errors import ArgumentError, ContextError
from pyspec.generate import Engine, GenerationResult
from pyspec.job import Delta, Event, Failed, Finished, Job
from pyspec.logprobs import TokenLogprob
from pyspec.prefill import ChatPrompt
from pyspec.sampling import resolve
from pyspec.scheduler import Scheduler
from pyspec.server.outbox import Outbox
from pyspec.server.output import THINK, THINK_END, OutputParser, Piece, merge
from pyspec.server.security import REQUEST_ID
from pyspec.server.tools import CallGrammar, Toolbox, without_tools

T = TypeVar("T")

_RESERVED = ("messages", "tools", "self")


class ClientGone(Exception):
    """The client closed its connection."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a request is decoded; see `Job` for what is not said here.

    Attributes:
        choices: Answers per prompt; with a seed, each has the one after its predecessor's.
        timeout: Seconds until it fails, or None.
    """

    sampling: SamplingConfig
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    choices: int = 1
    draft: str | None = None
    draft_nodes: int | None = None
    top_logprobs: int | None = None
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat and what its answer must look like.

    Attributes:
        messages: As chat templates expect them.
        toolbox: The tools.
        schema: JSON schema of the answer, or None.
        variables: More variables of the template.
        opening: Text that the answer has begun with already.
    """

    messages: list[dict[str, Any]]
    toolbox: Toolbox = field(default_factory=Toolbox)
    schema: Any | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    opening: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is ready for the engine.

    Attributes:
        tokens: Its token ids.
        grammar: GBNF that the answer must follow, or None.
        parser: Makes the parser of an answer.
        chat: The rendered chat that it is of, or None.
    """

    tokens: list[int]
    grammar: str | None = None
    parser: Callable[[], OutputParser] = OutputParser
    chat: ChatPrompt | None = None


@dataclass(slots=True)
class Update:
    """What is new of one choice.

    Attributes:
        index: The choice.
        pieces: New pieces of its text.
        logprobs: Log-probabilities of its new tokens, when asked for.
        finished: Set when it has ended.
    """

    index: int
    pieces: list[Piece]
    logprobs: list[TokenLogprob]
    finished: GenerationResult | None = None


@dataclass(slots=True)
class Choice:
    """One whole answer."""

    pieces: list[Piece] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: GenerationResult | None = None

    def text(self, kind: type) -> str:
        """All text of one kind of piece."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, kind))  # type: ignore[union-attr]


class Service:
    """What the APIs share: the engine's text side, and the scheduler.

    Args:
        scheduler: Decodes.
        model_name: What the model is called.
        timeout: Seconds that a request may take when it does not say, or None.
    """

    def __init__(self, scheduler: Scheduler, model_name: str, timeout: float | None = None) -> None:
        self.scheduler = scheduler
        self.engine = scheduler.engine
        self.model_name = model_name
        self.timeout = timeout
        # Templates, tokens and grammars are made beside the event loop and the scheduler.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="pyspec-prepare")

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def aside(self, function: Callable[..., T], *arguments: object) -> T:
        """The result of a function, run in another thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, function, *arguments)

    async def chat_prompt(self, conversation: Conversation) -> Prompt:
        """The prompt of a conversation.

        Raises:
            TemplateError: The template fails or refuses.
            SamplerError: The schema, or one of a tool, cannot become a grammar.
            ContextError: It does not fit.
        """
        return await self.aside(chat_prompt, self.engine, conversation)

    async def prompts(self, texts: Sequence[str | Sequence[int]]) -> list[Prompt]:
        """Prompts of plain texts or token ids."""
        return await self.aside(lambda: [plain_prompt(self.engine, text) for text in texts])

    async def answer(self, prompts: Sequence[Prompt], options: Options, request: Request) -> Answer:
        """Puts a request in line; returns when its first choice has a slot.

        Raises:
            PyspecError: It is refused, or has failed.
            ClientGone: The client did not wait.
        """
        if options.timeout is None:
            options = replace(options, timeout=self.timeout)
        answer = Answer(self.scheduler, prompts, options)
        try:
            await unless_gone(answer.start(), request)
        except BaseException:
            answer.cancel()
            raise
        return answer


class Answer:
    """The choices of a request on their way: `updates` as they come, `collect` at the end."""

    def __init__(self, scheduler: Scheduler, prompts: Sequence[Prompt], options: Options) -> None:
        self.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self._scheduler = scheduler
        self._n = options.choices
        self._outbox = Outbox()
        deadline = None if options.timeout is None else time.monotonic() + options.timeout
        self._jobs: list[Job] = []
        self._readers: list[_Reader] = []
        for prompt in prompts:
            for choice in range(options.choices):
                self._readers.append(_Reader(scheduler.engine, prompt.parser()))
                self._jobs.append(
                    Job(
                        prompt=prompt.tokens,
                        chat=prompt.chat,
                        sampling=_sampling(options.sampling, prompt.grammar, choice),
                        max_tokens=options.max_tokens,
                        stop=options.stop,
                        ignore_end=options.ignore_end,
                        draft=options.draft,
                        draft_nodes=options.draft_nodes,
                        top_logprobs=options.top_logprobs,
                        deadline=deadline,
                        request_id=REQUEST_ID.get(),
                        send=self._outbox.sender(len(self._jobs)),
                    )
                )
        self._first: tuple[int, Event] | None = None
        self.finished: dict[int, GenerationResult] = {}

    @property
    def size(self) -> int:
        """Number of choices."""
        return len(self._jobs)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated by the choices that have ended."""
        return sum(finished.stats.generated for finished in self.finished.values())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that needed no processing; every prompt counts once."""
        return sum(f.stats.cached_tokens for i, f in self.finished.items() if i % self._n == 0)

    @property
    def reasoning_tokens(self) -> int:
        """About how many tokens were reasoning."""
        return sum(reader.reasoning_tokens for reader in self._readers)

    async def start(self) -> None:
        """Puts the jobs in line and waits for the first event."""
        self._scheduler.submit(*self._jobs)
        self._first = await self._next()

    async def updates(self) -> AsyncIterator[Update]:
        """News of all choices, until every one has ended."""
        while len(self.finished) < self.size:
            index, event = self._first or await self._next()
            self._first = None
            reader = self._readers[index]
            if isinstance(event, Delta):
                update = reader.delta(index, event)
            elif isinstance(event, Finished):
                self.finished[index] = event.result
                update = reader.finish(index, event.result)
            else:
                continue
            if update.pieces or update.logprobs or update.finished:
                yield update

    async def collect(self) -> list[Choice]:
        """All choices, once they have ended."""
        choices = [Choice() for _ in self._jobs]
        async for update in self.updates():
            choice = choices[update.index]
            choice.pieces += update.pieces
            choice.logprobs += update.logprobs
            choice.finished = update.finished or choice.finished
        for choice in choices:
            choice.pieces = merge(choice.pieces)
        return choices

    def cancel(self) -> None:
        """Gives up whatever has not ended."""
        for job in self._jobs:
            job.cancel()

    async def _next(self) -> tuple[int, Event]:
        index, event = await self._outbox.next()
        if isinstance(event, Failed):
            raise event.error
        return index, event


class _Reader:
    """Makes updates of the events of one choice."""

    def __init__(self, engine: Engine, parser: OutputParser) -> None:
        self._engine = engine
        self._parser = parser
        self._held: list[tuple[int, TokenLogprob]] = []
        self._tokens_end = self._shown = 0  # in bytes of the text
        self.reasoning_tokens = 0

    def delta(self, index: int, event: Delta) -> Update:
        if self._parser.reasoning:
            self.reasoning_tokens += event.tokens
        self._shown += len(event.text.encode())
        for entry in event.logprobs:
            self._held.append((self._tokens_end, entry))
            self._tokens_end += len(self._engine.piece(entry.token))
        pieces = self._parser.push(event.text) if event.text else []
        return Update(index, merge(pieces), self._release(self._shown))

    def finish(self, index: int, result: GenerationResult) -> Update:
        # A stop string is no part of the text, and neither are its tokens.
        logprobs = self._release(self._shown if result.stopped_by else 1 << 62)
        return Update(index, merge(self._parser.finish()), logprobs, result)

    def _release(self, end: int) -> list[TokenLogprob]:
        """Entries of the tokens that begin before byte `end` of the text."""
        out = [entry for start, entry in self._held if start < end]
        self._held = self._held[len(out) :]
        return out


def chat_prompt(engine: Engine, conversation: Conversation) -> Prompt:
    """`Service.chat_prompt`, in this thread."""
    template, toolbox = engine.chat_template, conversation.toolbox
    for name in _RESERVED:
        if name in conversation.variables:
            raise ArgumentError(f"chat_template_kwargs has {name!r}, which is not free")
    messages, tools = conversation.messages, [tool.for_template() for tool in toolbox.shown]
    if not re.search(r"\btools\b", template.source):
        messages, tools = without_tools(messages, toolbox.shown), []
    chat = template.prompt(messages, tools=tools or None, **conversation.variables)
    text = ChatPrompt(chat + conversation.opening, chat.message_ends)
    thinking = text.rstrip().endswith(THINK)
    grammar = None
    if toolbox.mode == "required" or conversation.schema is not None:
        schema = None if toolbox.mode == "required" else conversation.schema
        grammar = CallGrammar(toolbox, "<function=" in template.source).build(schema, thinking)

    def parser() -> OutputParser:
        return OutputParser(
            thinks=THINK_END in template.source and not conversation.opening,
            thinking=thinking,
            schemas=toolbox.schemas,
            parallel=toolbox.parallel,
        )

    return Prompt(_fitting(engine, engine.tokenize(text)), grammar, parser, text)


def plain_prompt(engine: Engine, prompt: str | Sequence[int]) -> Prompt:
    """The prompt of a text or of token ids."""
    if isinstance(prompt, str):
        return Prompt(_fitting(engine, engine.tokenize(prompt)))
    return Prompt(_fitting(engine, list(prompt) or engine.tokenize("")))


def _fitting(engine: Engine, tokens: list[int]) -> list[int]:
    if len(tokens) > engine.n_ctx:
        raise ContextError(f"prompt has {len(tokens)} tokens, context holds {engine.n_ctx}")
    return tokens


def _sampling(sampling: SamplingConfig, grammar: str | None, choice: int) -> SamplingConfig:
    seed = None if sampling.seed is None else (sampling.seed + choice) % 2**32
    return resolve(replace(sampling, seed=seed, grammar=grammar))


async def unless_gone(work: Awaitable[T], request: Request) -> T:
    """The result of `work`; gives up at once when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def disconnected(request: Request) -> None:
    """Returns when the client has gone; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
