"""Shapes of the demo model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoConfig:
    """Shapes of the demo model. Every matrix row length is a multiple of 32, as Q8_0 requires."""

    vocab_size: int = 1024
    hidden_size: int = 160
    intermediate_size: int = 384
    num_hidden_layers: int = 24
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 64
    linear_num_key_heads: int = 1
    linear_num_value_heads: int = 2
    linear_head_dim: int = 64
    full_attention_interval: int = 4
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096

    def __post_init__(self) -> None:
        rows = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "head_dim": self.head_dim,
            "linear_head_dim": self.linear_head_dim,
        }
        for name, value in rows.items():
            if value % 32:
                raise ValueError(f"{name} must be a multiple of 32 for Q8_0, got {value}")
        if self.num_hidden_layers % self.full_attention_interval:
            raise ValueError(
                f"num_hidden_layers must be a multiple of {self.full_attention_interval}, "
                f"got {self.num_hidden_layers}"
            )

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def rotary_dim(self) -> int:
        return self.head_dim // 2

    def to_transformers(self) -> dict:
        """Keyword arguments of `Qwen3_5TextConfig`; also the body of config.json."""
        third = self.rotary_dim // 2 // 3
        return dict(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            linear_key_head_dim=self.linear_head_dim,
            linear_value_head_dim=self.linear_head_dim,
            linear_num_key_heads=self.linear_num_key_heads,
            linear_num_value_heads=self.linear_num_value_heads,
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            full_attention_interval=self.full_attention_interval,
            tie_word_embeddings=False,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=self.rope_theta,
                partial_rotary_factor=0.5,
                mrope_section=[self.rotary_dim // 2 - 2 * third, third, third],
                mrope_interleaved=True,
            ),
        )
