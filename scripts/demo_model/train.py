"""The training run: growth in depth, decay of the learning rate, then the MTP block alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .config import DemoConfig
from .data import Corpus
from .model import DemoModel, grow
from .quality import evaluate

LONGEST_STEP_S = (
    30.0  # a step that took longer was interrupted; the pause does not count as training
)


def option(default: float, explanation: str):
    """A field of `Plan` with the sentence that the command line shows for it."""
    return field(default=default, metadata={"help": explanation})


@dataclass(frozen=True)
class Plan:
    """Everything that decides the course of a run; `_at` is a part of its time, from 0 to 1."""

    first_layers: int = option(8, "Layers to begin with; three times cheaper a token than 24.")
    grow_at: float = option(0.56, "When the model grows to its full depth.")
    decay_at: float = option(0.6, "When the trunk's learning rates begin to fall.")
    long_at: float = option(0.8, "When rows of --long-length begin.")
    freeze_at: float = option(0.86, "When the trunk is frozen and the MTP block trained alone.")
    rows: int = option(8, "Rows of a batch.")
    length: int = option(256, "Tokens of a row.")
    long_length: int = option(1024, "Tokens of a row at the end, in batches of as many tokens.")
    chat_share: float = option(0.04, "Share of rows that are chats.")
    mtp_share: float = option(0.5, "Share of rows that train the MTP block before the freeze.")
    mtp_steps: int = option(3, "Chained steps for which the MTP block is trained.")
    mtp_to_trunk: float = option(0.5, "Share of the MTP block's gradient that reaches the trunk.")
    matrix_lr: float = option(0.01, "Learning rate of matrices (Muon).")
    embedding_lr: float = option(0.03, "Learning rate of the token embedding (AdamW).")
    head_lr: float = option(0.003, "Learning rate of the output head (AdamW).")
    vector_lr: float = option(0.003, "Learning rate of everything else (AdamW).")
    warmup_steps: int = option(40, "Steps of warmup, at the start and after growth.")
    seed: int = option(0, "Seed of weights and batches.")

    def learning_rate(self, progress: float) -> float:
        """Factor of the trunk's learning rates: constant, then linear to 2 % at the freeze."""
        left = (self.freeze_at - progress) / (self.freeze_at - self.decay_at)
        return min(1.0, max(0.02, left))

    def mtp_learning_rate(self, progress: float) -> float:
        """Factor of the MTP block's learning rates: constant, then linear after the freeze."""
        return min(1.0, max(0.02, (1 - progress) / (1 - self.freeze_at)))


@dataclass
class Clock:
    """How far a run is: time in training over that plus what is left; robust to pauses."""

    deadline: float
    used: float = 0.0
    last: float = field(default_factory=time.time)

    def tick(self) -> None:
        now = time.time()
        self.used += min(now - self.last, LONGEST_STEP_S)
        self.last = now

    @property
    def progress(self) -> float:
        left = self.deadline - time.time()
        return self.used / (self.used + left) if left > 0 else 1.0


def kind_of(name: str, weight: Tensor) -> str:
    """What a parameter is to the optimizers: a `matrix` is Muon's, the other kinds AdamW's."""
    if name.startswith("model.embed_tokens"):
        return "embedding"
    if name.startswith("lm_head"):
        return "head"
    return "matrix" if weight.ndim == 2 and min(weight.shape) >= 32 else "vector"


