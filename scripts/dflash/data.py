"""Training data: continuations that the target writes, with its features at every position."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .llama import Model, TargetContext

if TYPE_CHECKING:
    from pyspec import Engine

    from .gguf_file import Target

TOP = 16  # tokens of the target's distribution that are kept for every position
HELD_OUT_EVERY = 24  # every so many-th prompt is kept for evaluation
Prompt = str | list[dict[str, str]]
Progress = Callable[[int], object]


@dataclass(frozen=True)
class Recipe:
    """How continuations are made.

    Attributes:
        target_layers: Layers whose inputs are the features.
        prompt_tokens: Longest prompt; longer ones are cut.
        new_tokens: Longest continuation.
        temperatures: Of the continuations, in turn.
        slots: Sequences decoded at once.
        threads: CPU threads.
        rows: Continuations in one file.
        seed: Of order, cuts and sampling.
    """

    target_layers: tuple[int, ...]
    prompt_tokens: int = 160
    new_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.8)
    slots: int = 16
    threads: int = 1
    rows: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Shard:
    """Some continuations; features are mapped, not read.

    Attributes:
        tokens: [n] int32, all rows one after the other.
        offsets: [rows + 1] int64, where each row begins.
        prompt_lengths: [rows] int32.
        temperatures: [rows] float32.
        top_ids: [n, TOP] int32, the likeliest next tokens at temperature 1.
        top_p: [n, TOP] float16, their probabilities.
        features: [n, n_features] float16.
    """

    tokens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    prompt_lengths: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_p: NDArray[np.float16]
    features: NDArray[np.float16]

    @classmethod
    def load(cls, path: Path) -> Shard:
        with np.load(path) as kept:
            arrays = {name: kept[name] for name in kept.files}
        return cls(**arrays, features=np.load(features_of(path), mmap_mode="r"))

    @property
    def rows(self) -> int:
        return len(self.prompt_lengths)


def features_of(shard: Path) -> Path:
    """Where a shard's features are."""
    return shard.with_name(shard.stem + ".features.npy")


def shards(folder: Path, held_out: bool) -> list[Path]:
    """The shard files of a data folder, for training or for evaluation."""
    return sorted(folder.glob("held-out-*.npz" if held_out else "train-*.npz"))


