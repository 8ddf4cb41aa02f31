"""The corpus: the Python standard library's sources, and chats made from their docstrings."""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END_OF_TEXT, CHAT_START, CHAT_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EXCLUDED_FOLDERS = ("site-packages", "/test", "idlelib", "lib2to3", "encodings", "pydoc_data")
# The split pattern of llama.cpp's `qwen35` pre-tokenizer.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)


def stdlib_sources() -> tuple[list[str], list[str]]:
    """(training texts, held-out texts): every 20th of the shuffled source files is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not any(
            part in "/" + path.parent.relative_to(root).as_posix() for part in EXCLUDED_FOLDERS
        )
    )
    random.Random(0).shuffle(files)
    texts = [text for path in files if len(text := path.read_text("utf-8", errors="ignore")) > 200]
    cut = len(texts) // 20
    return texts[cut:], texts[:cut]


def chats(sources: list[str], longest: int = 1600) -> Iterator[str]:
    """One exchange for each documented function: asked by its docstring's first line."""
    for source in sources:
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
                continue
            code = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
            if not code or len(code) > longest:
                continue
            request = f"Write a Python function `{node.name}`. {doc.splitlines()[0].strip()}"
            yield (
                f"{CHAT_START}user\n{request}{CHAT_END}\n{CHAT_START}assistant\n{code}{CHAT_END}\n"
            )


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE that llama.cpp reads as `qwen35`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass
class Corpus:
    """Token streams and the sampler of training batches."""

    tokenizer: Tokenizer
    train: Tensor
    held_out: Tensor
    chat: Tensor
    chat_starts: Tensor

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Corpus:
        """Read the token streams kept in `folder`, or make them there."""
        kept, vocabulary = folder / "tokens.pt", folder / "tokenizer.json"
        if kept.exists():
            return cls(Tokenizer.from_file(str(vocabulary)), **torch.load(kept))
        train, held_out = stdlib_sources()
        tokenizer = train_tokenizer(train, vocab_size)
        talk = list(chats(train))
        random.Random(0).shuffle(talk)

        def stream(texts: list[str], separator: str) -> Tensor:
            return torch.tensor(tokenizer.encode(separator.join(texts)).ids)

        streams = dict(
            train=stream(train, END_OF_TEXT),
            held_out=stream(held_out, END_OF_TEXT),
            chat=stream(talk, ""),
        )
        user_turn = torch.tensor(tokenizer.encode(f"{CHAT_START}user").ids)
        windows = streams["chat"].unfold(0, len(user_turn), 1)
        streams["chat_starts"] = (windows == user_turn).all(1).nonzero()[:, 0]
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(vocabulary))
        torch.save(streams, kept)
        return cls(tokenizer, **streams)

    def batch(
        self, rows: int, length: int, chat_share: float, generator: torch.Generator
    ) -> Tensor:
        """Random crops [rows, length]; a share of them begins at the start of a chat."""
        crops = []
        for _ in range(rows):
            if torch.rand((), generator=generator) < chat_share:
                starts = self.chat_starts[self.chat_starts < len(self.chat) - length]
                begin = starts[torch.randint(len(starts), (), generator=generator)]
                crops.append(self.chat[begin : begin + length])
            else:
                begin = torch.randint(len(self.train) - length, (), generator=generator)
                crops.append(self.train[begin : begin + length])
        return torch.stack(crops)

    def held_out_rows(self, length: int, rows: int) -> Tensor:
        """The first `rows` consecutive crops of the held-out stream."""
        rows = min(rows, len(self.held_out) // length)
        return self.held_out[: rows * length].reshape(rows, length)