def optimizers(model: DemoModel, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest; groups know whether they belong to the MTP block."""

    def groups(**rates: float) -> list[dict]:
        members = {
            (kind, mtp): [
                p
                for n, p in model.named_parameters()
                if kind_of(n, p) == kind and n.startswith("mtp.") is mtp
            ]
            for kind in rates
            for mtp in (False, True)
        }
        return [
            {"params": params, "base_lr": rates[kind], "mtp": mtp}
            for (kind, mtp), params in members.items()
            if params
        ]

    return [
        torch.optim.Muon(groups(matrix=plan.matrix_lr), weight_decay=0.025, momentum=0.95),
        torch.optim.AdamW(
            groups(embedding=plan.embedding_lr, head=plan.head_lr, vector=plan.vector_lr),
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
        ),
    ]


def draft_loss(
    model: DemoModel,
    tokens: Tensor,
    hidden: Tensor,
    logits: Tensor,
    steps: int,
    greedy_share: float,
) -> Tensor:
    """How far chained MTP steps are from the main head, which stays untouched: mean over depths.

    Cross-entropy against the main head's distribution, mixed with that against its greedy token.
    """
    logits = logits.detach()
    target = (1 - greedy_share) * logits.softmax(-1)
    if greedy_share:
        target.scatter_add_(
            -1, logits.argmax(-1, keepdim=True), torch.full_like(logits[..., :1], greedy_share)
        )
    losses = []
    for depth, draft in enumerate(model.drafts(tokens, hidden, steps), 1):
        guess = F.linear(draft, model.lm_head.weight.detach()).float()
        losses.append(F.cross_entropy(guess.flatten(0, 1), target[:, depth:].flatten(0, 1)))
    return torch.stack(losses).mean()


class Trainer:
    """One resumable run in one folder."""

    def __init__(self, folder: Path, cfg: DemoConfig, plan: Plan, deadline: float) -> None:
        torch.manual_seed(plan.seed)
        self.folder, self.cfg, self.plan, self.clock = folder, cfg, plan, Clock(deadline)
        self.corpus = Corpus.load(folder, cfg.vocab_size)
        self.generator = torch.Generator().manual_seed(plan.seed)
        self.step, self.tokens, self.since_new = 0, 0, 0
        self.adopt(DemoModel(DemoConfig(**{**asdict(cfg), "num_hidden_layers": plan.first_layers})))
        if self.checkpoint.exists():
            self.resume()

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def adopt(self, model: DemoModel) -> None:
        """Train this model from now on, with fresh optimizers."""
        self.model, self.since_new = model, 0
        self.optimizers = optimizers(model, self.plan)

    def save(self) -> None:
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(
            {
                "config": asdict(self.model.cfg),
                "model": self.model.state_dict(),
                "plan": asdict(self.plan),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "used": self.clock.used,
                "step": self.step,
                "tokens": self.tokens,
                "since_new": self.since_new,
                "generator": self.generator.get_state(),
            },
            partial,
        )
        os.replace(partial, self.checkpoint)

    def resume(self) -> None:
        state = torch.load(self.checkpoint)
        model = DemoModel(DemoConfig(**state["config"]))
        model.load_state_dict(state["model"])
        self.adopt(model)
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            rates = [group["base_lr"] for group in optimizer.param_groups]
            optimizer.load_state_dict(kept)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["base_lr"] = rate
        self.clock.used, self.step, self.tokens = state["used"], state["step"], state["tokens"]
        self.since_new = state["since_new"]
        self.generator.set_state(state["generator"])

    def train_step(self) -> dict[str, float]:
        """One batch through the current phase; returns the losses."""
        plan, progress = self.plan, self.clock.progress
        if (
            progress >= plan.grow_at
            and self.model.cfg.num_hidden_layers < self.cfg.num_hidden_layers
        ):
            self.adopt(grow(self.model, self.cfg.num_hidden_layers))
        frozen = progress >= plan.freeze_at
        length = plan.long_length if progress >= plan.long_at else plan.length
        rows = plan.rows * plan.length // length
        batch = self.corpus.batch(rows, length, plan.chat_share, self.generator)
        drafted = rows if frozen else max(1, round(rows * plan.mtp_share))

        with torch.autocast("cpu", torch.bfloat16):
            with torch.set_grad_enabled(not frozen):
                hidden = self.model.hidden(batch)
                logits = self.model.lm_head(hidden).float()
                main = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            part = hidden[:drafted]
            part = part.detach() + plan.mtp_to_trunk * (part - part.detach())
            draft = draft_loss(
                self.model, batch[:drafted], part, logits[:drafted], plan.mtp_steps, 0.5 * frozen
            )
        (draft if frozen else main + draft).backward()

        warm = min(1.0, (self.since_new + 1) / plan.warmup_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                factor = (
                    plan.mtp_learning_rate(progress)
                    if group["mtp"]
                    else plan.learning_rate(progress)
                )
                group["lr"] = group["base_lr"] * factor * warm
            optimizer.step()  # parameters without a gradient, such as a frozen trunk's, are skipped
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.since_new += 1
        self.tokens += batch.numel()
        return {"main": main.item(), "draft": draft.item()}

    def run(self, save_every_s: float = 300.0) -> None:
        """Train until the deadline; SIGINT and SIGTERM save and stop."""
        stop: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda signum, frame: stop.append(signum))
        self.clock.last = saved = time.time()
        smooth: dict[str, float] = {}
        bar_format = "{desc} {percentage:.1f}% [{elapsed}<{remaining}]{postfix}"
        with tqdm(
            total=100.0, initial=100 * self.clock.progress, bar_format=bar_format, mininterval=5
        ) as bar:
            while self.clock.progress < 1 and not stop:
                losses = self.train_step()
                self.clock.tick()
                smooth = {k: v + 0.96 * (smooth.get(k, v) - v) for k, v in losses.items()}
                bar.set_description(f"{self.model.cfg.num_hidden_layers} layers", refresh=False)
                bar.set_postfix(
                    step=self.step,
                    Mtok=f"{self.tokens / 1e6:.2f}",
                    tok_s=f"{self.tokens / self.clock.used:.0f}",
                    refresh=False,
                    **{k: f"{v:.3f}" for k, v in smooth.items()},
                )
                bar.update(100 * self.clock.progress - bar.n)
                if time.time() - saved > save_every_s:
                    self.save()
                    saved = time.time()
                    tqdm.write(f"{bar.postfix} | {self.quality(rows=32)}", file=sys.stderr)
        self.save()

    def quality(self, rows: int) -> dict:
        """Held-out quality, with what it took."""
        result = evaluate(self.model, self.corpus.held_out_rows(512, rows))
        return {
            **result,
            "tokens_seen": self.tokens,
            "steps": self.step,
            "training_minutes": round(self.clock.used / 60, 1),
        }
