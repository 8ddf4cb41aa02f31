"""Options, checked where they are made: three frozen dataclasses and nothing else reads settings.

A wrong value raises `ArgumentError` with the option's name, the value and the rule, before any
model is touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspec.errors import ArgumentError

DEFAULT_CTX = 4096
"""Tokens a sequence holds when nothing else is said and the model was trained for as many."""

MAX_NODES = 64
"""Most nodes a draft tree may have, the root included."""

DEFAULT_NODES = 16
"""Most nodes a draft tree has when nothing is said."""

SPLIT_MODES = ("none", "layer", "row")
"""In the order of llama.cpp's numbers."""

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""What an attention cache may hold, as ggml calls it."""


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ArgumentError(f"{name} is {value!r}, must be {rule}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is opened.

    Attributes:
        n_ctx: Tokens a sequence may hold; None takes 4096 or the model's training context,
            whichever is less; 0 takes the training context.
        n_slots: Sequences that can be decoded at the same time.
        n_batch: Prompt tokens a decode call takes.
        n_ubatch: Tokens a forward pass takes.
        n_threads: CPU threads; 0 takes all physical cores, and for steps of a small model one, where
            that is measured to be faster.
        n_gpu_layers: Layers placed on the GPU; -1 for all.
        split_mode: How several devices share the model: ``"layer"``, ``"row"``, or ``"none"`` for
            one of them.
        main_gpu: The device of ``"none"``.
        tensor_split: Share of each device, in any unit; empty goes by free memory.
        flash_attn: True, False, or None to let llama.cpp decide.
        graph_argmax: Choose greedy tokens in the forward pass. Of use only where logits are on a device
            that they leave over a bus; elsewhere it costs a little. No result depends on it.
        cache_type_k: Type of the attention cache's keys, a ggml name such as ``"f16"``.
        cache_type_v: Type of the attention cache's values.
        use_mmap: Map the file instead of reading it.
        use_mlock: Keep the weights in RAM.
        offload_kqv: Keep the attention cache on the GPU when layers are there.
        cache_ram: Most bytes of checkpoints that prompts with a common beginning share; 0 reads
            every prompt from its start; None takes a quarter of the free memory.
        cache_dir: A directory in which checkpoints survive a restart, or None.
        cache_disk: Most bytes in it; None takes a quarter of the free disk space.
        verbose: Let llama.cpp log to stderr.
    """

    n_ctx: int | None = None
    n_slots: int = 1
    n_batch: int = 512
    n_ubatch: int = 512
    n_threads: int = 0
    n_gpu_layers: int = -1
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    flash_attn: bool | None = None
    graph_argmax: bool = False
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    use_mmap: bool = True
    use_mlock: bool = False
    offload_kqv: bool = True
    cache_ram: int | None = 0
    cache_dir: str | None = None
    cache_disk: int | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        _require(not self.n_ctx or self.n_ctx >= 8, "n_ctx", self.n_ctx, "0 or at least 8")
        _require(1 <= self.n_slots <= 64, "n_slots", self.n_slots, "between 1 and 64")
        _require(self.n_batch >= 1, "n_batch", self.n_batch, "at least 1")
        _require(self.n_ubatch >= 1, "n_ubatch", self.n_ubatch, "at least 1")
        _require(self.n_threads >= 0, "n_threads", self.n_threads, "0 or more")
        _require(self.n_gpu_layers >= -1, "n_gpu_layers", self.n_gpu_layers, "-1 or more")
        _require(
            self.split_mode in SPLIT_MODES,
            "split_mode",
            self.split_mode,
            "one of " + ", ".join(SPLIT_MODES),
        )
        _require(self.main_gpu >= 0, "main_gpu", self.main_gpu, "0 or more")
        _require(
            not self.tensor_split
            or (len(self.tensor_split) <= 16 and min(self.tensor_split) >= 0 < sum(self.tensor_split) < 1e9),
            "tensor_split", self.tensor_split, "at most 16 shares of 0 or more, not all of them 0",
        )  # fmt: skip
        for name in ("cache_ram", "cache_disk"):
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "0 or more bytes")
        for name in ("cache_type_k", "cache_type_v"):
            value = getattr(self, name)
            _require(value in CACHE_TYPES, name, value, "one of " + ", ".join(CACHE_TYPES))


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What is drafted in one step.

    With none of the limits `depth`, `top_k`, `width` and `nodes` given, a controller chooses them
    in every step, and drafts nothing where that is fastest. With any of them given, every step
    drafts to these limits.

    Attributes:
        name: A registered drafter, or ``"auto"`` for all that the file offers.
        depth: Longest chain of drafts below the root; 3 when only other limits are given.
        top_k: Candidates of a node; 1 drafts a chain, more a tree. 1 when not given.
        width: Nodes that `mtp` and `draft-model` expand at every depth. 1 when not given.
        nodes: Most nodes a tree may have, the root included; 16 when not given.
        model: File of a drafter that is a model of its own.
        head_rows: Rows of the output matrix that the drafter reads; None to choose, 0 for all.
        cache_type_k: Type of the keys in the cache of `mtp`, `dflash` and `draft-model`; None takes
            the target's.
        cache_type_v: Type of the values in it.
    """

    name: str = "auto"
    depth: int | None = None
    top_k: int | None = None
    width: int | None = None
    nodes: int | None = None
    model: str | None = None
    head_rows: int | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None

    def __post_init__(self) -> None:
        _require(bool(self.name), "draft", self.name, "the name of a drafter")
        for name, value, most in (
            ("draft_depth", self.depth, MAX_NODES - 1),
            ("draft_top_k", self.top_k, 64),
            ("draft_width", self.width, 8),
            ("draft_nodes", self.nodes, MAX_NODES),
        ):
            _require(value is None or 1 <= value <= most, name, value, f"1 to {most}")
        _require(
            self.head_rows is None or self.head_rows >= 0,
            "draft_head_rows",
            self.head_rows,
            "0 or more",
        )
        for name, kind in (("k", self.cache_type_k), ("v", self.cache_type_v)):
            _require(
                kind is None or kind in CACHE_TYPES,
                f"draft_cache_type_{name}",
                kind,
                "one of " + ", ".join(CACHE_TYPES),
            )

    @property
    def fixed(self) -> bool:
        """True when limits are given, so that no controller chooses them."""
        return any(limit is not None for limit in (self.depth, self.top_k, self.width, self.nodes))

    def limits(self, depth: int = 3, top_k: int = 1) -> DraftLimits:
        """The limits, with the given values in place of those that are left open."""
        return DraftLimits(
            self.depth or depth, self.top_k or top_k, self.width or 1, self.nodes or DEFAULT_NODES
        )


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of one drafter's trees; see `DraftConfig`."""

    depth: int = 3
    top_k: int = 1
    width: int = 1
    nodes: int = DEFAULT_NODES


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How the target's tokens are drawn; the same fields and meanings as llama.cpp's samplers.

    Attributes:
        temperature: 0 is greedy, and draws no random numbers.
        top_k: Keep the k most probable tokens; 0 turns it off.
        top_p: Nucleus sampling; 1 turns it off.
        min_p: Drop tokens below this share of the best one's probability; 0 turns it off.
        typical_p: Locally typical sampling; 1 turns it off.
        repeat_penalty: Divides the logits of recent tokens; 1 turns it off.
        frequency_penalty: Subtracted once per occurrence; 0 turns it off.
        presence_penalty: Subtracted once when present; 0 turns it off.
        penalty_last_n: Tokens the penalties look back at; -1 is the whole context.
        seed: Random seed; None takes a new one for every request.
        grammar: GBNF with the start symbol ``root``, or None.
        json_schema: A JSON schema (text or mapping) that the output must satisfy, or None.
        logit_bias: Token id to the value added to its logit.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < 1e3, "temperature", self.temperature, "0 or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(0 < self.typical_p <= 1, "typical_p", self.typical_p, "above 0, at most 1")
        _require(0 < self.repeat_penalty < 1e3, "repeat_penalty", self.repeat_penalty, "above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(-100 <= value <= 100, name, value, "between -100 and 100")
        _require(self.penalty_last_n >= -1, "penalty_last_n", self.penalty_last_n, "-1 or more")
        _require(
            self.seed is None or 0 <= self.seed < 2**32, "seed", self.seed, "between 0 and 2^32 - 1"
        )
        if self.grammar is not None and self.json_schema is not None:
            raise ArgumentError("grammar and json_schema are both set, must be at most one")
        if isinstance(self.json_schema, str):
            try:
                json.loads(self.json_schema)
            except ValueError as error:
                raise ArgumentError(f"json_schema is not JSON: {error}") from None

    @property
    def greedy(self) -> bool:
        """True when the most probable token is always taken."""
        return self.temperature == 0
