"""Shapes of a DFlash drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def spread_layers(n_layer: int, count: int = 5) -> tuple[int, ...]:
    """`count` layers of a target with `n_layer` whose inputs are the features, evenly spaced.

    As published with the reference models: from the output of the second layer to that of the last
    but two. Layer `i` of the file names the input of layer i, which is the output of layer i - 1.

    Raises:
        ValueError: The target has fewer layers than `count` plus three.
    """
    if count < 1 or n_layer < count + 3:
        raise ValueError(
            f"{count} feature layers of a target with {n_layer} layers: must be between 1 and n - 3"
        )
    if count == 1:
        return (n_layer // 2,)
    first, last = 2, n_layer - 2
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that the GGUF metadata says of a drafter.

    Attributes:
        n_embd: Width of the residual stream; the target's, whose embeddings and head are shared.
        n_vocab: Tokens of the target.
        n_layer: Transformer blocks.
        n_head: Query heads.
        n_head_kv: Key and value heads.
        head_dim: Size of a head; all of it is rotated (NeoX pairs).
        n_ff: Width of the feed-forward layer.
        block_size: Longest block, the anchor included: it drafts `block_size - 1` tokens.
        mask_token: Token id that stands for "to be predicted"; text must not contain it.
        target_layers: Target layers whose inputs are the features, ascending.
        rope_base: Base of the rotary frequencies.
        eps: Epsilon of all norms.
        n_ctx: Context length, the target's.
    """

    n_embd: int
    n_vocab: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    rope_base: float = 10_000.0
    eps: float = 1e-6
    n_ctx: int = 4096

    def __post_init__(self) -> None:
        _require(
            self.n_head % self.n_head_kv == 0, "n_head", self.n_head, "a multiple of n_head_kv"
        )
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        _require(self.block_size >= 2, "block_size", self.block_size, "at least 2")
        _require(
            0 <= self.mask_token < self.n_vocab,
            "mask_token",
            self.mask_token,
            "a token of the target",
        )
        layers = self.target_layers
        _require(
            bool(layers) and list(layers) == sorted({*layers}) and layers[0] >= 0,
            "target_layers",
            layers,
            "ascending layer numbers",
        )

    @property
    def n_features(self) -> int:
        """Width of a feature row: the inputs of all `target_layers`, one after the other."""
        return len(self.target_layers) * self.n_embd


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}, must be {rule}")


def tensor_shapes(cfg: DrafterConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(GGUF name, shape outermost first) of every tensor of a plain DFlash drafter."""
    q, kv = cfg.n_head * cfg.head_dim, cfg.n_head_kv * cfg.head_dim
    yield "fc.weight", (cfg.n_embd, cfg.n_features)
    yield "enc.output_norm.weight", (cfg.n_embd,)
    for i in range(cfg.n_layer):
        yield f"blk.{i}.attn_norm.weight", (cfg.n_embd,)
        yield f"blk.{i}.attn_q.weight", (q, cfg.n_embd)
        yield f"blk.{i}.attn_k.weight", (kv, cfg.n_embd)
        yield f"blk.{i}.attn_v.weight", (kv, cfg.n_embd)
        yield f"blk.{i}.attn_output.weight", (cfg.n_embd, q)
        yield f"blk.{i}.attn_q_norm.weight", (cfg.head_dim,)
        yield f"blk.{i}.attn_k_norm.weight", (cfg.head_dim,)
        yield f"blk.{i}.ffn_norm.weight", (cfg.n_embd,)
        yield f"blk.{i}.ffn_gate.weight", (cfg.n_ff, cfg.n_embd)
        yield f"blk.{i}.ffn_up.weight", (cfg.n_ff, cfg.n_embd)
        yield f"blk.{i}.ffn_down.weight", (cfg.n_embd, cfg.n_ff)
    yield "output_norm.weight", (cfg.n_embd,)
