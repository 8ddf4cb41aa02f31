"""The training run: resumable, by time, on data that may still grow."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from .config import DrafterConfig
from .data import Shard, shards
from .gguf_file import Weights, read_drafter, read_matrix
from .model import Drafter
from .start import focus

LONGEST_STEP_S = 30.0  # a step that took longer was interrupted; the pause is no training
START_ROWS = 4000  # feature rows from which the starting weights are made


def option(default: Any, explanation: str) -> Any:
    """A field of `Plan` with the sentence that the command line shows for it."""
    return field(default=default, metadata={"help": explanation})


@dataclass(frozen=True)
class Plan:
    """Everything that decides the course of a run."""

    minutes: float = option(60.0, "Length of the run; pauses do not count.")
    rows: int = option(4, "Continuations of a batch.")
    anchors: int = option(64, "Blocks of a continuation, at random places of its output.")
    shortest_block: int = option(
        8, "Blocks have this size up to the drafter's, so that a run may use shorter ones."
    )
    gamma: float = option(7.0, "The k-th draft weighs exp(-(k - 1) / gamma) in the loss.")
    soft: float = option(
        0.5, "Share of the target's distribution in the labels; the rest is the token it chose."
    )
    lr: float = option(6e-4, "Highest learning rate of AdamW.")
    weight_decay: float = option(0.01, "Weight decay of matrices.")
    warmup: float = option(0.04, "Share of the run in which the learning rate rises.")
    clip: float = option(1.0, "Largest norm of a gradient.")
    seed: int = option(0, "Seed of weights and batches.")

    def learning_rate(self, progress: float) -> float:
        """Factor of the learning rate: linear warm-up, then a half cosine to zero."""
        if progress < self.warmup:
            return progress / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))


@dataclass(frozen=True)
class Batch:
    """Rows padded to one length, and where their blocks begin.

    Attributes:
        tokens: [B, L].
        features: [B, L, n_features].
        begins: [B, N], positions of the anchors.
        lengths: [B], tokens of each row.
        temperatures: [B].
        top_ids: [B, L, TOP], the target's likeliest next tokens.
        top_p: [B, L, TOP], their probabilities at temperature 1.
    """

    tokens: Tensor
    features: Tensor
    begins: Tensor
    lengths: Tensor
    temperatures: Tensor
    top_ids: Tensor
    top_p: Tensor


class Rows:
    """Samples batches from the shards of a data folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: dict[Path, Shard] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take up shards that were written meanwhile."""
        for path in shards(self.folder, held_out=False):
            if path not in self.loaded:
                self.loaded[path] = Shard.load(path)
        self.every = [
            (shard, row)
            for shard in self.loaded.values()
            for row in range(shard.rows)
            if shard.offsets[row + 1] - shard.offsets[row] > shard.prompt_lengths[row]
        ]
        if not self.every:
            raise ValueError(f"{self.folder} holds no training data: run `generate` first")

    @property
    def tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.loaded.values())

    def sample_features(self, count: int) -> Tensor:
        """About so many feature rows [n, n_features], from all shards."""
        share = -(-count // len(self.loaded))
        parts = [s.features[:: max(1, len(s.tokens) // share)] for s in self.loaded.values()]
        return torch.from_numpy(np.concatenate(parts).astype(np.float32))

    def batch(self, rows: int, anchors: int, rng: np.random.Generator) -> Batch:
        """Random rows with random anchors, among them the last token of the prompt."""
        chosen = [self.every[i] for i in rng.integers(len(self.every), size=rows)]
        spans = [slice(int(s.offsets[r]), int(s.offsets[r + 1])) for s, r in chosen]
        lengths = [span.stop - span.start for span in spans]

        def padded(name: str, kind: Any) -> Tensor:
            first = getattr(chosen[0][0], name)
            out = np.zeros((rows, max(lengths), *first.shape[1:]), kind)
            for i, ((shard, _), span) in enumerate(zip(chosen, spans, strict=True)):
                out[i, : lengths[i]] = getattr(shard, name)[span]
            return torch.from_numpy(out)

        begins = [
            np.sort(rng.integers(int(s.prompt_lengths[r]) - 1, lengths[i] - 1, size=anchors))
            for i, (s, r) in enumerate(chosen)
        ]
        return Batch(
            tokens=padded("tokens", np.int64),
            features=padded("features", np.float32),
            begins=torch.from_numpy(np.stack(begins)),
            lengths=torch.tensor(lengths),
            temperatures=torch.tensor([float(s.temperatures[r]) for s, r in chosen]),
            top_ids=padded("top_ids", np.int64),
            top_p=padded("top_p", np.float32),
        )


def label_positions(batch: Batch, size: int) -> tuple[Tensor, Tensor]:
    """Positions [B, N, size - 1] of the tokens that blocks predict, and which of them exist."""
    positions = batch.begins[..., None] + torch.arange(1, size)
    exist = positions < batch.lengths[:, None, None]
    return positions.clamp(max=batch.tokens.shape[1] - 1), exist


def loss_of(model: Drafter, batch: Batch, size: int, gamma: float, soft: float) -> Tensor:
    """Weighted cross-entropy of the blocks' drafts, in nats; weights exp(-(k - 1) / gamma).

    A label is the token that the target chose, mixed with the distribution it chose from.
    """
    positions, exist = label_positions(batch, size)
    hidden = model(batch.features, batch.tokens, batch.begins, size)
    log_p = model.logits(hidden.to(torch.bfloat16)).float().log_softmax(-1)
    flat = positions.flatten(1)
    token = batch.tokens.gather(1, flat).reshape(positions.shape)
    loss = -log_p.gather(-1, token[..., None])[..., 0]
    if soft:
        row = torch.arange(len(flat))[:, None]
        ids = batch.top_ids[row, flat - 1].reshape(*positions.shape, -1)
        share = batch.top_p[row, flat - 1].reshape(*positions.shape, -1)
        loss = loss + soft * (_cross_entropy(log_p, ids, share, batch.temperatures) - loss)
    weight = torch.exp(-torch.arange(size - 1) / gamma) * exist
    return (loss * weight).sum() / weight.sum()


def _cross_entropy(log_p: Tensor, ids: Tensor, share: Tensor, temperatures: Tensor) -> Tensor:
    """Cross-entropy [B, N, K] with the target's distribution at each row's temperature."""
    power = 1 / temperatures.clamp(min=0.05)[:, None, None, None]
    share = (share / share.amax(-1, keepdim=True).clamp(min=1e-6)) ** power
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-6)  # rows are padded with zeros
    return -(share * log_p.gather(-1, ids)).sum(-1)


class Trainer:
    """One resumable run in one folder.

    Args:
        folder: Where the checkpoint is.
        data: The data folder.
        target: The target's GGUF file, for embeddings and head.
        cfg: Shapes of the drafter.
        plan: How to train.
        start: Weights to begin with, by GGUF name.
    """

    def __init__(
        self,
        folder: Path,
        data: Path,
        target: Path,
        cfg: DrafterConfig,
        plan: Plan,
        start: Weights | None = None,
    ) -> None:
        torch.manual_seed(plan.seed)
        self.folder, self.plan, self.cfg = folder, plan, cfg
        folder.mkdir(parents=True, exist_ok=True)
        self.rng = np.random.default_rng(plan.seed)
        self.rows = Rows(data)
        self.model = Drafter(cfg, *shared_matrices(target))
        if start is not None:
            adopt(self.model, start)
        elif not self.checkpoint.exists():
            gain = torch.from_numpy(read_matrix(target, "output_norm.weight"))
            focus(self.model, self.rows.sample_features(START_ROWS), gain)
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        vectors = [p for p in self.model.parameters() if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": plan.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
        )
        self.step, self.blocks, self.used, self.last_loss = 0, 0, 0.0, math.nan
        if self.checkpoint.exists():
            self._resume()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def progress(self) -> float:
        """Part of the run that is done, 0 to 1."""
        return min(1.0, self.used / (60 * self.plan.minutes))

    def save(self) -> None:
        """Write the checkpoint; it appears whole or not at all."""
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(
            {
                "config": asdict(self.cfg),
                "plan": asdict(self.plan),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "rng": self.rng.bit_generator.state,
                "step": self.step,
                "blocks": self.blocks,
                "used": self.used,
            },
            partial,
        )
        os.replace(partial, self.checkpoint)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=False)
        kept = DrafterConfig(**state["config"])
        if kept != self.cfg:
            raise ValueError(f"{self.checkpoint} is of {kept}, not of {self.cfg}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = state["rng"]
        self.step, self.blocks, self.used = state["step"], state["blocks"], state["used"]

    def train_step(self) -> float:
        """One batch; returns its loss in nats."""
        plan = self.plan
        rate = plan.lr * plan.learning_rate(self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        size = int(self.rng.integers(plan.shortest_block, self.cfg.block_size, endpoint=True))
        batch = self.rows.batch(plan.rows, plan.anchors, self.rng)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(self.model, batch, size, plan.gamma, plan.soft)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.blocks += batch.begins.numel()
        return float(loss.detach())

    def run(self, save_every_s: float = 120.0, report: Callable[[], object] | None = None) -> bool:
        """Train to the end of the plan; SIGINT and SIGTERM save and stop. True when it is done."""
        stop: list[int] = []
        before = {
            number: signal.signal(number, lambda signum, frame: stop.append(signum))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        last = saved = time.time()
        smooth = math.nan
        bar_format = "{desc} {percentage:.1f}% [{elapsed}<{remaining}]{postfix}"
        try:
            with tqdm(
                total=100.0, initial=100 * self.progress, bar_format=bar_format, mininterval=5
            ) as bar:
                while self.progress < 1 and not stop:
                    loss = self.train_step()
                    smooth = loss if math.isnan(smooth) else smooth + 0.02 * (loss - smooth)
                    now = time.time()
                    self.used += min(now - last, LONGEST_STEP_S)
                    last = now
                    bar.set_postfix(
                        loss=f"{smooth:.3f}",
                        step=self.step,
                        blocks=f"{self.blocks / 1e3:.0f}k",
                        data=f"{self.rows.tokens / 1e3:.0f}k",
                        refresh=False,
                    )
                    bar.update(100 * self.progress - bar.n)
                    if now - saved > save_every_s:
                        self.save()
                        self.rows.refresh()
                        if report:
                            tqdm.write(str(report()))
                        last = saved = time.time()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.save()
        return not stop


def shared_matrices(target: Path) -> tuple[Tensor, Tensor]:
    """The target's token embeddings and head [V, n_embd]."""
    return (
        torch.from_numpy(read_matrix(target, "token_embd.weight")),
        torch.from_numpy(read_matrix(target, "output.weight", "token_embd.weight")),
    )


def read_start(path: Path) -> tuple[DrafterConfig, dict[str, NDArray[np.float32]]]:
    """Shapes and weights of a drafter GGUF or of a checkpoint of this program."""
    if path.suffix == ".gguf":
        return read_drafter(path)
    state = torch.load(path, weights_only=False)
    return DrafterConfig(**state["config"]), to_numpy(state["model"])


def to_numpy(state: dict[str, Tensor]) -> dict[str, NDArray[np.float32]]:
    """A state dict as arrays."""
    return {name: value.float().numpy() for name, value in state.items()}


def adopt(model: Drafter, weights: Weights) -> None:
    """Load weights by GGUF name.

    Raises:
        ValueError: They are of other shapes, or of a variant with more tensors.
    """
    expected = model.state_dict()
    if extra := sorted({*weights} - {*expected}):
        raise ValueError(f"only plain DFlash drafters can be trained, this one has {extra[0]}")
    for name, value in expected.items():
        if name not in weights or weights[name].shape != tuple(value.shape):
            found = weights[name].shape if name in weights else "missing"
            raise ValueError(f"tensor {name} is {found}, must be {tuple(value.shape)}")
    model.load_state_dict({name: torch.from_numpy(weights[name].copy()) for name in expected})
