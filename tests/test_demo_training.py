"""The demo model's implementation against transformers', and what growth in depth must keep."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

from demo_model.config import DemoConfig  # noqa: E402
from demo_model.layers import UnitLowerInverse, rotary  # noqa: E402
from demo_model.model import DemoModel, grow, unroll_mask  # noqa: E402


def small_config(layers: int = 4, **changes) -> DemoConfig:
    return DemoConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "head_dim": 32,
            "linear_head_dim": 32,
            **changes,
        }
    )


def random_model(cfg: DemoConfig) -> DemoModel:
    """A model in which no weight has a special value."""
    torch.manual_seed(0)
    model = DemoModel(cfg)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(
                torch.randn_like(weight)
                * (0.5 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1)
            )
    return model


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda detail: f"{what}: {detail}"
    )


def tokens_for(cfg: DemoConfig, length: int) -> torch.Tensor:
    return torch.randint(cfg.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("length", [1, 31, 32, 77], ids="T{}".format)
@pytest.mark.parametrize(
    "heads",
    [dict(), dict(linear_num_key_heads=2, linear_num_value_heads=4)],
    ids=["one-key-head", "two-key-heads"],
)
@torch.no_grad()
def test_logits_equal_transformers(length: int, heads: dict) -> None:
    cfg = small_config(8, **heads)
    model, tokens = random_model(cfg), tokens_for(cfg, length)
    theirs = transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(**cfg.to_transformers())
    ).eval()
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert not missing, "weights that transformers expects"
    assert all(name.startswith("mtp.") for name in unexpected), (
        "weights that transformers does not know"
    )
    expected = theirs(input_ids=tokens).logits
    assert expected.std() > 0.1, "spread of the logits"
    torch.testing.assert_close(model.lm_head(model.hidden(tokens)), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_mtp_first_step_equals_transformers_layer() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    cfg = small_config()
    model, tokens = random_model(cfg), tokens_for(cfg, 20)
    theirs = transformers.Qwen3_5TextConfig(**cfg.to_transformers())
    theirs._attn_implementation = "eager"
    layer = qwen.Qwen3_5DecoderLayer(theirs, cfg.full_attention_interval - 1)
    layer.load_state_dict(model.mtp.layers[0].state_dict())
    hidden = model.hidden(tokens)
    embedding = model.model.embed_tokens(tokens[:, 1:])
    x = model.mtp.fc(
        torch.cat(
            [
                model.mtp.pre_fc_norm_embedding(embedding),
                model.mtp.pre_fc_norm_hidden(hidden[:, :-1]),
            ],
            -1,
        )
    )
    positions = torch.arange(1, 20).expand(3, 2, -1)
    mask = torch.full((19, 19), float("-inf")).triu(1)[None, None]
    rotary = qwen.Qwen3_5TextRotaryEmbedding(theirs)(x, positions)
    expected = model.mtp.norm(layer(x, position_embeddings=rotary, attention_mask=mask))
    torch.testing.assert_close(model.drafts(tokens, hidden, 1)[0], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("begin", [1, 5, 9], ids="from-{}".format)
def test_drafts_equal_drafting_one_token_at_a_time(begin: int) -> None:
    """All positions at once equal a cache filled from the trunk up to `begin`, then by drafts."""
    cfg = small_config()
    model, tokens = random_model(cfg), tokens_for(cfg, 12)
    hidden, embedding = model.hidden(tokens), model.model.embed_tokens(tokens)
    together = model.drafts(tokens, hidden, 3)
    assert [draft.shape[1] for draft in together] == [11, 10, 9], "positions covered by each depth"

    def step(positions: slice, previous: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        cos, sin = rotary(cfg, torch.arange(12)[positions])
        return model.mtp(embedding[:, positions], previous, cos, sin, cache, mask)

    cache: list = []
    causal = torch.ones(begin, begin, dtype=torch.bool).tril()
    draft = step(slice(1, begin + 1), hidden[:, :begin], causal)[:, -1:]
    for depth in (1, 2, 3):
        position = begin + depth - 1
        assert_close(together[depth - 1][:, position - depth], draft[:, 0], f"depth {depth}")
        seen = torch.ones(1, position + 1, dtype=torch.bool)
        if depth < 3:
            draft = step(slice(position + 1, position + 2), draft, seen)


def test_unroll_mask_shows_one_key_of_each_depth() -> None:
    shown = unroll_mask(5, 3)[4]
    assert shown.tolist() == [
        True,
        True,
        True,
        False,
        False,  # depth 1: the trunk's own positions
        False,
        False,
        False,
        True,
        False,  # depth 2: one draft
        False,
        False,
        False,
        False,
        True,
    ]  # depth 3: itself


@pytest.mark.parametrize("layers", [8, 12, 24], ids="to-{}".format)
@torch.no_grad()
def test_growth_keeps_the_function(layers: int) -> None:
    cfg = small_config(8 if layers > 8 else 4)
    model, tokens = random_model(cfg), tokens_for(cfg, 40)
    deeper = grow(model, layers)
    assert deeper.cfg.num_hidden_layers == layers
    torch.testing.assert_close(deeper.hidden(tokens), model.hidden(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [2, 17, 32, 64], ids="n{}".format)
def test_unit_lower_inverse_and_its_gradient(size: int) -> None:
    torch.manual_seed(0)
    lower = (torch.randn(3, size, size, dtype=torch.float64) * 0.3).tril(-1).requires_grad_()
    inverse = UnitLowerInverse.apply(lower)
    expected = torch.linalg.inv(lower + torch.eye(size, dtype=lower.dtype))
    torch.testing.assert_close(inverse, expected)
    weight = torch.randn_like(inverse)
    (ours,) = torch.autograd.grad((inverse * weight).sum(), lower)
    (theirs,) = torch.autograd.grad((expected * weight).sum(), lower)
    torch.testing.assert_close(ours, theirs)