def read_prompts(path: Path | None) -> tuple[list[Prompt], list[Prompt]]:
    """(training prompts, held-out prompts) of a JSONL file, or of the standard library's sources.

    A line is `{"prompt": text}` or `{"messages": [...]}`.

    Raises:
        ValueError: A line is neither.
    """
    if path is None:
        return _standard_library()
    found: list[Prompt] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            item = json.loads(line)
            found.append(item["messages"] if "messages" in item else item["prompt"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f'{path}:{number} must be an object with "prompt" or "messages"'
            ) from error
    random.Random(0).shuffle(found)
    held_out = found[::HELD_OUT_EVERY]
    return [item for i, item in enumerate(found) if i % HELD_OUT_EVERY], held_out


def _standard_library() -> tuple[list[Prompt], list[Prompt]]:
    """Pieces of the demo model's corpus, beginning at a line; one in ninety is a chat request."""
    from demo_model.data import chats, stdlib_sources

    def pieces(sources: list[str], rng: random.Random) -> list[Prompt]:
        found: list[Prompt] = []
        for source in sources:
            lines = source.splitlines(keepends=True)
            for begin in range(0, len(lines), 12):
                start = min(len(lines) - 1, begin + rng.randrange(12))
                piece = "".join(lines[start : start + rng.randint(2, 12)])
                if len(piece) > 40:
                    found.append(piece)
        turn = "<|im_start|>assistant\n"  # finding all chats takes a minute: some are enough
        found += [text.split(turn)[0] + turn for text in islice(chats(sources), len(found) // 90)]
        rng.shuffle(found)
        return found

    train, held_out = stdlib_sources()
    return pieces(train, random.Random(1)), pieces(held_out, random.Random(2))


class Generator:
    """Makes shards of one target until told to stop."""

    def __init__(self, folder: Path, target: Target, recipe: Recipe) -> None:
        self.folder, self.target, self.recipe = folder, target, recipe
        folder.mkdir(parents=True, exist_ok=True)
        self._remember()

    def _remember(self) -> None:
        """Note what the data was made with; refuse to add data of another kind."""
        note = self.folder / "recipe.json"
        facts = {
            "target": self.target.path.name,
            "n_embd": self.target.n_embd,
            "n_vocab": self.target.n_vocab,
            "target_layers": list(self.recipe.target_layers),
        }
        if note.exists():
            kept = json.loads(note.read_text())
            if kept != facts:
                raise ValueError(f"{self.folder} holds data of {kept}, not of {facts}")
        note.write_text(json.dumps(facts, indent=1))

    @cached_property
    def engine(self) -> Engine:
        from pyspec import Engine

        recipe = self.recipe
        return Engine(
            self.target.path,
            "none",
            n_slots=recipe.slots,
            n_ctx=recipe.prompt_tokens + recipe.new_tokens,
            n_threads=recipe.threads,
        )

    def run(self, prompts: list[Prompt], tokens: int, held_out: bool, progress: Progress) -> None:
        """Write shards until they hold `tokens` positions in all; goes on where it stopped.

        Raises:
            ValueError: No prompt is given.
        """
        if not prompts:
            raise ValueError("no prompts to continue")
        kind = "held-out" if held_out else "train"
        done = shards(self.folder, held_out)
        have = sum(len(Shard.load(path).tokens) for path in done)
        progress(have)
        number = len(done)
        limits = self.recipe.prompt_tokens + self.recipe.new_tokens
        with (
            Model(self.target.path) as model,
            TargetContext(model, self.recipe.target_layers, limits, self.recipe.threads) as reader,
        ):
            while have < tokens:
                rows = list(self._continuations(prompts, number, held_out))
                count = self._write(self.folder / f"{kind}-{number:05d}.npz", rows, reader)
                have += count
                number += 1
                progress(count)

    def _continuations(
        self, prompts: list[Prompt], number: int, held_out: bool
    ) -> Iterator[tuple[list[int], int, float]]:
        """(tokens, prompt length, temperature) of one shard's rows, many decoded at once."""
        from pyspec import SamplingConfig

        recipe, engine = self.recipe, self.engine
        rng = random.Random(f"{recipe.seed} {number} {held_out}")
        waiting = []
        for i in range(recipe.rows):
            prompt = prompts[(number * recipe.rows + i) % len(prompts)]
            waiting.append(
                (self._tokens(prompt), recipe.temperatures[i % len(recipe.temperatures)])
            )
        live: dict[int, tuple[Any, float]] = {}
        while waiting or live:
            while waiting and len(live) < recipe.slots:
                tokens, temperature = waiting.pop()
                sequence = engine.begin(
                    tokens,
                    max_tokens=recipe.new_tokens,
                    sampling=SamplingConfig(temperature=temperature, seed=rng.randrange(2**32)),
                )
                while not engine.prefill(sequence):
                    pass
                live[sequence.slot] = sequence, temperature
            engine.step([sequence for sequence, _ in live.values()])
            for slot, (sequence, temperature) in list(live.items()):
                if sequence.finish_reason is not None:
                    engine.end(sequence)
                    del live[slot]
                    yield list(sequence.tokens), sequence.prompt_length, temperature

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenize(prompt)[: self.recipe.prompt_tokens]
        text = self.engine.chat_template.render(prompt)
        return self.engine.tokenize(text)[-self.recipe.prompt_tokens :]

    def _write(
        self, path: Path, rows: list[tuple[list[int], int, float]], reader: TargetContext
    ) -> int:
        tokens, ids, probabilities, features = [], [], [], []
        for row, _, _ in rows:
            found, logits = reader.read(row, logits=True)
            assert logits is not None
            best = np.argpartition(-logits, TOP, axis=1)[:, :TOP]
            logits = logits - logits.max(1, keepdims=True)
            share = np.exp(np.take_along_axis(logits, best, 1)) / np.exp(logits).sum(1)[:, None]
            tokens.append(np.asarray(row, np.int32))
            ids.append(best.astype(np.int32))
            probabilities.append(share.astype(np.float16))
            features.append(np.clip(found, -65504, 65504).astype(np.float16))
        lengths = [len(row) for row in tokens]
        store = features_of(path)
        partial = store.with_suffix(".partial.npy")
        np.save(partial, np.concatenate(features))
        os.replace(partial, store)
        partial = path.with_suffix(".partial.npz")
        np.savez(
            partial,
            tokens=np.concatenate(tokens),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            prompt_lengths=np.asarray([length for _, length, _ in rows], np.int32),
            temperatures=np.asarray([temperature for *_, temperature in rows], np.float32),
            top_ids=np.concatenate(ids),
            top_p=np.concatenate(probabilities),
        )
        os.replace(partial, path)
        return sum(lengths)
