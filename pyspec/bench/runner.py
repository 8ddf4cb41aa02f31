"""Runs a benchmark: opens what is compared, measures scenario after scenario, keeps what it has.

Plain decoding is measured on an engine of its own, opened for trees of one node and without an MTP
block, so it carries none of speculation's cost. All engines share the loaded weights, and the number
of threads that is chosen when these are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from pyspec.bench import scenarios
from pyspec.bench.contestants import Contestant, Own
from pyspec.bench.figures import BenchResult
from pyspec.bench.machine import machine
from pyspec.bench.oracle import PREFIX, OracleDrafter, OracleMtpDrafter, parse
from pyspec.bench.peers import PeerConfig, open_peers
from pyspec.bench.prompts import BenchPrompt
from pyspec.config import DraftConfig, EngineConfig, SamplingConfig
from pyspec.cost import Tuning, settle_threads
from pyspec.drafter import Drafter
from pyspec.errors import ArgumentError
from pyspec.generate import Engine, context_of
from pyspec.model_file import ModelFile, resolve_model
from pyspec.native import NativeEngine
from pyspec.registry import choose, offers

PLAIN = "none"
SCENARIOS = ("decode", "prompt", "concurrency", "context", "cost", "memory", "layers")

Progress = Callable[[str], AbstractContextManager[Callable[[float], object] | None]]
"""Gives, for the name of what is measured, a context with a function that takes the fraction done."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much the scenarios measure.

    Attributes:
        max_tokens: Tokens a request generates.
        repeat: Rounds over all prompts.
        prompts: Lengths of prompts whose reading is timed.
        sequences: Numbers of requests at once.
        contexts: Lengths of prompts behind which decoding is timed.
        nodes: Largest tree whose cost is measured.
    """

    max_tokens: int = 128
    repeat: int = 3
    prompts: tuple[int, ...] = (128, 512, 2048)
    sequences: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    nodes: int = 32


@dataclass(slots=True)
class Bench:
    """What all scenarios of a run share.

    Attributes:
        file: The model.
        drafts: What is compared, plain decoding first.
        prompts: What is decoded, as token ids, with the names of their sets.
        config: How engines are opened.
        sampling: How tokens are drawn.
        sizes: How much is measured.
        peers: Peers beside pyspec.
        owner: Holds the weights; says how many threads a pass has.
        result: Filled by the scenarios.
    """

    file: ModelFile
    drafts: list[DraftConfig]
    prompts: list[tuple[list[int], str]]
    config: EngineConfig
    sampling: SamplingConfig
    sizes: Sizes
    peers: Sequence[PeerConfig]
    owner: NativeEngine
    result: BenchResult
    filler: list[int] = field(default_factory=list)

    @contextmanager
    def contestants(
        self, *, n_ctx: int | None = None, n_slots: int = 1, peers: bool = True
    ) -> Iterator[list[Contestant]]:
        """Opens plain decoding, the drafters and the peers, in this order."""
        with ExitStack() as stack:
            found: list[Contestant] = []
            config = replace(self.config, n_slots=n_slots, n_ctx=n_ctx or self.config.n_ctx)
            for draft in self.drafts:
                found.append(Own(stack.enter_context(self.engine(draft, config)), self.sampling))
            if peers and self.peers:
                found += stack.enter_context(
                    open_peers(
                        self.peers,
                        self.file,
                        next((draft for draft in self.drafts if draft.model), self.drafts[-1]),
                        config,
                        self.sampling,
                        n_ctx=context_of(config, self.file),
                        threads=found[0].threads,
                    )
                )
            yield found

    def engine(self, draft: DraftConfig, config: EngineConfig) -> Engine:
        """An engine on the weights that are loaded."""
        return Engine(
            self.file.path,
            draft,
            config,
            share=self.owner,
            drafters=kinds(draft, self.file),
        )

    def text(self, length: int) -> list[int]:
        """`length` tokens of the prompts, over and over."""
        return (self.filler * (length // len(self.filler) + 1))[:length]


def run(
    model: str,
    drafts: Sequence[DraftConfig],
    prompts: Sequence[str | BenchPrompt],
    *,
    config: EngineConfig,
    sampling: SamplingConfig,
    sizes: Sizes | None = None,
    scenario: Sequence[str] = ("decode",),
    peers: Sequence[PeerConfig] = (),
    progress: Progress | None = None,
) -> BenchResult:
    """Measures the scenarios; Ctrl-C ends it, and what was measured so far is returned.

    Args:
        model: Path of a file, or ``demo``.
        drafts: What to compare with plain decoding.
        prompts: Texts to decode.
        sampling: Must be greedy or carry a seed, so that every run decodes the same text.
        scenario: Names out of `SCENARIOS`.
        progress: Shows how far each scenario is.
    """
    sizes = sizes or Sizes()
    for name in scenario:
        if name not in SCENARIOS:
            raise ArgumentError(
                f"no scenario is called {name!r}, there are: {', '.join(SCENARIOS)}"
            )
    file = ModelFile.read(resolve_model(model))
    wanted = [DraftConfig(PLAIN), *(draft for draft in drafts if draft.name != PLAIN)]
    wanted = list(dict.fromkeys(wanted))
    uses_mtp = any(kind.uses_mtp for draft in wanted for kind in kinds(draft, file))
    result = BenchResult(str(file.path), machine())
    show = progress or (lambda name: nullcontext())
    with ExitStack() as stack:
        with show("loading") as report:
            owner = stack.enter_context(
                NativeEngine.open(
                    file.path, config, n_ctx=64, max_nodes=1, mtp=uses_mtp, progress=report
                )
            )
        if config.n_threads == 0:
            settle_threads(owner, Tuning.load(file, config))
        texts = [
            prompt if isinstance(prompt, BenchPrompt) else BenchPrompt(prompt, "")
            for prompt in prompts
        ]
        tokens = [(_tokens(owner, prompt), prompt.group) for prompt in texts]
        bench = Bench(file, wanted, tokens, config, sampling, sizes, peers, owner, result)
        bench.filler = [token for prompt, _ in tokens for token in prompt] or [0]
        result.settings = {
            "prompts": len(tokens),
            "sets": list(dict.fromkeys(group for _, group in tokens if group)),
            "max_tokens": sizes.max_tokens,
            "rounds": sizes.repeat,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
        }
        try:
            for name in scenario:
                with show(name) as report:
                    getattr(scenarios, name)(bench, report or _ignore)
        except KeyboardInterrupt:
            result.interrupted = True
    return result


def kinds(draft: DraftConfig, file: ModelFile) -> list[type[Drafter]]:
    """The drafters that a name stands for; those that only a benchmark has, too."""
    if draft.name.startswith(PREFIX):
        return [OracleMtpDrafter if parse(draft.name)[1] else OracleDrafter]
    return choose(draft, file)


def every_draft(file: ModelFile, base: DraftConfig) -> list[DraftConfig]:
    """Each drafter that the file can feed on its own, and all together."""
    able = [one.name for one in offers(file, base) if one.missing is None and one.name != PLAIN]
    return [replace(base, name=name) for name in (*able, "auto")]


def fixed_seed(sampling: SamplingConfig) -> SamplingConfig:
    """`sampling` with a seed, so that all runs decode the same text."""
    return sampling if sampling.seed is not None else replace(sampling, seed=0)


def _tokens(owner: NativeEngine, prompt: BenchPrompt) -> list[int]:
    if not isinstance(prompt.text, str):
        return list(prompt.text)
    return owner.tokenize(prompt.text, add_special=True, parse_special=True) or [
        max(owner.info.token_bos, 0)
    ]


def _ignore(done: float) -> None:
    pass
